"""Group-relative advantages: each completion's reward against the others of its own prompt; over the batch only where configured.

`within_groups` is all that one group needs no other one for, `over_batch` the rest: a batch may be of groups of several draws.
Pure functions of arrays: a row of [P, G] is a group, the completions of one prompt. Lengths are completions' tokens [P, G], which
only the baseline `opo` reads.
"""

import chex
import jax
import jax.numpy as jnp

from jax_grpo.config.learning import AdvantageConfig

STD_FLOOR = 1e-4  # added to the standard deviation, as in TRL
ROUNDING = 1e-6  # components cancel where their sum is at most this share of their sizes: what is left is rounding


def _without_signal(rewards_PG: jax.Array) -> jax.Array:
    """Whether a group's rewards are all equal, [P]. Exact: compares values, not their rounded mean."""
    return jnp.all(rewards_PG == rewards_PG[..., :1], axis=-1)


def _without_advantage(advantages_PG: jax.Array) -> jax.Array:
    """Whether a group's advantages are all exactly 0, [P]: of pass@k, groups of unequal rewards too."""
    return jnp.all(advantages_PG == 0, axis=-1)


def _robust_scale(rewards_PG: jax.Array) -> jax.Array:
    """sqrt(pi / 2) mean |r - median| of each group [P, 1]: a normal distribution's deviation, which one far value moves less.

    >>> spike = jnp.array([[0.0, 1, 2, 3, 100]])
    >>> round(float(_robust_scale(spike)[0, 0]), 1), round(float(jnp.std(spike, ddof=1)), 1)
    (25.6, 44.1)
    """
    median_P1 = jnp.median(rewards_PG, axis=-1, keepdims=True)
    distance_P1 = jnp.mean(jnp.abs(rewards_PG - median_P1), axis=-1, keepdims=True)
    return jnp.sqrt(jnp.pi / 2).astype(rewards_PG.dtype) * distance_P1


def _mean_baseline(rewards_PG: jax.Array, lengths_PG: jax.Array | None = None) -> jax.Array:
    """r_i - mean of its group (DeepSeekMath, Shao et al. 2024).

    >>> _mean_baseline(jnp.array([[1.0, 0, 0, 3]])).tolist()
    [[0.0, -1.0, -1.0, 2.0]]
    """
    return rewards_PG - jnp.mean(rewards_PG, axis=-1, keepdims=True)


def _leave_one_out_baseline(rewards_PG: jax.Array, lengths_PG: jax.Array | None = None) -> jax.Array:
    """r_i - mean of the other samples of its group (RLOO, Ahmadian et al. 2024).

    >>> _leave_one_out_baseline(jnp.array([[1.0, 0, 0, 3]])).tolist()
    [[0.0, -1.333, -1.333, 2.667]]
    """
    others_PG = jnp.sum(rewards_PG, axis=-1, keepdims=True) - rewards_PG
    return rewards_PG - others_PG / max(rewards_PG.shape[-1] - 1, 1)


def _opo_baseline(rewards_PG: jax.Array, lengths_PG: jax.Array | None = None) -> jax.Array:
    """r_i - sum_j l_j r_j / sum_j l_j over its group (OPO, Hao et al. 2025).

    The baseline of least variance, where the squared norm of a completion's gradient grows with its length l.

    >>> _opo_baseline(jnp.array([[1.0, 0, 0, 3]]), jnp.array([[2, 2, 2, 4]])).tolist()
    [[-0.4, -1.4, -1.4, 1.6]]
    """
    assert lengths_PG is not None, "the baseline opo weighs rewards by the completions' lengths"
    weighted_P1 = jnp.sum(lengths_PG * rewards_PG, axis=-1, keepdims=True)
    return rewards_PG - weighted_P1 / jnp.maximum(jnp.sum(lengths_PG, axis=-1, keepdims=True), 1)


BASELINES = {"mean": _mean_baseline, "leave_one_out": _leave_one_out_baseline, "opo": _opo_baseline}


