"""The GRPO family's per-token objectives, KL estimators and their controller, and aggregations, as pure functions of arrays.

A loss here is always `sum(weights_BS * per_token_BS)`: the aggregation is a table of weights computed once over the whole
optimiser batch, so that any cut into micro-batches sums to the same value and gradient. Masked positions may hold anything,
NaN included: they are replaced before the first exponential. Arrays of the wrong shape are refused when a function is called
or traced (AssertionError), not broadcast. Knows nothing of models, batches or text.
"""

from typing import Any

import chex
import jax
import jax.numpy as jnp

from jax_grpo.config.learning import KLConfig, ObjectiveConfig


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


def log_importance_ratio(logp_BS: jax.Array, old_logp_BS: jax.Array, mask_BS: jax.Array, level: str) -> jax.Array:
    """log rho = logp - old_logp, [B, S].

    Level `token` keeps it per token; level `sequence` (GSPO, Zheng et al. 2025, eq. 7) replaces it by its masked mean over
    the sequence, the same for all its tokens. 0 where masked.

    >>> mask = jnp.array([[1.0, 1, 1, 0]])
    >>> old, logp = jnp.array([[-1.0, -2, -3, 0]]), jnp.array([[-1.0, -1.5, -2.75, 0]])
    >>> log_importance_ratio(logp, old, mask, "token").tolist()
    [[0.0, 0.5, 0.25, 0.0]]
    >>> log_importance_ratio(logp, old, mask, "sequence").tolist()
    [[0.25, 0.25, 0.25, 0.0]]
    """
    log_rho_BS = masked(logp_BS - old_logp_BS, mask_BS)
    if level == "token":
        return log_rho_BS
    mean_B = masked_mean(log_rho_BS, mask_BS, axis=-1)
    return masked(jnp.broadcast_to(mean_B[:, None], log_rho_BS.shape), mask_BS)


