"""An optimiser step without a token to train on moves nothing, is counted, and is no observation: in both implementations."""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from both import Arrays, crafted_batch, jax_policy, settings, show, torch_model, weights
from conftest import config as tiny_config
from conftest import tiny_model
from flax import struct

import torch_ref.batch
from jax_grpo.config import Config
from jax_grpo.config.sections import CheckpointConfig
from jax_grpo.iteration.metrics import over_steps
from jax_grpo.model.weights import to_hf
from jax_grpo.replay import batch_from
from jax_grpo.report.health import diagnose
from jax_grpo.run.checkpoints import Checkpoints, abstract, load, restore
from jax_grpo.run.files import CheckpointError
from jax_grpo.update import LATER_COUNTERS, init_state, make_update
from torch_ref import train as torch_train
from torch_ref.compare import TOLERANCES, observable, tensor_errors
from torch_ref.update import optimiser_step, start

MEASURED = (
    "entropy", "ratio/mean", "ratio/deviation", "clip_fraction/low", "clip_fraction/high", "kl/mean", "kl/p95",
    "logp_mismatch/mean", "logp_mismatch/max",
)  # fmt: skip
# Moments are there when the first empty step comes; a non-finite step stands before, between and after empty ones.
KINDS = ("good", "good", "empty", "empty", "nonfinite", "empty", "good", "nonfinite", "good", "empty")


def _config(**sections) -> Config:
    return settings(
        "float64",
        iterations=len(KINDS),
        objective={"mask_truncated": True},
        kl={"adaptive": True, "target": 0.15, "beta_bounds": [1e-4, 50.0]} | sections.pop("kl", {}),
        update={"learning_rate": 3e-3, "schedule": "cosine", "warmup_steps": 2},
        **sections,
    )


def _batch(kind: str, seed: int) -> Arrays:
    arrays = crafted_batch(weights(), seed=seed)
    if kind == "empty":
        arrays["stopped"] = np.zeros_like(arrays["stopped"])
    if kind == "nonfinite":
        arrays["advantages"] = np.where(np.arange(8) == 3, np.nan, 1.0)
    return arrays


BATCHES = [_batch(kind, seed) for seed, kind in enumerate(KINDS)]


def _jax(config: Config):
    """Metrics of each step, and parameters, moments and beta behind each, as one list of arrays."""
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        policy = jax_policy(weights(), "float64")
        update = make_update(policy.graphdef, config.learning())
        state, records, states = init_state(policy.params, config.learning()), [], []
        for arrays in BATCHES:
            state, metrics = update(state, batch_from(arrays, config.learning()))
            records.append({name: float(x) for name, x in metrics.items()})
            retained = (state.params, state.opt_state, state.beta, state.optimizer_step)
            states.append([np.array(x) for x in jax.tree.leaves(retained)])
        return records, states, to_hf(state.params, policy.architecture), int(state.nonfinite_in_a_row)


def _torch(config: Config):
    model = torch_model(weights(), "float64")
    state, records, states = start(model, config.learning()), [], []
    for arrays in BATCHES:
        batch = torch_ref.batch.from_arrays(arrays, config.learning(), dtype=torch.float64)
        records.append({name: float(x) for name, x in optimiser_step(state, batch, config.learning()).items()})
        moments = [x for one in state.optimiser.state.values() for x in one.values()]
        retained = [*model.parameters(), *map(torch.as_tensor, [*moments, state.beta, state.step])]
        states.append([x.detach().clone().numpy() for x in retained])
    parameters = {name: p.detach().numpy() for name, p in model.named_parameters()}
    return records, states, parameters, state.nonfinite_in_a_row


@pytest.fixture(scope="module")
def runs():
    return {"jax_grpo": _jax(_config()), "torch_ref": _torch(_config())}


