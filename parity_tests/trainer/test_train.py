"""The loop: it learns, it logs, it records batches that replay to the same step, it guards itself."""

import dataclasses
import itertools
import json
import re

import numpy as np
import pytest
from conftest import relative_error

from jax_grpo.chess.positions.sources import read_packaged
from jax_grpo.config import ConfigError, load_config
from jax_grpo.iteration.draw import PromptSampler
from jax_grpo.policy.named import load_policy
from jax_grpo.prompts.dataset import PromptDataset
from jax_grpo.replay import BatchError, main, read_batch, replay
from jax_grpo.report.log import MetricsLog
from jax_grpo.report.records import read_records
from jax_grpo.system.phases import Phases
from jax_grpo.train import train
from jax_grpo.trainer import NonFiniteUpdates, Trainer

TOY = "configs/length_toy.yaml"
QUICK = "configs/legality.yaml"
SMALL = [
    "--iterations", "2", "--prompts.per_iteration", "4", "--rollout.group_size", "4", "--update.warmup_steps", "0",
    "--logging.samples_every", "1",
]  # fmt: skip
REQUIRED = [
    "iteration",
    "optimizer_step",
    "loss",
    "policy_loss",
    "kl/mean",
    "kl/p95",
    "beta",
    "entropy",
    "reward/mean",
    "reward/std",
    "reward/legal/mean",
    "legal_move_rate",
    "groups_without_signal",
    "clip_fraction/low",
    "clip_fraction/high",
    "grad_norm",
    "completion_length/mean",
    "truncated_fraction",
    "time/rollout",
    "time/reward",
    "time/score",
    "time/update",
    "tokens_per_second",
]


@pytest.fixture
def in_repository(monkeypatch, request):
    monkeypatch.chdir(request.config.rootpath)


@pytest.mark.slow  # a hundred iterations; by default test_api has a run that climbs
def test_the_length_toy_climbs_to_its_cap_and_stays(in_repository, tmp_path):
    run = train(load_config(TOY, ["--run_dir", str(tmp_path / "run"), "--logging.samples_every", "0"]))
    reward = [record["reward/mean"] for record in read_records(run / "metrics.jsonl")]
    print(
        f"reward: start {np.mean(reward[:3]):.2f}, last ten {np.mean(reward[-10:]):.3f}, least of them {min(reward[-10:]):.3f}"
    )
    assert np.mean(reward[:3]) < 0.3 and np.mean(reward[-10:]) > 0.98 and min(reward[-10:]) > 0.95
    # by then every completion is cut at the cap and earns the same, which is success here
    assert (run / "health.jsonl").read_text() == "", "a healthy run gives no alarm"


