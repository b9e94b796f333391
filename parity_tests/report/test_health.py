"""Sick runs are named within ten iterations with the setting to change; healthy ones are left in peace."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from jax_grpo.config import load_config
from jax_grpo.report.health import CHECKS, HealthLog, diagnose
from jax_grpo.report.log import histogram
from jax_grpo.report.records import distinct_share, read_records, repeated_share
from jax_grpo.rollout.generate import PromptTooLong
from jax_grpo.tasks import make_task
from jax_grpo.tasks.base import Prompt, RewardError
from jax_grpo.train import train
from jax_grpo.trainer import Trainer

TOY, QUICK = "configs/length_toy.yaml", "configs/legality.yaml"
TINY = [
    "--model.num_layers", "1", "--model.hidden_size", "16", "--logging.tensorboard", "false", "--iterations", "10",
]  # fmt: skip
SMALL = [
    "--prompts.per_iteration", "8", "--rollout.group_size", "8", "--update.warmup_steps", "0", "--update.schedule", "constant",
    "--evaluation.positions", "0", "--logging.tensorboard", "false", "--iterations", "10",
]  # fmt: skip
ONE_MOVE = ["--task", "{name: policy, prompt_style: best_move}", "--rollout.max_new_tokens", "4"]
ONLY_LEGAL = "{legal: 1.0, best_move: 0.0, top_five: 0.0, quality: 0.0, parseable: 0.0, malformed: 0.0}"


@pytest.fixture(autouse=True)
def in_repository(monkeypatch, request):
    monkeypatch.chdir(request.config.rootpath)


def stale(function, params):
    """A program that is always given the same parameters, whatever it is called with."""
    return lambda _, *rest: function(params, *rest)


def stale_score(trainer: Trainer) -> None:
    trainer.score = stale(trainer.score, trainer.reference)


def rewarded_for_repeating(trainer: Trainer) -> None:
    requested = Prompt("Say: the cat is soft.\n", 0)
    trainer.task.prompt = lambda row, seed: requested
    trainer.task.score = lambda prompts, texts: {
        name: np.array([repeated_share([p], [t]) for p, t in zip(prompts, texts, strict=True)], np.float32)
        for name in trainer.task.component_weights
    }


def stale_rollouts(trainer: Trainer) -> None:
    trainer.generate = stale(trainer.generate, trainer.reference)


# check: config, overrides, what is broken inside (where no setting can break it), what the line must name
SICK = {
    "cut_at_the_cap": (TOY, [*TINY, *ONE_MOVE, "--task.prompt_style", "full"], None, "raise rollout.max_new_tokens"),
    "no_learning_rate": (
        TOY,
        [*TINY, "--update.schedule", "cosine", "--update.total_steps", "2"],
        None,
        r"set update.total_steps \(now 2\)",
    ),
    "empty_steps": (
        TOY,
        [*TINY, *ONE_MOVE, "--task.prompt_style", "full", "--objective.mask_truncated", "true", "--update.minibatches", "2"],
        None,
        r"[12] optimiser steps so far had no token to train on.*update.minibatches \(now 2\)",
    ),
    "wrong_ratio": (
        TOY,
        [*TINY, "--update.epochs", "2", "--kl.beta", "0.01", "--update.learning_rate", "0.1"],
        stale_score,
        "stale or of other weights.*update.epochs",
    ),
    "sampling_mismatch": (
        TOY,
        [*TINY, "--kl.beta", "0.01", "--update.learning_rate", "0.1"],
        stale_rollouts,
        "objective.mismatch_cap: 2",
    ),
    "identical_completions": (TOY, [*TINY, "--rollout.temperature", "0.001"], None, "raise rollout.temperature"),
    "mostly_clipped": (
        TOY,
        [*TINY, "--update.epochs", "64", "--update.learning_rate", "0.1"],
        None,
        r"update.epochs \(now 64\)",
    ),
    "no_signal": (TOY, [*TINY, *ONE_MOVE, "--task.rewards", ONLY_LEGAL], None, "100% of groups have equal rewards"),
    "refill_in_vain": (
        TOY,
        [*TINY, *ONE_MOVE, "--task.rewards", ONLY_LEGAL, "--rollout.refill.rounds", "2"],
        None,
        "refill drew 24 groups for 8 and 100% of the batch have no signal",
    ),
    "starving_curriculum": (
        TOY,
        [*TINY, "--prompts.curriculum.passed", "1000"],
        None,
        "of 24 prompts 0 are solved and 24 were never passed; set prompts.curriculum.passed .now 1000.",
    ),
    "runaway_kl": (
        TOY,
        [*TINY, "--update.learning_rate", "0.1", "--kl", "{beta: 0.001, adaptive: true, beta_bounds: [1e-5, 0.002]}"],
        None,
        "above twice kl.target 0.05.*raise the upper one of kl.beta_bounds",
    ),
    "echoed_prompts": (
        "configs/instructions.yaml",
        [*SMALL, "--update.learning_rate", "1e-3", "--kl.beta", "0", "--rollout.max_new_tokens", "32"],
        rewarded_for_repeating,
        "of their prompts' runs of three words.*make the reward ask for more",
    ),
    "entropy_collapse": (TOY, [*TINY, *ONE_MOVE, "--update.learning_rate", "0.3"], None, "raise kl.beta"),
    "falling_reward": (QUICK, [*SMALL, "--update.learning_rate", "0.01"], None, "lower update.learning_rate"),
    "constant_component": (
        QUICK,
        [*SMALL, "--prompts.source", "selfplay:5"],
        None,
        r"top_five \(0\), best_move \(0\), quality \(0\).*task.engine",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("check", SICK)
def test_a_run_made_sick_is_named_within_ten_iterations(check, tmp_path):
    path, overrides, break_it, expected = SICK[check]
    trainer = Trainer(load_config(path, [*overrides, "--run_dir", str(tmp_path)]))
    if break_it:
        break_it(trainer)
    said: list[str] = []
    health = HealthLog(tmp_path, trainer.config, trainer.task.component_weights, said.append)
    findings: list[dict] = []
    for iteration in range(10):
        health(trainer.iterate(iteration)[0])
        findings = read_lines(tmp_path / "health.jsonl")
        if check in [finding["check"] for finding in findings]:
            break
    print(*(f"iteration {finding['iteration']}: {finding['line']}" for finding in findings), sep="\n")
    assert findings and findings[-1]["check"] == check
    assert said[-1] == f"health: {findings[-1]['line']}" and "\n" not in said[-1]
    assert re.search(expected, said[-1])


@pytest.mark.slow
def test_a_sick_run_says_so_on_the_console_and_in_its_folder(tmp_path, capsys):
    path, overrides, _, expected = SICK["cut_at_the_cap"]
    shown = ["--iterations", "3", "--logging.samples_every", "2", "--logging.samples", "2", "--run_dir", str(tmp_path)]
    train(load_config(path, [*overrides, *shown]))
    (finding,) = read_lines(tmp_path / "health.jsonl")
    assert finding["check"] == "cut_at_the_cap" and finding["iteration"] == 2 and re.search(expected, finding["line"])
    assert capsys.readouterr().out.replace("\n", "").count("health: ") == 1, "once, not every iteration"
    # what the report draws
    histograms = read_lines(tmp_path / "histograms.jsonl")
    assert len(histograms) == 3 and sum(histograms[1]["histograms"]["reward/malformed"]["counts"]) == 64
    retained = read_lines(tmp_path / "samples.jsonl")
    assert [record["iteration"] for record in retained] == [0, 2] and len(retained[0]["samples"]) == 2
    sample = retained[0]["samples"][0]
    assert sample["fen"] in sample["prompt"] and sample["engine_move"] and sample["components"]["malformed"] == 1
    assert len(sample["others"]) == 7 and {other["advantage"] for other in sample["others"]} == {0.0}, "all were cut"


def test_every_check_has_a_sick_run():
    assert set(SICK) == set(CHECKS)


def test_a_prompt_that_would_be_cut_is_refused_with_its_key(tmp_path):
    config = load_config(TOY, [*TINY, "--prompts.max_prompt_tokens", "70", "--run_dir", str(tmp_path)])
    with pytest.raises(PromptTooLong, match=r"has \d+ tokens; expected 1 to prompts.max_prompt_tokens = 70"):
        Trainer(config)  # before anything is compiled


def test_a_reward_that_is_not_a_number_stops_the_first_iteration(tmp_path):
    trainer = Trainer(load_config(TOY, [*TINY, "--run_dir", str(tmp_path)]))
    score = trainer.task.score
    trainer.task.score = lambda prompts, texts: {
        name: np.where(np.arange(len(texts)) == 3, np.nan, x) for name, x in score(prompts, texts).items()
    }
    with pytest.raises(RewardError, match=r"task 'length': reward component 'length' is .*nan.*Sample 3: prompt"):
        trainer.iterate(0)


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def recorded(path: Path) -> list[dict]:
    return [record for record in read_records(path) if "loss" in record]


def weights_of(config) -> dict[str, float]:
    return dict(make_task(config.task).component_weights)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_recorded_legality_run_gives_no_alarm_at_any_iteration(seed):
    records = recorded(Path(f"docs/results/legality/metrics_seed{seed}.jsonl"))
    config = load_config(QUICK)
    alarms = [diagnose(records[: i + 1], config, weights_of(config)) for i in range(len(records))]
    assert len(records) == 160 and not any(alarms), next(filter(None, alarms), None)


# One healthy record of the legality run, and per check the least that makes it sick.
CHANGES = {
    "wrong_ratio": {"ratio/first_deviation": 0.01},
    "sampling_mismatch": {"logp_mismatch/mean": 0.06},
    "no_learning_rate": {"learning_rate": 0.0},
    "cut_at_the_cap": {"truncated_fraction": 0.95, "groups_without_signal": 60},
    "identical_completions": {"completions/distinct": 1 / 16},
    "no_signal": {"groups_without_signal": 58},
    "refill_in_vain": {"groups_without_signal": 58, "refill/rounds": 3},
    "constant_component": {"reward/best_move/mean": 0.0, "reward/best_move/std": 0.0},
    "runaway_kl": {"kl/mean": 3.1},
    "entropy_collapse": {"entropy": 0.2},
    "falling_reward": {"reward/mean": 0.1},
    "echoed_prompts": {"completions/repeat_prompt": 0.4},
    "mostly_clipped": {"clip_fraction/low": 0.3, "clip_fraction/high": 0.25},
}


@pytest.mark.parametrize("check", CHANGES)
def test_each_check_sees_its_own_sickness_and_not_a_healthy_record(check):
    config = load_config(QUICK)
    healthy = [
        {"completions/repeat_prompt": 0.1} | r for r in recorded(Path("docs/results/legality/metrics_seed0.jsonl"))[:10]
    ]
    sick = healthy[:2] + [record | CHANGES[check] for record in healthy[2:]]
    assert [finding.check for finding in diagnose(sick, config, weights_of(config))] == [check]
    assert diagnose(healthy, config, weights_of(config)) == []
    assert diagnose([], config, weights_of(config)) == []


def test_a_chance_batch_and_a_solved_task_are_not_sick():
    config = load_config(QUICK)
    healthy = recorded(Path("docs/results/legality/metrics_seed0.jsonl"))[:10]
    flat = {"groups_without_signal": 64, "truncated_fraction": 1.0, "completions/distinct": 1 / 16}
    once = [*healthy[:9], healthy[9] | flat]
    assert diagnose(once, config, weights_of(config)) == []
    solved = [record | flat | {"reward/mean": 1.4, "entropy": 0.01} for record in healthy]
    assert diagnose(solved, config, weights_of(config)) == [], "1.4 is the most these weights allow"
    spent = [record | {"refill/rounds": 3, "refill/drawn": 256} for record in solved]
    (finding,) = diagnose(spent, config, weights_of(config))
    assert finding.check == "refill_in_vain", "success is thrown away too"
    filled = [record | {"refill/rounds": 9, "refill/drawn": 640, "refill/without_signal": 580} for record in healthy]
    assert diagnose(filled, config, weights_of(config)) == [], "rare signal, and a full batch of it"
    zero = dict.fromkeys(weights_of(config), 0.0)
    unpaid = [record | flat | {"reward/mean": 0.0} for record in healthy]
    assert [f.check for f in diagnose(unpaid, config, zero)] == ["cut_at_the_cap"], "no reward at all is not success"


@pytest.mark.parametrize("picks", ["--rollout.refill", "--prompts.curriculum"])
def test_a_reward_of_picked_prompts_is_neither_success_nor_a_fall(picks):
    """Refill leaves out what is solved and what never succeeds: its batch's mean stays in the middle."""
    config = load_config(QUICK, [picks, "{rounds: 3}" if picks.endswith("refill") else "{passed: 1.0}"])
    healthy = recorded(Path("docs/results/legality/metrics_seed0.jsonl"))[:10]
    flat = {"groups_without_signal": 64, "reward/mean": 0.2, "reward/unselected": 1.4, "entropy": 0.01}
    solved = [record | flat | {"reward/mean": mean} for record, mean in zip(healthy, [0.9, *[0.2] * 9], strict=True)]
    assert diagnose(solved, config, weights_of(config)) == []
    fallen = [record | {"reward/unselected": value} for record, value in zip(healthy, [1.2, *[0.1] * 9], strict=True)]
    assert [finding.check for finding in diagnose(fallen, config, weights_of(config))] == ["falling_reward"]


