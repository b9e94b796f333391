"""Several tasks in one batch: each prompt keeps its own stop, cap and rewards, and training improves what they share."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import TINY, arrays_of, tiny_model
from conftest import config as tiny_config
from hypothesis import given
from hypothesis import strategies as st

from jax_grpo.chess.positions.sources import read_packaged
from jax_grpo.chess.tasks.environment import environment_stop
from jax_grpo.chess.tasks.policy import policy_stop
from jax_grpo.config import ConfigError, load_config
from jax_grpo.config.tasks import MixturePart, TaskConfig, task_of
from jax_grpo.iteration.draw import PromptSampler
from jax_grpo.model.tokenizer import Tokenizer
from jax_grpo.report.records import read_records
from jax_grpo.rollout.decoding import DecodingSettings
from jax_grpo.rollout.generate import encode_prompts, make_generate
from jax_grpo.rollout.sampling import Sampling
from jax_grpo.tasks import make_task
from jax_grpo.tasks.base import Prompt, total_reward
from jax_grpo.tasks.checked import CapOutOfRange, checked_score
from jax_grpo.tasks.mixed import MixedTask
from jax_grpo.tasks.stop import union, word_stop
from jax_grpo.tasks.toy import LengthTask
from jax_grpo.train import train
from jax_grpo.trainer import Trainer
from torch_ref.options import Options
from torch_ref.train import Trainer as TorchTrainer

CONFIG = "configs/quickstart_mixed.yaml"
OWN = {
    "policy": {"prompt_style": "best_move"},
    "environment": {"illegal_fraction": 0.05},
}  # settings of each task alone
RULES = [policy_stop(), environment_stop(), word_stop()]
SMALL = ["--prompts.per_iteration", "6", "--rollout.group_size", "2", "--update.warmup_steps", "0", "--iterations", "2"]


@pytest.fixture(autouse=True)
def in_repository(monkeypatch, request):
    monkeypatch.chdir(request.config.rootpath)


@given(st.integers(0, 2), st.text(alphabet="B: +ab48e1q\n", max_size=40))
def test_a_rule_in_a_union_cuts_as_it_does_alone(which, text):
    together, offsets = union(RULES)
    alone = RULES[which]
    for state in range(len(alone.transitions_SB) - 1):
        assert together.truncate(text, offsets[which] + state) == alone.truncate(text, state)


def test_a_rule_in_a_union_reads_tokens_as_it_does_alone():
    tokenizer = Tokenizer.load("chess")
    together, offsets = union(RULES)
    table = together.token_table(tokenizer)
    for rule, offset in zip(RULES, offsets, strict=True):
        alone = rule.token_table(tokenizer)
        expected = np.where(alone == rule.accept, together.accept, alone + offset)
        live = [state for state in range(len(alone)) if state != rule.accept]
        np.testing.assert_array_equal(table[offset:][live], expected[live])


@pytest.mark.slow  # compiles three rollouts
def test_each_row_ends_at_its_own_cap_as_it_would_alone():
    graphdef, params = tiny_model()
    rng = np.random.default_rng(0)
    ids, mask = rng.integers(0, TINY.vocab_size, (4, 6)).astype(np.int32), np.ones((4, 6), np.int32)
    start, numbers = np.zeros(4, np.int32), np.arange(4, dtype=np.int32)
    table = np.repeat(np.arange(2)[:, None], TINY.vocab_size, axis=1)
    table[0, :3] = 1  # three tokens stop
    settings = DecodingSettings(
        vocab_size=TINY.vocab_size, pad_id=0, sampling=Sampling(1.5), stop_table_SV=table, accept_state=1
    )

    def generate(cap, caps=None):
        program = make_generate(graphdef, settings, group_size=5, max_new_tokens=cap)
        return program(params, ids, mask, start, numbers, 0, 0, caps)

    caps = np.array([3, 9, 1, 5], np.int32)
    together = generate(9, caps)
    lengths = np.asarray(together.completion_mask_PGC).sum(-1)
    assert (lengths.max(1) == caps).all() and (lengths < caps[:, None]).any(), "some stop before, some at their caps"
    for row, cap in enumerate(caps):
        alone = generate(int(cap))
        for name, x in arrays_of(alone).items():
            actual = arrays_of(together)[name][row]
            # Two programs: XLA may sum a softmax of 3 and of 9 tokens in another order.
            tolerance = 1e-6 if name == "sampling_logp_PGC" else 0
            np.testing.assert_allclose(
                actual[..., :cap] if actual.ndim == 2 else actual, x[row], rtol=tolerance, err_msg=name
            )
    stopped = np.asarray(together.stopped_PG)
    assert stopped.any() and not stopped.all() and (lengths == caps[:, None])[~stopped].all(), "a cap is not a stop"


def mixture() -> tuple[TaskConfig, list[Prompt]]:
    config = load_config(CONFIG, ["--task.mixture.policy.share", "3", "--task.mixture.environment.share", "1"]).task
    task = make_task(config)
    return config, [task.prompt(position, seed) for seed, position in enumerate(read_packaged("heldout")[:1000])]


def test_prompts_are_the_tasks_own_in_their_shares():
    config, prompts = mixture()
    assert config.mixture is not None
    parts = config.mixture
    # binomial of 1,000 draws: a standard deviation of 0.0137
    assert np.mean([prompt.task == "policy" for prompt in prompts]) == pytest.approx(0.75, abs=0.055)
    assert config.share("policy") == 0.75
    tasks = {name: make_task(task_of(name=name, **OWN[name])) for name in parts}
    _, offsets = union([tasks[name].stop_rule for name in parts])
    for seed, (prompt, position) in enumerate(zip(prompts, read_packaged("heldout"), strict=False)):
        own = tasks[prompt.task].prompt(position, seed)
        assert (prompt.text, prompt.answer, prompt.row) == (own.text, own.answer, own.row)
        assert prompt.start_state == own.start_state + dict(zip(parts, offsets, strict=True))[prompt.task]
        assert prompt.max_new_tokens == parts[prompt.task].max_new_tokens
    assert make_task(config).prompt(read_packaged("heldout")[7], 7) == prompts[7]


def test_rewards_are_each_tasks_own():
    config, prompts = mixture()
    assert config.mixture is not None
    parts, prompts = config.mixture, prompts[:60]
    good = [p.answer or (p.row.moves[0] if p.row and p.row.moves else "e2e4") for p in prompts]
    texts = [text if row % 3 else "nonsense" for row, text in enumerate(good)]
    task = make_task(config)
    scores = task.score(prompts, texts)
    assert list(scores) == list(task.component_weights)
    total = total_reward(scores, task.component_weights)
    values = {name: component.values_B for name, component in scores.items()}
    for name, part in parts.items():
        own = make_task(task_of(name=name, rewards=part.rewards, **OWN[name]))
        rows = [row for row, prompt in enumerate(prompts) if prompt.task == name]
        alone = checked_score(own, [prompts[row] for row in rows], [texts[row] for row in rows])
        others = np.setdiff1d(np.arange(len(prompts)), rows)
        for component, expected in alone.items():
            np.testing.assert_array_equal(values[f"{name}/{component}"][rows], expected.values_B)
            assert not values[f"{name}/{component}"][others].any() and scores[f"{name}/{component}"].about_B.all()
        expected = total_reward(alone, own.component_weights)
        np.testing.assert_allclose(total[rows], expected, rtol=1e-6)
        np.testing.assert_array_equal(values[f"{name}/reward"][rows], expected)
        assert len(set(expected.tolist())) > 1


@pytest.mark.slow
def test_both_implementations_ask_the_same_and_report_under_the_same_names():
    config = load_config(CONFIG, SMALL)
    ours, scored, batch = Trainer(config).iterate(0)
    theirs, _, reference, _ = TorchTrainer(config, Options()).iterate(0)
    assert {p.task for p in scored.prompts} == {"policy", "environment"}
    of_rewards = {name for name in ours if name.startswith("reward/")}
    assert of_rewards == {name for name in theirs if name.startswith("reward/")}
    assert {"reward/policy/legal/mean", "reward/policy/reward/mean", "reward/environment/reward/mean"} <= of_rewards
    # The same prompts, padded; and no completion of the policy is longer than its 4 tokens.
    tokens = batch.tokens.flat()
    texts = [p.text for p in scored.prompts]
    encoded = encode_prompts(texts, Tokenizer.load("chess"), config.prompts.max_prompt_tokens)
    np.testing.assert_array_equal(np.asarray(tokens.input_ids_BT)[:, : encoded.ids_PT.shape[1]], encoded.ids_PT)
    policy_B = np.array([prompt.task == "policy" for prompt in scored.prompts])
    for lengths_B in (np.asarray(batch.mask_BS).sum(1), reference.completion_mask_BT.numpy().sum(1)):
        assert lengths_B[policy_B].max() <= 4 < lengths_B[~policy_B].max() <= 96
    assert torch.isfinite(reference.old_logp_BT).all()  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--task.name", "policy"], r"task.name is policy and task.mixture is given"),
        (["--task.mixture", "null"], r"task.name is mixed and task.mixture is null"),
        (["--task.mixture", "{policy: {}}"], r"task.mixture has 1 task; expected at least 2"),
        (["--task.mixture", "{policy: {}, chess: {}}"], r"task.mixture.chess.task is 'chess'; expected policy, "),
        (
            ["--task.mixture.policy.shar", "2"],
            r"unknown key task.mixture.policy.shar. Did you mean task.mixture.policy.share\?",
        ),
        (
            ["--task.mixture.policy.illegal_fraction", "0.5"],
            r"task.mixture.policy.illegal_fraction is 0.5, which does nothing unless task.mixture.policy.task is environment",
        ),
        (
            ["--task.opponent", "capture"],
            r"task.opponent is 'capture', which does nothing unless task.name is game; it is mixed: give it to a part, as task.m",
        ),
        (
            ["--task.rewards", "{legal: 1}"],
            r"task.rewards is of one task; in a mixture set task.mixture.<task>.rewards",
        ),
        (["--task.mixture.policy.max_new_tokens", "97"], r"policy.max_new_tokens 97 exceeds rollout.max_new_tokens 96"),
        (["--task.mixture.policy.share", "0"], r"task.mixture.policy.share is 0"),
        (
            ["--objective.overlong_penalty", "{length: 16, weight: 1.0}"],
            r"overlong_penalty.length 16 exceeds task.mixture.policy.max_new_tokens 4: its completions would lose reward",
        ),
    ],
)
def test_a_wrong_mixture_is_one_clear_error(overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_config(CONFIG, overrides)


class Capped(LengthTask):
    """A prompt may have a cap of its own, which this task's user gives, and is as long as that."""

    def __init__(self, caps):
        super().__init__(task_of(name="length"))
        self.caps = caps

    def prompt(self, position, seed):
        return dataclasses.replace(super().prompt(position, seed), max_new_tokens=self.caps[seed % len(self.caps)])


