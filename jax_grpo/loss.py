"""A batch and a config put into the objective: effective masks, per-token weights, losses and metrics of one optimiser step."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_grpo import objective
from jax_grpo.batch import Batch
from jax_grpo.config import Config
from jax_grpo.lm_head.loops import IDLE, LEARNS, MEASURED


def effective_mask(batch: Batch, config: Config, dtype) -> jax.Array:
    """Completion mask [B, S], without the completions cut at the cap when `objective.mask_truncated` is set."""
    mask_BS = batch.mask_BS.astype(dtype)
    return mask_BS * batch.stopped_B[:, None].astype(dtype) if config.objective.mask_truncated else mask_BS


def is_empty(batch: Batch, config: Config) -> jax.Array:
    """Whether the batch has no token to train on, bool scalar: its loss is 0 whatever the policy, and its means are of nothing."""
    return ~jnp.any(effective_mask(batch, config, jnp.float32) != 0)


def token_weights(batch: Batch, config: Config, dtype) -> tuple[jax.Array, jax.Array]:
    """(aggregation weight, policy weight) of each token of the whole optimiser batch, [B, S]; see `objective`.

    The policy weight holds the top-entropy mask, whose threshold is over the whole batch and so cannot be found inside a
    micro-batch: it uses the cached entropies of the policy that made the rollout.
    """
    mask_BS = effective_mask(batch, config, dtype)
    weights_BS = objective.aggregation_weights(mask_BS, config.objective.aggregation, config.rollout.max_new_tokens)
    policy_BS = mask_BS
    if config.objective.entropy_quantile > 0:
        assert batch.entropy_BS is not None, "the scoring pass caches entropies when entropy_quantile is set"
        policy_BS = objective.top_entropy_mask(batch.entropy_BS, mask_BS, config.objective.entropy_quantile)
    return weights_BS, policy_BS


def losses(
    batch: Batch, logp_BS: jax.Array, policy_weights_BS: jax.Array, beta: jax.Array, config: Config
) -> jax.Array:
    """Per-token loss [B, S] of a (micro-)batch given the current log-probabilities."""
    mask_BS = effective_mask(batch, config, logp_BS.dtype)
    old_logp_BS = old_logprobs(batch, logp_BS)
    if config.objective.mismatch_cap is not None and batch.sampling_logp_BS is not None:
        policy_weights_BS = policy_weights_BS * objective.mismatch_weights(
            old_logp_BS, batch.sampling_logp_BS, mask_BS, config.objective.mismatch_cap
        )
    return objective.token_losses(
        logp_BS,
        old_logp_BS,
        batch.ref_logp_BS,
        batch.advantages_B,
        mask_BS,
        policy_weights_BS,
        beta,
        config.objective,
        config.kl,
    )


class Weighted(NamedTuple):
    """A (micro-)batch with what its tokens weigh in the optimiser batch's loss, each [B, S]; rows of it are one too.

    Attributes:
        batch: its log-probabilities, advantages and masks; its tokens are not read.
        weights: of aggregation.
        policy_weights: of the policy term alone.
        mask: effective mask, for the entropy bonus.
    """

    batch: Batch
    weights: jax.Array
    policy_weights: jax.Array
    mask: jax.Array

    def tokens_as_rows(self) -> "Weighted":
        """Every token a sequence of length 1, [B*S, 1]: what a loss that is local to a token can be asked about."""
        length = self.mask.shape[1]
        rows = jax.tree.map(
            lambda x: jnp.repeat(x, length) if x.ndim == 1 else x.reshape(-1, 1),
            self._replace(batch=dataclasses.replace(self.batch, tokens=None)),
        )
        return rows


def weighted_losses(
    part: Weighted, shared: tuple[jax.Array, jax.Array], logp_BS: jax.Array, entropy_BS: jax.Array, config: Config
) -> jax.Array:
    """What each token [B, S] adds to the loss of the optimiser batch; `shared` is beta and the bonus per token of entropy."""
    beta, bonus = shared
    loss_BS = part.weights * losses(part.batch, logp_BS, part.policy_weights, beta, config)
    if config.objective.entropy_coefficient:
        loss_BS = loss_BS - bonus * objective.masked(entropy_BS, part.mask)
    return loss_BS


def is_local_to_a_token(config: Config) -> bool:
    """Whether no token's loss depends on another's log-probability."""
    return config.objective.importance_level == "token"


def work(part: Weighted, config: Config) -> jax.Array:
    """What the head has to do for each token [B, S]: see `lm_head.loops`.

    A token whose loss is a constant 0 has no gradient: zero advantage (or outside the top-entropy mask) without KL term and
    entropy bonus. Metrics still want its log-probability; those of masked tokens nobody wants.
    """
    signal_BS = (part.policy_weights != 0) & (part.batch.advantages_B != 0)[:, None]
    if part.batch.ref_logp_BS is not None or config.objective.entropy_coefficient:
        signal_BS = part.mask != 0
    measured_BS = jnp.where(part.mask != 0, MEASURED, IDLE)
    return jnp.where(signal_BS & (part.mask != 0), LEARNS, measured_BS)


def old_logprobs(batch: Batch, logp_BS: jax.Array) -> jax.Array:
    """The cached old log-probabilities, or the current ones held constant when this is their first and only use."""
    return jax.lax.stop_gradient(logp_BS) if batch.old_logp_BS is None else batch.old_logp_BS


def metrics(batch: Batch, logp_BS: jax.Array, entropy_BS: jax.Array, config: Config) -> dict[str, jax.Array]:
    """What one optimiser step saw, before it moved: scalars by name. Means are over masked tokens, NaN where there are none.

    `policy_loss` is the loss without the KL and entropy terms. Clip fractions count tokens where the clip is active: the
    ratio is beyond the bound on the side the advantage pushes to.
    """
    mask_BS = effective_mask(batch, config, logp_BS.dtype)
    old_logp_BS = old_logprobs(batch, logp_BS)
    weights_BS, policy_weights_BS = token_weights(batch, config, logp_BS.dtype)
    without_kl = dataclasses.replace(batch, ref_logp_BS=None)
    policy_loss_BS = losses(without_kl, logp_BS, policy_weights_BS, jnp.zeros(()), config)
    log_rho_BS = objective.log_importance_ratio(logp_BS, old_logp_BS, mask_BS, config.objective.importance_level)
    rho_BS = jnp.exp(log_rho_BS)
    low_BS, high_BS = objective.clipped(rho_BS, batch.advantages_B[:, None], config.objective)
    empty = is_empty(batch, config)

    def mean(x_BS: jax.Array) -> jax.Array:  # a KL or an entropy of 0 would be acted on
        return jnp.where(empty, jnp.nan, objective.masked_mean(x_BS, mask_BS))

    out = {
        "policy_loss": jnp.sum(weights_BS * policy_loss_BS),
        "entropy": mean(entropy_BS),
        "ratio/mean": mean(rho_BS),
        # Stale old log-probabilities leave the mean at 1 (the policy that sampled averages it to 1), but not this.
        "ratio/deviation": mean(jnp.abs(rho_BS - 1)),
        "clip_fraction/low": mean(low_BS),
        "clip_fraction/high": mean(high_BS),
    }
    if batch.ref_logp_BS is not None:
        kl_BS = objective.kl_per_token(logp_BS, batch.ref_logp_BS, mask_BS, config.kl.estimator)
        out["kl/mean"] = mean(kl_BS)
        out["kl/p95"] = objective.masked_quantile(kl_BS, mask_BS, 0.95)
    if batch.sampling_logp_BS is not None:
        mismatch_BS = jnp.abs(objective.masked(old_logp_BS - batch.sampling_logp_BS, mask_BS))
        out["logp_mismatch/mean"] = mean(mismatch_BS)
        out["logp_mismatch/max"] = jnp.where(empty, jnp.nan, jnp.max(mismatch_BS))
    return out
