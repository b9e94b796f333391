"""A reference that follows the policy: where it goes, that it is nobody else's memory, and that a run that continues has it.

That both implementations move it alike stands in `test_parity_iterations`, that TRL does in `test_judges_training`.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pydantic
import pytest
from conftest import config as tiny_config
from conftest import tiny_model, training_batch
from short_runs import cut_and_whole, letters, lines_without_times

from jax_grpo.config import Config, ConfigError
from jax_grpo.config.learning import KLConfig
from jax_grpo.config.tasks import EpisodeConfig, task_of
from jax_grpo.loss import mean_kl
from jax_grpo.memory.programs import run_of
from jax_grpo.optimiser import moved_reference
from jax_grpo.run.checkpoints import Origin, content_hash, load, named
from jax_grpo.run.files import CheckpointError, complete
from jax_grpo.run.resume import require_same_run
from jax_grpo.tasks.guess import GuessTask
from jax_grpo.trainer import Trainer

EVERY, MIX = 3, 0.25


def settings(folder, **changes) -> Config:
    """Of two optimiser steps an iteration: the third is in the middle of one."""
    kl = {"beta": 0.1, "reference_every": EVERY, "reference_mix": MIX}
    return letters(folder, kl=kl | changes.pop("kl", {}), **changes)


def arrays(tree) -> dict[str, np.ndarray]:
    return {name: np.array(leaf) for name, leaf in named(tree).items()}  # copies: the update donates what it is given


def test_it_goes_where_the_policy_was_and_no_update_writes_over_it(tmp_path):
    trainer = Trainer(settings(tmp_path))
    expected, update = arrays(trainer.reference), trainer.update
    numbers = []

    def watched(state, batch, base):
        nonlocal expected
        state, metrics = update(state, batch, base)
        numbers.append(int(state.optimizer_step))
        if numbers[-1] % EVERY == 0:
            policy = arrays(state.params)
            expected = {name: MIX * policy[name] + (1 - MIX) * x for name, x in expected.items()}
        reference = arrays(state.reference)
        for name, x in expected.items():  # rounding of a product and a sum in float32, of weights of size 1
            np.testing.assert_allclose(reference[name], x, atol=3e-7, err_msg=f"{name} behind step {numbers[-1]}")
        addresses = [
            {x.unsafe_buffer_pointer() for x in jax.tree.leaves(tree)} for tree in (state.reference, state.params)
        ]
        assert not addresses[0] & addresses[1], "an alias of parameters that the next update donates"
        return state, metrics

    trainer.update = watched
    begun, seen = arrays(trainer.reference), []
    for iteration in range(3):
        metrics, _, batch = trainer.iterate(iteration)
        assert ("kl/after_move" in metrics) == (iteration > 0), (
            "steps 3 and 6 are of the second and the third iteration"
        )
        seen.append((metrics, batch))
    assert numbers == [1, 2, 3, 4, 5, 6]
    assert max(np.abs(expected[name] - x).max() for name, x in begun.items()) > 1e-3, "it has moved"
    assert all(m["kl/after_move"] < 0.9 * m["kl/before_move"] for m, _ in seen[1:]), "towards the policy"
    # The completions of an iteration are compared with one reference, that of its beginning.
    again, _ = trainer.score(trainer.reference, seen[-1][1])
    assert np.abs(np.asarray(again - seen[-1][1].ref_logp_BS))[np.asarray(seen[-1][1].mask_BS) == 1].max() > 1e-4


@pytest.mark.slow  # another update is compiled
def test_the_kl_across_a_move_is_of_the_tokens_that_are_trained_on():
    """Not of completions that `mask_truncated` leaves out, nor of padding."""
    graphdef, params = tiny_model()
    batch = dataclasses.replace(training_batch(graphdef, params), stopped_B=jnp.arange(16) % 3 != 0)
    for masks in (False, True):
        config = tiny_config(objective={"mask_truncated": masks}, kl={"beta": 0.1, "reference_every": 1})
        logp, reference, mask = (np.asarray(x) for x in (batch.old_logp_BS, batch.ref_logp_BS, batch.mask_BS))
        there = (mask == 1) & (np.asarray(batch.stopped_B)[:, None] | (not masks))
        d = (reference - logp)[there]
        actual = mean_kl(batch, jnp.asarray(logp), jnp.asarray(reference), config.objective, config.kl.estimator)
        assert float(actual) == pytest.approx(np.mean(np.exp(d) - 1 - d), rel=1e-5)


@pytest.mark.slow
def test_a_copy_is_the_policy_bit_for_bit_and_its_kl_is_zero(tmp_path):
    trainer = Trainer(settings(tmp_path, kl={"reference_every": 2, "reference_mix": 1.0}))
    metrics, *_ = trainer.iterate(0)
    assert content_hash(trainer.state.reference) == content_hash(trainer.state.params)
    assert metrics["kl/before_move"] > 1e-5 and metrics["kl/after_move"] == 0


def test_a_step_that_is_not_taken_moves_nothing():
    old, new = jnp.zeros(3), jnp.ones(3)
    config = KLConfig(reference_every=2)
    assert moved_reference(config, old, new, jnp.int32(2), jnp.bool_(True)).tolist() == [1, 1, 1]
    # The number is still that of the last good step: what was mixed behind it must not be mixed once more.
    assert moved_reference(config, old, new, jnp.int32(2), jnp.bool_(False)).tolist() == [0, 0, 0]
    assert moved_reference(KLConfig(), None, new, jnp.int32(2), jnp.bool_(True)) is None


@pytest.mark.slow  # three runs
def test_a_run_that_continues_has_the_reference_it_had(tmp_path, monkeypatch):
    def of(name: str) -> Config:
        return settings(tmp_path, run_dir=str(tmp_path / name))

    cut, whole = cut_and_whole(of, monkeypatch)
    assert lines_without_times(cut) == lines_without_times(whole) and len(lines_without_times(whole)) == 4
    states = [load(complete(run / "checkpoints")[-1]).arrays for run in (cut, whole)]
    assert states[0].keys() == states[1].keys()
    for name, x in states[0].items():
        np.testing.assert_array_equal(x, states[1][name], err_msg=name)
    moving = [name for name in states[0] if name.startswith("reference/")]
    assert len(moving) == sum(name.startswith("params/") for name in states[0]) > 0
    start = Trainer(of("fresh")).reference
    assert any(np.abs(states[0][f"reference/{name}"] - x).max() > 1e-4 for name, x in arrays(start).items())


def test_a_reference_that_stays_is_no_part_of_the_state(tmp_path):
    """Checkpoints are what they were, and those from before there was the setting are continued."""
    trainer = Trainer(settings(tmp_path, kl={"reference_every": None, "reference_mix": 1.0}))
    assert not [name for name in named(trainer.state) if name.startswith("reference")]
    assert trainer.reference is not None
    now = settings(tmp_path, kl={"reference_every": None, "reference_mix": 1.0})
    before = now.model_dump()
    del before["kl"]["reference_every"], before["kl"]["reference_mix"]
    told = require_same_run(Origin(tmp_path / "000001", {"config": before, "iteration": 1}, {}), now)
    assert told == ["kl.reference_every: (not set) -> None", "kl.reference_mix: (not set) -> 1.0"]


@pytest.mark.parametrize(("then", "now"), [(None, 5), (5, None)])
def test_whether_it_moves_is_settled_when_a_run_begins(tmp_path, then, now):
    def of(every):
        return settings(tmp_path, kl={"reference_every": every, "reference_mix": 1.0})

    origin = Origin(tmp_path / "000001", {"config": of(then).model_dump(), "iteration": 1}, {})
    message = rf"kl.reference_every is {now}, but \S*000001 was made with {then}: a reference that moves is part of the"
    with pytest.raises(CheckpointError, match=message):
        require_same_run(origin, of(now))
    assert require_same_run(origin, of(then)) == []
    if then:
        assert require_same_run(origin, of(7)) == ["kl.reference_every: 5 -> 7"]


@pytest.mark.slow
def test_memory_keeps_one_reference_and_the_update_reads_it():
    runs = {every: run_of(tiny_config(kl={"reference_every": every})) for every in (None, 2)}
    assert runs[2].resident == runs[None].resident and runs[2].resident["reference"] > 0
    assert runs[None].program("update").holds == ("parameters", "moments")
    assert runs[2].program("update").holds == ("parameters", "moments", "reference")
    assert runs[2].beside(runs[2].program("update")) == 0


@pytest.mark.slow  # compiles two updates
def test_the_update_writes_it_where_it_was():
    sizes = {}
    for every in (None, 2):
        run = run_of(tiny_config(kl={"reference_every": every, "reference_mix": 0.5 if every else 1.0}))
        update = run.program("update")
        sizes[every] = update.function.lower(*update.arguments).compile().memory_analysis(), run.resident["reference"]
    (fixed, size), (moving, _) = sizes[None], sizes[2]
    assert moving.alias_size_in_bytes - fixed.alias_size_in_bytes == size
    assert moving.temp_size_in_bytes - fixed.temp_size_in_bytes < size / 2, "no second one while it moves"


class AsksTheReference(GuessTask):
    """Of one's own, so that no setting says whom it asks."""

    asks = "reference"


