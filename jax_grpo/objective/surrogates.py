"""The policy loss of a token: the GRPO family's surrogates of the importance ratio rho, as pure functions of arrays.

A surrogate is given log rho, the log-probabilities, the advantages and the settings; `surrogate` gives it log rho at the level
it is of, tokens or whole sequences. Masked positions may hold anything, NaN included: they are replaced before the first
exponential. Arrays of the wrong shape are refused when a function is called or traced (AssertionError), not broadcast.
"""

import math
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp

from jax_grpo.config.objectives import Cispo, Clip, Dppo, Gmpo, KlCov, ObjectiveConfig, Reinforce, Sapo, Vespo
from jax_grpo.objective.masking import masked, masked_mean

LARGEST = 80.0  # log ratio: exp(89) is infinite in float32, and 0 times that, of a token without advantage, is NaN


def log_importance_ratio(logp_BS: jax.Array, old_logp_BS: jax.Array, mask_BS: jax.Array, level: str) -> jax.Array:
    """log rho = logp - old_logp, [B, S].

    Level `token` keeps it per token; level `sequence` (GSPO, Zheng et al. 2025, eq. 7) replaces it by its masked mean over
    the sequence, the same for all its tokens. 0 where masked, and at most `LARGEST`.

    >>> mask = jnp.array([[1.0, 1, 1, 0]])
    >>> old, logp = jnp.array([[-1.0, -2, -3, 0]]), jnp.array([[-1.0, -1.5, -2.75, 0]])
    >>> log_importance_ratio(logp, old, mask, "token").tolist()
    [[0.0, 0.5, 0.25, 0.0]]
    >>> log_importance_ratio(logp, old, mask, "sequence").tolist()
    [[0.25, 0.25, 0.25, 0.0]]
    """
    log_rho_BS = masked(jnp.minimum(logp_BS - old_logp_BS, LARGEST), mask_BS)
    if level == "token":
        return log_rho_BS
    mean_B = masked_mean(log_rho_BS, mask_BS, axis=-1)
    return masked(jnp.broadcast_to(mean_B[:, None], log_rho_BS.shape), mask_BS)


def clip_surrogate(log_rho_BS: jax.Array, logp_BS: jax.Array, advantages_B1: jax.Array, config: Clip):
    """-min(rho A, clip(rho, 1 - eps_low, 1 + eps_high) A) (Schulman et al. 2017, eq. 7; asymmetric: DAPO, Yu et al. 2025).

    With `delta`, rho in the first term is min(rho, delta) (two-sided clipping, INTELLECT-2 2025): it bounds the loss of a
    token with a negative advantage and a large ratio.

    >>> config = Clip(epsilon_low=0.25, epsilon_high=0.5)
    >>> log_rho = jnp.log(jnp.array([[0.5, 1.0, 2.0]]))
    >>> clip_surrogate(log_rho, log_rho, jnp.array([[1.0]]), config).tolist()  # a gain is at most 1.5
    [[-0.50, -1.00, -1.50]]
    >>> clip_surrogate(log_rho, log_rho, jnp.array([[-1.0]]), config).tolist()  # a loss is at least 0.75
    [[0.75, 1.00, 2.00]]
    """
    rho_BS = jnp.exp(log_rho_BS)
    clipped_BS = jnp.clip(rho_BS, 1 - config.epsilon_low, 1 + config.epsilon_high)
    first_BS = rho_BS if config.delta is None else jnp.minimum(rho_BS, config.delta)
    return -jnp.minimum(first_BS * advantages_B1, clipped_BS * advantages_B1)


def cispo_surrogate(log_rho_BS: jax.Array, logp_BS: jax.Array, advantages_B1: jax.Array, config: Cispo):
    """-stop_gradient(min(rho, eps_high)) A logp (MiniMax-M1 2025, eq. 4): clipping the weight keeps every gradient.

    >>> config = Cispo(epsilon_high=5.0)
    >>> gradient = jax.grad(lambda logp: cispo_surrogate(jnp.log(8.0), logp, 1.0, config))
    >>> float(gradient(-2.0))  # of a token eight times as likely as it was: its weight is 5
    -5.0
    """
    weight_BS = jax.lax.stop_gradient(jnp.minimum(jnp.exp(log_rho_BS), config.epsilon_high))
    return -weight_BS * advantages_B1 * logp_BS


