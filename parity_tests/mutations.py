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

    `file` is of `jax_grpo` where it does not begin with `torch_ref/`.
    """

    file: str
    right: str
    wrong: str
    tests: str

    @property
    def path(self) -> str:
        """Of the file, below the repository."""
        return self.file if self.file.startswith("torch_ref/") else f"jax_grpo/{self.file}"


PARITY = (
    "test_parity.py -m 'slow or not slow' -k "
    "'every_option or (float64_every_combination and (luspo or dapo and (k2 or k3)))'"
)
ONE_STEP = "test_parity.py -m 'slow or not slow' -k 'float64_every_combination and clip-token-dapo-k3'"
FAULTS = {
    "baseline over the batch": Fault(
        "advantages.py",
        "return rewards_B - _group_sum(rewards_B, group_ids_B) / size_B",
        "return rewards_B - jnp.mean(rewards_B) + 0 * size_B",
        PARITY,
    ),
    "standard deviation with ddof 0": Fault("advantages.py", "jnp.maximum(size_B - 1, 1))\n\n\ndef _robust", "size_B)\n\n\ndef _robust", PARITY),
    "a robust scale about the mean": Fault("advantages.py", "jnp.nanmedian(", "jnp.nanmean(", "test_advantages.py -k sum_to_zero"),
    "parts of an advantage are clipped": Fault("advantages.py", "lambda component_B: _unclipped(component_B", "lambda component_B: group_advantages(component_B", "test_advantages.py -k clipped"),
    "OPO without its weights": Fault("advantages.py", "weighted_B = _group_sum(lengths_B * rewards_B, group_ids_B)", "weighted_B = _group_sum(rewards_B, group_ids_B) * jnp.mean(lengths_B)", "test_advantage_methods.py -k opo"),
    "OPO counts the batch's lengths": Fault("advantages.py", "jnp.maximum(_group_sum(lengths_B, group_ids_B), 1)", "jnp.sum(lengths_B)", "test_advantage_methods.py -k opo"),
    "OPO weighs by the padded length": Fault("scored/__init__.py", "return np.asarray(self.rollout.completion_mask_PGC).sum(-1)", "return (np.asarray(self.rollout.completion_mask_PGC) >= 0).sum(-1)", "test_settings_act.py -k accepted_pair"),
    "MaxRL divides by the batch's mean": Fault("advantages.py", "_group_sum(rewards_B, group_ids_B) / _group_sum(jnp.ones_like(rewards_B), group_ids_B)\n    ),", "jnp.mean(rewards_B)\n    ),", "test_advantage_methods.py -k maxrl"),
    "MaxRL takes rewards below 0": Fault("scored/__init__.py", "not_negative(scored.rewards_B)", "not_negative(abs(scored.rewards_B))", "test_settings_act.py -k below_0"),
    "pass@k: a sample is of too few subsets": Fault("advantages.py", "jnp.maximum(size_B[:, None] - 2 - taken_k, 1)", "jnp.maximum(size_B[:, None] - 1 - taken_k, 1)", "test_advantage_methods.py -k 'all_subsets'"),
    "pass@k: tied samples have one place": Fault("advantages.py", " | (equal_BB & (row_B[None, :] < row_B[:, None])))", ")", "test_advantage_methods.py -k 'all_subsets'"),
    "pass@k: all but the best keep a credit": Fault("advantages.py", "gain_BB = jnp.where(below_BB, subsets_B", "gain_BB = jnp.where(same_BB, subsets_B", "test_advantage_methods.py -k 'all_subsets'"),
    "pass@k: a broken reward is not seen": Fault("advantages.py", "    summed_B += 0 * _group_sum(rewards_B, group_ids_B)\n", "", "test_advantage_methods.py -k 'not_finite'"),
    "refill: a slot with signal is taken": Fault("scored/refill.py", "empty, found = np.flatnonzero(~first)", "empty, found = np.arange(len(first))", "test_refill.py -k 'slots or definition_names'"),
    "refill: the last found comes first": Fault("scored/refill.py", "groups_P[empty[:taken]] = found[:taken]", "groups_P[empty[:taken]] = found[:taken][::-1]", "test_refill.py -k 'slots or definition_names'"),
    "refill: one round too many": Fault("scored/refill.py", "spent = len(rounds) == settings.rounds or", "spent = len(rounds) == settings.rounds + 1 or", "test_refill.py -k spent_budget"),
    "refill: the budget of tokens is not read": Fault("scored/refill.py", "            settings.tokens is not None and", "            False and", "test_refill.py -k spent_budget"),
    "refill: rewards stay in their place": Fault("scored/refill.py", "rewards_B=np.concatenate([one.rewards_B for one in drawn])[rows_B]", "rewards_B=drawn[0].rewards_B", "test_refill.py -k definition_names"),
    "refill: tokens stay in their place": Fault("scored/refill.py", "for one in rollouts])[groups_P])", "for one in rollouts])[: len(groups_P)])", "test_refill.py -k definition_names"),
    "refill: the cursor stays behind": Fault("trainer.py", "self.draws.further += len(filled.rounds) - 1", "self.draws.further += min(len(filled.rounds) - 1, 1)", "test_refill.py -k definition_names"),
    "refill: the cursor is not restored": Fault("draws.py", "self.further = next_prompt // self._size - iterations_done", "self.further = 0", "test_refill.py -k continues"),
    "refill: a draw that was not needed moves the curriculum on": Fault("trainer.py", "self.draws.back_to(before)", "self.draws.place", "test_refill.py -k beside"),
    "refill: a draw that was not needed is an iteration's": Fault("scored/refill.py", "return Filled(rounds, ahead)", "return Filled(rounds + ([] if ahead is None else [reward(finish(ahead))]), None)", "test_refill.py -k beside"),
    "a draw asks about the position next to its own": Fault("draws.py", "self.dataset.positions[number]", "self.dataset.positions[number - 1]", "test_train.py -k drawn_twice"),
    "refill: a prompt drawn twice is sampled alike": Fault("draws.py", "sampling_numbers(self._asked, len(self.dataset))[-len(prompts) :]", "sampling_numbers(numbers, len(self.dataset))", "test_refill.py -k sampled_anew"),
    "curriculum: the far are drawn and not the near": Fault("positions/curriculum.py", "+ 0.5 * np.square(distance_N", "- 0.5 * np.square(distance_N", "test_curriculum.py -k 'distance or both_implementations'"),
    "curriculum: a width that is a variance": Fault("positions/curriculum.py", "(self.rate_N - how.target) / how.width", "(self.rate_N - how.target) / how.width**0.5", "test_curriculum.py -k 'distance or both_implementations'"),
    "curriculum: shares are cut": Fault("positions/curriculum.py", "math.floor(share * prompts + rng.random())", "math.floor(share * prompts + 0 * rng.random())", "test_curriculum.py -k 'shares_are_met'"),
    "curriculum: what is solved stays": Fault("positions/curriculum.py", "smallest(near_N, known_N & ~retired_N & free_N,", "smallest(near_N, known_N & free_N,", "test_curriculum.py -k 'solved'"),
    "curriculum: one prompt in two draws": Fault("positions/curriculum.py", "free_N[list(taken)] = False", "pass", "test_curriculum.py -k both_implementations"),
    "curriculum: the newest group is all": Fault("positions/curriculum.py", "before + how.newest * (share - before)", "share", "test_curriculum.py -k running_mean"),
    "curriculum: a reward passes by its last bit": Fault("positions/curriculum.py", "how.passed - NEAR * max(1.0, abs(how.passed))", "how.passed", "test_curriculum.py -k running_mean"),
    "curriculum: rates are not restored": Fault("draws.py", "self.curriculum.restore(curriculum)", "pass", "test_curriculum.py -k continues"),
    "curriculum: the place in the order is not saved": Fault("positions/curriculum.py", "for count in (self._next, self._draws))", "for count in (0, self._draws))", "test_curriculum.py -k continues"),
    "curriculum: other draws' rewards": Fault("trainer.py", "self.draws.observe(drawn.numbers, scored.rewards_B)", "self.draws.observe(self.draws._asked[: len(drawn.numbers)], scored.rewards_B)", "test_parity_draws.py -m 'slow or not slow' -k 'both_trainers and curriculum'"),
    "torch_ref: a curriculum that keeps the solved": Fault("torch_ref/curriculum.py", "active = [number for number in known if not self._solved(number)]", "active = known", "test_curriculum.py -k both_implementations"),
    "pass@k: a group without advantage has signal": Fault("advantages.py", "    flat_B |= _without_advantage(unscaled_B, group_ids_B)\n", "", "test_advantage_methods.py -k more_successes"),
    "torch_ref: refill keeps what comes last": Fault("torch_ref/refill.py", "for number in range(1, len(drawn)) for group", "for number in reversed(range(1, len(drawn))) for group", "test_parity_draws.py -k 'both_trainers and fused'"),
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
        "model/gpt2.py",
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
        "update.py", "        model.wte.embedding[...],\n", "        jax.lax.stop_gradient(model.wte.embedding[...]),\n", PARITY
    ),
    "embedding's gradient accumulated in bfloat16": Fault(
        "lm_head/materialised.py",
        'to_embedding_VH = jnp.einsum("bsv,bsh->vh", gradient_BSV, hidden_BSH, preferred_element_type=accumulator)',
        'to_embedding_VH = jnp.einsum("bsv,bsh->vh", gradient_BSV, hidden_BSH, preferred_element_type=accumulator).astype(jnp.bfloat16)',
        "test_lm_head.py test_parity.py -k 'definition or every_option'",
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
    "DPPO bounds the ratio": Fault("objective/surrogates.py", "return jnp.abs(jnp.exp(logp_BS) - jnp.exp(old_logp_BS))", "return jnp.abs(jnp.exp(logp_BS - old_logp_BS) - 1)", "test_surrogates.py -k 'definition and dppo_tv'"),
    "DPPO holds back what leads back": Fault("objective/surrogates.py", "jnp.where(advantages_B1 > 0, high_BS, low_BS)", "high_BS | low_BS", "test_surrogates.py -k 'definition and dppo'"),
    "GMPO cuts both sides": Fault("objective/surrogates.py", "jnp.minimum(log_rho_BS, config.epsilon_high), jnp", "jnp.clip(log_rho_BS, -config.epsilon_low, config.epsilon_high), jnp", "test_surrogates.py -k 'definition and gmpo'"),
    "GMPO's mean counts padding": Fault("objective/surrogates.py", "masked_mean(cut_BS, mask_BS, axis=-1)[:, None]", "jnp.mean(cut_BS, axis=-1)[:, None]", "test_surrogates.py -k 'definition and gmpo'"),
    "VESPO differentiates its weight": Fault("objective/surrogates.py", "return -jax.lax.stop_gradient(weight_BS) * advantages_B1 * logp_BS\n\n\nSURROGATES", "return -weight_BS * advantages_B1 * logp_BS\n\n\nSURROGATES", "test_surrogates.py -k 'definition and vespo'"),
    "VESPO takes the mean ratio": Fault("objective/surrogates.py", "sum_B = jnp.sum(masked(jnp.clip(log_rho_BS, -20, 20), mask_BS), axis=-1)", "sum_B = masked_mean(jnp.clip(log_rho_BS, -20, 20), mask_BS, axis=-1)", "test_surrogates.py -k 'definition and vespo'"),
    "a masked mismatch is cut": Fault("objective/__init__.py", "(ratio_BS < floor) | (ratio_BS > cap), 0, ratio_BS)", "ratio_BS > cap, cap, ratio_BS)", "test_surrogates.py -k mismatch"),
    "a sequence's mismatch is its mean": Fault("objective/__init__.py", "jnp.broadcast_to(jnp.sum(log_ratio_BS, axis=-1, keepdims=True)", "jnp.broadcast_to(jnp.mean(log_ratio_BS, axis=-1, keepdims=True)", "test_surrogates.py -k mismatch"),
    "sequences are taken apart by a fused head": Fault("config/learning.py", 'self.name in ("gmpo", "vespo") or corrected', 'self.name == "gmpo" or corrected', "test_surrogates.py -k fused"),
    "weight decay on biases and norms": Fault("optimiser.py", "lambda x: x.ndim >= 2", "lambda x: x.ndim >= 1", "test_parity_steps.py -k float64"),
    "warm-up begins at 0": Fault("optimiser.py", "lr * (t + 1) / max(warmup, 1)", "lr * t / max(warmup, 1)", "test_parity_steps.py -k float64"),
    "entropy bonus is a penalty": Fault("loss.py", "- self.bonus *", "+ self.bonus *", PARITY),
    # NaN is on neither side of a tolerance: every comparator has to look for it.
    "NaN in kl/mean": Fault("loss.py", 'out["kl/mean"] = mean(kl_BS)', 'out["kl/mean"] = mean(kl_BS) * jnp.nan', ONE_STEP),
    "NaN in entropy": Fault("loss.py", '"entropy": mean(entropy_BS),', '"entropy": mean(entropy_BS) * jnp.nan,', ONE_STEP),
    "NaN in clip_fraction/low": Fault("loss.py", '"clip_fraction/low": mean(low_BS),', '"clip_fraction/low": mean(low_BS) * jnp.nan,', ONE_STEP),
    "NaN in wpe's gradient of the grouped layout": Fault(
        "model/gpt2.py", "self._embed(read_PGC, position_PGC))", "self._embed(read_PGC, position_PGC) + 0 * jnp.sqrt(0 * self.wpe(position_PGC)))",
        "test_model.py -k grouped_layout_equals",
    ),
    # The trainer and what it calls, data, evaluation, checkpoints.
    "minibatches: advantages stay in their place": Fault("batch.py", "order_B = (order_P[:, None] * group + np.arange(group)).reshape(-1)", "order_B = np.arange(prompts * group)", "test_minibatches.py"),
    "minibatches: tokens stay in their place": Fault("batch.py", "jax.tree.map(lambda x: x[order_P], batch.tokens)", "batch.tokens", "test_minibatches.py"),
    "minibatches: every epoch in the first one's order": Fault("batch.py", "_shuffled(batch, (seed, iteration, epoch))", "_shuffled(batch, (seed, iteration, 0))", "test_minibatches.py"),
    "metrics of the first step": Fault("scored/metrics.py", "if name in MEANS else values[-1]", "if name in MEANS else values[0]", "test_minibatches.py"),
    "a group's samples share their random numbers": Fault("rollout/generate.py", "lambda g: jax.random.fold_in(key, g))", "lambda g: key)", "test_random_numbers.py"),
    "iterations share their random numbers": Fault("rollout/generate.py", "jax.random.fold_in(jax.random.key(seed), step)", "jax.random.key(seed)", "test_random_numbers.py"),
    "tokens share their random number": Fault("rollout/generate.py", "jax.random.fold_in(key, t), dtype", "jax.random.fold_in(key, 0), dtype", "test_random_numbers.py"),
    "texts without their last token": Fault("rollout/generate.py", "rule.text(ids, state, tokenizer) for", "rule.text(ids[:-1], state, tokenizer) for", "test_random_numbers.py"),
    "one token beyond a prompt's own cap": Fault("rollout/decoding.py", "(t >= prompts.cap_P)", "(t > prompts.cap_P)", "test_mixed.py -k own_cap"),
    "positions of sampled tokens one on": Fault("rollout/decoding.py", "prompts.length_PG + t - 1", "prompts.length_PG + t", "test_rollout.py -k sampling_logprobs"),
    "observations are trained on": Fault("programs.py", "mask_BS=rollout.completion_mask_PGC.reshape(rows)", "mask_BS=read_PGC.reshape(rows)", "test_episodes.py -k 'not_trained_on'"),
    "a later turn does not read a completion's last token": Fault("rollout/turns.py", "[jnp.ones_like(last_PG1), mask_PGO]", "[jnp.zeros_like(last_PG1), mask_PGO]", "test_episodes.py -k sampling_logprobs"),
    "later turns draw the first one's numbers": Fault("rollout/turns.py", "dtype, windows.begin(turn))", "dtype)", "test_episodes.py -k number_of_its_column"),
    "an observation is no repetition": Fault("rollout/turns.py", "_also_seen(kept.seen_PGV, ids_PGO, mask_PGO)", "kept.seen_PGV", "test_episodes.py -k counts_as_repeated"),
    "a task is told observations for the model's tokens": Fault("rollout/generate.py", "ids_C[mask_C == 1].tolist()", "ids_C[: mask_C.sum()].tolist()", "test_own_episodes.py -k named_by"),
    "samples of a prompt meet one random opponent": Fault("rollout/episodes.py", "step, int(number), sample)", "step, int(number), 0)", "test_episodes.py -k numbers_of_its_own"),
    "an opponent draws alike at every move": Fault("tasks/game.py", "{self._draw}/{len(self.board.move_stack)}", "{self._draw}", "test_game.py -k what_an_opponent_draws"),
    "an illegal move is as good as a draw": Fault("tasks/game.py", '"forfeited": 0.0}', '"forfeited": 0.5}', "test_game.py -k worth_its_result"),
    "a mate is White's": Fault("tasks/game.py", "self.board.turn == self.colour else \"won\"", "self.board.turn == chess.WHITE else \"won\"", "test_game.py -k worth_its_result"),
    "material is counted for the opponent": Fault("tasks/game.py", "win_probability(balance(", "win_probability(-balance(", "test_game.py -k worth_its_material"),
    "a skill level's moves are pushed by half": Fault("tasks/opponents.py", "120 - 2 * level, min(", "120 - level, min(", "test_game.py -k skill_levels"),
    "top-p counts the token itself": Fault("rollout/sampling.py", "jnp.cumsum(probs_RK, axis=-1) - probs_RK ", "jnp.cumsum(probs_RK, axis=-1) ", "test_rollout.py -k exact_distribution"),
    "a token's probability is among those that were kept": Fault("rollout/sampling.py", "if kept_RV is not scaled_RV:", "if kept_RV is None:", "test_rollout.py -k exact_distribution"),
    "min-p is a factor of the logit": Fault("rollout/sampling.py", "jnp.max(logits_RV, axis=-1) + jnp.log(sampling.min_p)", "jnp.max(logits_RV, axis=-1) * sampling.min_p", "test_rollout.py -k exact_distribution"),
    "repetition rewards negative logits": Fault("rollout/sampling.py", "logits_RV / penalty, logits_RV * penalty)", "logits_RV / penalty, logits_RV / penalty)", "test_rollout.py -k repetition"),
    "a token of zero weight is drawn": Fault("rollout/sampling.py", "cumulative_RN > target_R[:, None]", "cumulative_RN >= target_R[:, None]", "test_rollout.py -k zero_weight"),
    "published labels turned for White": Fault("tasks/policy.py", '" b " in position.fen', '" w " in position.fen', "test_tasks.py -k black_gets"),
    "a candidate repeated counts again": Fault("tasks/policy.py", '"legal_moves": len(set(moves) & legal) / listed', '"legal_moves": sum(move in legal for move in moves) / listed', "test_tasks_policy.py -k more_candidates"),
    "top five are always five": Fault("tasks/policy.py", "len(set(moves) & first) / max(len(first), 1)", "len(set(moves) & first) / CANDIDATES", "test_tasks_policy.py -k perfect"),
    "a move's value is its opponent's": Fault("tasks/policy.py", "else -analyses[fen].score", "else analyses[fen].score", "test_tasks.py -k unlabelled"),
    "checkmate is rewarded as a draw": Fault("tasks/environment.py", "if outcome.winner is None else", "if outcome.winner is not None else", "test_tasks.py -k environment_answers"),
    "eleven moves of history": Fault("positions/rookworld.py", "before[-(HISTORY - 1) :]", "before[-HISTORY:]", "test_tasks.py -k published_formats"),
    "insertions are free": Fault("tasks/environment.py", "np.minimum.accumulate(candidate - steps) + steps", "np.minimum.accumulate(candidate)", "test_tasks.py -k edit_distance"),
    "no promotion on the first rank": Fault("tasks/stop.py", '(_TO_RANK, "18", _PROMOTION)', '(_TO_RANK, "8", _PROMOTION)', "test_stop_rules.py -k move_ends"),
    "BB: is not seen": Fault("tasks/stop.py", '(SEEN_B, "B", SEEN_B)', '(SEEN_B, "B", SEEKING)', "test_stop_rules.py -k hide_it"),
    "an interval's deviation with ddof 0": Fault("evaluate/statistics.py", "for value in values) / (n - 1)", "for value in values) / n", "test_evaluation.py -k normal_interval"),
    "a difference's interval upside down": Fault("evaluate/statistics.py", "before.high - before.value)", "before.low - before.value)", "test_evaluation.py -k newcombe"),
    "a better move than the label's costs": Fault("evaluate/policy.py", '"win_loss": max(0.0, win_probability(best) - win_probability(pawns))', '"win_loss": abs(win_probability(best) - win_probability(pawns))', "test_evaluation.py -k 'worse_move or better_move'"),
    "the other side's illegal move": Fault("evaluate/selfplay.py", "game.board.turn == color", "game.board.turn != color", "test_evaluation.py -k half_moves"),
    "states count again after a wrong one": Fault("evaluate/selfplay.py", "if game.exact == game.legal - 1 and", "if", "test_evaluation.py -k states"),
    "the least likely target is the mate": Fault("evaluate/mates.py", "target = max(scores,", "target = min(scores,", "test_evaluation.py -k mates_are_read"),
    "the strong side moves out of check it gives": Fault("positions/endings.py", "(before_KPW > 0) & strong_to_move_KPW & (mates", "(before_KPW > 0) & apart_KPW & (mates", "test_endings.py -k 'counts or sample'"),
    "the weak king steps beside the strong one": Fault("positions/endings.py", "(king_K != weak_W) & ~steps_SS[:, None, :] & ~attacks_KPS", "(king_K != weak_W) & ~attacks_KPS", "test_endings.py -k 'counts or sample'"),
    "mirrored twins in two splits": Fault("positions/endings.py", "for side in (board, board.T)", "for side in (board,)", "test_endings.py -k turned_and_mirrored"),
    "a win that slips is paid like a slow one": Fault("tasks/policy.py", "0.0 if lost is None else KEPT**lost", "KEPT ** (lost or 0)", "test_endings.py -k technique_pays"),
    "the defender walks into the mate": Fault("evaluate/endgame.py", "longest = max(resistance.values())", "longest = min(resistance.values())", "test_endings.py -k perfect_attacker"),
    "stalemate counts as mate": Fault("evaluate/endgame.py", '"mated" if board.is_check() else "stalemate"', '"mated"', "test_endings.py -k stalemate"),
    "no legal move is the best where all are alike": Fault("evaluate/strength.py", "passed = sum(loss < GOOD for loss in of_legal)", "passed = sum(loss < GOOD for loss in losses)", "test_strength.py -k no_legal_move"),
    "likelihoods and values of other moves": Fault("evaluate/strength.py", "kendall_tau([logps[move] for move in wins], ", "kendall_tau(list(logps.values()), ", "test_strength.py -k tau"),
    "positions resampled, not games": Fault("evaluate/statistics.py", "terms[cluster].append(", "terms[len(terms)].append(", "test_strength.py -k clusters"),
    "stalemate is worth the pieces on the board": Fault("tasks/reference_players.py", "if replies else -even", "if replies else 0", "test_strength.py -k two_plies"),
    "padding of a move is likely too": Fault("evaluate/move_logps.py", "(logp_BC.reshape(ids_PGC.shape) * mask_PGC).sum(-1)", "logp_BC.reshape(ids_PGC.shape).sum(-1)", "test_uci.py -k plain_models"),
    "samples of other prompts": Fault("rollout/texts.py", "completions[at * self._samples : (at + 1) * self._samples]", "completions[at :: len(rows)]", "test_strength.py -k samples"),
    "the oldest checkpoints are kept": Fault("run/checkpoints.py", "saved[-self._config.keep_last :]", "saved[: self._config.keep_last]", "test_checkpoint.py -k last_and_the_best"),
    "the worst checkpoints are kept": Fault("run/checkpoints.py", '{"largest": -1, "smallest": 1}', '{"largest": 1, "smallest": -1}', "test_checkpoint.py -k last_and_the_best"),
    "the origin goes with its abandoned future": Fault("run/checkpoints.py", "if int(path.name) > iteration]", "if int(path.name) >= iteration]", "test_checkpoint.py -k abandoned"),
    "the command to continue begins again": Fault("run/resume.py", "settings = OPTIONS.parse_known_args(argv)[1]", "settings = list(argv)", "test_resume.py -k command_that_continues"),
    "one row too many": Fault("data/shards.py", "or rows[split] < bound:", "or rows[split] <= bound:", "test_shard_bounds.py"),
    "a draw at the second occurrence": Fault("positions/position.py", "board.is_repetition(3)", "board.is_repetition(2)", "test_arbiter.py -k threefold"),
    "the first moves for the last": Fault("positions/position.py", "for move in board.move_stack[-HISTORY:]", "for move in board.move_stack[:HISTORY]", "test_prompts.py -k pgn_gives"),
    "every epoch in the same order": Fault("positions/dataset.py", "default_rng((self._seed, epoch))", "default_rng(self._seed)", "test_prompts.py -k 'order_is or own_order'"),
    "the KL's error relative to itself": Fault("objective/__init__.py", "(kl_observed - config.target) / config.target", "(kl_observed - config.target) / kl_observed", "test_kl_control.py -k relative_error"),
    "a record twice after resuming": Fault("report/log.py", '["iteration"] < first_iteration]', '["iteration"] <= first_iteration]', "test_metrics_continued.py"),
    "a token does not see itself": Fault("model/flops.py", "read_PG * (read_PG + 1) // 2", "read_PG * (read_PG - 1) // 2", "test_flops.py -k counted_once"),
    "health looks one iteration late": Fault("report/health.py", "if len(self.history) >= count else []", "if len(self.history) > count else []", "test_health.py -k each_check"),
    "a size in GiB is taken for bytes": Fault("memory/fit.py", r"([KMGT]i?B)?", r"(KiB)?", "test_guards.py -k memory_that_was_asked"),
    "the search goes the wrong way": Fault("memory/fit.py", "key=lambda count: needs(count) <= limit)", "key=lambda count: needs(count) > limit)", "test_micro_batches.py -k first_that_fits"),
    "a skipped step moves the reference again": Fault("optimiser.py", "due, share = taken & (step % every == 0)", "due, share = (step % every == 0)", "test_moving_reference.py -k not_taken"),
    "the reference's shares are swapped": Fault("optimiser.py", "share * new + (1 - share) * old.astype(new.dtype)", "(1 - share) * new + share * old.astype(new.dtype)", "test_moving_reference.py -k writes_over"),
    "the reference meets the parameters before the step": Fault("update.py", "moved_reference(config.kl, state.reference, params, ", "moved_reference(config.kl, state.reference, state.params, ", "test_moving_reference.py -k writes_over"),
    "completions are scored by the start, though the reference moved": Fault("trainer.py", "with_logps, self.config, self.score, self.state.params, self.reference)", "with_logps, self.config, self.score, self.state.params, self.__dict__.setdefault('start', jax.tree.map(jnp.array, self.reference)))", "test_parity_iterations.py -k follows"),
    "a moving reference is turned off in silence": Fault("run/resume.py", "(before.get(key) is None) != (now[key] is None)", "before.get(key) is None and now[key] is not None", "test_moving_reference.py -k settled"),
    "the entropy is held from above": Fault("objective/__init__.py", "jnp.where(entropy <= config.entropy_target, config.entropy_step, -config.entropy_step)", "jnp.where(entropy > config.entropy_target, config.entropy_step, -config.entropy_step)", "test_entropy_target.py -k rises"),
    "a bonus where there is entropy enough": Fault("objective/__init__.py", "jnp.where(entropy_before <= config.entropy_target, coefficient, 0)", "jnp.where(entropy_before <= jnp.inf, coefficient, 0)", "test_entropy_target.py -k rises"),
    "a step not taken moves the entropy's coefficient": Fault("update.py", '"entropy_coefficient": jnp.where(taken, moved, state.entropy_coefficient)', '"entropy_coefficient": moved', "test_entropy_target.py -k not_taken"),
    "the bonus is of the config's coefficient": Fault("loss.py", "(settings.entropy_coefficient if coefficient is None else coefficient) / ", "settings.entropy_coefficient / ", "test_entropy_target.py -k not_taken"),
    "covariances about 0": Fault("objective/covariance.py", "x_BS - masked_mean(x_BS, mask_BS) for", "x_BS for", "test_covariance.py -k 'verls or numpy'"),
    "KL-Cov holds back the smallest covariances": Fault("objective/covariance.py", "order_BS = -covariance_BS", "order_BS = covariance_BS", "test_covariance.py -k verls"),
    "KL-Cov pushes where nothing has moved": Fault("loss.py", "jax.lax.stop_gradient(jnp.sign(log_rho_BS)) * log_rho_BS", "jnp.abs(log_rho_BS)", "test_covariance.py -k verls"),
    "KL-Cov skips tokens without an advantage": Fault("loss.py", "            signal_BS |= self.penalised_BS != 0\n", "            pass\n", "test_covariance.py -k learns"),
    "Clip-Cov draws the same tokens in every step": Fault("objective/covariance.py", "for part in (jnp.asarray(step).astype(jnp.uint32), row_B1, number_BS):", "for part in (row_B1, number_BS):", "test_covariance.py -k 'lottery or verls'"),
    "Clip-Cov draws beyond its bounds": Fault("objective/covariance.py", "may_BS &= (covariance_BS > config.cov_low) & (covariance_BS < config.cov_high)", "may_BS &= covariance_BS > config.cov_low", "test_covariance.py -k 'verls or lottery or bounds'"),
    # The user's own prompts, rewards and tasks.
    "a function may be left without its column": Fault("tasks/rewards.py", "if missing := [name for name in reward.required()", "if missing := [name for name in reward.required()[:0]", "test_own_rewards.py -k 'column'"),
    "None counts as a number": Fault("tasks/rewards.py", "np.ma.masked_array(numbers, [value is None for value in values])", "numbers", "test_own_rewards.py -k none_leaves"),
    "a row without a reward is 0": Fault("tasks/rewards.py", "if not about_B.all():", "if not about_B.any():", "test_own_rewards.py -k wrong_answer"),
    "a loop for each iteration's coroutines": Fault("tasks/functions.py", "if self._loop is None:", "if True:", "test_own_rewards.py -k coroutines"),
    "coroutines one after another": Fault("tasks/functions.py", "if not reward.is_async:\n                self._wait", "if reward:\n                self._wait", "test_own_rewards.py -k coroutines"),
    "a hang is waited for without a word": Fault("tasks/functions.py", "if not futures[reward.name].done():", "if futures[reward.name].cancelled():", "test_own_rewards.py -k wrong_answer"),
    "the tokens of other rows": Fault("tasks/mixed.py", "[self._ids[row] for row in rows]", "list(self._ids[: len(rows)])", "test_own_prompts.py -k what_a_function_says"),
    "None is 0 in a mixture": Fault("tasks/mixed.py", "if np.ma.is_masked(values):", "if not len(values):", "test_own_prompts.py -k what_a_function_says"),
    "a share is not normalised": Fault("tasks/interleaved.py", "(np.arange(counts[name]) + 0.5) / share[name]", "(np.arange(counts[name]) + 0.5) * share[name]", "test_own_prompts.py -k take_turns"),
    "a stop text keeps its first bytes": Fault("tasks/stop.py", "max(map(len, ended), default=1) - 1", "0", "test_own_rewards.py -k 'stop'"),
    "a stop text begins again from nothing": Fault("tasks/stop.py", "for start in range(len(text) + 1) if text[start:] in numbers)", "for start in (len(text),))", "test_own_rewards.py -k 'stop'"),
    "columns of another row": Fault("prompts/rows.py", "self._columns_of(numbers[i]), identity", "self._columns_of(i), identity", "test_own_prompts.py -k held_out"),
    "a column that is there twice": Fault("prompts/rows.py", "names.count(name) > 1", "names.count(name) > 2", "test_own_prompts.py -k one_error"),
    "an old copy of the user's file": Fault("tasks/imported.py", "abs(hash((str(path.resolve()), file_hash(path))))", "abs(hash(str(path.resolve())))", "test_own_rewards.py -k changed_file"),
    "changed code is not told": Fault("run/resume.py", "if before.get(name) != now.get(name)]", "if before.get(name) == now.get(name)]", "test_own_rewards.py -k changed_file"),
    # The comparison with TRL by time, puzzles, and pictures of two evaluations.
    "TRL's upper clip bound is the lower one": Fault("bench/trl_settings.py", '"epsilon_high": objective.epsilon_high,', '"epsilon_high": objective.epsilon_low,', "test_time_to_score.py -k handed_over"),
    "TRL is not given the token that ends a completion": Fault("bench/trl_training.py", "return list(ids[:count])", "return list(ids[: count - 1])", "test_time_to_score.py -k stop_rule"),
    "TRL asks the prompts of another iteration": Fault("bench/trl_training.py", "if row != expected:", "if len(row) != len(expected):", "test_time_to_score.py -k another_order"),
    "a score is reached at the next point": Fault("bench/score_curves.py", "(level - low) / (high - low) * (after[axis] - before[axis])", "(after[axis] - before[axis])", "test_time_to_score.py -k interpolated"),
    "a puzzle is solved by its first move": Fault("evaluate/puzzles.py", "2 * step + 1 == len(line)]", "step == 0]", "test_puzzles.py -k whole_line"),
    "the listed mate alone solves": Fault("evaluate/puzzles.py", "given[attempt] == line[2 * step] or given[attempt] in mates]", "given[attempt] == line[2 * step]]", "test_puzzles.py -k any_mate"),
    "a rating's interval of one deviation": Fault("evaluate/puzzles.py", "HALF_CHI_SQUARE = 1.92", "HALF_CHI_SQUARE = 0.52", "test_puzzles.py -k likelihoods"),
    "a mate in two that a defence escapes": Fault("positions/position.py", "if defences and all(", "if defences and any(", "test_puzzles.py -k against_every_defence"),
    "no answer costs nothing in a distribution": Fault("evaluate/side_by_side.py", '(1 - legal) * table.loss("")', '0 * table.loss("")', "test_side_by_side.py -k illegal"),
    "special tokens around every text": Fault("model/tokenizer.py", "return self._backend.encode(self._to_backend(text), add_special_tokens=False).ids", "return self._backend.encode(self._to_backend(text)).ids", "test_tokenizer_file.py -k ids_of_transformers"),
    "a tokenizer's file cuts what it reads": Fault("model/tokenizer_file.py", "    backend.no_truncation()\n", "", "test_tokenizer_file.py -k ids_of_transformers"),
    "a token's bytes are those of its first place": Fault("model/tokenizer_file.py", "[[beside, token, beside] for token", "[[token, beside] for token", "test_tokenizer_file.py -k make_up_the_text"),
    "no answer is asked for after messages": Fault("prompts/chat.py", "add_generation_prompt=True, **self._tokens", "add_generation_prompt=False, **self._tokens", "test_messages.py -k ids_of_transformers"),
    "a completion of messages is a text": Fault("tasks/rewards.py", "            text if prompt.messages is None else [", "            text if prompt.text else [", "test_messages.py -k trl_gives"),
    "a stop token is part of the text": Fault("tasks/stop.py", "return tokenizer.decode(ids[:-1])", "return text", "test_stop_tokens.py -k 'ends_a_completion or mixture'"),
    "every task's completions end at one's stop tokens": Fault("tasks/stop.py", "table_SV[stop.begin : stop.end, [", "table_SV[:, [", "test_stop_tokens.py -k mixture"),
    "a component about no row of a batch is an error": Fault("tasks/base.py", "filled_B = np.ma.filled(values_B, 0)", "filled_B = values_B", "test_lessons.py -k no_row_of_a_batch"),
    "lessons follow all of it": Fault("tasks/instructions/lessons.py", "if rng.random() < followed]", "if rng.random() < 1 or followed]", "test_lessons.py -k asked_for"),
    "branches that are drawn weigh no more": Fault("sft/soft_moves.py", "first[token] * len(rest) / DRAWN", "first[token]", "test_soft_moves.py -k mean_loss"),
    "a branch forgets its share of the target": Fault("sft/soft_moves.py", "{one: share * p / total", "{one: p / total", "test_soft_moves.py -k 'mean_loss or keeps_its_share'"),
    "a mirrored position keeps its values' moves": Fault("positions/own_side.py", "tuple(move.translate(_OTHER_RANK) for move in position.moves)", "tuple(position.moves)", "test_soft_moves.py -k mirrored"),
    "Black is shown as it stands": Fault("positions/own_side.py", "return chess.Board(fen).mirror().fen() if is_black(fen) else fen", "return fen", "test_own_side.py -k turned_back"),
    "a move is not turned back": Fault("tasks/policy.py", "return turned(uci, fen) if style == OWN_SIDE else uci", "return uci", "test_own_side.py -k every_component"),
    "a player finds likely what it does not turn": Fault("play/player.py", 'f" {in_style(style, move.uci(), fen)}"', 'f" {move.uci()}"', "test_own_side.py -k player_of_such"),
    "samples are read in other positions": Fault("evaluate/suites.py", "positions[i // each].fen", "positions[i % len(positions)].fen", "test_own_side.py -k every_suite"),
    "a plain player's moves are not turned": Fault("evaluate/yardsticks.py", "in_style(task.style, move, position.fen)", "move", "test_strength.py -k plain"),
    "a player that chooses counts for all its moves": Fault("evaluate/yardsticks.py", "/ counts_P", "", "test_strength.py -k plain"),
    "memory is kept where it is short": Fault("system/memory.py", "available(sys.maxsize) > _ROOM * peak()", "True", "test_memory.py -k kept"),
    "a lead wins a half-move late": Fault("play/arena.py", "abs(game.held) >= HELD", "abs(game.held) > HELD", "test_arena.py -k lead"),
    "a lead that changes sides goes on counting": Fault("play/arena.py", " if game.held * side > 0 else 1)", ")", "test_arena.py -k lead"),
    "moments of a matrix are held twice under fsdp": Fault("mesh/__init__.py", '"mlp/c_proj/kernel": ("inner", "width"),', '"mlp/c_proj/kernel": ("inner", "positions"),', "test_mesh.py -k 'held_twice and fsdp8' -m 'not slow'"),
    "softmax sums of a device's own columns alone": Fault("lm_head/tiles.py", "jax.lax.psum((self.mass * share, self.weighted * share, self.target), axis)", "(self.mass * share, self.weighted * share, self.target)", "test_mesh.py -k 'step_is and fsdp2-tensor4'"),
    "a turn with a part of the parameters": Fault("rollout/turns.py", "decoding_model(graphdef, params, layout)", "decoding_model(graphdef, params)", "test_mesh.py -k 'rollout_is and turns and data2-fsdp2' -m 'not slow'"),
    "what others' environments answered is not read": Fault("rollout/episodes.py", "answers = {row: (observation, done) for own in told for row, observation, done in own}", "answers = {row: (observation, done) for own in told[:1] * 2 for row, observation, done in own} | {row: ('0', True) for own in told[1:] for row, *_ in own}", "test_processes.py -k 'episodes_of_one and guess'"),
    "an evaluation's episodes are others' than it scores": Fault("evaluate/during_training.py", "own_P = (numbers_P >= own.start)", "own_P = ~(numbers_P >= own.start)", "test_processes.py -k 'episodes_of_one and guess'"),
    "caches of all heads between turns": Fault("mesh/__init__.py", "axis=x.ndim - HEADS_AXIS if x.ndim > HEADS_AXIS else None", "axis=None", "test_mesh_memory.py -k 'episodes and cpu'"),
    "gradients of a device's own prompts alone": Fault("mesh/__init__.py", "total = self._sum(jnp.concatenate([x.reshape(-1) for x in arrays]), axes)", "total = self._sum(jnp.concatenate([x.reshape(-1) for x in arrays]), ())", "test_mesh.py -k 'step_is and data8' -m 'not slow'"),
    "a device leaves the rollout that others wait in": Fault("mesh/__init__.py", "return _agreed(holds, jax.lax.pmax)", "return holds", "test_mesh.py -k 'token_for_token and tensor2' -m 'not slow'"),
    "tokens of other devices are looked up too": Fault("mesh/__init__.py", "jnp.where(own[..., None], table_VH[jnp.where(own, row, 0)], 0)", "table_VH[jnp.where(own, row, 0)]", "test_mesh.py -k 'step_is and fsdp2-tensor4'"),
    "each process scores everybody's": Fault("mesh/processes.py", "return slice(first, last)", "return slice(0, rows)", "test_processes.py -k exchange -m 'not slow'"),
    "a signal stops its own process alone": Fault("mesh/processes.py", "any(exchanged(self._own.requested))", "self._own.requested", "test_processes.py -k exchange -m 'not slow'"),
    "parts of an array over each other": Fault("run/files.py", "slice(at * size, (at + 1) * size)", "slice(0, size)", "test_processes.py -k exchange -m 'not slow'"),
    "a process that failed says that it did not": Fault("mesh/processes.py", "os._exit(1)", "os._exit(0)", "test_processes.py -k exchange -m 'not slow'"),
    # The reference: it must be as easy to break.
    "torch_ref: the lottery forgets the seed": Fault("torch_ref/covariance.py", "ticket(seed, step, int(rows_K[k])", "ticket(0 * seed, step, int(rows_K[k])", "test_covariance.py -k verls"),
    "torch_ref: a coefficient beyond its bound": Fault("torch_ref/entropy_control.py", "min(coefficient + config.entropy_step, config.entropy_coefficient_max)", "coefficient + config.entropy_step", "test_entropy_target.py -k rises"),
    "torch_ref: the reference stays where it was": Fault("torch_ref/reference.py", "ours.lerp_(theirs, share)", "ours.lerp_(theirs, 1 - share)", "test_parity_iterations.py -k follows"),
    "torch_ref: others' mean of all": Fault("torch_ref/advantages.py", "/ (reward_G.numel() - 1)", "/ reward_G.numel()", "test_parity.py -k 'option and leave'"),
    "torch_ref: a sample is among the others": Fault("torch_ref/advantages.py", "others = ascending[:i] + ascending[i + 1 :]", "others = ascending[:i] + ascending[i:]", "test_advantage_methods.py -k 'all_subsets'"),
    "torch_ref: deviation with ddof 0": Fault("torch_ref/advantages.py", '"batch": lambda reward_G, rewards_B: rewards_B.std(correction=1)', '"batch": lambda reward_G, rewards_B: rewards_B.std(correction=0)', "test_parity.py -k 'option and leave'"),
    "torch_ref: truncated ones are trained on": Fault("torch_ref/batch.py", "* self.stopped_B[:, None]", "* ~self.stopped_B[:, None]", "test_parity.py -k 'option and truncated'"),
    "torch_ref: no bound beyond the clip": Fault("torch_ref/objective.py", "rho_BT.clamp(max=config.delta)", "rho_BT", "test_parity.py -k 'option and delta'"),
    "torch_ref: GMPO cuts the wrong side": Fault("torch_ref/objective.py", "rho_BT.clamp(max=upper), rho_BT.clamp(min=lower)", "rho_BT.clamp(min=lower), rho_BT.clamp(max=upper)", "test_surrogates.py -k 'definition and gmpo'"),
    "torch_ref: the entropy bonus is a penalty": Fault("torch_ref/update.py", "loss = loss - coefficient *", "loss = loss + coefficient *", "test_parity.py -k 'option and bonus'"),
    "torch_ref: top-p counts the token itself": Fault("torch_ref/sampling.py", "probability_BV.cumsum(dim=-1) - probability_BV >= p", "probability_BV.cumsum(dim=-1) >= p", "test_torch_ref_transformers.py -k every_sampling"),
    "torch_ref: one token beyond the cap": Fault("torch_ref/generate.py", "(count < cap_B)", "(count <= cap_B)", "test_twins.py -k cap"),
    "torch_ref: beta below its least": Fault("torch_ref/kl_control.py", "max(config.beta_min, min(config.beta_max, beta))", "min(config.beta_max, beta)", "test_twins.py -k beta"),
    "torch_ref: the schedule forgets its warm-up": Fault("torch_ref/optimiser.py", "(step - config.warmup_steps) / max(1, total_steps - config.warmup_steps)", "step / max(1, total_steps)", "test_twins.py -k learning_rate"),
    "torch_ref: the penalty begins at the cap": Fault("torch_ref/advantages.py", "(length_B - (cap - zone)) / zone", "(length_B - cap) / zone", "test_twins.py -k penalty"),
}  # fmt: skip


def run_pytest(tests: str, copy: Path) -> tuple[int, str]:
    """Exit status and output of pytest in the copy: in a child that begins with the libraries imported, which takes longest."""
    log = copy / "pytest.log"
    child = os.fork()
    if child == 0:
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.environ["PYTHONPATH"] = str(copy)
        sys.path.insert(0, str(copy))
        os.chdir(copy / "parity_tests")
        status = 70
        try:
            # A test that is marked slow one day still looks for its fault.
            marks = ["-m", "slow or not slow"]
            status = int(pytest.main(["-x", "-q", "-n", "0", "-p", "no:cacheprovider", *marks, *shlex.split(tests)]))
        finally:
            sys.stdout.flush()
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), log.read_text(errors="replace")


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
        kept_out = shutil.ignore_patterns(".git", ".venv*", "runs", "__pycache__", "docs")
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