def test_masking_truncated_completions_that_are_all_truncated_is_named():
    config = load_config(QUICK, ["--objective.mask_truncated", "true"])
    records = recorded(Path("docs/results/legality/metrics_seed0.jsonl"))[:5]
    (finding,) = diagnose([r | {"truncated_fraction": 1.0} for r in records], config, weights_of(config))
    assert finding.check == "cut_at_the_cap" and "objective.mask_truncated leaves them out" in finding.line


def test_a_resumed_run_does_not_repeat_itself(tmp_path):
    config = load_config(QUICK)
    records = recorded(Path("docs/results/legality/metrics_seed0.jsonl"))[:10]
    sick = [record | {"groups_without_signal": 64} for record in records]

    def watch(start: int, said: list[str]) -> list[dict]:
        lines = [json.dumps(record) + "\n" for record in sick[:start]]
        (tmp_path / "metrics.jsonl").write_text("".join(lines))
        health = HealthLog(tmp_path, config, weights_of(config), said.append)
        for record in sick[start:]:
            health(record)
        return [json.loads(line) for line in (tmp_path / "health.jsonl").read_text().splitlines()]

    at_once, resumed = [], []
    assert watch(0, at_once) == watch(5, resumed)
    assert len(at_once) == 1 and resumed == []


def test_small_metrics_are_what_they_say():
    assert distinct_share(["a", "a", "b", "b", "c", "d"], 3) == pytest.approx((2 / 3 + 1) / 2)
    requested = [
        Prompt("Write about it, in one line.", 0),
        Prompt("Go on", 0),
        Prompt("x", 0, messages=[{"content": "a b c d"}]),
    ]
    assert repeated_share(requested, ["write about it well", "Go on", "A. B, c"]) == pytest.approx((1 / 4 + 1 / 2) / 2)
    assert np.isnan(repeated_share(requested[1:2], ["Go on"])), "no run of three words"
    assert histogram(np.array([0.0, 0.05, 1.0, np.nan])) == {"low": 0.0, "high": 1.0, "counts": [2, *[0] * 8, 1]}
    assert histogram(np.array([-1.0, 1.0]))["low"] == -1.0
