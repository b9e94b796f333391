"""Group-relative advantages: each completion's reward against the others of its own prompt; over the batch only where asked.

Pure functions of arrays; groups are given by ids in any order and of any sizes.
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


def _mean_baseline(rewards_B: jax.Array, group_ids_B: jax.Array) -> jax.Array:
    """r_i - mean of its group (DeepSeekMath, Shao et al. 2024).

    >>> _mean_baseline(jnp.array([1.0, 0, 0, 3]), jnp.array([7, 7, 7, 7])).tolist()
    [0.0, -1.0, -1.0, 2.0]
    """
    size_B = _group_sum(jnp.ones_like(rewards_B), group_ids_B)
    return rewards_B - _group_sum(rewards_B, group_ids_B) / size_B


def _leave_one_out_baseline(rewards_B: jax.Array, group_ids_B: jax.Array) -> jax.Array:
    """r_i - mean of the other samples of its group (RLOO, Ahmadian et al. 2024).

    >>> _leave_one_out_baseline(jnp.array([1.0, 0, 0, 3]), jnp.array([7, 7, 7, 7])).tolist()
    [0.0, -1.333, -1.333, 2.667]
    """
    size_B = _group_sum(jnp.ones_like(rewards_B), group_ids_B)
    others_B = _group_sum(rewards_B, group_ids_B) - rewards_B
    return rewards_B - others_B / jnp.maximum(size_B - 1, 1)


BASELINES = {"mean": _mean_baseline, "leave_one_out": _leave_one_out_baseline}

# All are of the rewards themselves, before any baseline; deviations with ddof 1, that of `batch` over all B rewards.
SCALES = {
    "none": lambda rewards_B, group_ids_B: 1.0,
    "group": lambda rewards_B, group_ids_B: _group_std(rewards_B, group_ids_B) + STD_FLOOR,
    "batch": lambda rewards_B, group_ids_B: jnp.std(rewards_B, ddof=1) + STD_FLOOR,
    "robust": lambda rewards_B, group_ids_B: _robust_scale(rewards_B, group_ids_B) + STD_FLOOR,
}


def group_advantages(
    rewards_B: jax.Array, group_ids_B: jax.Array, config: AdvantageConfig
) -> tuple[jax.Array, jax.Array]:
    """Advantages [B] and which rows belong to a group without signal [B].

    A_i = (r_i - baseline_g) / scale (DeepSeekMath, Shao et al. 2024, section 4.1.2). A group whose rewards are all equal
    has A = 0 exactly; so has a group of one. With `config.clip` c, A is then cut to [-c, c].

    >>> rewards, groups = jnp.array([1.0, 0, 5, 5]), jnp.array([0, 0, 1, 1])
    >>> advantages, flat = group_advantages(rewards, groups, AdvantageConfig(scale="none"))
    >>> advantages.tolist(), flat.tolist()
    ([0.5, -0.5, 0.0, 0.0], [False, False, True, True])
    >>> group_advantages(rewards, groups, AdvantageConfig(scale="group"))[0].tolist()
    [0.707, -0.707, 0.0, 0.0]
    """
    chex.assert_equal_shape([rewards_B, group_ids_B])
    advantages_B, flat_B = _unclipped(rewards_B, group_ids_B, config)
    return _clipped(advantages_B, config), flat_B


def _unclipped(rewards_B: jax.Array, group_ids_B: jax.Array, config: AdvantageConfig) -> tuple[jax.Array, jax.Array]:
    flat_B = _without_signal(rewards_B, group_ids_B)
    advantages_B = BASELINES[config.baseline](rewards_B, group_ids_B) / SCALES[config.scale](rewards_B, group_ids_B)
    return jnp.where(flat_B, 0, advantages_B), flat_B


def _clipped(advantages_B: jax.Array, config: AdvantageConfig) -> jax.Array:
    """Within +-clip, which is the last thing that is done: of what enters the loss, not of its parts."""
    return advantages_B if config.clip is None else jnp.clip(advantages_B, -config.clip, config.clip)


def combined_advantages(
    components_KB: jax.Array, weights_K: jax.Array, group_ids_B: jax.Array, config: AdvantageConfig
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
    advantages_B, also_flat_B = COMBINATIONS[config.components](components_KB, weights_K, group_ids_B, config)
    flat_B |= also_flat_B
    return _clipped(jnp.where(flat_B, 0, advantages_B), config), flat_B


def _weighted_sum(x_KB: jax.Array, weights_K: jax.Array) -> jax.Array:
    """sum_k weights x, without the components of weight 0, which may hold anything."""
    weights_K1 = weights_K[:, None]
    return jnp.sum(jnp.where(weights_K1 == 0, 0, weights_K1 * x_KB), axis=0)


def _sum_first(components_KB, weights_K, group_ids_B, config: AdvantageConfig) -> tuple[jax.Array, jax.Array]:
    return _unclipped(_weighted_sum(components_KB, weights_K), group_ids_B, config)


def _normalise_each(components_KB, weights_K, group_ids_B, config: AdvantageConfig) -> tuple[jax.Array, jax.Array]:
    assert config.scale == "group", "the config refuses another"
    advantages_KB, _ = jax.vmap(lambda component_B: _unclipped(component_B, group_ids_B, config))(components_KB)
    # Components that cancel leave no advantage, but their groups are not constant: nothing more is called flat here.
    return _weighted_sum(advantages_KB, weights_K), jnp.zeros(group_ids_B.shape, bool)


def _gdpo(components_KB, weights_K, group_ids_B, config: AdvantageConfig) -> tuple[jax.Array, jax.Array]:
    sum_B, flat_B = _normalise_each(components_KB, weights_K, group_ids_B, config)
    return (sum_B - jnp.mean(sum_B)) / (jnp.std(sum_B, ddof=1) + STD_FLOOR), flat_B


COMBINATIONS = {"sum_first": _sum_first, "normalise_each": _normalise_each, "gdpo": _gdpo}


def overlong_penalty(length_B: jax.Array, cap: int | jax.Array, buffer: int, weight: float) -> jax.Array:
    """Added to the reward: 0 up to cap - buffer tokens, then linearly down to -weight at the cap (DAPO, eq. 13).

    >>> (overlong_penalty(jnp.array([10, 90, 95, 100]), cap=100, buffer=10, weight=2.0) + 0.0).tolist()
    [0.0, 0.0, -1.0, -2.0]
    """
    return -weight * jnp.clip((length_B - (cap - buffer)) / buffer, 0.0, 1.0)
