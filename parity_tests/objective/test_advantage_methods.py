"""OPO, MaxRL and pass@k advantages: their definitions, what they are made to estimate, and rewards at the edge.

What an estimator is unbiased for is tested without sampling: its mean over all outcomes of n coin tosses, each with its
probability, against the derivative that the paper promises.
"""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jax_grpo.advantages import combined_advantages, group_advantages
from jax_grpo.config.learning import AdvantageConfig
from torch_ref.advantages import component_advantages, groups_with_signal, settings_of
from torch_ref.advantages import group_advantages as torch_group_advantages

REWARDS = np.array([[1.0, 0.2, 0.7, 0.2, 0.2], [0.0, 0.9, 0.9, 0.0, 0.35], [0.1, 0.4, 0.35, 0.6, 0.1]])  # three groups
LENGTHS = np.array([[1, 4, 5, 8, 2], [4, 6, 2, 1, 7], [3, 9, 7, 5, 2]])
OPO = AdvantageConfig(baseline="opo", scale="none")
MAXRL = AdvantageConfig(scale="maxrl")


def pass_at_k(k: int, scale: str = "none") -> AdvantageConfig:
    return AdvantageConfig.model_validate({"pass_at_k": k, "scale": scale})


def of_reference(rewards: np.ndarray, config: AdvantageConfig, lengths: np.ndarray) -> np.ndarray:
    """Those of `torch_ref`, [P, G]."""
    rewards_B, ids_B, lengths_B = (
        torch.from_numpy(x.reshape(-1).copy()) for x in (rewards, group_ids(rewards), lengths)
    )
    return (
        torch_group_advantages(rewards_B, ids_B, **settings_of(config), lengths_B=lengths_B)
        .numpy()
        .reshape(rewards.shape)
    )


def group_ids(rewards: np.ndarray) -> np.ndarray:
    return np.broadcast_to(np.arange(len(rewards))[:, None], rewards.shape)


def both(rewards: np.ndarray, config: AdvantageConfig, lengths=None) -> np.ndarray:
    """Advantages of `jax_grpo`, after those of `torch_ref` were found to be the same."""
    lengths = np.ones(rewards.shape, int) if lengths is None else lengths
    ours, _ = group_advantages(jnp.asarray(rewards), config, jnp.asarray(lengths))
    # float64 rounding of at most a dozen terms
    np.testing.assert_allclose(ours, of_reference(rewards, config, lengths), rtol=1e-12, atol=1e-13)
    assert np.isfinite(ours).all()
    return np.asarray(ours)


def expected_gradient(p: float, n: int, config: AdvantageConfig) -> float:
    """Mean over all 2^n outcomes of mean_i A_i d log P(outcome i) / d logit, for n tosses that succeed with probability p."""
    total = 0.0
    for outcome in itertools.product([0.0, 1.0], repeat=n):
        rewards = np.array(outcome)
        (advantages,) = both(rewards[None], config)
        score = rewards - p  # of the logit: 1 - p of a success, -p of a failure
        total += np.prod(np.where(rewards == 1, p, 1 - p)) * np.mean(advantages * score)
    return total


# OPO ------------------------------------------------------------------------------------------------------------


def test_opo_takes_off_the_mean_that_lengths_weigh(x64):
    for actual, rewards, lengths in zip(both(REWARDS, OPO, LENGTHS), REWARDS, LENGTHS, strict=True):
        base = (lengths * rewards).sum() / lengths.sum()
        np.testing.assert_allclose(actual, rewards - base, rtol=1e-12)
        assert abs((lengths * actual).sum()) < 1e-12 < abs(actual.sum())


def test_no_other_baseline_has_less_variance_than_opos_where_gradients_grow_with_length(x64):
    """Var of sum_i g_i (r_i - b), E g = 0 and E g^2 = l: sum l (r - b)^2, which is least at OPO's b."""
    actual, lengths = both(REWARDS, OPO, LENGTHS)[0], LENGTHS[0]
    least = (lengths * actual**2).sum()
    for shift in (-0.1, -1e-3, 1e-3, 0.1):
        assert (lengths * (actual + shift) ** 2).sum() > least
    mean = REWARDS[0] - REWARDS[0].mean()
    assert (lengths * mean**2).sum() > 1.01 * least


def test_opo_of_equal_lengths_is_the_groups_mean(x64):
    actual = both(REWARDS, OPO, np.full(REWARDS.shape, 6))
    expected, _ = group_advantages(jnp.asarray(REWARDS), AdvantageConfig(scale="none"))
    np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-15)


def test_opo_normalises_each_component_about_its_own_weighted_mean(x64):
    config = AdvantageConfig(baseline="opo", components="normalise_each")
    stacked, weights, lengths = (jnp.asarray(x) for x in ([REWARDS, REWARDS[::-1] ** 2], [1.0, 0.5], LENGTHS))
    actual, _ = combined_advantages(stacked, weights, config, lengths)
    each = [group_advantages(component, config, lengths)[0] for component in stacked]
    np.testing.assert_allclose(actual, each[0] + 0.5 * each[1], rtol=1e-12)


