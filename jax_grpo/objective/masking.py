"""Arrays of which only some places count: selection, means and quantiles over a mask [B, S] of 1 and 0.

Masked places may hold anything, NaN included. Knows nothing of losses.
"""

from typing import Any

import jax
import jax.numpy as jnp

# Nats (of a covariance, times advantage) within which two numbers are tied: float32 rounds one context's in two programs so far.
TIED = 1e-5


def masked(x_BS: jax.Array, mask_BS: jax.Array) -> jax.Array:
    """x where mask, else 0, with a zero gradient there (a product with the mask would turn inf into NaN)."""
    return jnp.where(mask_BS.astype(bool), x_BS, 0)


def token_count(mask_BS: jax.Array, **over: Any) -> jax.Array:
    """Tokens in the mask, at least 1: what a mean is divided by."""
    return jnp.maximum(jnp.sum(mask_BS, **over), 1)


def masked_mean(x_BS: jax.Array, mask_BS: jax.Array, axis: int | None = None) -> jax.Array:
    """Mean over mask; 0 where the mask is empty.

    >>> float(masked_mean(jnp.array([1.0, 3.0, jnp.nan]), jnp.array([1.0, 1.0, 0.0])))
    2.0
    """
    tokens = token_count(mask_BS, axis=axis)
    return jnp.sum(masked(x_BS, mask_BS), axis=axis) / tokens


def masked_quantile(x_BS: jax.Array, mask_BS: jax.Array, quantile: float) -> jax.Array:
    """Quantile over mask, linear between neighbours; NaN where the mask is empty.

    >>> float(masked_quantile(jnp.array([1.0, 2.0, 9.0]), jnp.array([1.0, 1.0, 0.0]), 0.5))
    1.5
    """
    return jnp.nanquantile(jnp.where(mask_BS.astype(bool), x_BS, jnp.nan), quantile)