def test_a_run_leaves_metrics_weights_config_pictures_and_batches(in_repository, tmp_path, capsys):
    arguments = [*SMALL, "--run_dir", str(tmp_path), "--evaluation.positions", "20", "--record_batches", "1"]
    config = load_config(QUICK, arguments)
    train(config)
    records = [r for r in read_records(tmp_path / "metrics.jsonl") if "loss" in r]
    assert len(records) == 2
    for name in REQUIRED:
        assert name in records[-1], name
    assert records[0]["optimizer_step"] == 1 and records[0]["kl/mean"] == pytest.approx(0, abs=1e-6)
    assert records[0]["logp_mismatch/max"] < 2e-4, "float32 rounding of decode against the batched forward"
    assert records[1]["kl/mean"] > 0
    for name in ("curves.png", "boards.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert load_config(str(tmp_path / "config.yaml")) == config
    out = capsys.readouterr().out
    assert "held-out, iteration 0" in out and "P: " in out and "reward" in out

    # the recorded batch, replayed from the run's starting weights, is the first optimiser step
    policy = load_policy(config.model, config.seed, 1)
    replayed = replay(config.learning(), policy, read_batch(tmp_path / "batches" / "000000.npz"))
    for name in ("loss", "policy_loss", "grad_norm", "entropy", "kl/mean"):
        # tolerance: grouped and flat layouts sum float32 in another order
        assert float(replayed[name]) == pytest.approx(records[0][name], rel=2e-4, abs=2e-6), name


def test_a_top_k_that_leaves_no_token_out_is_refused_before_anything_is_compiled(in_repository, tmp_path):
    arguments = ["--run_dir", str(tmp_path), "--rollout.top_k"]
    with pytest.raises(
        ConfigError, match=r"rollout.top_k 585 leaves none of the vocabulary's 585 tokens out; expected fewer, or 0"
    ):
        Trainer(load_config(TOY, [*arguments, "585"]))
    Trainer(load_config(TOY, [*arguments, "584"]))


@pytest.mark.slow
def test_two_runs_of_one_seed_are_the_same_and_of_another_seed_are_not(in_repository, tmp_path):
    def rewards(name, seed):
        overrides = [*SMALL, "--run_dir", str(tmp_path / name), "--seed", str(seed), "--evaluation.positions", "0"]
        trainer = Trainer(load_config(QUICK, overrides))
        return [trainer.iterate(i)[1].completions for i in range(2)]

    assert rewards("a", 0) == rewards("b", 0) != rewards("c", 1)


@pytest.mark.slow
def test_minibatches_epochs_and_options_take_their_steps(in_repository, tmp_path):
    for name in ("clip", "sapo"):  # the others differ in one formula, which has its own tests
        overrides = [*SMALL, "--objective.name", name, "--update.epochs", "2", "--update.minibatches", "2", "--kl.adaptive", "true",
                     "--update.micro_batches", "2", "--objective.entropy_quantile", "0.2", "--objective.mismatch_cap", "2",
                     "--objective.entropy_coefficient", "0.01", "--run_dir", str(tmp_path)]  # fmt: skip
        trainer = Trainer(load_config(QUICK, overrides))
        metrics, _, batch = trainer.iterate(0)
        assert metrics["optimizer_step"] == 4 and batch.entropy_BS is not None
        assert np.isfinite([v for k, v in metrics.items() if k != "iteration"]).all()
        assert metrics["kl/mean"] > 0


def test_a_position_drawn_twice_in_one_iteration_gets_completions_of_its_own(in_repository, tmp_path):
    """Three positions fill four prompts: the fourth begins another epoch. The first time keeps the key it has always had."""
    overrides = [*SMALL, "--prompts.per_iteration", "8", "--run_dir", str(tmp_path), "--rollout.temperature", "3"]
    trainer = Trainer(load_config(QUICK, overrides))
    positions = read_packaged("heldout")[:3]
    trainer.prompts.dataset = PromptDataset(positions, 0)
    numbers, requested = trainer.prompts.in_order(0)
    assert [prompt.row for prompt in requested] == [positions[number] for number in numbers]
    made = trainer._draw(0, Phases())
    prompts, ids = made.prompts, np.asarray(made.rollout.completion_ids_PGC)
    groups = {number: [ids[row] for row, sampled in enumerate(numbers) if sampled == number] for number in range(3)}
    assert sorted(map(len, groups.values())) == [2, 3, 3] and len(prompts) == 8
    for number, sampled in groups.items():
        for a, b in itertools.combinations(sampled, 2):
            assert not np.array_equal(a, b), f"position {number} was drawn twice and completed alike"
    # A batch without repetitions gives the first occurrences: runs whose draws are distinct are what they were.
    three = trainer.config.prompts.model_copy(update={"per_iteration": 3})
    trainer.config = trainer.config.model_copy(update={"prompts": three})
    trainer.prompts = PromptSampler(trainer.config, trainer.task, trainer.positions)
    once = trainer.prompts.dataset = PromptDataset(positions, 0)
    assert sorted(trainer.prompts.in_order(0)[0]) == [0, 1, 2] and len(once) == 3
    alone = np.asarray(trainer._draw(0, Phases()).rollout.completion_ids_PGC)
    for number, completions in zip(trainer.prompts.in_order(0)[0], alone, strict=True):
        assert np.array_equal(completions, groups[number][0])


@pytest.mark.slow
def test_nonfinite_updates_in_a_row_end_the_run_with_the_cause(in_repository, tmp_path):
    overrides = [
        *SMALL,
        "--update.learning_rate",
        "1e30",
        "--update.max_consecutive_nonfinite",
        "1",
        "--run_dir",
        str(tmp_path),
    ]
    trainer = Trainer(load_config(QUICK, overrides))
    with pytest.raises(NonFiniteUpdates, match=r"update.max_consecutive_nonfinite = 1.*lower update.learning_rate"):
        for i in range(4):
            trainer.iterate(i)


@pytest.mark.slow
def test_a_row_of_nonfinite_minibatches_ends_the_run_though_the_last_one_is_sound(in_repository, tmp_path):
    limit = ["--update.minibatches", "4", "--update.max_consecutive_nonfinite", "3", "--run_dir", str(tmp_path)]
    trainer = Trainer(load_config(QUICK, [*SMALL, *limit]))
    batch = trainer.iterate(0)[2]
    last = np.random.default_rng((trainer.config.seed, 1, 0)).permutation(4)[-1]  # see `batch.minibatches`
    advantages = np.where(np.arange(16) // 4 == last, 0.5, np.nan).astype(np.float32)
    with pytest.raises(NonFiniteUpdates, match="3 optimiser steps in a row"):
        trainer._optimise(dataclasses.replace(batch, advantages_B=advantages), 1)
    assert int(trainer.state.nonfinite_in_a_row) == 0, "the last step was sound"


@pytest.mark.slow
def test_replay_from_the_command_line_writes_every_gradient_and_parameter(in_repository, tmp_path):
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 585, (4, 12)).astype(np.int32)
    arrays = {
        "input_ids": ids,
        "attention_mask": np.ones_like(ids),
        "completion_mask": (np.arange(12) >= rng.integers(4, 10, (4, 1))).astype(np.int32),
        "rewards": np.array([1.0, 0.0, 0.5, 0.0]),
        "group_ids": np.array([0, 0, 1, 1]),
    }
    np.savez(tmp_path / "b.npz", **arrays)
    weights = "jax_grpo/assets/models/rook-small"
    command = [
        "--config",
        QUICK,
        "--weights",
        weights,
        "--batch",
        str(tmp_path / "b.npz"),
        "--out",
        str(tmp_path / "o.npz"),
    ]
    main(command)
    out = dict(np.load(tmp_path / "o.npz"))
    grads = {name for name in out if name.startswith("grad/transformer.")}
    assert len(grads) == 4 * 12 + 4 == len([name for name in out if name.startswith("param/")])
    assert all(np.abs(out[name]).max() > 0 for name in grads)
    assert out["advantages"][:2].sum() == pytest.approx(0) and out["logp"].shape == (4, 12)
    main([*command, "--update.micro_batches", "4"])
    again = dict(np.load(tmp_path / "o.npz"))
    assert relative_error([again[n] for n in sorted(grads)], [out[n] for n in sorted(grads)]) < 1e-4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.pop("attention_mask"), "array 'attention_mask' is missing"),
        (lambda a: a.update(old_logp=np.zeros((2, 3))), r"old_logp has shape \(2, 3\); expected \(2, 5\)"),
        (lambda a: a.pop("advantages"), r"needs advantages \[B\], or rewards \[B\] with group_ids \[B\]"),
    ],
)
def test_bad_batches_are_named(change, message, tmp_path):
    arrays = {n: np.ones((2, 5), np.int32) for n in ("input_ids", "attention_mask", "completion_mask")} | {
        "advantages": np.ones(2)
    }
    change(arrays)
    np.savez(tmp_path / "b.npz", **arrays)
    with pytest.raises(BatchError, match=message):
        read_batch(tmp_path / "b.npz")
    (tmp_path / "b.npz").write_bytes(b"PK\x03\x04 cut short")
    with pytest.raises(BatchError, match=re.escape(f"{tmp_path}/b.npz: not a readable .npz batch")):
        read_batch(tmp_path / "b.npz")


def test_metrics_are_strict_json_and_a_line_cut_short_is_left_out(tmp_path, in_repository):
    with MetricsLog(tmp_path, load_config(TOY)) as log:
        log.write({"iteration": 0, "loss": 1.5})
        log.write({"iteration": 1, "loss": float("nan")})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[1], parse_constant=pytest.fail) == {
        "iteration": 1,
        "loss": None,
        "nonfinite_metrics": ["loss"],
    }
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 2, "lo')
    assert len(read_records(tmp_path / "metrics.jsonl")) == 2
    assert list((tmp_path / "tensorboard").iterdir())