@pytest.mark.parametrize("side", ["jax_grpo", "torch_ref"])
def test_an_empty_step_leaves_parameters_moments_beta_and_step_count_as_they_were(runs, side):
    records, states, _, in_a_row = runs[side]
    for number, kind in enumerate(KINDS):
        if number == 0:
            continue
        pairs = list(zip(states[number - 1], states[number], strict=True))
        same = [np.array_equal(before, after) for before, after in pairs]
        assert all(same) if kind != "good" else not any(same[:4]), (number, kind)
    assert [record["empty_steps"] for record in records] == [0, 0, 1, 2, 2, 3, 3, 3, 3, 4]
    assert [record["nonfinite"] for record in records] == [0, 0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert in_a_row == 0
    assert len({record["beta"] for record in records}) > 3, "beta adapts in the other steps"


@pytest.mark.parametrize("side", ["jax_grpo", "torch_ref"])
def test_an_empty_step_observes_nothing(runs, side):
    for record, kind in zip(runs[side][0], KINDS, strict=True):
        assert record["empty"] == (kind == "empty")
        if kind == "empty":
            assert all(math.isnan(record[name]) for name in MEASURED), record
            assert record["loss"] == record["policy_loss"] == record["grad_norm"] == 0
        else:
            assert all(math.isfinite(record[name]) for name in MEASURED), record


def test_both_implementations_agree_over_good_empty_and_nonfinite_steps(runs):
    (ours, _, parameters, _), (theirs, _, expected, _) = runs["jax_grpo"], runs["torch_ref"]
    for name in (*MEASURED, "loss", "beta", "learning_rate", "grad_norm", "nonfinite", "empty_steps"):
        errors = {}
        for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            if math.isnan(a[name]) or math.isnan(b[name]):  # of an empty step, and the loss of a non-finite one
                assert math.isnan(a[name]) and math.isnan(b[name]) and KINDS[number] != "good", (
                    name,
                    number,
                    a[name],
                    b[name],
                )
            else:
                errors[f"step {number}"] = abs(a[name] - b[name])
        show(name, errors, 1e-11)  # scalars of size up to 50 (the largest gap), ten float64 steps
    changes = [{f"change/{n}": x - weights()[n] for n, x in of.items()} for of in (parameters, expected)]
    show("change", tensor_errors(*map(observable, changes), "change/"), TOLERANCES["float64"].change)


@pytest.mark.slow
def test_a_row_of_nonfinite_steps_is_not_ended_by_empty_ones():
    learning = _config().learning()
    with jax.enable_x64(True):
        policy = jax_policy(weights(), "float64")
        update, state = make_update(policy.graphdef, learning), init_state(policy.params, learning)
        reference = start(torch_model(weights(), "float64"), learning)
        for number in (4, 5, 4):  # non-finite, empty, non-finite
            state, _ = update(state, batch_from(BATCHES[number], learning))
            optimiser_step(
                reference, torch_ref.batch.from_arrays(BATCHES[number], learning, dtype=torch.float64), learning
            )
    assert int(state.nonfinite_in_a_row) == reference.nonfinite_in_a_row == 2


def _step(**values) -> dict:
    seen = {
        "empty": False,
        "loss": 1.0,
        "grad_norm": 2.0,
        "kl/mean": 0.3,
        "beta": 0.1,
        "empty_steps": 0,
        "nonfinite": 0,
    }
    return seen | {"learning_rate": 0.5, "policy_loss": 1.5} | values


EMPTY = {"empty": True, "loss": 0.0, "policy_loss": 0.0, "grad_norm": 0.0, "kl/mean": math.nan}


@pytest.mark.parametrize("combine", [over_steps, torch_train.over_steps], ids=["jax_grpo", "torch_ref"])
def test_an_iterations_metrics_pass_over_its_empty_steps(combine):
    steps = [
        _step(),
        _step(**EMPTY, empty_steps=1),
        _step(loss=3.0, **{"kl/mean": 0.4}),
        _step(**EMPTY, empty_steps=2, beta=0.2),
    ]
    actual = combine(steps)
    expected = {"loss": 2.0, "grad_norm": 2.0, "kl/mean": 0.4, "beta": 0.2, "empty_steps": 2, "nonfinite": 0}
    assert {name: actual[name] for name in expected} == expected and "empty" not in actual
    nothing = combine([_step(**EMPTY, empty_steps=1)])
    assert all(math.isnan(nothing[name]) for name in ("loss", "policy_loss", "grad_norm", "kl/mean"))
    assert nothing["empty_steps"] == 1 and nothing["beta"] == 0.1


def test_health_takes_no_reading_from_an_empty_iteration_but_names_it():
    def record(iteration: int, **values) -> dict:
        healthy = {
            "entropy": 1.0,
            "kl/mean": 0.01,
            "loss": 0.1,
            "truncated_fraction": 0.5,
            "reward/mean": 0.3,
            "reward/std": 0.2,
        }
        return (
            healthy
            | {"iteration": iteration, "ratio/first_deviation": 0.0, "empty_steps": 0, "groups_without_signal": 0}
            | values
        )

    nothing = {"entropy": math.nan, "kl/mean": math.nan, "loss": math.nan, "ratio/first_deviation": math.nan}
    history = [record(i) for i in range(4)] + [record(4 + i, **nothing, empty_steps=i + 1) for i in range(3)]
    config = tiny_config(objective={"mask_truncated": True})
    actual = diagnose(history, config, {"legal": 1.0})
    assert [finding.check for finding in actual] == ["empty_steps"], "no collapse of an entropy that nobody measured"
    assert "3 optimiser steps so far had no token to train on" in actual[0].line
    # read as zeros, as they were before, the same records are a collapsed policy
    zeros = [record(i) for i in range(4)] + [record(4 + i, entropy=0.0, **{"kl/mean": 0.0}) for i in range(3)]
    assert "entropy_collapse" in [finding.check for finding in diagnose(zeros, config, {"legal": 1.0})]


@pytest.mark.slow
def test_a_checkpoint_from_before_the_counter_restores_with_none_counted(tmp_path):
    @struct.dataclass
    class Before:
        params: dict
        opt_state: dict
        beta: jax.Array
        optimizer_step: jax.Array
        nonfinite_in_a_row: jax.Array
        nonfinite_total: jax.Array

    _, params = tiny_model()
    fresh = init_state(params, tiny_config().learning())
    names = Before.__dataclass_fields__
    old = Before(**{name: getattr(fresh, name) for name in names}).replace(
        optimizer_step=jnp.int32(7), beta=jnp.float32(0.3)
    )
    with Checkpoints(tmp_path, CheckpointConfig(keep_best=0)) as checkpoints:
        checkpoints.save(1, old, {}, {})
        checkpoints.save(2, fresh.replace(empty_total=jnp.int32(5)), {}, {})
    back = restore(load(tmp_path / "000001"), abstract(fresh), LATER_COUNTERS)
    assert (int(back.empty_total), int(back.optimizer_step), float(back.beta)) == (0, 7, np.float32(0.3))
    chex.assert_trees_all_equal(back.params, params)
    assert int(restore(load(tmp_path / "000002"), abstract(fresh), LATER_COUNTERS).empty_total) == 5
    with pytest.raises(CheckpointError, match="'empty_total' is not in the checkpoint"):
        restore(load(tmp_path / "000001"), abstract(fresh))
