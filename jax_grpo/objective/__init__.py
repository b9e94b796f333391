"""The loss's parts as pure functions of arrays: KL estimators and their controller, mismatch weights, aggregations.

The policy loss itself is in `objective.surrogates`; both select with `objective.masking`.
A loss here is always `sum(weights_BS * per_token_BS)`: the aggregation is a table of weights computed once over the whole
optimiser batch, so that any cut into micro-batches sums to the same value and gradient. Masked positions may hold anything,
NaN included: they are replaced before the first exponential. Arrays of the wrong shape are refused when a function is called
or traced (AssertionError), not broadcast. Knows nothing of models, batches or text.
"""

import chex
import jax
import jax.numpy as jnp

from jax_grpo.config.learning import KLConfig
from jax_grpo.config.objectives import ObjectiveConfig
from jax_grpo.objective.masking import TIED, masked, masked_quantile, token_count

# Schulman, "Approximating KL divergence" (2020), with d = ref_logp - logp. All estimate KL(policy || reference) from
# samples of the policy; k1 is unbiased, k2 is low-variance, k3 is both and never negative. `kl_per_token` has an example.
KL_ESTIMATORS = {
    "k1": lambda d: -d,
    "k2": lambda d: 0.5 * jnp.square(d),
    "k3": lambda d: jnp.expm1(d) - d,
}


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


def mismatch_weights(
    old_logp_BS: jax.Array, sampling_logp_BS: jax.Array, mask_BS: jax.Array, config: ObjectiveConfig
) -> jax.Array:
    """exp(old_logp - sampling_logp) within its bounds [B, S], constant under differentiation.

    Corrects tokens sampled by a program that rounds differently from the trainer. `config.mismatch_mode`: of each token, or of the
    whole sequence (the product of its tokens', for each of them); beyond [mismatch_floor, mismatch_cap] cut to the bound
    (truncated importance sampling, Yao et al. 2025) or 0 (masked; of tokens with both bounds: IcePop).

    >>> old, sampling = jnp.log(jnp.array([[0.5, 0.9]])), jnp.log(jnp.array([[0.25, 0.9]]))
    >>> for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"):
    ...     config = ObjectiveConfig(name="clip", mismatch_cap=1.5, mismatch_mode=mode)
    ...     print(mismatch_weights(old, sampling, jnp.ones((1, 2)), config).tolist())
    [[1.5, 1.0]]
    [[0.0, 1.0]]
    [[1.5, 1.5]]
    [[0.0, 0.0]]
    """
    chex.assert_equal_shape([old_logp_BS, sampling_logp_BS, mask_BS])
    level, what = config.mismatch_mode.split("_")
    log_ratio_BS = masked(old_logp_BS - sampling_logp_BS, mask_BS)
    if level == "sequence":
        log_ratio_BS = jnp.broadcast_to(jnp.sum(log_ratio_BS, axis=-1, keepdims=True), mask_BS.shape)
    ratio_BS = jnp.exp(log_ratio_BS)
    floor, cap = config.mismatch_floor or 0.0, config.mismatch_cap
    assert cap is not None, "mismatch_cap is set"
    if what == "truncate":
        return jax.lax.stop_gradient(jnp.clip(ratio_BS, floor, cap))
    return jax.lax.stop_gradient(jnp.where((ratio_BS < floor) | (ratio_BS > cap), 0, ratio_BS))


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
    """1 on the tokens whose entropy is at or above the given quantile of the masked tokens (Wang et al. 2025), all ties included.

    >>> top_entropy_mask(jnp.array([[0.1, 0.9, 0.3, 9.0]]), jnp.array([[1.0, 1, 1, 0]]), 0.5).tolist()
    [[0.0, 1.0, 1.0, 0.0]]
    """
    chex.assert_equal_shape([entropy_BS, mask_BS])
    least = masked_quantile(entropy_BS, mask_BS, quantile) - TIED
    return masked((entropy_BS >= least).astype(mask_BS.dtype), mask_BS)


MAX_LOG_CHANGE = 0.2  # of beta in one step, either way


def adaptive_beta(beta: jax.Array, kl_observed: jax.Array, config: KLConfig) -> jax.Array:
    """beta * exp(clip((KL_obs - KL_target) / KL_target, -0.2, 0.2)), clamped to beta_bounds.

    Proportional control of the mean KL per token in nats (Ziegler et al. 2019, section 2.2, with an exponential step).
    A non-finite observation leaves beta as it is.

    >>> config = KLConfig(adaptive=True, target=0.02)
    >>> [round(float(adaptive_beta(jnp.float32(0.1), kl, config)), 4) for kl in (0.02, 0.021, 0.5, 0.0, jnp.nan)]
    [0.1, 0.1051, 0.1221, 0.0819, 0.1]
    """
    error = jnp.clip((kl_observed - config.target) / config.target, -MAX_LOG_CHANGE, MAX_LOG_CHANGE)
    new_beta = jnp.clip(beta * jnp.exp(error), *config.beta_bounds)
    return jnp.where(jnp.isfinite(kl_observed), new_beta, beta).astype(beta.dtype)


def applied_coefficient(coefficient: jax.Array, entropy_before: jax.Array, config: ObjectiveConfig) -> jax.Array:
    """The weight of the entropy bonus in a step: 0 where the step before saw more than the target (Skywork-OR1, He et al. 2025).

    As in TRL the entropy is of the step before, so that a step need not see its own: inf before the first.
    """
    assert config.entropy_target is not None, "entropy_target is set"
    return jnp.where(entropy_before <= config.entropy_target, coefficient, 0).astype(coefficient.dtype)


def next_coefficient(coefficient: jax.Array, entropy: jax.Array, config: ObjectiveConfig) -> jax.Array:
    """The coefficient behind a step that saw this mean entropy: up by `entropy_step` at or below the target, else down, in bounds.

    >>> config = ObjectiveConfig(name="clip", entropy_target=2.0, entropy_step=0.25, entropy_bounds=(0.0, 0.5))
    >>> [float(next_coefficient(jnp.float32(c), jnp.float32(h), config)) for c, h in ((0.0, 1.9), (0.5, 2.0), (0.125, 2.1))]
    [0.25, 0.5, 0.0]
    """
    assert config.entropy_target is not None, "entropy_target is set"
    step = jnp.where(entropy <= config.entropy_target, config.entropy_step, -config.entropy_step)
    moved = jnp.clip(coefficient + step, *config.entropy_bounds)
    return moved.astype(coefficient.dtype)


def beyond_guardrail(kl_observed: float | jax.Array, config: KLConfig) -> jax.Array:
    """Whether the KL per token is more than twice its target.

    >>> [bool(beyond_guardrail(kl, KLConfig(target=0.02))) for kl in (0.04, 0.05)]
    [False, True]
    """
    return jnp.asarray(kl_observed) > 2 * config.target
