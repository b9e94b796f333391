"""Advantages: within groups only, zero where there is no signal, equal to the definition."""

import jax.numpy as jnp
import numpy as np
import pytest

from jax_grpo.advantages import combined_advantages, group_advantages, overlong_penalty
from jax_grpo.config import AdvantageConfig, KLConfig
from jax_grpo.kl_control import adaptive_beta, beyond_guardrail

IDS = jnp.array([2, 0, 2, 1, 0, 1, 1, 2, 0])
REWARDS = np.array([0.1, 1.0, 0.4, 0.0, 0.2, 0.9, 0.3, 0.35, 0.7])


def _config(baseline="mean", scale="none", components="sum_first"):
    return AdvantageConfig(baseline=baseline, scale=scale, components=components)


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("scale", ["none", "group", "batch"])
def test_advantages_are_their_definition_and_sum_to_zero_per_group(baseline, scale, x64):
    found, _ = group_advantages(jnp.asarray(REWARDS), IDS, _config(baseline, scale))
    for group in range(3):
        rows = np.flatnonzero(np.asarray(IDS) == group)
        r = REWARDS[rows]
        base = r.mean() if baseline == "mean" else np.array([np.delete(r, i).mean() for i in range(len(r))])
        std = {"none": 1.0, "group": r.std(ddof=1) + 1e-4, "batch": REWARDS.std(ddof=1) + 1e-4}[scale]
        np.testing.assert_allclose(found[rows], (r - base) / std, rtol=1e-10)
        assert abs(found[rows].sum()) < 1e-9


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("scale", ["none", "group", "batch"])
def test_advantage_of_a_constant_group_is_exactly_zero(baseline, scale):
    # 0.1 summed seven times over seven is not 0.1 in float32: the mean alone would leave a residue that the scale blows up
    rewards = jnp.array([0.1] * 7 + [0.0, 1.0], jnp.float32)
    ids = jnp.array([0] * 7 + [1, 1])
    advantages, flat = group_advantages(rewards, ids, _config(baseline, scale))
    assert (advantages[:7] == 0).all() and (advantages[7:] != 0).all()
    assert flat.tolist() == [True] * 7 + [False] * 2


def test_a_reward_moves_its_own_group_only():
    before, _ = group_advantages(jnp.asarray(REWARDS), IDS, _config(scale="group"))
    after, _ = group_advantages(jnp.asarray(REWARDS).at[1].add(5.0), IDS, _config(scale="group"))
    changed = np.asarray(before != after)
    assert (changed == (np.asarray(IDS) == 0)).all()
    assert after[1] > before[1]


def test_components_summed_first_or_normalised_each(x64):
    wide, narrow = jnp.array([0.0, 100.0, 50.0]), jnp.array([0.1, 0.0, 0.0])
    stacked, weights, ids = jnp.stack([wide, narrow]), jnp.array([1.0, 2.0]), jnp.zeros(3, int)
    summed, _ = combined_advantages(stacked, weights, ids, _config())
    expected, _ = group_advantages(wide + 2 * narrow, ids, _config())
    np.testing.assert_allclose(summed, expected)
    each, flat = combined_advantages(stacked, weights, ids, _config(scale="group", components="normalise_each"))
    parts = [group_advantages(x, ids, _config(scale="group"))[0] for x in (wide, narrow)]
    np.testing.assert_allclose(each, parts[0] + 2 * parts[1])
    assert not flat.any()


def test_overlong_penalty_is_linear_in_the_buffer():
    found = overlong_penalty(jnp.array([10, 15, 20]), cap=20, buffer=10, weight=0.5)
    np.testing.assert_allclose(found, [0.0, -0.25, -0.5])


def test_beta_follows_the_kl_and_keeps_its_bounds():
    kl = KLConfig(target=0.05, beta_min=0.01, beta_max=0.1)
    step = lambda beta, observed: float(adaptive_beta(jnp.float32(beta), jnp.float32(observed), kl))  # noqa: E731
    assert step(0.04, 0.05) == pytest.approx(0.04)
    assert step(0.04, 0.055) == pytest.approx(0.04 * np.exp(0.1), rel=1e-5)
    assert step(0.04, 5.0) == pytest.approx(0.04 * np.exp(0.2), rel=1e-5)
    assert step(0.04, 0.0) == pytest.approx(0.04 * np.exp(-0.2), rel=1e-5)
    assert step(0.0995, 5.0) == pytest.approx(0.1) and step(0.0101, 0.0) == pytest.approx(0.01)
    assert step(0.04, np.nan) == pytest.approx(0.04)
    assert beyond_guardrail(0.11, kl) and not beyond_guardrail(0.1, kl)