def _best_of_k(rewards_PG: jax.Array, k: int) -> jax.Array:
    """n s_i: the share of row i in an unbiased gradient of E[max of k samples] (PKPO, Walder and Karkhanis 2025, eq. 33).

    s_i = sum over the subsets I of k rows with i of (max_I r - max_{I without i} r) / (n over k), for a group of n; times n, so
    that the mean over rows is that gradient. What is summed is not 0 only where i is the best of I, and is then r_i less the best
    of the others: row j is that one in (j' - 1 over k - 2) subsets, j' its place in the group in ascending order. So

        n s_i = k (k - 1) / (n - 1) sum over j below i of prod_{t < k - 2} (j' - 1 - t) / (n - 2 - t) (r_i - r_j)

    whose factors are at most 1: binomial coefficients would overflow. NaN in a group smaller than k.

    >>> _best_of_k(jnp.array([[0.0, 0, 1, 1]]), 2).tolist()  # each of two successes shares the credit
    [[0.0, 0.0, 1.333, 1.333]]
    >>> _best_of_k(jnp.array([[0.0, 0, 1, 1]]), 4).tolist()  # the best of four is 1 without either of them
    [[0.0, 0.0, 0.0, 0.0]]
    """
    size = rewards_PG.shape[-1]
    if size < k:
        return jnp.full_like(rewards_PG, jnp.nan)
    own_PG1, other_P1G = rewards_PG[..., :, None], rewards_PG[..., None, :]
    earlier_GG = jnp.tri(size, k=-1, dtype=bool)  # of equal rewards the later row is above
    below_PGG = (other_P1G < own_PG1) | ((other_P1G == own_PG1) & earlier_GG)
    place_PG1 = jnp.sum(below_PGG, axis=-1, keepdims=True)  # from 0 for the lowest
    taken_k = jnp.arange(k - 2)
    factors_PGk = jnp.maximum(place_PG1 - taken_k, 0) / (size - 2 - taken_k)
    subsets_PG = jnp.prod(factors_PGk.astype(rewards_PG.dtype), axis=-1)
    gain_PGG = jnp.where(below_PGG, subsets_PG[..., None, :] * (own_PG1 - other_P1G), 0)
    summed_PG = k * (k - 1) / (size - 1) * jnp.sum(gain_PGG, axis=-1)
    # A reward that is not finite is neither below nor above another: the update's guard has to see it all the same.
    return summed_PG + 0 * jnp.sum(rewards_PG, axis=-1, keepdims=True)


# All are of the rewards themselves, before any baseline; deviations with ddof 1.
SCALES = {
    "none": lambda rewards_PG: 1.0,
    "batch": lambda rewards_PG: 1.0,  # see `over_batch`
    "group": lambda rewards_PG: jnp.std(rewards_PG, axis=-1, ddof=1, keepdims=True) + STD_FLOOR,
    "robust": lambda rewards_PG: _robust_scale(rewards_PG) + STD_FLOOR,
    # MaxRL (Tajwar et al. 2026): the success rate of binary rewards. It is 0 only where no reward is above 0, a group without
    # signal; rewards below 0 would turn signs, and are refused where they come from.
    "maxrl": lambda rewards_PG: jnp.mean(rewards_PG, axis=-1, keepdims=True),
}