# MaxRL ----------------------------------------------------------------------------------------------------------


def test_maxrl_divides_by_the_success_rate(x64):
    actual = both(np.array([[1.0, 0, 0, 0], [1, 1, 1, 0]]), MAXRL)
    np.testing.assert_allclose(actual, [[3, -1, -1, -1], [1 / 3, 1 / 3, 1 / 3, -1]], rtol=1e-12)


@pytest.mark.default_cases("2-0.5", "2-0.9")
@pytest.mark.parametrize("p", [0.05, 0.5, 0.9])
@pytest.mark.parametrize("n", [2, 4, 6])
def test_maxrl_is_unbiased_for_the_first_terms_of_the_log_likelihood(n, p, x64):
    """d/dlogit of -sum_{k < n} (1 - p)^k / k; log p is the sum of all terms. dp/dlogit = p (1 - p)."""
    promised = sum((1 - p) ** (k - 1) for k in range(1, n)) * p * (1 - p)
    assert abs(expected_gradient(p, n, MAXRL) - promised) < 1e-14
    assert promised < p * (1 - p) / p, "and so less than that of log p"


# pass@k ---------------------------------------------------------------------------------------------------------


def enumerated(rewards: np.ndarray, k: int) -> np.ndarray:
    """n times eq. 33 as it is written: over every subset of k rows."""
    credits, n = np.zeros(len(rewards)), len(rewards)
    for subset in itertools.combinations(range(n), k):
        for row in subset:
            credits[row] += max(rewards[list(subset)]) - max(rewards[j] for j in subset if j != row)
    return n * credits / math.comb(n, k)


@pytest.mark.parametrize("kind", ["binary", "tied", "any", "negative"])
@pytest.mark.parametrize(("n", "k"), [(n, k) for n in (2, 3, 5, 7) for k in range(2, n + 1)])
def test_pass_at_k_is_its_definition_over_all_subsets(n, k, kind, x64):
    rng = np.random.default_rng(n * 10 + k)
    draws = {
        "binary": rng.integers(0, 2, (3, n)).astype(float),
        "tied": rng.integers(0, 3, (3, n)) / 2,
        "any": rng.normal(size=(3, n)),
        "negative": -rng.exponential(size=(3, n)),
    }[kind]
    draws[:, :2] = [0.25, 1.0]  # no group without signal
    draws = rng.permuted(draws, axis=1)
    actual = both(draws, pass_at_k(k))
    np.testing.assert_allclose(actual, [enumerated(rewards, k) for rewards in draws], rtol=1e-12, atol=1e-13)
    assert (actual >= 0).all(), "a sample can only add to the best of k"


def test_pass_at_k_is_divided_by_its_groups_deviation(x64):
    for actual, rewards in zip(both(REWARDS, pass_at_k(3, "group")), REWARDS, strict=True):
        expected = enumerated(rewards, 3) / (rewards.std(ddof=1) + 1e-4)
        np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.default_cases("2-2-0.5", "2-2-0.9")
@pytest.mark.parametrize("p", [0.05, 0.5, 0.9])
@pytest.mark.parametrize(("n", "k"), [(2, 2), (4, 2), (5, 3), (5, 5)])
def test_pass_at_k_is_unbiased_for_the_gradient_of_pass_at_k(n, k, p, x64):
    """d/dlogit of 1 - (1 - p)^k."""
    promised = k * (1 - p) ** (k - 1) * p * (1 - p)
    assert abs(expected_gradient(p, n, pass_at_k(k)) - promised) < 1e-14


def test_the_best_of_all_alone_is_paid_by_what_it_is_ahead_and_nobody_else(x64):
    """verl's grpo_passk, the best's reward less the second's, times k; elsewhere the others kept theirs (EasyR1 585)."""
    rewards = np.array([[0.2, 0.9, 0.4, 0.0]])
    np.testing.assert_allclose(both(rewards, pass_at_k(4)), [[0, 4 * 0.5, 0, 0]], atol=1e-15)


def test_more_successes_than_a_subset_can_miss_teach_nothing(x64):
    """Such a group is one without signal, although its rewards differ; every group of up to five rewards of three values."""
    batches = {size: list(itertools.product((0.0, 0.3, 1.0), repeat=size)) for size in (2, 4, 5)}
    unequal = 0
    for size, k in ((2, 2), (4, 2), (4, 3), (5, 3), (5, 5)):
        rewards = np.array(batches[size])
        actual, flat = group_advantages(jnp.asarray(rewards), pass_at_k(k))
        expected = [bool(np.abs(enumerated(group, k)).max() > 1e-9) for group in rewards]
        assert (~flat).tolist() == expected
        assert ((np.asarray(actual) == 0).all(1) == ~np.array(expected)).all()
        theirs = of_reference(rewards, pass_at_k(k), np.ones(rewards.shape, int))
        tensors = [torch.from_numpy(x.reshape(-1).copy()) for x in (rewards, theirs, group_ids(rewards))]
        assert groups_with_signal(*tensors, k) == expected
        unequal += sum(len(set(group)) > 1 and not has for group, has in zip(batches[size], expected, strict=True))
    assert unequal > 50


