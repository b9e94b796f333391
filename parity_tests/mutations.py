"""Can the tests fail? Breaks one line of `jax_grpo` or `torch_ref` at a time, in a copy, and records which test notices.

    python parity_tests/mutations.py --out docs/results/parity/mutations.json [NAME ...]

Exit status 1 if a fault stays unseen. Not collected by pytest: it runs pytest.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

# Not used here: the tests' slowest imports, made once for all children. None of them starts a thread before it is used.
import flax.nnx  # noqa: F401
import jax.numpy  # noqa: F401
import optax  # noqa: F401
import orbax.checkpoint  # noqa: F401
import pytest
import torch  # noqa: F401

ROOT = Path(__file__).resolve().parent.parent


class Fault(NamedTuple):
    """One wrong line: in `file`, `right` becomes `wrong`; `tests` are looked at until one is red.

    `file` is of `jax_grpo` where it does not begin with `torch_ref/` or `docs/`.
    """

    file: str
    right: str
    wrong: str
    tests: str

    @property
    def path(self) -> str:
        """Of the file, below the repository."""
        return self.file if self.file.startswith(("torch_ref/", "docs/")) else f"jax_grpo/{self.file}"


PARITY = (
    "parity/test_parity.py -m 'slow or not slow' -k "
    "'every_option or (float64_every_combination and (luspo or dapo and (k2 or k3)))'"
)
ONE_STEP = "parity/test_parity.py -m 'slow or not slow' -k 'float64_every_combination and clip-token-dapo-k3'"
FAULTS = {
    "baseline over the batch": Fault(
        "advantages.py",
        "return rewards_PG - jnp.mean(rewards_PG, axis=-1, keepdims=True)",
        "return rewards_PG - jnp.mean(rewards_PG)",
        PARITY,
    ),
    "standard deviation with ddof 0": Fault("advantages.py", "jnp.std(rewards_PG, axis=-1, ddof=1", "jnp.std(rewards_PG, axis=-1, ddof=0", PARITY),
    "a robust scale about the mean": Fault("advantages.py", "jnp.median(", "jnp.mean(", "objective/test_advantages.py -k sum_to_zero"),
    "parts of an advantage are clipped": Fault("advantages.py", "sum_PG = _weighted_sum(advantages_KPG, weights_K)", "sum_PG = _weighted_sum(over_batch(advantages_KPG, None, None, config.model_copy(update={'components': 'sum_first'})), weights_K)", "objective/test_advantages.py -k clipped"),
    "OPO without its weights": Fault("advantages.py", "weighted_P1 = jnp.sum(lengths_PG * rewards_PG, ", "weighted_P1 = jnp.mean(lengths_PG) * jnp.sum(rewards_PG, ", "objective/test_advantage_methods.py -k opo"),
    "OPO counts the batch's lengths": Fault("advantages.py", "jnp.maximum(jnp.sum(lengths_PG, axis=-1, keepdims=True), 1)", "jnp.sum(lengths_PG)", "objective/test_advantage_methods.py -k opo"),
    "OPO weighs by the padded length": Fault("iteration/reward.py", "return np.asarray(rollout.completion_mask_PGC).sum(-1)", "return (np.asarray(rollout.completion_mask_PGC) >= 0).sum(-1)", "config/test_settings_act.py -k accepted_pair"),
    "MaxRL divides by the batch's mean": Fault("advantages.py", '"maxrl": lambda rewards_PG: jnp.mean(rewards_PG, axis=-1, keepdims=True)', '"maxrl": lambda rewards_PG: jnp.mean(rewards_PG)', "objective/test_advantage_methods.py -k maxrl"),
    "MaxRL takes rewards below 0": Fault("iteration/reward.py", "not_negative(rewards_B)", "not_negative(abs(rewards_B))", "config/test_settings_act.py -k below_0"),
    "pass@k: a sample is of too few subsets": Fault("advantages.py", "(size - 2 - taken_k)", "(size - 1 - taken_k)", "objective/test_advantage_methods.py -k 'all_subsets'"),
    "pass@k: tied samples have one place": Fault("advantages.py", " | ((other_P1G == own_PG1) & earlier_GG)", "", "objective/test_advantage_methods.py -k 'all_subsets'"),
    "pass@k: all but the best keep a credit": Fault("advantages.py", "gain_PGG = jnp.where(below_PGG, ", "gain_PGG = jnp.where(True, ", "objective/test_advantage_methods.py -k 'all_subsets'"),
    "pass@k: a broken reward is not seen": Fault("advantages.py", "return summed_PG + 0 * jnp.sum(rewards_PG, axis=-1, keepdims=True)", "return summed_PG", "objective/test_advantage_methods.py -k 'not_finite'"),
    "refill: a slot with signal is taken": Fault("iteration/refill.py", "empty, others = np.flatnonzero(~first)", "empty, others = np.arange(len(first))", "trainer/test_refill.py -k 'slots or definition_names'"),
    "refill: the last found comes first": Fault("iteration/refill.py", "groups_P[empty[:taken]] = others[:taken]", "groups_P[empty[:taken]] = others[:taken][::-1]", "trainer/test_refill.py -k 'slots or definition_names'"),
    "refill: one round too many": Fault("iteration/refill.py", "len(earlier) == settings.rounds:", "len(earlier) == settings.rounds + 1:", "trainer/test_refill.py -k spent_budget"),
    "refill: the budget of tokens is not read": Fault("iteration/refill.py", "return settings.tokens is not None and", "return False and", "trainer/test_refill.py -k spent_budget"),
    "refill: rewards stay in their place": Fault("iteration/refill.py", "rewards_B=np.concatenate([samples.rewards_B for samples in draws])[rows_B]", "rewards_B=draws[0].rewards_B", "trainer/test_refill.py -k definition_names"),
    "refill: tokens stay in their place": Fault("iteration/refill.py", "lambda *x: jnp.asarray(groups(*x))", "lambda *x: x[0]", "trainer/test_refill.py -k definition_names"),
    "refill: the cursor stays behind": Fault("trainer.py", "self.prompts.further += len(draws) - 1", "self.prompts.further += min(len(draws) - 1, 1)", "trainer/test_refill.py -k definition_names"),
    "refill: the cursor is not restored": Fault("iteration/draw.py", "self.further = next_prompt // self._size - iterations_done", "self.further = 0", "trainer/test_refill.py -k continues"),
    "refill: a draw that was not needed moves the curriculum on": Fault("trainer.py", "self.prompts.undo()", "None", "trainer/test_refill.py -k beside"),
    "refill: the outcome is not asked": Fault("iteration/refill.py", "flat_P = samples.flat_P | alike(", "flat_P = samples.flat_P & alike(", "trainer/test_refill.py -k beside_the_outcome"),
    "refill: an outcome that is about nothing decides": Fault("iteration/refill.py", "return least_P == np.where", "return least_P >= np.where", "trainer/test_refill.py -k component_is_asked"),
    "torch_ref: an outcome that is about nothing decides": Fault("torch_ref/refill.py", "about_B].unique()) == 1", "about_B].unique()) <= 1", "trainer/test_refill.py -k component_is_asked"),
    "rewards: a difference is a negative number": Fault("rewards/texts.py", r'(?:(?<![\w)\].])[-−]', r'(?:[-−]', "rewards/test_rewards.py -k last_number_of_a_text"),
    "rewards: the first mark counts": Fault("rewards/numeric.py", "text.rpartition(MARK)", "text.partition(MARK)", "rewards/test_rewards.py -k published_rule"),
    "rewards: a number may be used twice": Fault("rewards/countdown.py", "sorted(_leaves(tree)) == sorted(map(int, numbers))", "set(_leaves(tree)) == set(map(int, numbers))", "rewards/test_rewards.py -k each_number_once"),
    "rewards: a tag may come twice": Fault("rewards/formats.py", "text.count(tag) == 1", "text.count(tag) >= 1", "rewards/test_rewards.py -k format_of_thoughts"),
    "rewards: a target that is a text is never reached": Fault("rewards/countdown.py", "_value(tree) == Fraction(target)", "_value(tree) == target", "rewards/test_rewards.py -k value_of_an_expression"),
    "worker: what a text prints is the next reply": Fault("rewards/worker.py", "sys.stdin, sys.stdout = open(os.devnull), sys.stderr", "sys.stdin = open(os.devnull)", "rewards/test_worker.py -k replies_belong"),
    "worker: every process has its own order of sets": Fault("rewards/worker.py", '"PYTHONHASHSEED": "0"', '"PYTHONHASHSEED": "random"', "rewards/test_worker.py -k order_of_sets"),
    "worker: Ctrl-C ends the process, too": Fault("rewards/worker.py", "start_new_session=True", "start_new_session=False", "rewards/test_worker.py -k ctrl_c"),
    "prompts: another template is the same data": Fault("prompts/rows.py", "; template {self.template.identity}", "; template", "prompts/test_template.py -k another_template"),
    "prompts: a split's messages are of other rows": Fault("prompts/rows.py", "self._template(columns)", "self._template(dict(self._columns_of(0)))", "prompts/test_template.py -k rendered"),
    "a mixture: a component called reward takes the total's name": Fault("tasks/mixed.py", 'f"{name}/{TOTAL}/{TOTAL}" if component == TOTAL else', 'f"{name}/{TOTAL}" if component == TOTAL else', "prompts/test_own_prompts.py -k called_reward"),
    "a component whose name has a slash is about nothing": Fault("tasks/base.py", 'not prompt.task or name.startswith(f"{prompt.task}/")', 'prompt.task == name.rpartition("/")[0]', "trainer/test_refill.py -k beside_the_outcome"),
    "torch_ref: a component whose name has a slash is about nothing": Fault("torch_ref/train.py", 'prompt.task in ("", refill.by.partition("/")[0])', 'prompt.task == refill.by.rpartition("/")[0]', "parity/test_parity_draws.py -k 'by and outcome and gdpo' -m 'slow or not slow'"),
    "a reward beyond float32 is an infinity": Fault("tasks/checked.py", "np.isfinite(np.float32(value))", "np.isfinite(value)", "tasks/test_guards.py -k no_reward"),
    "a mixture does not read what reasoning_gym makes": Fault("tasks/mixed.py", "part.source is None and name not in own_rows", "part.source is None", "tasks/test_reasoning_gym.py -k questions_are_messages"),
    "an evaluation of a run counts a prompt twice": Fault("evaluate/own_rewards.py", "texts[own].tolist(), config.seed)", "np.arange(len(values)).tolist(), config.seed)", "evaluate/test_own_rewards_of_a_run.py"),
    "health: what a completion repeats is a share of itself": Fault("report/records.py", "len(runs & _runs(completion)) / len(runs)", "len(runs & _runs(completion)) / max(len(_runs(completion)), 1)", "report/test_health.py -k small_metrics"),
    "refill: a draw that was not needed is an iteration's": Fault("trainer.py", "        return draws, ahead\n", "        return draws + ([] if ahead is None else [self._reward(iteration, ahead)]), None\n", "trainer/test_refill.py -k beside"),
    "a draw asks about the position next to its own": Fault("iteration/draw.py", "self.dataset.rows[number]", "self.dataset.rows[number - 1]", "trainer/test_train.py -k drawn_twice"),
    "refill: a prompt drawn twice is sampled alike": Fault("iteration/draw.py", "sampling_numbers(self._numbers, len(self.dataset))[-len(prompts) :]", "sampling_numbers(numbers, len(self.dataset))", "trainer/test_refill.py -k sampled_anew"),
    "curriculum: the far are drawn and not the near": Fault("prompts/curriculum.py", "+ 0.5 * np.square(distance_N", "- 0.5 * np.square(distance_N", "prompts/test_curriculum.py -k 'distance or both_implementations'"),
    "curriculum: a width that is a variance": Fault("prompts/curriculum.py", "(self.rate_N - how.target) / how.width", "(self.rate_N - how.target) / how.width**0.5", "prompts/test_curriculum.py -k 'distance or both_implementations'"),
    "curriculum: shares are cut": Fault("prompts/curriculum.py", "math.floor(share * prompts + rng.random())", "math.floor(share * prompts + 0 * rng.random())", "prompts/test_curriculum.py -k 'shares_are_met'"),
    "curriculum: what is solved stays": Fault("prompts/curriculum.py", "smallest(near_N, known_N & ~retired_N & free_N,", "smallest(near_N, known_N & free_N,", "prompts/test_curriculum.py -k 'solved'"),
    "curriculum: one prompt in two draws": Fault("prompts/curriculum.py", "free_N[list(taken)] = False", "pass", "prompts/test_curriculum.py -k both_implementations"),
    "curriculum: the newest group is all": Fault("prompts/curriculum.py", "before + how.newest * (share - before)", "share", "prompts/test_curriculum.py -k running_mean"),
    "curriculum: a reward passes by its last bit": Fault("prompts/curriculum.py", "how.passed - NEAR * max(1.0, abs(how.passed))", "how.passed", "prompts/test_curriculum.py -k running_mean"),
    "curriculum: rates are not restored": Fault("iteration/draw.py", "self.curriculum.restore(curriculum)", "pass", "prompts/test_curriculum.py -k continues"),
    "curriculum: the place in the order is not saved": Fault("prompts/curriculum.py", "for count in (self._next, self._draws))", "for count in (0, self._draws))", "prompts/test_curriculum.py -k continues"),
    "curriculum: other draws' rewards": Fault("trainer.py", "self.prompts.observe(draw.numbers, samples.rewards_B)", "self.prompts.observe(self.prompts._numbers[: len(draw.numbers)], samples.rewards_B)", "parity/test_parity_draws.py -m 'slow or not slow' -k 'both_trainers and curriculum'"),
    "torch_ref: a curriculum that keeps the solved": Fault("torch_ref/curriculum.py", "active = [number for number in known if not self._solved(number)]", "active = known", "prompts/test_curriculum.py -k both_implementations"),
    "pass@k: a group without advantage has signal": Fault("advantages.py", " | _without_advantage(unscaled_PG)\n", "\n", "objective/test_advantage_methods.py -k more_successes"),
    "torch_ref: refill keeps what comes last": Fault("torch_ref/refill.py", "for number in range(1, len(rounds)) for group", "for number in reversed(range(1, len(rounds))) for group", "parity/test_parity_draws.py -k 'both_trainers and fused'"),
    "k2 and k3 swapped": Fault(
        "objective/__init__.py",
        '"k2": lambda d: 0.5 * jnp.square(d),\n    "k3": lambda d: jnp.expm1(d) - d,',
        '"k3": lambda d: 0.5 * jnp.square(d),\n    "k2": lambda d: jnp.expm1(d) - d,',
        PARITY,
    ),
    "sign of d": Fault("objective/__init__.py", "masked(ref_logp_BS - logp_BS, mask_BS)", "masked(logp_BS - ref_logp_BS, mask_BS)", PARITY),
    "ratio against the reference": Fault(
        "loss.py", "else self.old_logp_BS\n", "else (self.old_logp_BS if self.ref_logp_BS is None else self.ref_logp_BS)\n", PARITY
    ),
    "mask off by one": Fault("loss.py", "mask_BS = batch.mask_BS.astype(dtype)\n", "mask_BS = jnp.roll(batch.mask_BS, 1, 1).astype(dtype)\n", PARITY),
    "positions count padding": Fault(
        "model/decoder.py",
        "return jnp.maximum(jnp.cumsum(attention_mask_BT.astype(jnp.int32), axis=-1) - 1, 0)",
        "return jnp.broadcast_to(jnp.arange(attention_mask_BT.shape[-1]), attention_mask_BT.shape)",
        PARITY,
    ),
    "missing temperature": Fault("lm_head/materialised.py", "logits_BSV / temperature", "logits_BSV", PARITY),
    "sequence ratio is the sum": Fault(
        "objective/surrogates.py", "mean_B = masked_mean(log_rho_BS, mask_BS, axis=-1)", "mean_B = jnp.sum(log_rho_BS, axis=-1)", PARITY
    ),
    "denominator counts the cap": Fault(
        "objective/__init__.py", '"luspo": lambda mask_BS, max_completion: 1 / mask_BS.shape[0],', '"luspo": lambda mask_BS, max_completion: 1 / mask_BS.shape[1],', PARITY
    ),
    "untied embedding gradient": Fault(
        "update.py", "return (hidden_BSH, model.head_VH, targets_BS)", "return (hidden_BSH, jax.lax.stop_gradient(model.head_VH), targets_BS)", PARITY
    ),
    "embedding's gradient accumulated in bfloat16": Fault(
        "lm_head/materialised.py",
        'to_embedding_VH = contract(gradient_NV, hidden_NH, (0, 0), jnp.promote_types(dtype, jnp.float32))',
        'to_embedding_VH = contract(gradient_NV, hidden_NH, (0, 0), jnp.promote_types(dtype, jnp.float32)).astype(jnp.bfloat16)',
        "lm_head/test_lm_head.py parity/test_parity.py -k 'definition or every_option'",
    ),
    "micro-batches accumulated in bfloat16": Fault(
        "update.py",
        "lambda total, x: total + x.astype(total.dtype), total",
        "lambda total, x: (total + x).astype(jnp.bfloat16).astype(total.dtype), total",
        PARITY,
    ),
    "upper clip bound for bad tokens": Fault(
        "objective/surrogates.py", "1 - config.epsilon_low, 1 + config.epsilon_high)\n    first", "1 - config.epsilon_high, 1 + config.epsilon_low)\n    first", PARITY
    ),
    "cispo differentiates its weight": Fault(
        "objective/surrogates.py", "weight_BS = jax.lax.stop_gradient(jnp.minimum(jnp.exp(log_rho_BS), config.epsilon_high))", "weight_BS = jnp.minimum(jnp.exp(log_rho_BS), config.epsilon_high)", PARITY
    ),
    "DPPO bounds the ratio": Fault("objective/surrogates.py", "return jnp.abs(jnp.exp(logp_BS) - jnp.exp(old_logp_BS))", "return jnp.abs(jnp.exp(logp_BS - old_logp_BS) - 1)", "objective/test_surrogates.py -k 'definition and dppo_tv'"),
    "DPPO holds back what leads back": Fault("objective/surrogates.py", "jnp.where(advantages_B1 > 0, high_BS, low_BS)", "high_BS | low_BS", "objective/test_surrogates.py -k 'definition and dppo'"),
    "GMPO cuts both sides": Fault("objective/surrogates.py", "jnp.minimum(log_rho_BS, config.epsilon_high), jnp", "jnp.clip(log_rho_BS, -config.epsilon_low, config.epsilon_high), jnp", "objective/test_surrogates.py -k 'definition and gmpo'"),
    "GMPO's mean counts padding": Fault("objective/surrogates.py", "masked_mean(cut_BS, mask_BS, axis=-1)[:, None]", "jnp.mean(cut_BS, axis=-1)[:, None]", "objective/test_surrogates.py -k 'definition and gmpo'"),
    "VESPO differentiates its weight": Fault("objective/surrogates.py", "return -jax.lax.stop_gradient(weight_BS) * advantages_B1 * logp_BS\n\n\nSURROGATES", "return -weight_BS * advantages_B1 * logp_BS\n\n\nSURROGATES", "objective/test_surrogates.py -k 'definition and vespo'"),
    "VESPO takes the mean ratio": Fault("objective/surrogates.py", "sum_B = jnp.sum(masked(jnp.clip(log_rho_BS, -20, 20), mask_BS), axis=-1)", "sum_B = masked_mean(jnp.clip(log_rho_BS, -20, 20), mask_BS, axis=-1)", "objective/test_surrogates.py -k 'definition and vespo'"),
    "a masked mismatch is cut": Fault("objective/__init__.py", "(ratio_BS < floor) | (ratio_BS > cap), 0, ratio_BS)", "ratio_BS > cap, cap, ratio_BS)", "objective/test_surrogates.py -k mismatch"),
    "a sequence's mismatch is its mean": Fault("objective/__init__.py", "jnp.broadcast_to(jnp.sum(log_ratio_BS, axis=-1, keepdims=True)", "jnp.broadcast_to(jnp.mean(log_ratio_BS, axis=-1, keepdims=True)", "objective/test_surrogates.py -k mismatch"),
    "sequences are taken apart by a fused head": Fault("config/objectives.py", 'self.name in ("gmpo", "vespo") or corrected', 'self.name == "gmpo" or corrected', "objective/test_surrogates.py -k fused"),
    "weight decay on biases and norms": Fault("optimiser.py", "lambda x: x.ndim >= 2", "lambda x: x.ndim >= 1", "parity/test_parity_steps.py -k float64"),
    "warm-up begins at 0": Fault("optimiser.py", "lr * (t + 1) / max(warmup, 1)", "lr * t / max(warmup, 1)", "parity/test_parity_steps.py -k float64"),
    "entropy bonus is a penalty": Fault("loss.py", "- self.bonus *", "+ self.bonus *", PARITY),
    # NaN is on neither side of a tolerance: every comparator has to look for it.
    "NaN in kl/mean": Fault("loss.py", 'out["kl/mean"] = mean(kl_BS)', 'out["kl/mean"] = mean(kl_BS) * jnp.nan', ONE_STEP),
    "NaN in entropy": Fault("loss.py", '"entropy": mean(entropy_BS),', '"entropy": mean(entropy_BS) * jnp.nan,', ONE_STEP),
    "NaN in clip_fraction/low": Fault("loss.py", '"clip_fraction/low": mean(low_BS),', '"clip_fraction/low": mean(low_BS) * jnp.nan,', ONE_STEP),
    "NaN in wpe's gradient of the grouped layout": Fault(
        "model/decoder.py", "self._embed(read_PGC, position_PGC))", "self._embed(read_PGC, position_PGC) + 0 * jnp.sqrt(0 * self.wpe(position_PGC)))",
        "model/test_model.py -k grouped_layout_equals",
    ),
    # The trainer and what it calls, data, evaluation, checkpoints.
    "minibatches: advantages stay in their place": Fault("batch.py", "order_B = (order_P[:, None] * group + np.arange(group)).reshape(-1)", "order_B = np.arange(prompts * group)", "trainer/test_minibatches.py"),
    "minibatches: tokens stay in their place": Fault("batch.py", "jax.tree.map(lambda x: x[order_P], batch.tokens)", "batch.tokens", "trainer/test_minibatches.py"),
    "minibatches: every epoch in the first one's order": Fault("batch.py", "default_rng((seed, iteration, epoch))", "default_rng((seed, iteration, 0))", "trainer/test_minibatches.py"),
    "metrics of the first step": Fault("iteration/metrics.py", "if name in MEANS else values[-1]", "if name in MEANS else values[0]", "trainer/test_minibatches.py"),
    "a group's samples share their random numbers": Fault("rollout/generate.py", "lambda g: jax.random.fold_in(key, g))", "lambda g: key)", "parity/test_random_numbers.py"),
    "iterations share their random numbers": Fault("rollout/generate.py", "jax.random.fold_in(jax.random.key(seed), step)", "jax.random.key(seed)", "parity/test_random_numbers.py"),
    "tokens share their random number": Fault("rollout/generate.py", "jax.random.fold_in(key, t), dtype", "jax.random.fold_in(key, 0), dtype", "parity/test_random_numbers.py"),
    "texts without their last token": Fault("rollout/generate.py", "rule.text(ids, state, tokenizer) for", "rule.text(ids[:-1], state, tokenizer) for", "parity/test_random_numbers.py"),
    "the penalty for long completions is of the run's cap": Fault("iteration/reward.py", "caps(prompts, learning.most_tokens)", "caps(prompts, learning.most_tokens) * 0 + learning.most_tokens", "config/test_settings_act.py -k penalty_for_long"),
    "an episode is cut by its last completion alone": Fault("rollout/episodes.py", "episode.cut or not stopped_B[row]", "not stopped_B[row]", "rollout/test_episodes.py -k windows"),
    "sampled evaluations at temperature 1": Fault("evaluate/during_training.py", "zip(MODES, (0.0, config.rollout.temperature), strict=True)", "zip(MODES, (0.0, 1.0), strict=True)", "evaluate/test_evaluation_modes.py"),
    "the KL across a move is of truncated completions too": Fault("loss.py", "    mask_BS = effective_mask(batch, settings, logp_BS.dtype)\n    kl_BS", "    mask_BS = batch.mask_BS\n    kl_BS", "objective/test_moving_reference.py -k across_a_move"),
    "too long prompts of refill's rounds are not looked for": Fault("iteration/draw.py", "draws = min(config.iterations * rounds, epoch)", "draws = min(config.iterations, epoch)", "trainer/test_refill.py -k further_rounds_are_looked"),
    "the padding before a prompt counts as repeated": Fault("rollout/generate.py", ".max(mask_PT.astype(bool))", ".set(True)", "rollout/test_rollout.py -k repeated_tokens"),
    "the padding of a completion that has stopped counts as repeated": Fault("rollout/decoding.py", "token_PG.reshape(rows)].max(live_PG.reshape(rows))", "token_PG.reshape(rows)].set(True)", "rollout/test_rollout.py -k repeated_tokens"),
    "FLOPs of one optimiser step": Fault("iteration/metrics.py", "phase_flops(config.learning(), architecture, batch, len(steps), works)", "phase_flops(config.learning(), architecture, batch, 1, works)", "memory/test_flops.py -k steps_it_took"),
    "the schedule forgets its epochs": Fault("config/__init__.py", "self.update.total_steps or self.iterations * self.update.epochs * self.update.minibatches", "self.update.total_steps or self.iterations * self.update.minibatches", "parity/test_twins.py -k as_many_steps"),
    "column tiles' sums rounded to bfloat16": Fault("lm_head/loops.py", 'to_weights_VH += contract(d_CV, hidden_CH, (0, 0), tokens.accumulator)', 'to_weights_VH += contract(d_CV, hidden_CH, (0, 0), tokens.accumulator).astype(jnp.bfloat16)', "lm_head/test_lm_head_fused.py -k summed_wider"),
    "an evaluation knows the run's cap alone": Fault("rollout/texts.py", "caps(prompts, self.max_new_tokens)", "caps(prompts, self.max_new_tokens) * 0 + self.max_new_tokens", "evaluate/test_evaluation_modes.py"),
    "a part's own cap takes the place of a prompt's": Fault("tasks/mixed.py", "max_new_tokens=min(caps, default=None)", "max_new_tokens=self._parts[name].max_new_tokens", "tasks/test_mixed.py -k holds_in_a_mixture"),
    "the last step's row of non-finite steps": Fault("trainer.py", 'for step in steps]))', 'for step in steps[-1:]]))', "trainer/test_train.py -k row_of_nonfinite"),
    "GDPO: components that cancel have signal": Fault("advantages.py", "advantages_PG = jnp.where(flat_P[:, None], 0, normalised_PG)", "advantages_PG = normalised_PG", "objective/test_advantage_methods.py -k cancel"),
    "rounding decides which entropies are at the quantile": Fault("objective/__init__.py", "masked_quantile(entropy_BS, mask_BS, quantile) - TIED", "masked_quantile(entropy_BS, mask_BS, quantile)", "objective/test_objective.py -k rounding"),
    "a ratio that float32 has not": Fault("objective/surrogates.py", "jnp.minimum(logp_BS - old_logp_BS, LARGEST)", "logp_BS - old_logp_BS", "objective/test_surrogates.py -k beyond_float32"),
    "bfloat16 parameters without a caution": Fault("config/__init__.py", 'self.model.param_dtype == "bfloat16" and rate < BFLOAT16_STEP', 'self.model.param_dtype == "bfloat16" and rate > 1', "config/test_settings_act.py -k bfloat16_parameters"),
    "KL-Cov's penalty of rounding": Fault("loss.py", "jnp.where(jnp.abs(log_rho_BS) > TIED, jnp.sign(log_rho_BS), 0)", "jnp.sign(log_rho_BS)", "objective/test_covariance.py -k no_distance"),
    "rounding decides which covariances are held back": Fault("objective/covariance.py", "-jnp.round(covariance_BS / TIED)", "-covariance_BS", "objective/test_covariance.py -k whatever_their_rounding"),
    "a prompt is retired by rounding": Fault("prompts/curriculum.py", "rates >= self._settings.solved - NEAR", "rates >= self._settings.solved", "prompts/test_curriculum.py -k failed_once"),
    "unselected rewards have the picked ones in them": Fault("iteration/metrics.py", "rewards_PG[picked:]", "rewards_PG[picked + 1 :]", "prompts/test_curriculum.py -k unselected"),
    "the best checkpoint is that of picked prompts": Fault("config/__init__.py", '("reward/unselected" if self.picks_prompts() else "reward/mean")', '"reward/mean"', "prompts/test_curriculum.py -k picked_most_kindly"),
    "torch_ref: an evaluation draws as a rollout does": Fault("torch_ref/rollout.py", "Sampling(settings.temperature) if temperature_alone else sampling", "sampling", "evaluate/test_evaluation_modes.py"),
    "one token beyond a prompt's own cap": Fault("rollout/decoding.py", "(t >= prompts.cap_P)", "(t > prompts.cap_P)", "tasks/test_mixed.py -k own_cap"),
    "positions of sampled tokens one on": Fault("rollout/decoding.py", "prompts.length_PG + t - 1", "prompts.length_PG + t", "rollout/test_rollout.py -k sampling_logprobs"),
    "observations are trained on": Fault("programs.py", "mask_BS=rollout.completion_mask_PGC.reshape(rows)", "mask_BS=rollout.read_PGC.reshape(rows)", "rollout/test_episodes.py -k 'not_trained_on'"),
    "a later turn does not read a completion's last token": Fault("rollout/turns.py", "[jnp.ones_like(last_PG1), mask_PGO]", "[jnp.zeros_like(last_PG1), mask_PGO]", "rollout/test_episodes.py -k sampling_logprobs"),
    "later turns draw the first one's numbers": Fault("rollout/turns.py", "dtype, windows.begin(turn))", "dtype)", "rollout/test_episodes.py -k number_of_its_column"),
    "an observation is no repetition": Fault("rollout/turns.py", "_also_seen(cache.seen_PGV, ids_PGO, mask_PGO)", "cache.seen_PGV", "rollout/test_episodes.py -k counts_as_repeated"),
    "a task is told observations for the model's tokens": Fault("rollout/generate.py", "ids_C[mask_C == 1].tolist()", "ids_C[: mask_C.sum()].tolist()", "rollout/test_own_episodes.py -k named_by"),
    "samples of a prompt meet one random opponent": Fault("rollout/episodes.py", "step, int(number), sample)", "step, int(number), 0)", "rollout/test_episodes.py -k numbers_of_its_own"),
    "an opponent draws alike at every move": Fault("chess/tasks/game.py", "{game.draw}/{len(game.board.move_stack)}", "{game.draw}", "chess/test_game.py -k what_an_opponent_draws"),
    "an illegal move is as good as a draw": Fault("chess/tasks/game.py", '"forfeited": 0.0}', '"forfeited": 0.5}', "chess/test_game.py -k worth_its_result"),
    "a mate is White's": Fault("chess/games.py", "float(self.winner == self.colour)", "float(self.winner == chess.WHITE)", "chess/test_game.py -k worth_its_result"),
    "material is counted for the opponent": Fault("chess/tasks/game.py", "win_probability(balance(", "win_probability(-balance(", "chess/test_game.py -k worth_its_material"),
    "a skill level's moves are pushed by half": Fault("chess/tasks/opponents.py", "120 - 2 * level, min(", "120 - level, min(", "chess/test_game.py -k skill_levels"),
    "top-p counts the token itself": Fault("rollout/sampling.py", "jnp.cumsum(probs_RK, axis=-1) - probs_RK ", "jnp.cumsum(probs_RK, axis=-1) ", "rollout/test_rollout.py -k exact_distribution"),
    "a token's probability is among those that were kept": Fault("rollout/sampling.py", "if limited_RV is not scaled_RV:", "if limited_RV is None:", "rollout/test_rollout.py -k exact_distribution"),
    "min-p is a factor of the logit": Fault("rollout/sampling.py", "jnp.max(logits_RV, axis=-1) + jnp.log(sampling.min_p)", "jnp.max(logits_RV, axis=-1) * sampling.min_p", "rollout/test_rollout.py -k exact_distribution"),
    "repetition rewards negative logits": Fault("rollout/sampling.py", "logits_RV / penalty, logits_RV * penalty)", "logits_RV / penalty, logits_RV / penalty)", "rollout/test_rollout.py -k repetition"),
    "a token of zero weight is drawn": Fault("rollout/sampling.py", "cumulative_RN > target_R[:, None]", "cumulative_RN >= target_R[:, None]", "rollout/test_rollout.py -k zero_weight"),
    "published labels turned for White": Fault("chess/tasks/policy.py", '" b " in position.fen', '" w " in position.fen', "tasks/test_tasks.py -k black_gets"),
    "a candidate repeated counts again": Fault("chess/tasks/policy.py", '"legal_moves": len(set(moves) & legal) / listed', '"legal_moves": sum(move in legal for move in moves) / listed', "chess/test_tasks_policy.py -k more_candidates"),
    "top five are always five": Fault("chess/tasks/policy.py", "len(set(moves) & first) / max(len(first), 1)", "len(set(moves) & first) / CANDIDATES", "chess/test_tasks_policy.py -k perfect"),
    "a move's value is its opponent's": Fault("chess/tasks/policy.py", "else -analyses[fen].score", "else analyses[fen].score", "tasks/test_tasks.py -k unlabelled"),
    "checkmate is rewarded as a draw": Fault("chess/tasks/environment.py", "if outcome.winner is None else", "if outcome.winner is not None else", "tasks/test_tasks.py -k environment_answers"),
    "eleven moves of history": Fault("chess/positions/rookworld.py", "before[-(HISTORY - 1) :]", "before[-HISTORY:]", "tasks/test_tasks.py -k published_formats"),
    "insertions are free": Fault("chess/tasks/environment.py", "np.minimum.accumulate(candidate - steps) + steps", "np.minimum.accumulate(candidate)", "tasks/test_tasks.py -k edit_distance"),
    "no promotion on the first rank": Fault("chess/tasks/policy.py", '(_TO_RANK, "18", _PROMOTION)', '(_TO_RANK, "8", _PROMOTION)', "rollout/test_stop_rules.py -k move_ends"),
    "BB: is not seen": Fault("chess/tasks/policy.py", '(SEEN_B, "B", SEEN_B)', '(SEEN_B, "B", SEEKING)', "rollout/test_stop_rules.py -k hide_it"),
    "an interval's deviation with ddof 0": Fault("evaluate/statistics.py", "for value in values) / (n - 1)", "for value in values) / n", "chess/test_evaluation.py -k normal_interval"),
    "a difference's interval upside down": Fault("evaluate/statistics.py", "before.high - before.value)", "before.low - before.value)", "chess/test_evaluation.py -k newcombe"),
    "a better move than the label's costs": Fault("chess/evaluate/policy.py", '"win_loss": max(0.0, win_probability(best) - win_probability(pawns))', '"win_loss": abs(win_probability(best) - win_probability(pawns))', "chess/test_evaluation.py -k 'worse_move or better_move'"),
    "the other side's illegal move": Fault("chess/evaluate/selfplay.py", "game.board.turn == color", "game.board.turn != color", "chess/test_evaluation.py -k half_moves"),
    "states count again after a wrong one": Fault("chess/evaluate/selfplay.py", "if game.exact == game.half_moves - 1 and", "if", "chess/test_evaluation.py -k states"),
    "the least likely target is the mate": Fault("chess/evaluate/puzzles.py", "target = max(scores,", "target = min(scores,", "chess/test_evaluation.py -k mates_are_read"),
    "the strong side moves out of check it gives": Fault("chess/positions/endings.py", "(before_KPW > 0) & strong_to_move_KPW & (mates", "(before_KPW > 0) & apart_KPW & (mates", "chess/test_endings.py -k 'counts or sample'"),
    "the weak king steps beside the strong one": Fault("chess/positions/endings.py", "(king_K != weak_W) & ~steps_SS[:, None, :] & ~attacks_KPS", "(king_K != weak_W) & ~attacks_KPS", "chess/test_endings.py -k 'counts or sample'"),
    "mirrored twins in two splits": Fault("chess/positions/endings.py", "for side in (board, board.T)", "for side in (board,)", "chess/test_endings.py -k turned_and_mirrored"),
    "a win that slips is paid like a slow one": Fault("chess/tasks/policy.py", "0.0 if lost is None else DECAY**lost", "DECAY ** (lost or 0)", "chess/test_endings.py -k technique_pays"),
    "the defender walks into the mate": Fault("chess/evaluate/endgame.py", "longest = max(resistance.values())", "longest = min(resistance.values())", "chess/test_endings.py -k perfect_attacker"),
    "stalemate counts as mate": Fault("chess/evaluate/endgame.py", '"stalemate": ("stalemate", ', '"stalemate": ("mated", ', "chess/test_endings.py -k stalemate"),
    "no legal move is the best where all are alike": Fault("chess/evaluate/strength.py", "passed = sum(loss < GOOD for loss in of_legal)", "passed = sum(loss < GOOD for loss in losses)", "chess/test_strength.py -k no_legal_move"),
    "likelihoods and values of other moves": Fault("chess/evaluate/strength.py", "kendall_tau([logps[move] for move in wins], ", "kendall_tau(list(logps.values()), ", "chess/test_strength.py -k tau"),
    "positions resampled, not games": Fault("evaluate/statistics.py", "terms[cluster].append(", "terms[len(terms)].append(", "chess/test_strength.py -k clusters"),
    "stalemate is worth the pieces on the board": Fault("chess/games.py", "if replies else -even", "if replies else 0", "chess/test_strength.py -k two_plies"),
    "padding of a move is likely too": Fault("chess/evaluate/policy.py", "(logp_BC.reshape(ids_PGC.shape) * mask_PGC).sum(-1)", "logp_BC.reshape(ids_PGC.shape).sum(-1)", "chess/test_uci.py -k plain_models"),
    "samples of other prompts": Fault("rollout/texts.py", "completions[at * self._samples + sample]", "completions[sample * len(order) + at]", "chess/test_strength.py -k samples"),
    "the oldest checkpoints are kept": Fault("run/checkpoints.py", "saved[-self._config.keep_last :]", "saved[: self._config.keep_last]", "run/test_checkpoint.py -k last_and_the_best"),
    "the worst checkpoints are kept": Fault("run/checkpoints.py", "sign = 1 if self._smallest else -1", "sign = -1 if self._smallest else 1", "run/test_checkpoint.py -k last_and_the_best"),
    "the origin goes with its abandoned future": Fault("run/checkpoints.py", "if int(path.name) > iteration]", "if int(path.name) >= iteration]", "run/test_checkpoint.py -k abandoned"),
    "the command to continue begins again": Fault("run/resume.py", "settings = OPTIONS.parse_known_args(argv)[1]", "settings = list(argv)", "run/test_resume.py -k command_that_continues"),
    "one row too many": Fault("chess/data/shards.py", "or rows[split] < bound:", "or rows[split] <= bound:", "mesh/test_shard_bounds.py"),
    "a draw at the second occurrence": Fault("chess/positions/position.py", "board.is_repetition(3)", "board.is_repetition(2)", "chess/test_arbiter.py -k threefold"),
    "the first moves for the last": Fault("chess/positions/position.py", "for move in board.move_stack[-HISTORY:]", "for move in board.move_stack[:HISTORY]", "chess/test_prompts.py -k pgn_gives"),
    "every epoch in the same order": Fault("prompts/dataset.py", "default_rng((self._seed, epoch))", "default_rng(self._seed)", "chess/test_prompts.py -k 'order_is or own_order'"),
    "the KL's error relative to itself": Fault("objective/__init__.py", "(kl_observed - config.target) / config.target", "(kl_observed - config.target) / kl_observed", "objective/test_kl_control.py -k relative_error"),
    "a record twice after resuming": Fault("report/log.py", '["iteration"] < first_iteration]', '["iteration"] <= first_iteration]', "run/test_metrics_continued.py"),
    "a token does not see itself": Fault("model/flops.py", "rising * (rising + 1) / 2", "rising * (rising - 1) / 2", "memory/test_flops.py -k counted_once"),
    "health looks one iteration late": Fault("report/health.py", "if len(self.history) >= count else []", "if len(self.history) > count else []", "report/test_health.py -k each_check"),
    "a run's end is told backwards": Fault("report/records.py", "first, last = evaluated[0], evaluated[-1]", "last, first = evaluated[0], evaluated[-1]", "report/test_console.py -k held_out_first"),
    "one advantage for all samples": Fault("report/records.py", '{"advantage": _finite(advantages_B[i])}', '{"advantage": _finite(advantages_B[0])}', "report/test_report.py -k advantages"),
    "escapes of a text reach the terminal": Fault("system/terminal.py", "c if c.isprintable() else", "c if c else", "report/test_console.py -k cursor"),
    "a size in GiB is taken for bytes": Fault("memory/fit.py", r"([KMGT]i?B)?", r"(KiB)?", "tasks/test_guards.py -k memory_that_was_asked"),
    "the search goes the wrong way": Fault("memory/fit.py", "key=lambda count: needs(count) <= limit)", "key=lambda count: needs(count) > limit)", "trainer/test_micro_batches.py -k first_that_fits"),
    "a skipped step moves the reference again": Fault("optimiser.py", "due, share = taken & (step % every == 0)", "due, share = (step % every == 0)", "objective/test_moving_reference.py -k not_taken"),
    "the reference's shares are swapped": Fault("optimiser.py", "share * new + (1 - share) * old.astype(new.dtype)", "(1 - share) * new + share * old.astype(new.dtype)", "objective/test_moving_reference.py -k writes_over"),
    "the reference meets the parameters before the step": Fault("update.py", "moved_reference(learning.kl, state.reference, params, ", "moved_reference(learning.kl, state.reference, state.params, ", "objective/test_moving_reference.py -k writes_over"),
    "completions are scored by the start, though the reference moved": Fault("trainer.py", "given = self.config.learning(), self.score, self.weights, self.reference, batch", "given = self.config.learning(), self.score, self.weights, self.__dict__.setdefault('start', jax.tree.map(jnp.array, self.reference)), batch", "parity/test_parity_iterations.py -k follows"),
    "a moving reference is turned off in silence": Fault("run/resume.py", "(before.get(key) is None) != (now[key] is None)", "before.get(key) is None and now[key] is not None", "objective/test_moving_reference.py -k settled"),
    "the entropy is held from above": Fault("objective/__init__.py", "jnp.where(entropy <= config.entropy_target, config.entropy_step, -config.entropy_step)", "jnp.where(entropy > config.entropy_target, config.entropy_step, -config.entropy_step)", "objective/test_entropy_target.py -k rises"),
    "a bonus where there is entropy enough": Fault("objective/__init__.py", "jnp.where(entropy_before <= config.entropy_target, coefficient, 0)", "jnp.where(entropy_before <= jnp.inf, coefficient, 0)", "objective/test_entropy_target.py -k rises"),
    "a step not taken moves the entropy's coefficient": Fault("update.py", '"entropy_coefficient": jnp.where(taken, moved, state.entropy_coefficient)', '"entropy_coefficient": moved', "objective/test_entropy_target.py -k not_taken"),
    "the bonus is of the config's coefficient": Fault("loss.py", "(settings.entropy_coefficient if coefficient is None else coefficient) / ", "settings.entropy_coefficient / ", "objective/test_entropy_target.py -k not_taken"),
    "covariances about 0": Fault("objective/covariance.py", "x_BS - masked_mean(x_BS, mask_BS) for", "x_BS for", "objective/test_covariance.py -k 'verls or numpy'"),
    "KL-Cov holds back the smallest covariances": Fault("objective/covariance.py", "order_BS = -jnp.round(", "order_BS = jnp.round(", "objective/test_covariance.py -k verls"),
    "KL-Cov pushes where nothing has moved": Fault("loss.py", "jax.lax.stop_gradient(away_BS) * log_rho_BS", "jnp.abs(log_rho_BS)", "objective/test_covariance.py -k verls"),
    "KL-Cov skips tokens without an advantage": Fault("loss.py", "            signal_BS |= self.penalised_BS != 0\n", "            pass\n", "objective/test_covariance.py -k learns"),
    "Clip-Cov draws the same tokens in every step": Fault("objective/covariance.py", "for part in (jnp.asarray(step).astype(jnp.uint32), row_B1, number_BS):", "for part in (row_B1, number_BS):", "objective/test_covariance.py -k 'lottery or verls'"),
    "Clip-Cov draws beyond its bounds": Fault("objective/covariance.py", "may_BS &= (covariance_BS > least) & (covariance_BS < most)", "may_BS &= covariance_BS > least", "objective/test_covariance.py -k 'verls or lottery or bounds'"),
    # The user's own prompts, rewards and tasks.
    "a function may be left without its column": Fault("tasks/rewards.py", "if missing := [name for name in reward.required()", "if missing := [name for name in reward.required()[:0]", "tasks/test_own_rewards.py -k 'column'"),
    "None counts as a number": Fault("tasks/base.py", "np.array([value is not None for value in values], bool)", "np.ones(len(values), bool)", "tasks/test_own_rewards.py -k none_leaves"),
    "reward functions share their arguments": Fault("tasks/functions.py", "value if callable(value) else copied(value)", "value", "tasks/test_own_rewards.py -k changes_what_it_is_given"),
    "a group's prompts are one to a score": Fault("tasks/checked.py", "task.score([own_prompt(prompt) for prompt in prompts], list(completions))", "task.score(prompts, list(completions))", "tasks/test_own_rewards.py -k changes_what_it_is_given"),
    "held-out instructions are drawn like any": Fault("tasks/instructions/task.py", 'is_heldout(each["prompt"], 1, 9) == heldout', "True", "tasks/test_instructions.py -k no_held_out_prompt"),
    "a finished run is written over": Fault("run/folder.py", 'if finished or (exported / "config.json").is_file() or is_adapter(exported):', "if False:", "run/test_resume.py -k finished_run"),
    "a warm-up longer than the run": Fault("optimiser.py", "warmup = min(config.warmup_steps, total_steps - 1)", "warmup = config.warmup_steps", "parity/test_twins.py -k learning_rate"),
    "TRL's epsilon is the lower bound alone": Fault("config/trl_names.py", 'own["objective.epsilon_high"] = "epsilon", given["epsilon"]', "pass", "config/test_config.py -k name_of_trls_is_ours"),
    "a manifest's shapes may be any": Fault("run/files.py", "math.prod(shape) * np.dtype(dtype).itemsize <= stored", "math.prod(shape) >= 0", "run/test_checkpoint.py -k states_what_cannot_be"),
    "a row without a reward is 0": Fault("tasks/rewards.py", "if not rewarded_B.all():", "if not rewarded_B.any():", "tasks/test_own_rewards.py -k wrong_answer"),
    "a loop for each iteration's coroutines": Fault("tasks/functions.py", "if self._loop is None:", "if True:", "tasks/test_own_rewards.py -k coroutines"),
    "coroutines one after another": Fault("tasks/functions.py", "if not reward.is_async:\n                yield from", "if reward:\n                yield from", "tasks/test_own_rewards.py -k coroutines"),
    "a hang is waited for without a word": Fault("tasks/functions.py", "if not future.done():", "if future.cancelled():", "tasks/test_own_rewards.py -k wrong_answer"),
    "the tokens of other rows": Fault("tasks/mixed.py", "[self._ids[row] for row in rows]", "list(self._ids[: len(rows)])", "prompts/test_own_prompts.py -k what_a_function_says"),
    "None is 0 in a mixture": Fault("tasks/mixed.py", "values_B[rows], about_B[rows] = own", "values_B[rows] = own.values_B", "prompts/test_own_prompts.py -k what_a_function_says"),
    "a share is not normalised": Fault("tasks/interleaved.py", "(np.arange(counts[name]) + 0.5) / share[name]", "(np.arange(counts[name]) + 0.5) * share[name]", "prompts/test_own_prompts.py -k take_turns"),
    "a stop text keeps its first bytes": Fault("tasks/stop.py", "max(map(len, ended), default=1) - 1", "0", "tasks/test_own_rewards.py -k 'stop'"),
    "a stop text begins again from nothing": Fault("tasks/stop.py", "for start in range(len(text) + 1) if text[start:] in numbers)", "for start in (len(text),))", "tasks/test_own_rewards.py -k 'stop'"),
    "columns of another row": Fault("prompts/rows.py", "self._columns_of(numbers[i]), identity", "self._columns_of(i), identity", "prompts/test_own_prompts.py -k held_out"),
    "a column that is there twice": Fault("prompts/rows.py", "names.count(name) > 1", "names.count(name) > 2", "prompts/test_own_prompts.py -k one_error"),
    "an old copy of the user's file": Fault("config/imported.py", "abs(hash((str(path.resolve()), _hash(path))))", "abs(hash(str(path.resolve())))", "tasks/test_own_rewards.py -k changed_file"),
    "changed code is not told": Fault("run/resume.py", "if before.get(name) != now.get(name)]", "if before.get(name) == now.get(name)]", "tasks/test_own_rewards.py -k changed_file"),
    # The comparison with TRL by time, puzzles, and pictures of two evaluations.
    "TRL's upper clip bound is the lower one": Fault("bench/trl_settings.py", "name: own[key] for", 'name: own[key.replace("high", "low")] for', "bench/test_time_to_score.py -k handed_over"),
    "TRL is not given the token that ends a completion": Fault("docs/experiments/time_to_score.py", "return list(ids[:count])", "return list(ids[: count - 1])", "bench/test_time_to_score.py -k stop_rule"),
    "TRL asks the prompts of another iteration": Fault("docs/experiments/time_to_score.py", "if row != expected:", "if len(row) != len(expected):", "bench/test_time_to_score.py -k another_order"),
    "a score is reached at the next point": Fault("bench/curves.py", "share = (level - before.score) / (after.score - before.score)", "share = 1.0", "bench/test_time_to_score.py -k interpolated"),
    "a puzzle is solved by its first move": Fault("chess/evaluate/puzzles.py", "2 * step + 1 == len(line)]", "step == 0]", "chess/test_puzzles.py -k whole_line"),
    "the listed mate alone solves": Fault("chess/evaluate/puzzles.py", "given[attempt] == line[2 * step] or given[attempt] in mates]", "given[attempt] == line[2 * step]]", "chess/test_puzzles.py -k any_mate"),
    "a rating's interval of one deviation": Fault("chess/evaluate/puzzles.py", "HALF_CHI_SQUARE = 1.92", "HALF_CHI_SQUARE = 0.52", "chess/test_puzzles.py -k likelihoods"),
    "a mate in two that a defence escapes": Fault("chess/positions/position.py", "if defences and all(", "if defences and any(", "chess/test_puzzles.py -k against_every_defence"),
    "no answer costs nothing in a distribution": Fault("chess/evaluate/side_by_side.py", '(1 - legal) * table.loss("")', '0 * table.loss("")', "chess/test_side_by_side.py -k illegal"),
    "special tokens around every text": Fault("model/tokenizer.py", "texts], add_special_tokens=False)", "texts])", "model/test_tokenizer_file.py -k ids_of_transformers"),
    "a tokenizer's file cuts what it reads": Fault("prompts/tokenizer_files.py", "    backend.no_truncation()\n", "", "model/test_tokenizer_file.py -k ids_of_transformers"),
    "only the first end of a text ends one": Fault("tasks/stop.py", "table_SV[:, list(tokenizer.eos_ids)]", "table_SV[:, list(tokenizer.eos_ids)[:1]]", "model/test_tokenizer_folders.py -k every_end"),
    "a prompt begins without its token": Fault("model/tokenizer.py", "for text in texts], add_special_tokens=True)", "for text in texts], add_special_tokens=False)", "model/test_tokenizer_folders.py -k transformers_makes_of_it"),
    "a chat begins with its token twice": Fault("model/tokenizer.py", "            whole[i] = ids\n", "            pass\n", "model/test_tokenizer_folders.py -k chats"),
    "tokens that the rules leave out stay out": Fault("prompts/tokenizer_files.py", "    backend.add_special_tokens([text for", "    list([text for", "model/test_tokenizer_folders.py -k transformers_makes_of_it"),
    "an export's tokenizer is written anew": Fault("model/tokenizer.py", "if TOKENIZER_FILE not in self.file.files:", "if True:", "model/test_tokenizer_folders.py -k byte_for_byte"),
    "a row's tools are not shown": Fault("prompts/chat.py", '{"tools": tools or None,', '{"tools": None,', "prompts/test_messages.py -k tools_and_arguments"),
    "a card plays Black as it plays White": Fault("chess/card.py", "seen = board if board.turn else board.mirror()", "seen = board", "export/test_export.py -k 'plays_both and own_side'"),
    "a token's bytes are those of its first place": Fault("model/token_bytes.py", "[[beside, token, beside] for token", "[[token, beside] for token", "model/test_tokenizer_file.py -k make_up_the_text"),
    "no answer is asked for after messages": Fault("prompts/chat.py", '"add_generation_prompt": True, **self._tokens', '"add_generation_prompt": False, **self._tokens', "prompts/test_messages.py -k ids_of_transformers"),
    "a completion of messages is a text": Fault("tasks/rewards.py", "            text if prompt.messages is None else [", "            text if prompt.text else [", "prompts/test_messages.py -k trl_gives"),
    "a stop token is part of the text": Fault("tasks/stop.py", "return tokenizer.decode(ids[:-1])", "return text", "rollout/test_stop_tokens.py -k 'ends_a_completion or mixture'"),
    "every task's completions end at one's stop tokens": Fault("tasks/stop.py", "table_SV[stop.begin : stop.end, [", "table_SV[:, [", "rollout/test_stop_tokens.py -k mixture"),
    "a component about no row of a batch has a mean": Fault("tasks/base.py", "for name, values in own.items() if len(values)}", "for name, values in own.items()}", "tasks/test_lessons.py -k no_row_of_a_batch"),
    "lessons follow all of it": Fault("tasks/instructions/lessons.py", "if rng.random() < followed]", "if rng.random() < 1 or followed]", "tasks/test_lessons.py -k asked_for"),
    "branches that are drawn weigh no more": Fault("chess/lessons.py", "first[token] * len(rest) / SAMPLED", "first[token]", "chess/test_soft_moves.py -k mean_loss"),
    "a branch forgets its share of the target": Fault("chess/lessons.py", "{one: share * p / total", "{one: p / total", "chess/test_soft_moves.py -k 'mean_loss or keeps_its_share'"),
    "a mirrored position keeps its values' moves": Fault("chess/positions/position.py", "tuple(move.translate(_OTHER_RANK) for move in position.moves)", "tuple(position.moves)", "chess/test_soft_moves.py -k mirrored"),
    "Black is shown as it stands": Fault("chess/positions/position.py", "return chess.Board(fen).mirror().fen() if is_black(fen) else fen", "return fen", "chess/test_own_side.py -k turned_back"),
    "a move is not turned back": Fault("chess/positions/position.py", "return turned(uci, fen) if style == OWN_SIDE else uci", "return uci", "chess/test_own_side.py -k every_component"),
    "a player finds likely what it does not turn": Fault("chess/play/player.py", 'f" {in_style(style, move.uci(), fen)}"', 'f" {move.uci()}"', "chess/test_own_side.py -k player_of_such"),
    "samples are read in other positions": Fault("chess/evaluate/policy.py", "positions[i // each].fen", "positions[i % len(positions)].fen", "chess/test_own_side.py -k every_suite"),
    "a plain player's moves are not turned": Fault("chess/evaluate/strength.py", "in_style(task.style, move, position.fen)", "move", "chess/test_strength.py -k plain"),
    "a player that chooses counts for all its moves": Fault("chess/evaluate/strength.py", "/ counts_P", "", "chess/test_strength.py -k plain"),
    "memory is kept where it is short": Fault("system/memory.py", "available(sys.maxsize) > _ROOM * peak()", "True", "memory/test_memory.py -k kept"),
    "a lead wins a half-move late": Fault("chess/play/arena.py", "abs(lead) >= HELD", "abs(lead) > HELD", "chess/test_arena.py -k lead"),
    "a lead that changes sides goes on counting": Fault("chess/play/arena.py", " if before * side > 0 else 1)", ")", "chess/test_arena.py -k lead"),
    "moments of a matrix are held twice under fsdp": Fault("mesh/__init__.py", '"mlp/c_proj/kernel": ("inner", "width"),', '"mlp/c_proj/kernel": ("inner", "positions"),', "mesh/test_mesh.py -k 'held_twice and fsdp8' -m 'not slow'"),
    "softmax sums of a device's own columns alone": Fault("lm_head/tiles.py", "jax.lax.psum((self.mass * share, self.weighted * share, self.target), axis)", "(self.mass * share, self.weighted * share, self.target)", "mesh/test_mesh.py -k 'step_is and fsdp2-tensor4'"),
    "a turn with a part of the parameters": Fault("rollout/turns.py", "decoding_model(graphdef, params, layout)", "decoding_model(graphdef, params)", "mesh/test_mesh.py -k 'rollout_is and turns-data2-fsdp2-tensor2'"),
    "what others' environments answered is not read": Fault("rollout/episodes.py", "answers = {row: (observation, done) for own in everybodys for row, observation, done in own}", "answers = {row: (observation, done) for own in everybodys[:1] * 2 for row, observation, done in own} | {row: ('0', True) for own in everybodys[1:] for row, *_ in own}", "mesh/test_processes.py -k 'episodes_of_one and guess'"),
    "an evaluation's rewards get its texts' tokens": Fault("evaluate/during_training.py", "ids |= zip(numbers, sampled, strict=True)", "ids |= zip(numbers, self._tokenizer.encode_batch(written), strict=True)", "evaluate/test_evaluation_modes.py -k encoded_again"),
    "JAX's note on a traceback is shown without one": Fault("train.py", ' if of_jax not in note)', ")", "policy/test_adapters.py -k what_jax_traces"),
    "a component called reward takes the total's name": Fault("tasks/base.py", "        if name not in values:", "        if True:", "tasks/test_own_rewards.py -k called_reward"),
    "a path that begins at home is a folder called ~": Fault("config/sections.py", "AfterValidator(os.path.expanduser)", "AfterValidator(str)", "config/test_config.py -k begin_at_home"),
    "copies of a hub's model in other formats are downloaded": Fault("config/files.py", "ignore_patterns=HUB_OTHERS", "ignore_patterns=[]", "model/test_hub.py -k nothing_twice"),
    "a hub's tensors come with the settings": Fault("config/files.py", "HUB_WEIGHTS if tensors else HUB_SETTINGS", "HUB_WEIGHTS", "model/test_hub.py -k nothing_twice"),
    "a run that trained no chess is judged at it": Fault("chess/style.py", "TASKS.get(task, OF_CHESS).startswith(OF_CHESS)", "OF_CHESS.startswith(OF_CHESS)", "chess/test_evaluation.py -k trained_no_chess"),
    "an evaluation's later turns count as a first one": Fault("memory/programs.py", 'self.name.endswith("later turns")', "self.name == LATER_TURNS", "memory/test_launches.py -k against_itself"),
    "an evaluation's episodes are others' than it scores": Fault("evaluate/during_training.py", "own_P = (numbers_P >= own.start)", "own_P = ~(numbers_P >= own.start)", "mesh/test_processes.py -k 'episodes_of_one and guess'"),
    "caches of all heads between turns": Fault("mesh/tensor.py", "axis=x.ndim - HEADS_AXIS if x.ndim > HEADS_AXIS else None", "axis=None", "memory/test_mesh_memory.py -k 'episodes and cpu'"),
    "gradients of a device's own prompts alone": Fault("mesh/__init__.py", "arrays = unravel(self._sum(vector, axes))", "arrays = unravel(vector)", "mesh/test_mesh.py -k 'step_is and data8' -m 'not slow'"),
    "a device leaves the rollout that others wait in": Fault("mesh/tensor.py", "holds if _tensor_parts() == 1 or not several else jax.lax.pmax(holds.astype(jnp.int32), several) > 0", "holds", "mesh/test_mesh.py -k 'token_for_token and tensor2' -m 'not slow'"),
    "tokens of other devices are looked up too": Fault("mesh/tensor.py", "jnp.where(own[..., None], table_VH[jnp.where(own, row, 0)], 0)", "table_VH[jnp.where(own, row, 0)]", "mesh/test_mesh.py -k 'step_is and fsdp2-tensor4'"),
    "each process scores everybody's": Fault("mesh/processes.py", "return slice(first, last)", "return slice(0, rows)", "mesh/test_processes.py -k exchange -m 'not slow'"),
    "a signal stops its own process alone": Fault("mesh/processes.py", "any(exchanged(self._own.requested))", "self._own.requested", "mesh/test_processes.py -k exchange -m 'not slow'"),
    "parts of an array over each other": Fault("run/files.py", "slice(at * size, (at + 1) * size)", "slice(0, size)", "mesh/test_processes.py -k exchange -m 'not slow'"),
    "a process that failed says that it did not": Fault("mesh/processes.py", "os._exit(1)", "os._exit(0)", "mesh/test_processes.py -k exchange -m 'not slow'"),
    # The reference: it must be as easy to break.
    "torch_ref: the lottery forgets the seed": Fault("torch_ref/covariance.py", "ticket(seed, step, int(rows_K[k])", "ticket(0 * seed, step, int(rows_K[k])", "objective/test_covariance.py -k verls"),
    "torch_ref: a coefficient beyond its bound": Fault("torch_ref/entropy_control.py", "min(coefficient + config.entropy_step, most)", "coefficient + config.entropy_step", "objective/test_entropy_target.py -k rises"),
    "torch_ref: the reference stays where it was": Fault("torch_ref/reference.py", "ours.lerp_(theirs, share)", "ours.lerp_(theirs, 1 - share)", "parity/test_parity_iterations.py -k follows"),
    "torch_ref: others' mean of all": Fault("torch_ref/advantages.py", "/ (reward_G.numel() - 1)", "/ reward_G.numel()", "parity/test_parity.py -k 'option and leave'"),
    "torch_ref: a sample is among the others": Fault("torch_ref/advantages.py", "others = ascending[:i] + ascending[i + 1 :]", "others = ascending[:i] + ascending[i:]", "objective/test_advantage_methods.py -k 'all_subsets'"),
    "torch_ref: deviation with ddof 0": Fault("torch_ref/advantages.py", '"batch": lambda reward_G, rewards_B: rewards_B.std(correction=1)', '"batch": lambda reward_G, rewards_B: rewards_B.std(correction=0)', "parity/test_parity.py -k 'option and leave'"),
    "torch_ref: truncated ones are trained on": Fault("torch_ref/batch.py", "* self.stopped_B[:, None]", "* ~self.stopped_B[:, None]", "parity/test_parity.py -k 'option and truncated'"),
    "torch_ref: no bound beyond the clip": Fault("torch_ref/objective.py", "rho_BT.clamp(max=config.delta)", "rho_BT", "parity/test_parity.py -k 'option and delta'"),
    "torch_ref: GMPO cuts the wrong side": Fault("torch_ref/objective.py", "rho_BT.clamp(max=upper), rho_BT.clamp(min=lower)", "rho_BT.clamp(min=lower), rho_BT.clamp(max=upper)", "objective/test_surrogates.py -k 'definition and gmpo'"),
    "torch_ref: the entropy bonus is a penalty": Fault("torch_ref/update.py", "loss = loss - coefficient *", "loss = loss + coefficient *", "parity/test_parity.py -k 'option and bonus'"),
    "torch_ref: top-p counts the token itself": Fault("torch_ref/sampling.py", "probability_BV.cumsum(dim=-1) - probability_BV >= p", "probability_BV.cumsum(dim=-1) >= p", "parity/test_torch_ref_transformers.py -k every_sampling"),
    "torch_ref: one token beyond the cap": Fault("torch_ref/generate.py", "(count < cap_B)", "(count <= cap_B)", "parity/test_twins.py -k cap"),
    "torch_ref: beta below its least": Fault("torch_ref/kl_control.py", "max(least, min(most, beta))", "min(most, beta)", "parity/test_twins.py -k beta"),
    "torch_ref: the schedule forgets its warm-up": Fault("torch_ref/optimiser.py", "(step - warmup) / max(1, total_steps - warmup)", "step / max(1, total_steps)", "parity/test_twins.py -k learning_rate"),
    "torch_ref: the penalty begins at the cap": Fault("torch_ref/advantages.py", "(length_B - (cap - zone)) / zone", "(length_B - cap) / zone", "parity/test_twins.py -k penalty"),
    "torch_ref: rotary pairs are neighbours": Fault("torch_ref/decoder.py", "first, second = x_BNTD.to(wide).chunk(2, dim=-1)", "first, second = x_BNTD.to(wide)[..., ::2], x_BNTD.to(wide)[..., 1::2]", "parity/test_torch_ref_families.py -k every_gradient"),
    "torch_ref: the last layer's rotary base in every layer": Fault("torch_ref/decoder.py", "config.layers[self.layer].rotary", "config.layers[-1].rotary", "parity/test_torch_ref_families.py -k every_gradient"),
    "torch_ref: heads of keys repeated in the wrong order": Fault("torch_ref/decoder.py", "key.repeat_interleave(group, dim=1), value", "key.repeat(1, group, 1, 1), value", "parity/test_torch_ref_families.py -k every_gradient"),
    "torch_ref: a norm without its 1": Fault("torch_ref/decoder.py", "self.offset + self.weight.to", "self.weight.to", "parity/test_torch_ref_families.py -k every_gradient"),
    "torch_ref: gate and up swapped": Fault("torch_ref/decoder.py", "self.activation(self.gate_proj(x_BTH)) * self.up_proj(x_BTH)", "self.activation(self.up_proj(x_BTH)) * self.gate_proj(x_BTH)", "parity/test_torch_ref_families.py -k every_gradient"),
    "torch_ref: a window of one token more": Fault("torch_ref/model.py", "key_BS[:, None, :] < window", "key_BS[:, None, :] <= window", "parity/test_torch_ref_families.py -k every_gradient"),
    "torch_ref: a head that is not the embedding is": Fault("torch_ref/decoder.py", '"embed_tokens"] if self.config.tied else', '"embed_tokens"] if self.config.vocab_size else', "parity/test_torch_ref_families.py -k every_gradient"),
    "torch_ref: no rotary scaling": Fault("torch_ref/families.py", "return SCALINGS[self.kind](self, frequency_d)", "return frequency_d", "parity/test_torch_ref_families.py -k every_gradient"),
    "torch_ref: llama3's interpolation ends at 0": Fault("torch_ref/families.py", "/ (rotary.high - rotary.low)", "/ rotary.high", "parity/test_torch_ref_families.py -k every_gradient"),
    "torch_ref: embeddings are not scaled": Fault("torch_ref/decoder.py", "(input_ids_BT) * self.config.embedding_scale", "(input_ids_BT)", "parity/test_torch_ref_families.py -k every_gradient"),
    "torch_ref: queries are normed once rotated": Fault("torch_ref/decoder.py", "rotate(self.q_norm(heads(self.q_proj(x_BTH))), position_BT, frequency_d)", "self.q_norm(rotate(heads(self.q_proj(x_BTH)), position_BT, frequency_d))", "parity/test_torch_ref_families.py -k every_gradient"),
    "torch_ref: scores by the size of a head": Fault("torch_ref/decoder.py", "scale=config.attention_scale", "scale=config.head_dim**-0.5", "parity/test_torch_ref_families.py -k every_gradient"),
    "torch_ref: no norm behind the attention": Fault("torch_ref/decoder.py", "x_BTH + self.post_attention_layernorm(mixed_BTH)", "x_BTH + mixed_BTH", "parity/test_torch_ref_families.py -k every_gradient"),
    "torch_ref: layers with a window have the others' base": Fault("torch_ref/families.py", '("rope_local_base_freq", 1e4)', '("rope_theta", 1e4)', "parity/test_torch_ref_families.py -k every_gradient"),
    "torch_ref: Qwen's windows begin a layer early": Fault("torch_ref/families.py", 'layer >= values["max_window_layers"]', 'layer >= values["max_window_layers"] - 1', "parity/test_torch_ref_families.py -k qwen"),
    "torch_ref: an index beside a single file wins": Fault("torch_ref/weights.py", "if not (directory / shards[0]).exists() and index.exists():", "if index.exists():", "parity/test_torch_ref_families.py -k single_file"),
    "GGUF: rows of queries stay permuted": Fault("gguf_files/families.py", "-1, 2, *values.shape[1:]).swapaxes(1, 2)", "-1, 2, *values.shape[1:])", "model/test_gguf.py -k logits_of_its_source"),
    "GGUF: keys have as many heads as queries": Fault("gguf_files/families.py", '"attn_k": "num_key_value_heads"', '"attn_k": "num_attention_heads"', "model/test_gguf.py -k logits_of_its_source"),
    "GGUF: Gemma's norms keep their 1": Fault("gguf_files/families.py", "values.astype(np.float32) - 1 if", "values.astype(np.float32) if", "model/test_gguf.py -k logits_of_its_source"),
    "GGUF: Gemma's first layer sees everything": Fault("gguf_files/families.py", "bool((layer + 1) % pattern)", "bool(layer % pattern)", "model/test_gguf.py -k logits_of_its_source"),
    "GGUF: Llama 3's rotary factors are left out": Fault("gguf_files/families.py", "if ROPE_FACTORS not in file.tensors:", "if ROPE_FACTORS in file.tensors or ROPE_FACTORS not in file.tensors:", "model/test_gguf.py -k logits_of_its_source"),
    "GGUF: any other key is passed over": Fault("gguf_files/families.py", "if key not in known and not", "if not known and not", "model/test_gguf.py -k refused_by_its_key"),
    "GGUF: a copy of the embedding is another head": Fault("gguf_files/families.py", "return not (same and np", "return True or not (same and np", "model/test_gguf.py -k written_a_second_time"),
    "GGUF: SmolLM's digits stay together": Fault("gguf_files/tokenizer.py", '"smollm": Cutting((r"\\p{N}", GPT2_WORDS))', '"smollm": Cutting((GPT2_WORDS,))', "model/test_gguf.py -k smollm_cuts"),
    "GGUF: the worst score joins first": Fault("gguf_files/tokenizer.py", '(-given["scores"]', '(given["scores"]', "model/test_gguf.py -k sentencepiece"),
    "GGUF: what fills the vocabulary up is a token": Fault("gguf_files/tokenizer.py", 'if given["token_type"][i] != UNUSED}', 'if given["token_type"][i]}', "model/test_gguf.py -k special_tokens"),
    "rotary pairs are neighbours": Fault("model/attention.py", "    a, b = jnp.split(x.astype(cos.dtype), 2, axis=-1)\n", "    a, b = x.astype(cos.dtype)[..., 0::2], x.astype(cos.dtype)[..., 1::2]\n", "model/test_families.py -k 'padding_on_either_side and left and qwen3'"),
    "heads that share keys are not neighbours": Fault("model/attention.py", "    queries = q.reshape(*q.shape[:-2], kv_heads, heads // kv_heads, q.shape[-1]) if shared else q\n", "    queries = jnp.swapaxes(q.reshape(*q.shape[:-2], heads // kv_heads, kv_heads, q.shape[-1]), -3, -2) if shared else q\n", "model/test_families.py -k 'padding_on_either_side and left and llama_tied'"),
    "a norm without its 1": Fault("model/layers.py", "(self.offset + self.scale[...].astype(x.dtype))", "self.scale[...].astype(x.dtype)", "model/test_families.py -k 'padding_on_either_side and left and gemma3'"),
    "gate and up are exchanged": Fault("model/layers.py", "gate, up = jnp.split(inner, 2, axis=-1)", "up, gate = jnp.split(inner, 2, axis=-1)", "model/test_families.py -k 'padding_on_either_side and left and llama_tied'"),
    "blocks: the last key that a block sees is missing": Fault("model/attention.py", "one.until(end) for one", "one.until(end - 1) for one", "model/test_families.py -k 'grouped_completions and llama_tied'"),
    "blocks: queries have the first block's positions": Fault("model/attention.py", "kvs, at[..., begin:end], end))", "kvs, at[..., : end - begin], end))", "model/test_families.py -k 'grouped_completions and llama_tied'"),
    "blocks: a prompt is cut as a completion is": Fault("model/attention.py", "one if one.past else one.until(end)", "one.until(end)", "model/test_families.py -k 'grouped_completions and llama_tied'"),
    "blocks: gradients are of the last block alone": Fault("model/attention.py", "out.append(block(q[..., begin:end, :, :], kvs,", "out.append(block(q[..., begin:end, :, :], kvs if end == queries else jax.lax.stop_gradient(kvs),", "model/test_families.py -k 'gradients_in_blocks and llama_tied'"),
    "attention kernels: windows are one token too wide": Fault("fused_attention.py", "at_query - at_key < window", "at_query - at_key <= window", "model/test_attention.py -k kernels_give"),
    "attention kernels: heads of keys are repeated in the wrong order": Fault("fused_attention.py", "0, _div(n, e), 0)", "0, jax.lax.rem(n, jnp.int32(2)), 0)", "model/test_attention.py -k kernels_give"),
    "attention kernels: keys have no gradient from their own block of queries": Fault("fused_attention.py", "_div(first, size) if own else 0", "_div(first, size) + 1 if own else 0", "model/test_attention.py -k kernels_give"),
    "attention kernels: a prompt's keys learn from its first completion alone": Fault("fused_attention.py", "0, neighbours * each, of_head", "0, each, of_head", "model/test_attention.py -k kernels_give"),
    "attention kernels: what was summed is not scaled to a new largest score": Fault("fused_attention.py", "out_QD * shrink_Q[:, None] +", "out_QD +", "model/test_attention.py -k kernels_give"),
    "attention kernels: the softmax's own gradient is left out": Fault("fused_attention.py", "(to_weight_QK - along_Q[:, None])", "to_weight_QK", "model/test_attention.py -k kernels_give"),
    "attention kernels: padding is seen": Fault("fused_attention.py", "jnp.where(True if one.real is None else one.real, one.at, UNSEEN)", "one.at", "model/test_attention.py -k kernels_give"),
    "padding left out: tokens come back from the next one's row": Fault("arrays/token_rows.py", "jnp.maximum(here_N - 1, 0)", "here_N", "model/test_token_rows.py -k come_back"),
    "padding left out: gradients go back by the way there": Fault("arrays/token_rows.py", "_pick(to_picked, *reversed(places))", "_pick(to_picked, *places)", "model/test_token_rows.py -k cotangents"),
    "padding left out: rows beyond the last token are not empty": Fault("arrays/token_rows.py", "jnp.arange(count) < here_N[-1]", "jnp.arange(count) >= 0", "model/test_token_rows.py -k come_back"),
    "padding has scores": Fault("update.py", "tuple(masked(score_bS, mask_bS) for", "tuple(score_bS for", "model/test_token_rows.py -k same_scores"),
    "equal prompts of other caps have one answer": Fault("evaluate/during_training.py", "prompt.start_state, prompt.max_new_tokens)", "prompt.start_state)", "evaluate/test_evaluation_modes.py -k equal"),
    "a CPU's products in bfloat16 return bfloat16": Fault("arrays/products.py", "return product(a, b, jnp.float32)", "return product(a, b, jnp.bfloat16)", "model/test_products.py -k instructions"),
    "a product's gradient in its weights is of the cotangent alone": Fault("arrays/products.py", "contract(x_NI, to_NO, (0, 0), w_IO.dtype)", "contract(jnp.ones_like(x_NI), to_NO, (0, 0), w_IO.dtype)", "model/test_products.py -k gradients"),
    "padding left out: room for the emptiest micro-batch": Fault("batch.py", "real = max(", "real = min(", "model/test_token_rows.py -k quarters"),
    "padding left out: the last column has a row": Fault("batch.py", "read_NPGC = pieces.completion_mask_PGC[..., :-1]", "read_NPGC = pieces.completion_mask_PGC", "model/test_token_rows.py -k quarters"),
    "columns of the cache without a token are seen": Fault("model/decoder.py", "Seen(last, at_PGS[-1])]", "Seen(last, at_PGS[-1], past=True)]", "model/test_families.py -k 'cache_of_chunks and llama_tied'"),
    "padding of a prompt is seen": Fault("model/attention.py", "[] if real is None else [real[..., None, :]]", "[]", "model/test_families.py -k 'grouped_completions and llama_tied'"),
    "a window of one token more": Fault("model/attention.py", "[distance < window]", "[distance <= window]", "model/test_families.py -k 'padding_on_either_side and left and mistral'"),
    "an untied head is the embedding": Fault("model/decoder.py", "(self.wte if self.config.tied else self.head)", "self.wte", "model/test_families.py -k 'padding_on_either_side and left and mistral'"),
    "rotary scaling is left out": Fault("model/attention.py", "((1 - unscaled_D) / (rope.factor or 1) + unscaled_D) * turns_D", "turns_D", "model/test_families.py -k 'padding_on_either_side and left and llama_tied'"),
    "layers with a window turn by the other base": Fault("model/architecture.py", "return self.rope if window is None else self.window_rope or self.rope", "return self.rope", "model/test_families.py -k 'padding_on_either_side and left and gemma3'"),
    "Gemma scales by the unrounded factor": Fault("model/decoder.py", "jnp.asarray(self.config.hidden_size**0.5, self.compute_dtype).astype(tokens.dtype)", "jnp.asarray(self.config.hidden_size**0.5, tokens.dtype)", "model/test_families.py -k gemmas_embeddings"),
    "scores are divided by the head's size alone": Fault("model/architecture.py", "self.head_dim if self.query_scale is None else self.query_scale", "self.head_dim", "model/test_families.py -k 'padding_on_either_side and left and gemma3'"),
    "decode kernel: a window is one key longer": Fault("model/decode_kernel.py", "length + behind - window + 1, 0)", "length + behind - window, 0)", "model/test_families.py -k 'decode_kernel and mistral'"),
    "decode kernel: heads that share keys are not neighbours": Fault("model/decode_kernel.py", "(p, n // queries, 0, 0))", "(p, jax.lax.rem(n, kv_heads), 0, 0))", "model/test_families.py -k 'decode_kernel and qwen3'"),
    "decode kernel: padding of a prompt is seen": Fault("model/decode_kernel.py", "mask=counts_K, other=0) != 0", "mask=counts_K, other=0) >= 0", "model/test_families.py -k 'decode_kernel and llama_tied'"),
    "a decoded token does not see itself": Fault("model/attention.py", "[distance >= 0]", "[distance > 0]", "model/test_families.py -k 'cache_of_chunks and llama_tied'"),
    "adapters: alpha and rank change places": Fault("policy/adapters.py", "return self.alpha / (math.sqrt(self.rank) if self.rank_stabilised else self.rank)", "return (math.sqrt(self.rank) if self.rank_stabilised else self.rank) / self.alpha", "parity/test_parity_adapters.py -k every_adapters_gradient"),
    "adapters: the scale twice": Fault("policy/adapters.py", "return (self.scale * (x @ ", "return self.scale * (self.scale * (x @ ", "parity/test_parity_adapters.py -k every_adapters_gradient"),
    "adapters: A and B change places in files": Fault("model/families.py", "lora_{kind.upper()}.weight", "lora_{dict(a='B', b='A')[kind]}.weight", "policy/test_adapters.py -k peft_loads"),
    "adapters: the reference has the policy's": Fault("trainer.py", "(own := self._own_reference) is None else joined(own, self.base)", "self._own_reference is None else self.weights", "parity/test_parity_adapters.py -k reference_is_the_base"),
    "adapters: the base is trained and decays": Fault("policy/adapters.py", "return (adapters, base) if jax.tree.leaves(adapters) else (params, None)", "return params, None", "parity/test_parity_adapters.py -k behind_a_step"),
    "adapters: none under recomputation": Fault("model/decoder.py", "return pure(*barrier((params, x)))", "return pure(*barrier((jax.lax.stop_gradient(params) if remat else params, x)))", "parity/test_parity_adapters.py -k every_adapters_gradient"),
    "adapters: what is merged forgets the scale": Fault("policy/adapters.py", "return self.scale * (self.a[...] @ self.b[...])", "return self.a[...] @ self.b[...]", "policy/test_adapters.py -k merged"),
    "adapters: of another base": Fault("policy/named.py", 'jnp.dtype(dtype or "float32"))) != before', 'jnp.dtype(dtype or "float32"))) == ""', "policy/test_adapters.py -k another_base"),
    "adapters: a run continues on another base": Fault("run/resume.py", '("architecture", "base", "reference")', '("architecture", "reference")', "run/test_adapter_runs.py -k another_is_not_continued"),
    "adapters: rollouts are of the base": Fault("trainer.py", "self.generate(self.weights, *tokens", "self.generate(joined(jax.tree.map(jnp.zeros_like, self.state.params), self.base), *tokens", "parity/test_parity_adapters.py -k reference_is_the_base"),
    "torch_ref: adapters without their scale": Fault("torch_ref/adapters.py", "h + scale * module.lora_B", "h + module.lora_B", "parity/test_parity_adapters.py -k every_adapters_gradient"),
    "int8: scales of a file's other axis": Fault("model/weights.py", "axis=int(one.transposed)) for one in tensors]", "axis=int(not one.transposed)) for one in tensors]", "policy/test_int8.py -k own_layout"),
    "int8: the scale twice": Fault("model/layers.py", "(product.astype(wide) * self.kernel_scale[...].astype(wide))", "(product.astype(wide) * jnp.square(self.kernel_scale[...].astype(wide)))", "parity/test_parity_int8.py -k 'every_adapters_gradient and (gpt2 or mistral)'"),
    "int8: rounded towards zero": Fault("model/int8.py", "return np.rint(steps, out=steps)", "return np.trunc(steps, out=steps)", "parity/test_parity_int8.py -k 'every_adapters_gradient and (gpt2 or mistral)'"),
    "int8: levels of 128": Fault("model/int8.py", "LARGEST = np.float32(127)", "LARGEST = np.float32(128)", "parity/test_parity_int8.py -k 'every_adapters_gradient and (gpt2 or mistral)'"),
    "int8: a column of zeros divides by zero": Fault("model/int8.py", "np.where(scale < LEAST, np.float32(1), scale)", "np.where(scale < 0, np.float32(1), scale)", "policy/test_int8.py -k scale_one"),
    "int8: the reference has other scales": Fault("trainer.py", "(own := self._own_reference) is None else joined(own, self.base)", "(own := self._own_reference) is None else joined(own, jax.tree.map(lambda x: x * 1.01 if x.dtype == jnp.float32 else x, self.base))", "parity/test_parity_int8.py -k same_iterations"),
    "int8: biases and norms keep the files' digits": Fault("model/weights.py", "floats = int8.OTHERS if small else dtype", "floats = jnp.float32 if small else dtype", "parity/test_parity_int8.py -k 'every_adapters_gradient and (gpt2 or mistral)'"),
    "int8: a copy in floats before a rollout": Fault("model/layers.py", "if matrix and floats else leaf", "if matrix else leaf", "policy/test_int8.py -k 'no_cast or what_samples'"),
    "int8: a name means the files' own weights": Fault("policy/named.py", "return int8_base.rounded(base)", "return base", "run/test_adapter_runs.py -k 'on_int8'"),
    "int8: adapters of one base begin on it in floats' hash": Fault("policy/named.py", "return checkpoints.content_hash(base if int8_base.is_held(base) else int8_base.held(base), jnp.float32)", "return checkpoints.content_hash(base, jnp.float32)", "policy/test_int8.py -k one_base"),
    "int8: a run continues on it that began without": Fault("run/resume.py", 'if "int8" in changed.get(', 'if "int4" in changed.get(', "run/test_adapter_runs.py -k 'on_int8'"),
    "torch_ref: int8 by column instead of output": Fault("torch_ref/int8.py", "weight_OI = module.weight.T if isinstance(module, Conv1D) else module.weight", "weight_OI = module.weight", "parity/test_parity_int8.py -k 'every_adapters_gradient and gpt2'"),
    "torch_ref: int8 without its scale": Fault("torch_ref/int8.py", "scaled = product.to(wide) * self.scale_O.to(wide)", "scaled = product.to(wide)", "parity/test_parity_int8.py -k 'every_adapters_gradient and (gpt2 or mistral)'"),
    "torch_ref: the head in int8 too": Fault("torch_ref/int8.py", "if name == HEAD or not isinstance", "if not isinstance", "parity/test_parity_int8.py -k 'every_adapters_gradient and mistral'"),
    "a top_k of the whole vocabulary is taken": Fault("programs.py", "if how.top_k >= tokenizer.vocab_size:", "if how.top_k > tokenizer.vocab_size:", "trainer/test_train.py -k top_k"),
    "rows given keep the keys that Arrow adds": Fault("prompts/given.py", "{name: without_none(value) if name in READ else value for", "{name: value for", "prompts/test_given.py -k library"),
    "rows given have one file, whatever they are": Fault("prompts/given.py", "hashlib.sha256(text.encode()).hexdigest()[:12]", "'rows'", "prompts/test_given.py -k named_by_them"),
}  # fmt: skip


def start_pytest(tests: Sequence[str], copy: Path, *, own_group: bool = False) -> int:
    """The process of pytest in the copy, which begins with the libraries imported; its output goes to `pytest.log` there.

    With `own_group` it leads a process group, so that all that it starts can be ended with it.
    """
    child = os.fork()
    if child == 0:
        if own_group:
            os.setpgid(0, 0)
        with (copy / "pytest.log").open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.environ["PYTHONPATH"] = str(copy)
        sys.path.insert(0, str(copy))
        os.chdir(copy / "parity_tests")
        status = 70
        try:
            status = int(pytest.main(["-x", "-q", "-n", "0", "-p", "no:cacheprovider", *tests]))
        finally:
            sys.stdout.flush()
            os._exit(status)
    return child


def run_pytest(tests: str, copy: Path) -> tuple[int, str]:
    """Exit status and output of pytest in the copy."""
    # A test that is marked slow one day still looks for its fault.
    child = start_pytest(["-m", "slow or not slow", *shlex.split(tests)], copy)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), (copy / "pytest.log").read_text(errors="replace")


def first_red(fault: Fault, copy: Path) -> str | None:
    """The first test that fails with the fault in place, or None."""
    file = copy / fault.path
    source = file.read_text()
    if source.count(fault.right) != 1:
        raise SystemExit(f"{fault.file}: {fault.right!r} stands there {source.count(fault.right)} times; expected once")
    file.write_text(source.replace(fault.right, fault.wrong))
    status, output = run_pytest(fault.tests, copy)
    file.write_text(source)
    red = re.search(r"^(?:FAILED|ERROR) (?:parity_tests/)?(.+?)(?: - .*)?$", output, re.MULTILINE)
    if red is None and status not in (0, 1):
        raise SystemExit(f"{fault.tests}: pytest did not run: {output[-2000:]}")
    return red[1] if red else None


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="faults; all by default", metavar="NAME")
    parser.add_argument("--out", required=True, type=Path)
    arguments = parser.parse_args()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    records: dict[str, dict[str, str | None]] = {}
    if arguments.names and arguments.out.exists():  # those that were not asked for keep what was seen of them
        records = json.loads(arguments.out.read_text())
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        kept_out = shutil.ignore_patterns(".git", ".venv*", "runs", "__pycache__", "results")
        shutil.copytree(ROOT, copy, ignore=kept_out)
        for name in arguments.names or FAULTS:
            fault = FAULTS[name]
            red = first_red(fault, copy)
            print(f"{name}: {red or 'NOT SEEN'}", flush=True)
            records[name] = {"file": fault.file, "right": fault.right, "wrong": fault.wrong, "red": red}
            records = {name: records[name] for name in FAULTS if name in records}
            arguments.out.write_text(
                json.dumps(records, indent=1) + "\n"
            )  # after each: an interrupted run keeps what it saw
    sys.exit(0 if all(records[name]["red"] for name in arguments.names or FAULTS) else 1)


if __name__ == "__main__":
    main()
