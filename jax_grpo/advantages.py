"""Group-relative advantages: each completion's reward against the others of its own prompt; over the batch only where asked.

Pure functions of arrays; groups are given by ids in any order and of any sizes. Lengths are completions' tokens [B], which only
the baseline `opo` reads.
"""

import chex
import jax
import jax.numpy as jnp

from jax_grpo.config.learning import AdvantageConfig

STD_FLOOR = 1e-4  # added to the standard deviation, as in TRL


def _group_sum(x_B: jax.Array, group_ids_B: jax.Array) -> jax.Array:
    """For each row, the sum of x over its group.

    Not a matmul with the membership matrix: 0 * inf would carry a broken reward into every other group, and float32
    matmuls may run in TF32 on a GPU, which keeps three digits of a reward.
    """
    same_BB = group_ids_B[:, None] == group_ids_B[None, :]
    return jnp.sum(jnp.where(same_BB, x_B, 0), axis=-1)


def _without_signal(rewards_B: jax.Array, group_ids_B: jax.Array) -> jax.Array:
    """True on rows whose group's rewards are all equal. Exact: compares values, not their rounded mean."""
    same_BB = group_ids_B[:, None] == group_ids_B[None, :]
    return jnp.all(~same_BB | (rewards_B[:, None] == rewards_B[None, :]), axis=-1)


def _without_advantage(advantages_B: jax.Array, group_ids_B: jax.Array) -> jax.Array:
    """True on rows whose group's advantages are all exactly 0: of pass@k, groups of unequal rewards too."""
    same_BB = group_ids_B[:, None] == group_ids_B[None, :]
    return jnp.all(~same_BB | (advantages_B[None, :] == 0), axis=-1)


def _group_std(rewards_B: jax.Array, group_ids_B: jax.Array) -> jax.Array:
    """Standard deviation (ddof 1) of each row's group; 0 for a group of one."""
    size_B = _group_sum(jnp.ones_like(rewards_B), group_ids_B)
    mean_B = _group_sum(rewards_B, group_ids_B) / size_B
    return jnp.sqrt(_group_sum(jnp.square(rewards_B - mean_B), group_ids_B) / jnp.maximum(size_B - 1, 1))


def _robust_scale(rewards_B: jax.Array, group_ids_B: jax.Array) -> jax.Array:
    """sqrt(pi / 2) mean |r - median| of each row's group: a normal distribution's deviation, which one far value moves less.

    >>> spike = jnp.array([0.0, 1, 2, 3, 100])
    >>> round(float(_robust_scale(spike, jnp.zeros(5, int))[0]), 1), round(float(jnp.std(spike, ddof=1)), 1)
    (25.6, 44.1)
    """
    same_BB = group_ids_B[:, None] == group_ids_B[None, :]
    median_B = jnp.nanmedian(jnp.where(same_BB, rewards_B[None, :], jnp.nan), axis=-1)
    size_B = _group_sum(jnp.ones_like(rewards_B), group_ids_B)
    far_BB = jnp.where(same_BB, jnp.abs(rewards_B[None, :] - median_B[:, None]), 0)
    return jnp.sqrt(jnp.pi / 2).astype(rewards_B.dtype) * jnp.sum(far_BB, axis=-1) / size_B


def _mean_baseline(rewards_B: jax.Array, group_ids_B: jax.Array, lengths_B: jax.Array | None = None) -> jax.Array:
    """r_i - mean of its group (DeepSeekMath, Shao et al. 2024).

    >>> _mean_baseline(jnp.array([1.0, 0, 0, 3]), jnp.array([7, 7, 7, 7])).tolist()
    [0.0, -1.0, -1.0, 2.0]
    """
    size_B = _group_sum(jnp.ones_like(rewards_B), group_ids_B)
    return rewards_B - _group_sum(rewards_B, group_ids_B) / size_B