@pytest.mark.parametrize("how", ["normalise_each", "gdpo"])
@pytest.mark.parametrize("weights", [[1.0, 1.0, 0.0], [0.1, 0.3, 0.2]], ids=["exactly", "up to rounding"])
def test_components_that_cancel_leave_a_group_without_signal(how, weights, x64):
    """GDPO too, which takes the batch's mean off afterwards: it is 0 but for rounding."""
    first = np.array([0.0, 1, 1, 0, 2, 5, 1, 1])
    second, ids, expected = np.where(np.arange(8) < 4, 1 - first, 0.0), np.repeat([0, 1], 4), [False, True]
    config = AdvantageConfig.model_validate({"components": how})
    components = np.stack([first, second, np.where(np.arange(8) < 4, first, 1.0)])
    actual, flat = combined_advantages(jnp.asarray(components).reshape(3, 2, 4), jnp.asarray(weights), config)
    assert (~flat).tolist() == expected
    assert [bool(row.any()) for row in np.asarray(actual)] == expected
    judged, ids_B = torch.from_numpy(components.T), torch.from_numpy(ids)
    theirs = component_advantages(judged, weights, ids_B, components=how)
    # float64 rounding of four terms
    np.testing.assert_allclose(actual, theirs.numpy().reshape(2, 4), rtol=1e-12, atol=1e-13)
    assert groups_with_signal(judged, theirs, ids_B) == expected


def test_pass_at_k_of_a_large_group_stays_within_float32():
    """512 over 256 has 153 digits, and float32 ends at 38."""
    rewards = np.random.default_rng(0).normal(size=(1, 512))
    actual, _ = group_advantages(jnp.float32(rewards), pass_at_k(256))
    theirs = of_reference(rewards, pass_at_k(256), np.ones((1, 512), int))
    assert np.isfinite(actual).all()
    # float32: products of 254 factors, each rounded
    np.testing.assert_allclose(actual, theirs, rtol=1e-3, atol=1e-5)


# at the edge ----------------------------------------------------------------------------------------------------

EVERY = {"OPO": OPO, "MaxRL": MAXRL, "pass@2": pass_at_k(2)}


@pytest.mark.parametrize("config", EVERY.values(), ids=EVERY)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_groups_without_signal_and_groups_of_one_have_exactly_no_advantage(config, dtype, x64):
    rewards = np.array([[0.1] * 7, [0.0] * 7, [0.0] * 6 + [1.0]], dtype)
    actual, flat = group_advantages(jnp.asarray(rewards), config, jnp.arange(1, 22).reshape(3, 7))
    assert (actual[:2] == 0).all() and float(actual[2, 6]) > 0 and np.isfinite(actual).all() and actual.dtype == dtype
    assert flat.tolist() == [True, True, False]
    if config.pass_at_k is None:
        actual, flat = group_advantages(jnp.asarray(rewards[:, :1]), config, jnp.arange(1, 4)[:, None])
        assert (actual == 0).all() and flat.all()


@pytest.mark.parametrize("config", EVERY.values(), ids=EVERY)
@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_a_reward_that_is_not_finite_stays_in_its_group_and_is_seen(config, broken):
    lengths, others = jnp.asarray(LENGTHS), np.array([0, 2])
    before, _ = group_advantages(jnp.asarray(REWARDS), config, lengths)
    after, flat = group_advantages(jnp.asarray(REWARDS).at[1, 1].set(broken), config, lengths)
    np.testing.assert_array_equal(after[others], before[others])
    assert not np.isfinite(after[1]).any() and not flat.any(), "the update's guard must see it"


def test_a_group_with_fewer_samples_than_k_has_no_estimate():
    assert np.isnan(group_advantages(jnp.array([[0.0, 1.0]]), pass_at_k(3))[0]).all()


@pytest.mark.parametrize("config", EVERY.values(), ids=EVERY)
def test_they_compile(config):
    rewards, lengths = jnp.float32(REWARDS), jnp.asarray(LENGTHS)
    actual, _ = jax.jit(lambda rewards, lengths: group_advantages(rewards, config, lengths))(rewards, lengths)
    expected, _ = group_advantages(rewards, config, lengths)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)  # float32, sums in another order


def test_lengths_of_another_shape_are_refused():
    with pytest.raises(AssertionError, match="shape"):
        group_advantages(jnp.asarray(REWARDS), OPO, jnp.asarray(LENGTHS)[:, None])
