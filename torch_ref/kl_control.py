"""The coefficient of the KL penalty: moved after each optimiser step so that the observed KL stays at its target.

Knows a number, not where it comes from.
"""

import math

from jax_grpo.config.learning import KLConfig

MAX_RELATIVE_ERROR = 0.2  # one step moves log(beta) by at most this
GUARDRAIL = 2.0  # times the target


def next_beta(beta: float, observed_kl: float, config: KLConfig) -> float:
    """beta * exp(clip((KL_obs - KL_target) / KL_target, -0.2, 0.2)), kept within beta_bounds.

    After Ziegler et al. 2019, section 2.2, with an exponential in place of 1 + K_beta * error. A KL that is not finite
    leaves beta as it is. KL in nats per token.
    """
    if not config.adaptive or not math.isfinite(observed_kl):
        return beta
    error = (observed_kl - config.target) / config.target
    beta = beta * math.exp(max(-MAX_RELATIVE_ERROR, min(MAX_RELATIVE_ERROR, error)))
    least, most = config.beta_bounds
    return max(least, min(most, beta))


def beyond_guardrail(observed_kl: float, config: KLConfig) -> bool:
    """Whether the KL is above twice its target."""
    return observed_kl > GUARDRAIL * config.target