def _leave_one_out_baseline(
    rewards_B: jax.Array, group_ids_B: jax.Array, lengths_B: jax.Array | None = None
) -> jax.Array:
    """r_i - mean of the other samples of its group (RLOO, Ahmadian et al. 2024).

    >>> _leave_one_out_baseline(jnp.array([1.0, 0, 0, 3]), jnp.array([7, 7, 7, 7])).tolist()
    [0.0, -1.333, -1.333, 2.667]
    """
    size_B = _group_sum(jnp.ones_like(rewards_B), group_ids_B)
    others_B = _group_sum(rewards_B, group_ids_B) - rewards_B
    return rewards_B - others_B / jnp.maximum(size_B - 1, 1)


def _opo_baseline(rewards_B: jax.Array, group_ids_B: jax.Array, lengths_B: jax.Array | None = None) -> jax.Array:
    """r_i - sum_j l_j r_j / sum_j l_j over its group (OPO, Hao et al. 2025).

    The baseline of least variance, where the squared norm of a completion's gradient grows with its length l.

    >>> _opo_baseline(jnp.array([1.0, 0, 0, 3]), jnp.array([7, 7, 7, 7]), jnp.array([2, 2, 2, 4])).tolist()
    [-0.4, -1.4, -1.4, 1.6]
    """
    assert lengths_B is not None, "the baseline opo weighs rewards by the completions' lengths"
    weighted_B = _group_sum(lengths_B * rewards_B, group_ids_B)
    return rewards_B - weighted_B / jnp.maximum(_group_sum(lengths_B, group_ids_B), 1)


BASELINES = {"mean": _mean_baseline, "leave_one_out": _leave_one_out_baseline, "opo": _opo_baseline}


def _best_of_k(rewards_B: jax.Array, group_ids_B: jax.Array, k: int) -> jax.Array:
    """n s_i: the share of row i in an unbiased gradient of E[max of k samples] (PKPO, Walder and Karkhanis 2025, eq. 33).

    s_i = sum over the subsets I of k rows with i of (max_I r - max_{I without i} r) / (n over k), for a group of n; times n, so
    that the mean over rows is that gradient. What is summed is not 0 only where i is the best of I, and is then r_i less the best
    of the others: row j is that one in (j' - 1 over k - 2) subsets, j' its place in the group in ascending order. So

        n s_i = k (k - 1) / (n - 1) sum over j below i of prod_{t < k - 2} (j' - 1 - t) / (n - 2 - t) (r_i - r_j)

    whose factors are at most 1: binomial coefficients would overflow. NaN in a group smaller than k.

    >>> one = jnp.zeros(4, int)
    >>> _best_of_k(jnp.array([0.0, 0, 1, 1]), one, 2).tolist()  # each of two successes shares the credit
    [0.0, 0.0, 1.333, 1.333]
    >>> _best_of_k(jnp.array([0.0, 0, 1, 1]), one, 4).tolist()  # the best of four is 1 without either of them
    [0.0, 0.0, 0.0, 0.0]
    """
    same_BB = group_ids_B[:, None] == group_ids_B[None, :]
    size_B = _group_sum(jnp.ones_like(rewards_B), group_ids_B)
    row_B = jnp.arange(rewards_B.size)
    equal_BB = rewards_B[None, :] == rewards_B[:, None]
    below_BB = same_BB & ((rewards_B[None, :] < rewards_B[:, None]) | (equal_BB & (row_B[None, :] < row_B[:, None])))
    place_B = jnp.sum(below_BB, axis=-1)  # from 0 for the lowest
    taken_k = jnp.arange(k - 2)
    factors_Bk = jnp.maximum(place_B[:, None] - taken_k, 0) / jnp.maximum(size_B[:, None] - 2 - taken_k, 1)
    subsets_B = jnp.prod(factors_Bk.astype(rewards_B.dtype), axis=-1)
    gain_BB = jnp.where(below_BB, subsets_B[None, :] * (rewards_B[:, None] - rewards_B[None, :]), 0)
    summed_B = k * (k - 1) / jnp.maximum(size_B - 1, 1) * jnp.sum(gain_BB, axis=-1)
    # A reward that is not finite is neither below nor above another: the update's guard has to see it all the same.
    summed_B += 0 * _group_sum(rewards_B, group_ids_B)
    return jnp.where(size_B < k, jnp.nan, summed_B)