def sapo_surrogate(log_rho_BS: jax.Array, logp_BS: jax.Array, advantages_B1: jax.Array, config: Sapo):
    """-(4 / tau) sigmoid(tau (rho - 1)) A, tau by the advantage's sign (SAPO, Gao et al. 2025): a soft clip.

    >>> config = Sapo()
    >>> gradient = jax.grad(lambda log_rho: sapo_surrogate(log_rho, log_rho, 1.0, config))
    >>> float(gradient(0.0)), round(float(gradient(jnp.log(9.0))), 4)  # that of -rho A at 1, almost none far off
    (-1.0, -0.0121)
    """
    tau_B1 = jnp.where(advantages_B1 > 0, *config.tau)
    return -(4 / tau_B1) * jax.nn.sigmoid(tau_B1 * (jnp.exp(log_rho_BS) - 1)) * advantages_B1


def reinforce_surrogate(log_rho_BS: jax.Array, logp_BS: jax.Array, advantages_B1: jax.Array, config: Reinforce):
    """-A logp (Williams 1992): no ratio, for ablation.

    >>> float(reinforce_surrogate(jnp.log(9.0), -2.0, 0.5, Reinforce()))
    1.0
    """
    return -advantages_B1 * logp_BS


def ratio_surrogate(log_rho_BS: jax.Array, logp_BS: jax.Array, advantages_B1: jax.Array, config: KlCov | Gmpo):
    """-rho A, without a clip: KL-Cov bounds the tokens that it holds back by their penalty alone (Cui et al. 2025).

    And GMPO's, whose rho is that of the sequence's `geometric_mean`, clipped before: each token has its sequence's loss.

    >>> float(ratio_surrogate(jnp.log(2.0), -2.0, 0.5, KlCov()))
    -1.0
    """
    return -jnp.exp(log_rho_BS) * advantages_B1


def total_variation(logp_BS: jax.Array, old_logp_BS: jax.Array) -> jax.Array:
    """abs(p - q) of the sampled token: the total variation of "this token or another" (DPPO's Binary-TV).

    >>> total_variation(jnp.log(jnp.array([0.75])), jnp.log(jnp.array([0.5]))).tolist()
    [0.25]
    """
    return jnp.abs(jnp.exp(logp_BS) - jnp.exp(old_logp_BS))


def binary_kl(logp_BS: jax.Array, old_logp_BS: jax.Array) -> jax.Array:
    """q log(q / p) + (1 - q) log((1 - q) / (1 - p)), q of the old policy: KL of "this token or another" (DPPO's Binary-KL).

    1e-8 is added to 1 - q and 1 - p, as in verl.

    >>> binary_kl(jnp.log(jnp.array([0.75, 0.5])), jnp.log(jnp.array([0.5, 0.5]))).round(4).tolist()
    [0.1438, 0.0]
    """
    old_p_BS = jnp.exp(old_logp_BS)
    others_BS = jnp.log((1 - old_p_BS + 1e-8) / (1 - jnp.exp(logp_BS) + 1e-8))
    return old_p_BS * (old_logp_BS - logp_BS) + (1 - old_p_BS) * others_BS


DIVERGENCES = {"dppo_tv": total_variation, "dppo_kl": binary_kl}


def _beyond(log_rho_BS: jax.Array, logp_BS: jax.Array, config: Dppo) -> tuple[jax.Array, jax.Array]:
    """Tokens that became less likely, and more likely, by more than the divergence allows."""
    apart_BS = DIVERGENCES[config.name](logp_BS, logp_BS - log_rho_BS)
    return (
        (log_rho_BS < 0) & (apart_BS > config.epsilon_low),
        (log_rho_BS > 0) & (apart_BS > config.epsilon_high),
    )