def clip_surrogate(log_rho_BS: jax.Array, logp_BS: jax.Array, advantages_B1: jax.Array, config: ObjectiveConfig):
    """-min(rho A, clip(rho, 1 - eps_low, 1 + eps_high) A) (Schulman et al. 2017, eq. 7; asymmetric: DAPO, Yu et al. 2025).

    With `delta`, rho in the first term is min(rho, delta) (two-sided clipping, INTELLECT-2 2025): it bounds the loss of a
    token with a negative advantage and a large ratio.

    >>> config = ObjectiveConfig(epsilon_low=0.25, epsilon_high=0.5)
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


def cispo_surrogate(log_rho_BS: jax.Array, logp_BS: jax.Array, advantages_B1: jax.Array, config: ObjectiveConfig):
    """-stop_gradient(min(rho, eps_high)) A logp (MiniMax-M1 2025, eq. 4): clipping the weight keeps every gradient.

    >>> config = ObjectiveConfig(name="cispo", epsilon_high=5.0)
    >>> gradient = jax.grad(lambda logp: cispo_surrogate(jnp.log(8.0), logp, 1.0, config))
    >>> float(gradient(-2.0))  # of a token eight times as likely as it was: its weight is 5
    -5.0
    """
    weight_BS = jax.lax.stop_gradient(jnp.minimum(jnp.exp(log_rho_BS), config.epsilon_high))
    return -weight_BS * advantages_B1 * logp_BS


def sapo_surrogate(log_rho_BS: jax.Array, logp_BS: jax.Array, advantages_B1: jax.Array, config: ObjectiveConfig):
    """-(4 / tau) sigmoid(tau (rho - 1)) A, tau by the advantage's sign (SAPO, Gao et al. 2025): a soft clip.

    >>> config = ObjectiveConfig(name="sapo")
    >>> gradient = jax.grad(lambda log_rho: sapo_surrogate(log_rho, log_rho, 1.0, config))
    >>> float(gradient(0.0)), round(float(gradient(jnp.log(9.0))), 4)  # that of -rho A at 1, almost none far off
    (-1.0, -0.0121)
    """
    tau_B1 = jnp.where(advantages_B1 > 0, config.tau_pos, config.tau_neg)
    return -(4 / tau_B1) * jax.nn.sigmoid(tau_B1 * (jnp.exp(log_rho_BS) - 1)) * advantages_B1


def reinforce_surrogate(log_rho_BS: jax.Array, logp_BS: jax.Array, advantages_B1: jax.Array, config: ObjectiveConfig):
    """-A logp (Williams 1992): no ratio, for ablation.

    >>> float(reinforce_surrogate(jnp.log(9.0), -2.0, 0.5, ObjectiveConfig(name="reinforce")))
    1.0
    """
    return -advantages_B1 * logp_BS


SURROGATES = {
    "clip": clip_surrogate,
    "cispo": cispo_surrogate,
    "sapo": sapo_surrogate,
    "reinforce": reinforce_surrogate,
}

# The importance ratios [low, high] beyond which the objective acts on a token's weight; none where there is no bound.
RATIO_BOUNDS = {
    "clip": lambda config: (1 - config.epsilon_low, 1 + config.epsilon_high),
    "cispo": lambda config: (None, config.epsilon_high),
    "sapo": lambda config: (None, None),
    "reinforce": lambda config: (None, None),
}

# Schulman, "Approximating KL divergence" (2020), with d = ref_logp - logp. All estimate KL(policy || reference) from
# samples of the policy; k1 is unbiased, k2 is low-variance, k3 is both and never negative. `kl_per_token` has an example.
KL_ESTIMATORS = {
    "k1": lambda d: -d,
    "k2": lambda d: 0.5 * jnp.square(d),
    "k3": lambda d: jnp.expm1(d) - d,
}


def surrogate(
    logp_BS: jax.Array, old_logp_BS: jax.Array, advantages_B: jax.Array, mask_BS: jax.Array, config: ObjectiveConfig
) -> jax.Array:
    """Policy loss of each token [B, S], nats times advantage; 0 where masked. A negative value is normal.

    >>> mask = jnp.array([[1.0, 1, 0]])
    >>> old = jnp.array([[-1.0, -2, jnp.nan]])
    >>> surrogate(old, old, jnp.array([0.5]), mask, ObjectiveConfig()).tolist()  # on-policy: the ratio is 1
    [[-0.5, -0.5, 0.0]]
    """
    chex.assert_equal_shape([logp_BS, old_logp_BS, mask_BS])
    chex.assert_shape(advantages_B, mask_BS.shape[:1])
    log_rho_BS = log_importance_ratio(logp_BS, old_logp_BS, mask_BS, config.importance_level)
    loss_BS = SURROGATES[config.name](log_rho_BS, masked(logp_BS, mask_BS), advantages_B[:, None], config)
    return masked(loss_BS, mask_BS)


def kl_per_token(logp_BS: jax.Array, ref_logp_BS: jax.Array, mask_BS: jax.Array, estimator: str) -> jax.Array:
    """KL estimate of each token [B, S] in nats; 0 where masked.

    >>> logp, ref, mask = jnp.array([[-1.0, -1.0]]), jnp.array([[-2.0, -1.0]]), jnp.ones((1, 2))
    >>> for estimator in ("k1", "k2", "k3"):
    ...     print(kl_per_token(logp, ref, mask, estimator).tolist())
    [[1.0, 0.0]]
    [[0.5, 0.0]]
    [[0.3679, 0.0]]
    """
    chex.assert_equal_shape([logp_BS, ref_logp_BS, mask_BS])
    return masked(KL_ESTIMATORS[estimator](masked(ref_logp_BS - logp_BS, mask_BS)), mask_BS)


def clipped(rho_BS: jax.Array, advantages_B1: jax.Array, config: ObjectiveConfig) -> tuple[jax.Array, jax.Array]:
    """Tokens [B, S] whose ratio is beyond the lower bound and A < 0, and beyond the upper bound and A > 0.

    >>> low, high = clipped(jnp.array([[0.5, 2.0]]), jnp.array([[1.0]]), ObjectiveConfig())
    >>> low.tolist(), high.tolist()
    ([[False, False]], [[False, True]])
    """
    low, high = RATIO_BOUNDS[config.name](config)
    none_BS = jnp.zeros(rho_BS.shape, bool)
    return (
        none_BS if low is None else (rho_BS < low) & (advantages_B1 < 0),
        none_BS if high is None else (rho_BS > high) & (advantages_B1 > 0),
    )


def mismatch_weights(old_logp_BS: jax.Array, sampling_logp_BS: jax.Array, mask_BS: jax.Array, cap: float) -> jax.Array:
    """min(exp(old_logp - sampling_logp), cap), constant under differentiation.

    Corrects tokens sampled by a program that rounds differently from the trainer (truncated importance sampling, Yao et
    al. 2025).

    >>> mismatch_weights(jnp.log(jnp.array([[0.5, 0.9]])), jnp.log(jnp.array([[0.25, 0.9]])), jnp.ones((1, 2)), 1.5).tolist()
    [[1.5, 1.0]]
    """
    chex.assert_equal_shape([old_logp_BS, sampling_logp_BS, mask_BS])
    ratio_BS = jnp.exp(masked(old_logp_BS - sampling_logp_BS, mask_BS))
    return jax.lax.stop_gradient(jnp.minimum(ratio_BS, cap))


# The factor of each row [B, 1] (or scalar) that the mask is multiplied by; B rows, mask over the whole optimiser batch.
AGGREGATIONS = {
    # Mean over each sequence's tokens, then over sequences (DeepSeekMath, Shao et al. 2024, eq. 3).
    "grpo": lambda mask_BS, max_completion: 1 / (token_count(mask_BS, axis=-1, keepdims=True) * mask_BS.shape[0]),
    # Mean over all tokens. TRL divides by each micro-batch's own tokens; weighting micro-batches by their token share is
    # the only form that gives the same update for every cut, and is then equal to `dapo` on one device.
    "bnpo": lambda mask_BS, max_completion: 1 / token_count(mask_BS),
    # Sum over tokens / tokens of the whole optimiser batch (DAPO, Yu et al. 2025, eq. 8).
    "dapo": lambda mask_BS, max_completion: 1 / token_count(mask_BS),
    # Sum / (B * cap): no length in the denominator (Dr. GRPO, Liu et al. 2025).
    "dr_grpo": lambda mask_BS, max_completion: 1 / (mask_BS.shape[0] * max_completion),
    # Sum over each sequence, mean over sequences (LUSPO 2026).
    "luspo": lambda mask_BS, max_completion: 1 / mask_BS.shape[0],
}


def aggregation_weights(mask_BS: jax.Array, aggregation: str, max_completion: int) -> jax.Array:
    """Weight of each token's loss [B, S]: the loss is `sum(weights * per_token)`.

    The mask is of the WHOLE optimiser batch, float; `max_completion` is the cap in tokens, for `dr_grpo`.

    >>> mask = jnp.array([[1.0, 1, 1, 1], [1, 0, 0, 0]])
    >>> aggregation_weights(mask, "grpo", 8).tolist()  # each sequence weighs the same
    [[0.125, 0.125, 0.125, 0.125], [0.5, 0.0, 0.0, 0.0]]
    >>> aggregation_weights(mask, "dr_grpo", 8).tolist()  # each token, and length is no reward
    [[0.0625, 0.0625, 0.0625, 0.0625], [0.0625, 0.0, 0.0, 0.0]]
    >>> float(aggregation_weights(mask, "dapo", 8).sum())
    1.0
    """
    chex.assert_rank(mask_BS, 2)
    return mask_BS * AGGREGATIONS[aggregation](mask_BS, max_completion)


def top_entropy_mask(entropy_BS: jax.Array, mask_BS: jax.Array, quantile: float) -> jax.Array:
    """1 on the tokens whose entropy is at or above the given quantile of the masked tokens (Wang et al. 2025).

    >>> top_entropy_mask(jnp.array([[0.1, 0.9, 0.3, 9.0]]), jnp.array([[1.0, 1, 1, 0]]), 0.5).tolist()
    [[0.0, 1.0, 1.0, 0.0]]
    """
    chex.assert_equal_shape([entropy_BS, mask_BS])
    return masked((entropy_BS >= masked_quantile(entropy_BS, mask_BS, quantile)).astype(mask_BS.dtype), mask_BS)


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
    new_beta = jnp.clip(beta * jnp.exp(error), config.beta_min, config.beta_max)
    return jnp.where(jnp.isfinite(kl_observed), new_beta, beta).astype(beta.dtype)


def beyond_guardrail(kl_observed: float | jax.Array, config: KLConfig) -> jax.Array:
    """Whether the KL per token is more than twice its target.

    >>> [bool(beyond_guardrail(kl, KLConfig(target=0.02))) for kl in (0.04, 0.05)]
    [False, True]
    """
    return jnp.asarray(kl_observed) > 2 * config.target
