"""Advantages: within groups only, zero where there is no signal, equal to the definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_grpo.advantages import combined_advantages, group_advantages, overlong_penalty
from jax_grpo.config.learning import AdvantageConfig

REWARDS = np.array([[1.0, 0.2, 0.7], [0.0, 0.9, 0.3], [0.1, 0.4, 0.35]])  # three groups

SCALES = ["none", "group", "batch", "robust"]


def _config(baseline="mean", scale="none", components="sum_first", clip=None):
    return AdvantageConfig(baseline=baseline, scale=scale, components=components, clip=clip)


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("scale", SCALES)
def test_advantages_are_their_definition_and_sum_to_zero_per_group(baseline, scale, x64):
    actual, _ = group_advantages(jnp.asarray(REWARDS), _config(baseline, scale))
    for r, found_G in zip(REWARDS, actual, strict=True):
        base = r.mean() if baseline == "mean" else np.array([np.delete(r, i).mean() for i in range(len(r))])
        std = {
            "none": 1.0,
            "group": r.std(ddof=1) + 1e-4,
            "batch": REWARDS.std(ddof=1) + 1e-4,
            "robust": np.sqrt(np.pi / 2) * np.abs(r - np.median(r)).mean() + 1e-4,
        }[scale]
        np.testing.assert_allclose(found_G, (r - base) / std, rtol=1e-10)
        assert abs(found_G.sum()) < 1e-9


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out", "opo"])
@pytest.mark.parametrize("scale", SCALES)
def test_advantage_of_a_constant_group_is_exactly_zero(baseline, scale):
    # 0.1 summed seven times over seven is not 0.1 in float32: the mean alone would leave a residue that the scale blows up
    lengths = jnp.arange(3, 17).reshape(2, 7)
    for value in (0.1, 1 / 3, 0.7, -1e-3):
        rewards = jnp.array([[value] * 7, [0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 5.0]], jnp.float32)
        advantages, flat = group_advantages(rewards, _config(baseline, scale), lengths)
        assert (advantages[0] == 0).all() and (advantages[1] != 0).all()
        assert flat.tolist() == [True, False]


def test_a_robust_scale_is_a_normal_distributions_deviation_and_a_spike_moves_it_less(x64):
    rng = np.random.default_rng(0)
    rewards = rng.normal(3.0, 2.0, 1000)
    spiked = np.append(rewards[:63], 100.0)
    divisor = {}
    for scale in ("group", "robust"):
        (actual,), _ = group_advantages(jnp.asarray([rewards]), _config(scale=scale))
        # A thousand values give the deviation to about 0.024 of it, and an advantage is 3.5 at most.
        np.testing.assert_allclose(actual, (rewards - rewards.mean()) / 2, atol=0.15)
        (actual,), _ = group_advantages(jnp.asarray([spiked]), _config(scale=scale))
        divisor[scale] = (spiked - spiked.mean())[-1] / actual[-1]
    assert 2 < divisor["robust"] < 4 and divisor["group"] > 12  # the others' deviation is 2


@pytest.mark.parametrize("components", ["sum_first", "normalise_each", "gdpo"])
def test_what_is_clipped_is_the_advantage_and_no_part_of_it(components, x64):
    both, weights = jnp.stack([jnp.asarray(REWARDS), jnp.asarray(REWARDS**2)]), jnp.array([1.0, 0.5])
    whole, _ = combined_advantages(both, weights, _config(scale="group", components=components))
    limit = float(np.abs(whole).mean())
    cut, _ = combined_advantages(both, weights, _config(scale="group", components=components, clip=limit))
    np.testing.assert_array_equal(cut, np.clip(whole, -limit, limit))
    assert (np.abs(whole) > limit).any() and (np.abs(whole) < limit).any()


def test_arrays_of_the_wrong_shape_are_refused_in_one_line():
    rewards, weights, lengths = jnp.asarray(REWARDS), jnp.ones(2), jnp.ones((3, 2))
    for misshapen in (
        lambda: group_advantages(rewards.reshape(-1), _config()),
        lambda: group_advantages(rewards, _config(), lengths),
        lambda: combined_advantages(jnp.stack([rewards] * 2), weights, _config(), lengths),
        lambda: combined_advantages(rewards[:2], weights, _config()),
        lambda: combined_advantages(rewards[None], weights, _config()),
    ):
        with pytest.raises(AssertionError, match="shape") as refusal:
            misshapen()
        assert "\n" not in str(refusal.value)


def test_a_reward_moves_its_own_group_only():
    before, _ = group_advantages(jnp.asarray(REWARDS), _config(scale="group"))
    after, _ = group_advantages(jnp.asarray(REWARDS).at[1, 0].add(5.0), _config(scale="group"))
    changed = np.asarray(before != after)
    assert changed[1].all() and not changed[[0, 2]].any()
    assert after[1, 0] > before[1, 0]


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_a_nonfinite_reward_stays_in_its_own_group(broken, baseline):
    config, others = _config(baseline, "group"), np.array([0, 2])
    before, _ = group_advantages(jnp.asarray(REWARDS), config)
    after, flat = group_advantages(jnp.asarray(REWARDS).at[1, 0].set(broken), config)
    np.testing.assert_array_equal(after[others], before[others])
    assert not np.isfinite(after[1]).all() and not flat.any(), "the update's guard must see it"


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("scale", SCALES)
def test_a_group_of_one_has_no_signal(baseline, scale):
    advantages, flat = group_advantages(jnp.array([[3.0], [1.0]]), _config(baseline, scale))
    assert (advantages == 0).all() and flat.tolist() == [True, True]


def test_advantages_compile():
    step = jax.jit(lambda rewards: group_advantages(rewards, _config(scale="group")))
    actual, flat = step(jnp.asarray(REWARDS, jnp.float32))
    expected, _ = group_advantages(jnp.asarray(REWARDS, jnp.float32), _config(scale="group"))
    np.testing.assert_allclose(actual, expected, rtol=1e-5)
    assert actual.dtype == jnp.float32 and not flat.any()


def test_components_summed_first_or_normalised_each(x64):
    wide, narrow = jnp.array([[0.0, 100.0, 50.0]]), jnp.array([[0.1, 0.0, 0.0]])
    stacked, weights = jnp.stack([wide, narrow]), jnp.array([1.0, 2.0])
    summed, _ = combined_advantages(stacked, weights, _config())
    expected, _ = group_advantages(wide + 2 * narrow, _config())
    np.testing.assert_allclose(summed, expected)
    each, flat = combined_advantages(stacked, weights, _config(scale="group", components="normalise_each"))
    parts = [group_advantages(x, _config(scale="group"))[0] for x in (wide, narrow)]
    np.testing.assert_allclose(each, parts[0] + 2 * parts[1])
    assert not flat.any()


def test_each_component_is_normalised_in_its_own_group_and_by_gdpo_once_more_over_the_batch(x64):
    stacked, weights = jnp.stack([jnp.asarray(REWARDS), 100 * jnp.asarray(REWARDS[::-1, ::-1])]), jnp.array([1.0, 0.5])
    expected = sum(w * group_advantages(x, _config(scale="group"))[0] for w, x in zip(weights, stacked, strict=True))
    actual, _ = combined_advantages(stacked, weights, _config(scale="group", components="normalise_each"))
    np.testing.assert_allclose(actual, expected, rtol=1e-12)
    actual, _ = combined_advantages(stacked, weights, _config(scale="group", components="gdpo"))
    np.testing.assert_allclose(actual, (expected - expected.mean()) / (np.std(expected, ddof=1) + 1e-4), rtol=1e-12)


@pytest.mark.default_cases("gdpo")
@pytest.mark.parametrize("components", ["sum_first", "normalise_each", "gdpo"])
def test_equal_components_give_exactly_zero_whatever_the_rounding_of_their_sum(components):
    # nine columns of different batch sizes: a vectorised product may round a row of the tail differently
    rng = np.random.default_rng(0)
    for size in (5, 7, 12, 33):
        stacked = np.broadcast_to(rng.normal(size=(9, 1, 1)), (9, 2, size)).copy()
        stacked[0, 1] += np.arange(size) ** 2
        advantages, flat = combined_advantages(
            jnp.asarray(stacked, jnp.float32),
            jnp.asarray(rng.normal(size=9), jnp.float32),
            _config(scale="group", components=components),
        )
        assert (advantages[0] == 0).all() and (advantages[1] != 0).all()
        assert flat.tolist() == [True, False]


@pytest.mark.parametrize("components", ["sum_first", "normalise_each"])  # `gdpo` scales once more: the test below
def test_a_component_of_weight_zero_gives_no_signal_and_may_hold_anything(components):
    stacked = jnp.array([[[1.0, 1.0], [0.0, 2.0]], [[np.nan, 1.0], [np.inf, 0.0]]])
    config = _config(scale="group", components=components)
    advantages, flat = combined_advantages(stacked, jnp.array([1.0, 0.0]), config)
    expected, _ = group_advantages(stacked[0], config)
    np.testing.assert_allclose(advantages, expected, rtol=1e-6)
    assert flat.tolist() == [True, False]


def test_gdpo_takes_no_note_of_a_component_of_weight_zero(x64):
    stacked = jnp.array([[[1.0, 1.0], [0.0, 2.0]], [[np.nan, 1.0], [np.inf, 0.0]]])
    config = _config(scale="group", components="gdpo")
    actual, flat = combined_advantages(stacked, jnp.array([1.0, 0.0]), config)
    alone, _ = combined_advantages(stacked[:1], jnp.array([1.0]), config)
    np.testing.assert_array_equal(actual, alone)
    assert flat.tolist() == [True, False] and (actual[0] == 0).all() and (actual[1] != 0).all()


def test_overlong_penalty_is_linear_in_the_buffer():
    actual = overlong_penalty(jnp.array([10, 15, 20]), cap=20, buffer=10, weight=0.5)
    np.testing.assert_allclose(actual, [0.0, -0.25, -0.5])
