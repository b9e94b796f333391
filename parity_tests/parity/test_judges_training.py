"""TRL as a judge of what stands around the loss: advantages, the learning rate, an entropy that is held, a reference that moves.

Where our definition differs from TRL's on purpose (docs/trl_differences.md), a test pins the difference.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from both import (
    objective,
    settings,
    show,
)
from transformers import get_constant_schedule_with_warmup
from trl_judge import (
    REWARDS,
    agree,
    both_steps,
    inputs_of,
    judged_batch,
    trl_step,
    trl_trainer,  # noqa: F401 (a fixture)
)

from jax_grpo.advantages import combined_advantages, group_advantages
from jax_grpo.config.learning import AdvantageConfig, KLConfig
from jax_grpo.objective import applied_coefficient, next_coefficient
from jax_grpo.optimiser import moved_reference, schedule
from torch_ref.advantages import component_advantages
from torch_ref.advantages import group_advantages as torch_group_advantages
from torch_ref.compare import difference
from torch_ref.entropy_control import behind, in_force
from torch_ref.reference import due


def _trl_advantages(trainer, first: list[float], second: list[float] | None, **attributes) -> np.ndarray:
    """Advantages of TRL's own `_generate_and_score_completions` for given rewards."""
    REWARDS["first"], REWARDS["second"] = first, second or [0.0] * len(first)
    trainer.model.train()  # a new one is evaluating, which has settings of its own
    with pytest.MonkeyPatch.context() as patch:
        for name, value in attributes.items():
            patch.setattr(trainer, name, value)
        output = trainer._generate_and_score_completions([{"prompt": "w3 w4 w5"} for _ in first])
    return output["advantages"].numpy()


FIRST = [0.1, 0.9, 0.4, 0.4, -1.0, 2.0, 0.5, 0.0]
SECOND = [5.0, 1.0, 1.0, 7.0, 0.0, 0.0, 0.0, 30.0]
GROUPS = np.repeat([0, 1], 4)


@pytest.mark.parametrize("scale", ["none", "group", "batch"])
def test_trl_agrees_on_advantages(trainer, scale):
    expected = _trl_advantages(trainer, FIRST, SECOND, scale_rewards=scale)
    rewards = np.float32(FIRST) + np.float32(SECOND)
    ours = group_advantages(jnp.asarray(rewards).reshape(2, 4), AdvantageConfig(scale=scale))[0].reshape(-1)
    theirs = torch_group_advantages(torch.from_numpy(rewards), torch.from_numpy(GROUPS), scale=scale)
    for name, actual in (("jax_grpo", ours), ("torch_ref", theirs)):
        # float32 rounding of rewards of size 30
        show(name, {"advantages": difference(name, actual, expected)}, 1e-5)
    assert np.abs(expected).max() > 0.5


@pytest.mark.parametrize(
    "second", [SECOND, [5.0, 1.0, 1.0, 7.0, 3.0, 3.0, 3.0, 3.0]], ids=["both vary", "one is constant in a group"]
)
@pytest.mark.parametrize("weights", [[1.0, 1.0], [1.0, 0.25]], ids=str)
def test_trl_agrees_on_gdpo(trainer, second, weights):
    """TRL's normalize_then_sum: each component over its group, the weighted sum over the batch."""
    theirs = _trl_advantages(
        trainer, FIRST, second, multi_objective_aggregation="normalize_then_sum", reward_weights=torch.tensor(weights)
    )
    components = np.float32([FIRST, second])
    config = AdvantageConfig(components="gdpo")
    ours = combined_advantages(jnp.asarray(components).reshape(2, 2, 4), jnp.asarray(weights), config)[0].reshape(-1)
    reference = component_advantages(
        torch.from_numpy(components.T), weights, torch.from_numpy(GROUPS), components="gdpo"
    )
    for name, actual in (("jax_grpo", ours), ("torch_ref", reference)):
        # float32: three digits of a reward of 30 are lost where its group's mean is taken off
        show(name, {"advantages": float(np.abs(np.asarray(actual) - theirs).max())}, 1e-5)
    assert np.abs(theirs).max() > 0.5


def test_difference_components_are_normalised_in_their_group_and_not_once_more_over_the_batch(trainer):
    theirs = _trl_advantages(trainer, FIRST, SECOND, multi_objective_aggregation="normalize_then_sum")
    components = np.float32([FIRST, SECOND])
    config = AdvantageConfig(components="normalise_each")
    ours = np.asarray(combined_advantages(jnp.asarray(components).reshape(2, 2, 4), jnp.ones(2), config)[0]).reshape(-1)
    reference = component_advantages(
        torch.from_numpy(components.T), [1.0, 1.0], torch.from_numpy(GROUPS), components="normalise_each"
    )
    np.testing.assert_allclose(ours, reference.numpy(), atol=1e-6)
    assert np.abs(ours - theirs).max() > 0.03
    # TRL's last step, on ours: the batch's own mean (0) and deviation
    np.testing.assert_allclose((ours - ours.mean()) / (ours.std(ddof=1) + 1e-4), theirs, atol=1e-5)


