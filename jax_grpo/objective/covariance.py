"""Which tokens Clip-Cov and KL-Cov hold back (Cui et al. 2025, "The Entropy Mechanism"): those that make the policy sure of itself.

Policy gradients lower the entropy by the covariance of log-probability and advantage, most of which a few tokens have. The choice
is made of the whole optimiser batch, by the policy that sampled: no cut into micro-batches changes it.
"""

import chex
import jax
import jax.numpy as jnp

from jax_grpo.config.objectives import ClipCov, KlCov
from jax_grpo.objective.masking import TIED, masked, masked_mean

ROUNDING = 1e-4  # of share * tokens in float32: 0.1 * 30 must be 3 tokens in every precision


def covariances(logp_BS: jax.Array, advantages_B: jax.Array, mask_BS: jax.Array) -> jax.Array:
    """(A - mean A) (logp - mean logp) of each token [B, S], both means over the masked tokens; 0 where masked.

    >>> logp, mask = jnp.array([[-1.0, -3.0], [-2.0, jnp.nan]]), jnp.array([[1.0, 1], [1, 0]])
    >>> covariances(logp, jnp.array([2.0, -1.0]), mask).tolist()
    [[1.0, -1.0], [-0.0, 0.0]]
    """
    chex.assert_equal_shape([logp_BS, mask_BS])
    advantages_BS = jnp.broadcast_to(advantages_B[:, None], mask_BS.shape)
    centred = [x_BS - masked_mean(x_BS, mask_BS) for x_BS in (advantages_BS, masked(logp_BS, mask_BS))]
    return masked(centred[0] * centred[1], mask_BS)


def held_back(
    logp_BS: jax.Array,
    advantages_B: jax.Array,
    mask_BS: jax.Array,
    config: ClipCov | KlCov,
    seed: int,
    step: jax.typing.ArrayLike,
) -> jax.Array:
    """1 on the tokens held back [B, S], constant under differentiation; max(1, floor(cov_share * tokens)) of them at most.

    `kl_cov`: those of the largest covariance, of tied ones the first by row and token. `clip_cov`: some of those within
    cov_bounds, in an order that depends on nothing but the seed, the optimiser step, the row and the token's number in it.
    """
    covariance_BS = jax.lax.stop_gradient(covariances(logp_BS, advantages_B, mask_BS))
    may_BS = mask_BS != 0
    if config.name == "kl_cov":
        order_BS = -jnp.round(covariance_BS / TIED)
    else:
        least, most = config.cov_bounds
        may_BS &= (covariance_BS > least) & (covariance_BS < most)
        order_BS = lottery(mask_BS, seed, step)
    count = jnp.maximum(jnp.floor(config.cov_share * jnp.sum(mask_BS) + ROUNDING), 1)
    # Those that may not come last whatever their order: two keys, the last one first.
    ranked = jnp.lexsort((order_BS.reshape(-1), ~may_BS.reshape(-1)))
    rank_BS = jnp.zeros(ranked.shape, jnp.int32).at[ranked].set(jnp.arange(ranked.size, dtype=jnp.int32))
    return (may_BS & (rank_BS.reshape(mask_BS.shape) < count)).astype(mask_BS.dtype)


def lottery(mask_BS: jax.Array, seed: int, step: jax.typing.ArrayLike) -> jax.Array:
    """A number for each token [B, S], uint32, as good as random: of the seed, the step, the row and which of its tokens it is.

    Written out, with MurmurHash3's finaliser, so that another program can make the same.
    """
    number_BS = jnp.cumsum(mask_BS.astype(jnp.uint32), axis=-1)
    row_B1 = jnp.arange(mask_BS.shape[0], dtype=jnp.uint32)[:, None]
    mixed = _mixed(jnp.uint32(seed))
    for part in (jnp.asarray(step).astype(jnp.uint32), row_B1, number_BS):
        mixed = _mixed(mixed + part)
    return mixed


def _mixed(x: jax.Array) -> jax.Array:
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> shift)) * jnp.uint32(factor)
    return x ^ (x >> 16)