# All are of the rewards themselves, before any baseline; deviations with ddof 1, that of `batch` over all B rewards.
SCALES = {
    "none": lambda rewards_B, group_ids_B: 1.0,
    "group": lambda rewards_B, group_ids_B: _group_std(rewards_B, group_ids_B) + STD_FLOOR,
    "batch": lambda rewards_B, group_ids_B: jnp.std(rewards_B, ddof=1) + STD_FLOOR,
    "robust": lambda rewards_B, group_ids_B: _robust_scale(rewards_B, group_ids_B) + STD_FLOOR,
    # MaxRL (Tajwar et al. 2026): the success rate of binary rewards. It is 0 only where no reward is above 0, a group without
    # signal; rewards below 0 would turn signs, and are refused where they come from.
    "maxrl": lambda rewards_B, group_ids_B: (
        _group_sum(rewards_B, group_ids_B) / _group_sum(jnp.ones_like(rewards_B), group_ids_B)
    ),
}


def group_advantages(
    rewards_B: jax.Array, group_ids_B: jax.Array, config: AdvantageConfig, lengths_B: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Advantages [B] and which rows belong to a group without signal [B], one whose advantages are all 0.

    A_i = (r_i - baseline_g) / scale (DeepSeekMath, Shao et al. 2024, section 4.1.2), or `_best_of_k` / scale with
    `config.pass_at_k`. A group whose rewards are all equal has A = 0 exactly; so has a group of one. With `config.clip` c, A is
    then cut to [-c, c].

    >>> rewards, groups = jnp.array([1.0, 0, 5, 5]), jnp.array([0, 0, 1, 1])
    >>> advantages, flat = group_advantages(rewards, groups, AdvantageConfig(scale="none"))
    >>> advantages.tolist(), flat.tolist()
    ([0.5, -0.5, 0.0, 0.0], [False, False, True, True])
    >>> group_advantages(rewards, groups, AdvantageConfig(scale="group"))[0].tolist()
    [0.707, -0.707, 0.0, 0.0]
    """
    chex.assert_equal_shape([rewards_B, group_ids_B, *(() if lengths_B is None else (lengths_B,))])
    advantages_B, flat_B = _unclipped(rewards_B, group_ids_B, config, lengths_B)
    return _clipped(advantages_B, config), flat_B


def _unclipped(
    rewards_B: jax.Array, group_ids_B: jax.Array, config: AdvantageConfig, lengths_B: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    flat_B = _without_signal(rewards_B, group_ids_B)
    if config.pass_at_k is None:
        unscaled_B = BASELINES[config.baseline](rewards_B, group_ids_B, lengths_B)
    else:
        unscaled_B = _best_of_k(rewards_B, group_ids_B, config.pass_at_k)
    flat_B |= _without_advantage(unscaled_B, group_ids_B)
    return jnp.where(flat_B, 0, unscaled_B / SCALES[config.scale](rewards_B, group_ids_B)), flat_B


def _clipped(advantages_B: jax.Array, config: AdvantageConfig) -> jax.Array:
    """Within +-clip, which is the last thing that is done: of what enters the loss, not of its parts."""
    return advantages_B if config.clip is None else jnp.clip(advantages_B, -config.clip, config.clip)


def combined_advantages(
    components_KB: jax.Array,
    weights_K: jax.Array,
    group_ids_B: jax.Array,
    config: AdvantageConfig,
    lengths_B: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Advantages [B] of several unweighted reward components, and which rows have a group without signal [B].

    `sum_first` (default): the weighted sum of the components is the reward. `normalise_each`: each component is divided by its
    own deviation in the group, and then the weighted sum is taken, so that a component with a wide range does not drown the
    others. `gdpo` (Liu et al. 2026): that sum A is then normalised over the batch, (A - mean A) / (std A + 1e-4), so that the
    size of an advantage does not depend on how many components there are. A component of weight 0 gives no signal. `config.clip` is
    of what comes out.

    >>> components = jnp.array([[1.0, 0, 0, 1], [0, 100, 0, 0]])  # the second has a hundred times the range
    >>> weights, groups = jnp.ones(2), jnp.zeros(4, int)
    >>> for combination in ("sum_first", "normalise_each", "gdpo"):
    ...     config = AdvantageConfig(scale="group", components=combination)
    ...     print(combined_advantages(components, weights, groups, config)[0].tolist())
    [-0.49, 1.50, -0.51, -0.49]
    [0.37, 0.63, -1.37, 0.37]
    [0.40, 0.69, -1.49, 0.40]
    """
    chex.assert_shape(components_KB, (*weights_K.shape, *group_ids_B.shape))
    # Equal components mean no signal even where the rounding of their weighted sum differs from row to row.
    flat_KB = jax.vmap(lambda component_B: _without_signal(component_B, group_ids_B))(components_KB)
    flat_B = jnp.all(flat_KB | (weights_K == 0)[:, None], axis=0)
    advantages_B, also_flat_B = COMBINATIONS[config.components](
        components_KB, weights_K, group_ids_B, config, lengths_B
    )
    flat_B |= also_flat_B
    return _clipped(jnp.where(flat_B, 0, advantages_B), config), flat_B


def _weighted_sum(x_KB: jax.Array, weights_K: jax.Array) -> jax.Array:
    """sum_k weights x, without the components of weight 0, which may hold anything."""
    weights_K1 = weights_K[:, None]
    return jnp.sum(jnp.where(weights_K1 == 0, 0, weights_K1 * x_KB), axis=0)


def _sum_first(
    components_KB, weights_K, group_ids_B, config: AdvantageConfig, lengths_B
) -> tuple[jax.Array, jax.Array]:
    return _unclipped(_weighted_sum(components_KB, weights_K), group_ids_B, config, lengths_B)


def _normalise_each(
    components_KB, weights_K, group_ids_B, config: AdvantageConfig, lengths_B
) -> tuple[jax.Array, jax.Array]:
    assert config.scale == "group", "the config refuses another"
    advantages_KB, _ = jax.vmap(lambda component_B: _unclipped(component_B, group_ids_B, config, lengths_B))(
        components_KB
    )
    sum_B = _weighted_sum(advantages_KB, weights_K)
    return sum_B, _without_advantage(sum_B, group_ids_B)  # components that cancel


def _gdpo(components_KB, weights_K, group_ids_B, config: AdvantageConfig, lengths_B) -> tuple[jax.Array, jax.Array]:
    sum_B, _ = _normalise_each(components_KB, weights_K, group_ids_B, config, lengths_B)
    # A group whose components cancel is at 0 before the batch's mean is taken off, and not after.
    return (sum_B - jnp.mean(sum_B)) / (jnp.std(sum_B, ddof=1) + STD_FLOOR), jnp.zeros(group_ids_B.shape, bool)


COMBINATIONS = {"sum_first": _sum_first, "normalise_each": _normalise_each, "gdpo": _gdpo}


def overlong_penalty(length_B: jax.Array, cap: int | jax.Array, buffer: int, weight: float) -> jax.Array:
    """Added to the reward: 0 up to cap - buffer tokens, then linearly down to -weight at the cap (DAPO, eq. 13).

    >>> (overlong_penalty(jnp.array([10, 90, 95, 100]), cap=100, buffer=10, weight=2.0) + 0.0).tolist()
    [0.0, 0.0, -1.0, -2.0]
    """
    return -weight * jnp.clip((length_B - (cap - buffer)) / buffer, 0.0, 1.0)