def group_advantages(
    rewards_PG: jax.Array, config: AdvantageConfig, lengths_PG: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Advantages [P, G], and which groups are without signal [P]: all their advantages are 0.

    A_i = (r_i - baseline_g) / scale (DeepSeekMath, Shao et al. 2024, section 4.1.2), or `_best_of_k` / scale with
    `config.pass_at_k`. A group whose rewards are all equal has A = 0 exactly; so has a group of one. With `config.clip` c, A is
    then cut to [-c, c].

    >>> rewards = jnp.array([[1.0, 0], [5, 5]])
    >>> advantages, flat = group_advantages(rewards, AdvantageConfig(scale="none"))
    >>> advantages.tolist(), flat.tolist()
    ([[0.5, -0.5], [0.0, 0.0]], [False, True])
    >>> group_advantages(rewards, AdvantageConfig(scale="group"))[0].tolist()
    [[0.707, -0.707], [0.0, 0.0]]
    """
    chex.assert_rank(rewards_PG, 2)
    return combined_advantages(rewards_PG[None], jnp.ones(1, rewards_PG.dtype), config, lengths_PG)


def combined_advantages(
    components_KPG: jax.Array, weights_K: jax.Array, config: AdvantageConfig, lengths_PG: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Advantages [P, G] of several unweighted reward components, and which groups are without signal [P].

    `sum_first` (default): the weighted sum of the components is the reward. `normalise_each`: each component is divided by its
    own deviation in the group, and then the weighted sum is taken, so that a component with a wide range does not drown the
    others. `gdpo` (Liu et al. 2026): that sum A is then normalised over the batch, (A - mean A) / (std A + 1e-4), so that the
    size of an advantage does not depend on how many components there are. A component of weight 0 gives no signal. `config.clip` is
    of what comes out.

    >>> components = jnp.array([[[1.0, 0, 0, 1]], [[0, 100, 0, 0]]])  # the second has a hundred times the range
    >>> for combination in ("sum_first", "normalise_each", "gdpo"):
    ...     config = AdvantageConfig(scale="group", components=combination)
    ...     print(combined_advantages(components, jnp.ones(2), config)[0].tolist())
    [[-0.49, 1.50, -0.51, -0.49]]
    [[0.37, 0.63, -1.37, 0.37]]
    [[0.40, 0.69, -1.49, 0.40]]
    """
    advantages_PG, flat_P = within_groups(components_KPG, weights_K, config, lengths_PG)
    return over_batch(advantages_PG, flat_P, _weighted_sum(components_KPG, weights_K), config), flat_P


def within_groups(
    components_KPG: jax.Array, weights_K: jax.Array, config: AdvantageConfig, lengths_PG: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """As `combined_advantages`, but for what is of the whole batch, which `over_batch` does."""
    chex.assert_shape(components_KPG, (*weights_K.shape, None, None))
    chex.assert_equal_shape([components_KPG[0], *(() if lengths_PG is None else (lengths_PG,))])
    if config.components == "sum_first":
        advantages_PG, flat_P = _of_rewards(_weighted_sum(components_KPG, weights_K), config, lengths_PG)
    else:
        advantages_PG, flat_P = _normalise_each(components_KPG, weights_K, config, lengths_PG)
    # Equal components mean no signal even where the rounding of their weighted sum differs from row to row.
    flat_P |= jnp.all(_without_signal(components_KPG) | (weights_K == 0)[:, None], axis=0)
    return jnp.where(flat_P[:, None], 0, advantages_PG), flat_P


def over_batch(
    advantages_PG: jax.Array, flat_P: jax.Array, rewards_PG: jax.Array, config: AdvantageConfig
) -> jax.Array:
    """Advantages [P, G] of those within groups: the scale `batch`, GDPO's normalisation, and the clip of what enters the loss."""
    if config.scale == "batch":
        advantages_PG = advantages_PG / (jnp.std(rewards_PG, ddof=1) + STD_FLOOR)
    if config.components == "gdpo":
        normalised_PG = (advantages_PG - jnp.mean(advantages_PG)) / (jnp.std(advantages_PG, ddof=1) + STD_FLOOR)
        advantages_PG = jnp.where(flat_P[:, None], 0, normalised_PG)
    return advantages_PG if config.clip is None else jnp.clip(advantages_PG, -config.clip, config.clip)


def _normalise_each(components_KPG, weights_K, config: AdvantageConfig, lengths_PG) -> tuple[jax.Array, jax.Array]:
    assert config.scale == "group", "the config refuses another"
    advantages_KPG, _ = _of_rewards(components_KPG, config, lengths_PG)
    sum_PG = _weighted_sum(advantages_KPG, weights_K)
    cancel_PG = jnp.abs(sum_PG) <= ROUNDING * _weighted_sum(jnp.abs(advantages_KPG), jnp.abs(weights_K))
    return sum_PG, _without_advantage(jnp.where(cancel_PG, 0, sum_PG))


def _of_rewards(
    rewards_PG: jax.Array, config: AdvantageConfig, lengths_PG: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    if config.pass_at_k is None:
        unscaled_PG = BASELINES[config.baseline](rewards_PG, lengths_PG)
    else:
        unscaled_PG = _best_of_k(rewards_PG, config.pass_at_k)
    flat_P = _without_signal(rewards_PG) | _without_advantage(unscaled_PG)
    return jnp.where(flat_P[..., None], 0, unscaled_PG / SCALES[config.scale](rewards_PG)), flat_P


def _weighted_sum(x_KPG: jax.Array, weights_K: jax.Array) -> jax.Array:
    """sum_k weights x, without the components of weight 0, which may hold anything."""
    weights_K11 = weights_K[:, None, None]
    return jnp.sum(jnp.where(weights_K11 == 0, 0, weights_K11 * x_KPG), axis=0)


def overlong_penalty(length_B: jax.Array, cap: int | jax.Array, buffer: int, weight: float) -> jax.Array:
    """Added to the reward: 0 up to cap - buffer tokens, then linearly down to -weight at the cap (DAPO, eq. 13).

    >>> (overlong_penalty(jnp.array([10, 90, 95, 100]), cap=100, buffer=10, weight=2.0) + 0.0).tolist()
    [0.0, 0.0, -1.0, -2.0]
    """
    return -weight * jnp.clip((length_B - (cap - buffer)) / buffer, 0.0, 1.0)