def dppo_surrogate(log_rho_BS: jax.Array, logp_BS: jax.Array, advantages_B1: jax.Array, config: Dppo):
    """-stop_gradient(M min(rho, delta)) A logp (DPPO, Qi et al. 2026), with the gradient of -M rho A.

    M is 0 where A pushes a token further whose divergence from the old policy is beyond epsilon_low (less likely) or epsilon_high
    (more likely), else 1: a bound on probabilities, where that of `clip` is on their ratio. `delta`, here of every token, is
    verl's clip_ratio_c; None: rho has no bound.

    >>> config = Dppo(epsilon_high=0.25)
    >>> gradient = jax.grad(lambda logp, old: dppo_surrogate(logp - old, logp, 1.0, config))
    >>> p, q = jnp.array([0.008, 0.9]), jnp.array([0.001, 0.6])
    >>> jax.vmap(gradient)(jnp.log(p), jnp.log(q)).tolist()  # eight times as likely and still rare; half as likely again
    [-8.0, -0.0]
    """
    low_BS, high_BS = _beyond(log_rho_BS, logp_BS, config)
    rho_BS = jnp.exp(log_rho_BS)
    bounded_BS = rho_BS if config.delta is None else jnp.minimum(rho_BS, config.delta)
    weight_BS = jnp.where(jnp.where(advantages_B1 > 0, high_BS, low_BS), 0, bounded_BS)
    return -jax.lax.stop_gradient(weight_BS) * advantages_B1 * logp_BS


def geometric_mean(log_rho_BS: jax.Array, advantages_B1: jax.Array, mask_BS: jax.Array, config: Gmpo):
    """Mean over a sequence of log rho, each first cut on the side A pushes to (GMPO, Zhao et al. 2025), for each of its tokens.

    The bounds are of log rho: -epsilon_low where A < 0, epsilon_high where A > 0.

    >>> log_rho, mask = jnp.array([[0.5, -0.25, 9.0]]), jnp.array([[1.0, 1, 0]])
    >>> config = Gmpo(epsilon_low=0.125, epsilon_high=0.25)
    >>> [geometric_mean(log_rho, jnp.array([[a]]), mask, config)[0, 0].item() for a in (1.0, -1.0)]
    [0.0, 0.1875]
    """
    cut_BS = jnp.where(
        advantages_B1 > 0, jnp.minimum(log_rho_BS, config.epsilon_high), jnp.maximum(log_rho_BS, -config.epsilon_low)
    )
    return jnp.broadcast_to(masked_mean(cut_BS, mask_BS, axis=-1)[:, None], log_rho_BS.shape)


def whole_sequence(log_rho_BS: jax.Array, advantages_B1: jax.Array, mask_BS: jax.Array, config: Vespo):
    """log w, the sum of a sequence's log rho, for each of its tokens; TRL's bounds: a token's +-20, the sum's log 1e-8 and 20.

    >>> whole_sequence(jnp.array([[0.5, 0.25, 9.0]]), None, jnp.array([[1.0, 1, 0]]), Vespo()).tolist()
    [[0.75, 0.75, 0.75]]
    """
    sum_B = jnp.sum(masked(jnp.clip(log_rho_BS, -20, 20), mask_BS), axis=-1)
    return jnp.broadcast_to(jnp.clip(sum_B, math.log(1e-8), 20)[:, None], log_rho_BS.shape)


def vespo_surrogate(log_rho_BS: jax.Array, logp_BS: jax.Array, advantages_B1: jax.Array, config: Vespo):
    """-stop_gradient(w^k exp(lambda (1 - w))) A logp (VESPO, Shen et al. 2026), w of the `whole_sequence`.

    k and lambda by the advantage's sign. The weight is 1 at w = 1; it falls to 0 far off on either side.

    >>> gradient = jax.grad(lambda logp, w: vespo_surrogate(jnp.log(w), logp, 1.0, Vespo()))
    >>> [round(float(gradient(-2.0, w)), 4) for w in (0.01, 1.0, 4.0)]
    [-0.0019, -1.0, -0.002]
    """
    positive_B1 = advantages_B1 >= 0
    k_B1 = jnp.where(positive_B1, *config.power)
    lambda_B1 = jnp.where(positive_B1, *config.decay)
    weight_BS = jnp.exp(k_B1 * log_rho_BS + lambda_B1 * (1 - jnp.exp(log_rho_BS)))
    return -jax.lax.stop_gradient(weight_BS) * advantages_B1 * logp_BS


