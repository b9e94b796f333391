"""The coefficient of an entropy bonus that holds the entropy at a target: where it goes, when it acts, that a run keeps it.

Whole iterations of both implementations stand in `test_parity_iterations`, TRL's own steps in `test_judges_training`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from both import crafted_batch, jax_policy, jax_step, objective, settings, show, uncompiled, weights
from conftest import TINY
from short_runs import cut_and_whole, letters, lines_without_times

from jax_grpo.config.objectives import Clip
from jax_grpo.model.weights import to_hf
from jax_grpo.objective import applied_coefficient, next_coefficient
from jax_grpo.replay import batch_from
from jax_grpo.run.checkpoints import Origin, named
from jax_grpo.run.files import CheckpointError
from jax_grpo.run.resume import require_same_run
from jax_grpo.update import init_state, make_step
from torch_ref.compare import TOLERANCES, tensor_errors
from torch_ref.entropy_control import NOTHING_SEEN, behind, in_force

HELD = Clip(
    entropy_target=2.0,
    entropy_step=0.1,
    entropy_coefficient=0.2,
    entropy_bounds=(0.05, 0.3),
)


def test_it_rises_at_and_below_the_target_falls_above_and_stays_in_bounds():
    entropies = [2.5, 1.9, 2.0, 1.0, 0.5, 2.1, 3.0, 4.0, 5.0, 1.0]
    coefficients = [0.2, 0.1, 0.2, 0.3, 0.3, 0.3, 0.2, 0.1, 0.05, 0.05, 0.15]
    # Given in a step whose step before was at or below the target: never in the first.
    applied = [0.0, 0.0, 0.2, 0.3, 0.3, 0.3, 0.0, 0.0, 0.0, 0.0, 0.15]
    ours, theirs, before = jnp.float32(0.2), 0.2, NOTHING_SEEN
    for at, entropy in enumerate([*entropies, 0.0]):
        assert float(ours) == pytest.approx(coefficients[at], abs=1e-6) and theirs == pytest.approx(coefficients[at])
        given = applied_coefficient(ours, jnp.float32(before), HELD)
        assert float(given) == pytest.approx(applied[at], abs=1e-6), at  # float32
        assert in_force(theirs, before, HELD) == pytest.approx(applied[at])
        ours, theirs = next_coefficient(ours, jnp.float32(entropy), HELD), behind(theirs, entropy, HELD)
        before = entropy
    assert ours.dtype == jnp.float32


ONE_LAYER = dataclasses.replace(TINY, num_layers=1)


def _weights():
    return weights(4.0, ONE_LAYER)


@functools.cache
def _batch():
    return crafted_batch(_weights(), architecture=ONE_LAYER)


@pytest.mark.slow  # operations in float64, compiled one by one
def test_a_step_gives_the_bonus_the_step_before_called_for_and_one_not_taken_leaves_it():
    held = {"entropy_target": 4.0, "entropy_coefficient": 0.2, "entropy_step": 0.05}
    how = settings("float64", objective=objective("clip", **held, mask_truncated=True))
    constant = {
        c: jax_step(
            settings("float64", objective=objective("clip", entropy_coefficient=c, mask_truncated=True)),
            _weights(),
            _batch(),
            architecture=ONE_LAYER,
        )
        for c in (0.0, 0.2)
    }
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        policy = jax_policy(_weights(), "float64", ONE_LAYER)
        step, fresh = make_step(policy.graphdef, how.learning()), init_state(policy.params, how.learning())
        batch = batch_from(_batch(), how.learning())
        nothing = dataclasses.replace(batch, stopped_B=jnp.zeros_like(batch.stopped_B))
        with uncompiled("float64", how.update.parts):
            for before, given in ((np.inf, 0.0), (1.0, 0.2)):
                state = dataclasses.replace(fresh, entropy_before=jnp.float64(before))
                after, metrics, _, grads = step(state, batch)
                actual = {f"grad/{name}": x for name, x in to_hf(grads, policy.architecture).items()}
                show(f"behind {before}", tensor_errors(actual, constant[given]), TOLERANCES["float64"].gradients)
                assert float(metrics["entropy_bonus/applied"]) == given and metrics["entropy_bonus/coefficient"] == 0.2
                assert float(after.entropy_before) == float(metrics["entropy"]) > 4.0, "of random weights"
                assert float(after.entropy_coefficient) == pytest.approx(0.15)
            after, metrics, *_ = step(state, nothing)
    assert bool(metrics["empty"]) and float(after.entropy_before) == 1.0 and float(after.entropy_coefficient) == 0.2
    apart = max(tensor_errors(constant[0.0], constant[0.2]).values())
    assert apart > 1e-2, "the bonus shows"


@pytest.mark.slow  # three runs
def test_a_run_that_continues_has_the_coefficient_it_had(tmp_path, monkeypatch):
    # Behind a target that is never reached it rises; from what it begins with it would be behind.
    cut, whole = cut_and_whole(
        lambda name: letters(tmp_path, run_dir=str(tmp_path / name), objective={"entropy_target": 9.0}), monkeypatch
    )
    records = lines_without_times(whole)
    assert lines_without_times(cut) == records
    assert [record["entropy_bonus/applied"] for record in records] == pytest.approx([0.005, 0.015, 0.025, 0.035])
    assert (cut / "weights" / "model.safetensors").read_bytes() == (
        whole / "weights" / "model.safetensors"
    ).read_bytes()


def test_a_constant_coefficient_is_no_state_and_one_that_moves_is_not_set_anew(tmp_path):
    def of(**changes):
        return letters(tmp_path, objective=changes)

    def origin(**changes) -> Origin:
        return Origin(tmp_path / "000001", {"config": of(**changes).model_dump(), "iteration": 1}, {})

    params = {"w": jnp.zeros((2, 2))}
    assert "entropy_coefficient" not in named(init_state(params, of().learning()))
    assert {"entropy_coefficient", "entropy_before"} <= named(
        init_state(params, of(entropy_target=1.0).learning())
    ).keys()
    for then, now in (({}, {"entropy_target": 1.0}), ({"entropy_target": 1.0}, {})):
        with pytest.raises(
            CheckpointError, match=r"objective.entropy_target is .*: the coefficient that it moves is part of"
        ):
            require_same_run(origin(**then), of(**now))
    other = {"entropy_target": 1.0, "entropy_coefficient": 0.1}
    with pytest.raises(
        CheckpointError, match=r"objective.entropy_coefficient is 0.1, but .* with 0.0: the coefficient that"
    ):
        require_same_run(origin(entropy_target=1.0), of(**other))
    reported = require_same_run(origin(entropy_target=1.0), of(entropy_target=2.0, entropy_step=0.01))
    assert reported == ["objective.entropy_target: 1.0 -> 2.0", "objective.entropy_step: 0.005 -> 0.01"]
    assert require_same_run(origin(entropy_coefficient=0.1), of()) == ["objective.entropy_coefficient: 0.1 -> 0.0"]