@pytest.mark.parametrize("penalty", [None, {"length": 4, "weight": 1.0}])
@pytest.mark.parametrize("own", [7, 0, 3, 6, 4])
def test_a_prompts_own_cap_is_within_the_runs_and_holds_the_penalty(own, penalty):
    """Before anything is compiled; by default that of the run, 6."""
    sizes = {"model": {"max_position_embeddings": 200}, "prompts": {"max_prompt_tokens": 100}}
    config = tiny_config(objective={"overlong_penalty": penalty}, **sizes)
    task = Capped([None, own])
    draws = PromptSampler(config, task, task.read(config.prompts, 0, None))
    if 1 <= own <= 6 and (penalty is None or own >= 4):
        draws.require_fitting(Tokenizer.load("chess"))
        return
    expected = "4" if 1 <= own <= 6 else "1 to rollout.max_new_tokens = 6"
    with pytest.raises(CapOutOfRange, match=rf"prompt '.+' has max_new_tokens {own}; expected .*{expected}"):
        draws.require_fitting(Tokenizer.load("chess"))


@pytest.mark.parametrize(("own", "part", "expected"), [(5, None, 5), (5, 3, 3), (2, 3, 2), (None, 3, 3)])
def test_a_prompts_own_cap_holds_in_a_mixture_too(own, part, expected):
    tasks = {"own": Capped([own]), "length": LengthTask(task_of(name="length"))}
    parts = {"own": MixturePart(task="a:B", max_new_tokens=part), "length": MixturePart(task="length", share=1e-9)}
    prompt = MixedTask(tasks, parts).prompt(read_packaged("heldout")[0], 0)
    assert (prompt.task, prompt.max_new_tokens) == ("own", expected)


@pytest.mark.slow
def test_training_on_a_mixture_improves_both_tasks(tmp_path):
    """Held-out rewards before and after; a shorter run than the config's."""
    train(load_config(CONFIG, ["--iterations", "60", "--run_dir", str(tmp_path), "--logging.progress", "false"]))
    first, last = (
        record for record in read_records(Path(tmp_path) / "metrics.jsonl") if "eval/greedy/reward" in record
    )
    # GRPO raises the expected reward of samples. The environment's greedy texts are well-formed from the start, and exact boards
    # are beyond this model: there is little to gain, so that one must only not fall by more than chance (three standard errors
    # of 128 rewards).
    least = {"sampled/policy": 0.05, "sampled/environment": 0.2, "greedy/policy": 0.0, "greedy/environment": -0.1}
    gained = {name: last[f"eval/{name}/reward"] - first[f"eval/{name}/reward"] for name in least}
    print({name: f"{gain:+.3f}" for name, gain in gained.items()})
    assert all(gained[name] > least[name] for name in least)
