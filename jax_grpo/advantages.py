"""Group-relative advantages: each completion's reward against the others of its own prompt, never over the batch.

Pure functions of arrays; groups are given by ids in any order and of any sizes.
"""

import jax
import jax.numpy as jnp

from jax_grpo.config import AdvantageConfig

STD_FLOOR = 1e-4  # added to the standard deviation, as in TRL


def _group_sum(x_B: jax.Array, group_ids_B: jax.Array) -> jax.Array:
    """For each row, the sum of x over its group."""
    same_BB = group_ids_B[:, None] == group_ids_B[None, :]
    return same_BB.astype(x_B.dtype) @ x_B


def _without_signal(rewards_B: jax.Array, group_ids_B: jax.Array) -> jax.Array:
    """True on rows whose group's rewards are all equal. Exact: compares values, not their rounded mean."""
    same_BB = group_ids_B[:, None] == group_ids_B[None, :]
    return jnp.all(~same_BB | (rewards_B[:, None] == rewards_B[None, :]), axis=-1)


def _group_std(rewards_B: jax.Array, group_ids_B: jax.Array) -> jax.Array:
    """Standard deviation (ddof 1) of each row's group; 0 for a group of one."""
    size_B = _group_sum(jnp.ones_like(rewards_B), group_ids_B)
    mean_B = _group_sum(rewards_B, group_ids_B) / size_B
    return jnp.sqrt(_group_sum(jnp.square(rewards_B - mean_B), group_ids_B) / jnp.maximum(size_B - 1, 1))


def _mean_baseline(rewards_B: jax.Array, group_ids_B: jax.Array) -> jax.Array:
    """r_i - mean of its group (DeepSeekMath, Shao et al. 2024)."""
    size_B = _group_sum(jnp.ones_like(rewards_B), group_ids_B)
    return rewards_B - _group_sum(rewards_B, group_ids_B) / size_B


def _leave_one_out_baseline(rewards_B: jax.Array, group_ids_B: jax.Array) -> jax.Array:
    """r_i - mean of the other samples of its group (RLOO, Ahmadian et al. 2024)."""
    size_B = _group_sum(jnp.ones_like(rewards_B), group_ids_B)
    others_B = _group_sum(rewards_B, group_ids_B) - rewards_B
    return rewards_B - others_B / jnp.maximum(size_B - 1, 1)


BASELINES = {"mean": _mean_baseline, "leave_one_out": _leave_one_out_baseline}

SCALES = {
    "none": lambda rewards_B, group_ids_B: 1.0,
    "group": lambda rewards_B, group_ids_B: _group_std(rewards_B, group_ids_B) + STD_FLOOR,
    "batch": lambda rewards_B, group_ids_B: jnp.std(rewards_B, ddof=1) + STD_FLOOR,
}


def group_advantages(
    rewards_B: jax.Array, group_ids_B: jax.Array, config: AdvantageConfig
) -> tuple[jax.Array, jax.Array]:
    """Advantages [B] and which rows belong to a group without signal [B].

    A_i = (r_i - baseline_g) / scale. A group whose rewards are all equal has A = 0 exactly.
    """
    flat_B = _without_signal(rewards_B, group_ids_B)
    advantages_B = BASELINES[config.baseline](rewards_B, group_ids_B) / SCALES[config.scale](rewards_B, group_ids_B)
    return jnp.where(flat_B, 0.0, advantages_B), flat_B


def combined_advantages(
    components_KB: jax.Array, weights_K: jax.Array, group_ids_B: jax.Array, config: AdvantageConfig
) -> tuple[jax.Array, jax.Array]:
    """Advantages [B] of several reward components, and which rows have a group without signal [B].

    `sum_first` (default): the weighted sum of the components is the reward. `normalise_each` (GDPO, 2026): each component
    gets its own advantage with a group scale, and their weighted sum is taken, so that a component with a wide range
    does not drown the others.
    """
    if config.components == "sum_first":
        return group_advantages(weights_K @ components_KB, group_ids_B, config)
    advantages_KB, flat_KB = jax.vmap(lambda r: group_advantages(r, group_ids_B, config))(components_KB)
    counted_K = weights_K != 0
    return weights_K @ advantages_KB, jnp.all(flat_KB | ~counted_K[:, None], axis=0)


def overlong_penalty(length_B: jax.Array, cap: int, buffer: int, weight: float) -> jax.Array:
    """Added to the reward: 0 up to cap - buffer tokens, then linearly down to -weight at the cap (DAPO, eq. 13)."""
    return -weight * jnp.clip((length_B - (cap - buffer)) / buffer, 0.0, 1.0)