SURROGATES: dict[str, Callable[..., jax.Array]] = {
    "clip": clip_surrogate,
    "cispo": cispo_surrogate,
    "sapo": sapo_surrogate,
    "reinforce": reinforce_surrogate,
    "dppo_tv": dppo_surrogate,
    "dppo_kl": dppo_surrogate,
    "gmpo": ratio_surrogate,  # of the `geometric_mean`
    "vespo": vespo_surrogate,
    "clip_cov": clip_surrogate,  # on the tokens that are not held back
    "kl_cov": ratio_surrogate,
}

# Of tokens' log ratios those of their sequences, for the objectives that are of nothing else.
SEQUENCE_RATIOS: dict[str, Callable[..., jax.Array]] = {"gmpo": geometric_mean, "vespo": whole_sequence}

# The importance ratios [low, high] of a token beyond which the objective acts on its weight; objectives without are left out.
RATIO_BOUNDS: dict[str, Callable[[Any], tuple[float, float]]] = {
    "clip": lambda config: (1 - config.epsilon_low, 1 + config.epsilon_high),
    "clip_cov": lambda config: (1 - config.epsilon_low, 1 + config.epsilon_high),
    "cispo": lambda config: (0.0, config.epsilon_high),
    "gmpo": lambda config: (math.exp(-config.epsilon_low), math.exp(config.epsilon_high)),
}


def surrogate(
    logp_BS: jax.Array, old_logp_BS: jax.Array, advantages_B: jax.Array, mask_BS: jax.Array, config: ObjectiveConfig
) -> jax.Array:
    """Policy loss of each token [B, S], nats times advantage; 0 where masked. A negative value is normal.

    Or of tokens [N] that are of no sequences, each with its own advantage, where no ratio is of a whole sequence.

    >>> mask = jnp.array([[1.0, 1, 0]])
    >>> old = jnp.array([[-1.0, -2, jnp.nan]])
    >>> surrogate(old, old, jnp.array([0.5]), mask, Clip()).tolist()  # on-policy: the ratio is 1
    [[-0.5, -0.5, 0.0]]
    """
    chex.assert_equal_shape([logp_BS, old_logp_BS, mask_BS])
    chex.assert_shape(advantages_B, mask_BS.shape[:1])
    advantages_B1 = advantages_B if mask_BS.ndim == 1 else advantages_B[:, None]
    log_rho_BS = log_importance_ratio(logp_BS, old_logp_BS, mask_BS, config.importance_level)
    if config.name in SEQUENCE_RATIOS:
        log_rho_BS = SEQUENCE_RATIOS[config.name](log_rho_BS, advantages_B1, mask_BS, config)
    loss_BS = SURROGATES[config.name](log_rho_BS, masked(logp_BS, mask_BS), advantages_B1, config)
    return masked(loss_BS, mask_BS)


def clipped(
    log_rho_BS: jax.Array, logp_BS: jax.Array, advantages_B1: jax.Array, config: ObjectiveConfig
) -> tuple[jax.Array, jax.Array]:
    """Tokens [B, S] that are beyond the lower bound with A < 0, and beyond the upper bound with A > 0.

    The bound is of the ratio, or for DPPO of the divergence. Masked places are of no meaning.

    >>> log_rho = jnp.log(jnp.array([[0.5, 2.0]]))
    >>> low, high = clipped(log_rho, log_rho, jnp.array([[1.0]]), Clip())
    >>> low.tolist(), high.tolist()
    ([[False, False]], [[False, True]])
    """
    if isinstance(config, Dppo):
        below_BS, above_BS = _beyond(log_rho_BS, logp_BS, config)
    else:
        low, high = RATIO_BOUNDS[config.name](config) if config.name in RATIO_BOUNDS else (0.0, math.inf)
        rho_BS = jnp.exp(log_rho_BS)
        below_BS, above_BS = rho_BS < low, rho_BS > high
    return below_BS & (advantages_B1 < 0), above_BS & (advantages_B1 > 0)