def test_nobody_plays_against_a_reference_that_moves(tmp_path):
    episode = {"turns": 2, "max_observation_tokens": 4}
    game = {"name": "game", "opponent": "reference", "episode": episode, "prompt_style": "best_move"}
    with pytest.raises(
        pydantic.ValidationError, match=r"task\.opponent reference plays with the run's frozen start, which kl"
    ):
        tiny_config(task=game, kl={"reference_every": 2})
    with pytest.raises(
        pydantic.ValidationError, match=r"task\.opponent reference plays with the reference on the device"
    ):
        tiny_config(task=game, kl={"offload_reference": True})
    settled = settings(tmp_path)
    own = settled.model_copy(update={"task": task_of(episode=EpisodeConfig(**episode))})
    message = (
        r"asks the frozen reference, which is kept with kl\.beta > 0 and kl\.reference_every null; they are 0\.1 and 3"
    )
    with pytest.raises(ConfigError, match=message):
        Trainer(own, task=AsksTheReference(task_of(name="guess", episode=episode)))


def test_a_caution_says_what_copies_do_to_an_adaptive_beta():
    def told(**kl) -> bool:
        return any("kl.adaptive lowers beta" in caution for caution in tiny_config(kl=kl).cautions())

    assert told(adaptive=True, reference_every=5)
    assert not told(adaptive=True, reference_every=5, reference_mix=0.1) and not told(reference_every=5) and not told()