def test_difference_a_group_of_equal_rewards_has_exactly_no_advantage(trainer):
    """TRL divides the rounding of r - mean(r) by 0 + 1e-4: a group that taught nothing still moves the policy a little."""
    rewards = [2.6] * 6
    theirs = _trl_advantages(trainer, rewards, None, num_generations=6)
    assert 1e-3 < np.abs(theirs).max() < 1e-2
    ours, without_signal = group_advantages(jnp.float32([rewards]), AdvantageConfig())
    assert (np.asarray(ours) == 0).all() and np.asarray(without_signal).all()
    assert (torch_group_advantages(torch.tensor(rewards), torch.zeros(6)) == 0).all()


def test_difference_the_first_warm_up_step_learns_here_and_has_rate_zero_in_trl(trainer):
    config = settings("float32", update={"warmup_steps": 4, "total_steps": 20, "learning_rate": 1.0}).update
    ours = [float(schedule(config, 20)(t)) for t in range(5)]
    optimiser = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    theirs = get_constant_schedule_with_warmup(optimiser, 4)
    rates = []
    for _ in range(5):
        rates.append(optimiser.param_groups[0]["lr"])
        optimiser.step()
        theirs.step()
    assert rates == [0.0, 0.25, 0.5, 0.75, 1.0]
    np.testing.assert_allclose(ours, [0.25, 0.5, 0.75, 1.0, 1.0], rtol=1e-6)


@pytest.mark.slow
def test_trl_agrees_on_an_entropy_that_is_held(trainer):
    """Its own steps move the coefficient, and give the bonus or not by the entropy of the step before."""
    held = {"entropy_coefficient": 0.2, "entropy_target": 4.5, "entropy_step": 0.05, "entropy_bounds": [0.0, 0.22]}
    config = settings("float32", objective=objective("clip", **held)).objective
    names = {"entropy_target": 4.5, "entropy_coef_delta": 0.05, "entropy_coef_min": 0.0, "entropy_coef_max": 0.22}
    actual = {c: both_steps(judged_batch(), objective=objective("clip", entropy_coefficient=c)) for c in (0.0, 0.2)}
    inputs, behind_each = inputs_of(judged_batch(), actual[0.0][1]), []

    def and_look(of, model, given):
        loss = of._compute_loss(model, given)
        behind_each.append((of.entropy_coef, of._last_world_entropy))
        return loss

    for before, target in ((float("inf"), 4.5), (4.4, 4.5), (4.6, 4.5), (4.4, 9.0)):
        attributes = {"use_adaptive_entropy": True, "_entropy_bonus_enabled": True, "entropy_coef": 0.2}
        attributes |= {"_last_world_entropy": before, "_entropy_window_stats": None}
        theirs = trl_step(
            trainer, inputs, "dapo", "token", attributes, names | {"entropy_target": target}, compute=and_look
        )
        config = config.model_copy(update={"entropy_target": target})
        given = in_force(0.2, before, config)
        assert given == (0.2 if before <= target else 0.0)
        assert float(applied_coefficient(jnp.float32(0.2), jnp.float32(before), config)) == pytest.approx(given)
        agree(actual[given][0], theirs)
        coefficient, entropy = behind_each[-1]
        assert behind(0.2, entropy, config) == pytest.approx(coefficient) == pytest.approx(0.15 if target < 5 else 0.22)
        assert float(next_coefficient(jnp.float32(0.2), jnp.float32(entropy), config)) == pytest.approx(coefficient)
        for arrays in actual[0.0][0].values():  # the mean over the same tokens; float32
            assert float(arrays["entropy"]) == pytest.approx(entropy, rel=1e-5)


@pytest.mark.parametrize("share", [0.6, 1.0])
def test_trl_agrees_on_where_the_reference_moves(share):
    from trl.trainer.callbacks import SyncRefModelCallback  # here: see `trl_trainer`

    rng, config = np.random.default_rng(2), KLConfig(reference_every=3, reference_mix=share)
    old, new = (rng.normal(size=(40, 7)).astype(np.float32) for _ in range(2))
    theirs, policy = (torch.nn.ParameterList([torch.from_numpy(x.copy())]) for x in (old, new))
    # What `on_step_end` does where ref_model_sync_steps divides global_step.
    SyncRefModelCallback._sync_target_model(policy, theirs, share)
    for step in (2, 3, 4, 6):
        actual = moved_reference(config, jnp.asarray(old), jnp.asarray(new), jnp.int32(step), jnp.bool_(True))
        expected = theirs[0].detach().numpy() if step % 3 == 0 else old
        # float32: two products and a sum of size 1, in another order
        show(f"step {step}", {"reference": float(np.abs(np.asarray(actual) - expected).max())}, 3e-7)
        assert due(step, config) == (step % 3 == 0)


def test_trls_defaults_are_those_that_the_page_names():
    """docs/trl_differences.md speaks of TRL's defaults; another version may have others."""
    from trl import GRPOConfig  # slow to import

    defaults = {field.name: field.default for field in dataclasses.fields(GRPOConfig)}
    named = {
        "use_bias_correction_kl": True,
        "pad_to_multiple_of": "auto",
        "adam_beta2": 0.999,
        "ref_model_sync_steps": 512,
    }
    assert {name: defaults[name] for name in named} == named
