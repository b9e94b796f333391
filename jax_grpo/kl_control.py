"""The KL coefficient's controller. Pure functions of arrays."""

import jax
import jax.numpy as jnp

from jax_grpo.config_sections import KLConfig

MAX_LOG_CHANGE = 0.2  # of beta in one step, either way


def adaptive_beta(beta: jax.Array, kl_observed: jax.Array, config: KLConfig) -> jax.Array:
    """beta * exp(clip((KL_obs - KL_target) / KL_target, -0.2, 0.2)), clamped to [beta_min, beta_max].

    Proportional control of the mean KL per token in nats (Ziegler et al. 2019, section 2.2, with an exponential step).
    A non-finite observation leaves beta as it is.

    >>> config = KLConfig(adaptive=True, target=0.02)
    >>> [round(float(adaptive_beta(jnp.float32(0.1), kl, config)), 4) for kl in (0.02, 0.021, 0.5, 0.0, jnp.nan)]
    [0.1, 0.1051, 0.1221, 0.0819, 0.1]
    """
    error = jnp.clip((kl_observed - config.target) / config.target, -MAX_LOG_CHANGE, MAX_LOG_CHANGE)
    moved = jnp.clip(beta * jnp.exp(error), config.beta_min, config.beta_max)
    return jnp.where(jnp.isfinite(kl_observed), moved, beta).astype(beta.dtype)


def beyond_guardrail(kl_observed: float | jax.Array, config: KLConfig) -> jax.Array:
    """Whether the KL per token is more than twice its target.

    >>> [bool(beyond_guardrail(kl, KLConfig(target=0.02))) for kl in (0.04, 0.05)]
    [False, True]
    """
    return jnp.asarray(kl_observed) > 2 * config.target
