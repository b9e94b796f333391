"""The loss of one optimiser step as one object, made from a batch and a config; and what that step saw, as metrics."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jax_grpo import objective
from jax_grpo.batch import Batch, GroupedTokens
from jax_grpo.config.learning import KLConfig, Learning
from jax_grpo.config.objectives import ClipCov, KlCov, ObjectiveConfig
from jax_grpo.lm_head.loops import IDLE, LEARNS, MEASURED
from jax_grpo.model import flops
from jax_grpo.objective import covariance, surrogates
from jax_grpo.objective.masking import TIED, masked, masked_mean, masked_quantile, token_count


@struct.dataclass
class TokenTerms:
    """The constants that each token's loss is made of; with its log-probability and entropy they give the loss.

    Rows of it are terms too, and so are its tokens by themselves (`by_token`), whose arrays and advantages are all [N]. The
    log-probabilities are as in `Batch`; where masked they may hold anything.
    """

    old_logp_BS: jax.Array | None  # None: the current ones, held constant
    ref_logp_BS: jax.Array | None  # None: there is no KL term
    sampling_logp_BS: jax.Array | None  # None: there is no mismatch to correct
    advantages_B: jax.Array
    mask_BS: jax.Array  # 1 on tokens that count, else 0
    weight_BS: jax.Array  # of aggregation, over the whole optimiser batch: the loss is a sum whatever the micro-batches
    policy_weight_BS: jax.Array  # of the policy term alone (the top-entropy mask); the KL term holds every token
    beta: jax.typing.ArrayLike  # KL coefficient, scalar
    bonus: jax.typing.ArrayLike  # weight of a token's entropy, scalar
    objective: ObjectiveConfig = struct.field(pytree_node=False)
    kl: KLConfig = struct.field(pytree_node=False)
    held_back_BS: jax.Array | None = None  # 1 on the tokens that Clip-Cov leaves out and KL-Cov penalises

    def loss(self, logp_BS: jax.Array, entropy_BS: jax.Array) -> jax.Array:
        """weight * (policy_weight * surrogate + beta * KL) - bonus * entropy of each token [B, S], nats."""
        chex.assert_equal_shape([logp_BS, entropy_BS, self.mask_BS])
        loss_BS = self.policy_loss(logp_BS)
        if self.ref_logp_BS is not None:
            loss_BS = loss_BS + self.beta * self.kl_loss(logp_BS)
        loss_BS = self.weight_BS * loss_BS
        if self.objective.has_bonus:
            loss_BS = loss_BS - self.bonus * masked(entropy_BS, self.mask_BS)
        return loss_BS

    @property
    def penalised_BS(self) -> jax.Array | None:
        """1 on the tokens that lose by their distance from the old policy (KL-Cov); None: no such objective."""
        return self.held_back_BS if self.objective.name == "kl_cov" else None

    def old_logp(self, logp_BS: jax.Array) -> jax.Array:
        """The cached old log-probabilities, or the current ones held constant when this is their first and only use."""
        return jax.lax.stop_gradient(logp_BS) if self.old_logp_BS is None else self.old_logp_BS

    def log_ratio(self, logp_BS: jax.Array) -> jax.Array:
        """log of the importance ratio [B, S], per token or per sequence as configured."""
        level = self.objective.importance_level
        return surrogates.log_importance_ratio(logp_BS, self.old_logp(logp_BS), self.mask_BS, level)

    def policy_loss(self, logp_BS: jax.Array) -> jax.Array:
        """policy_weight * surrogate of each token [B, S], the surrogate corrected for sampling by another program."""
        old_logp_BS, weight_BS = self.old_logp(logp_BS), self.policy_weight_BS
        if self.objective.mismatch_cap is not None and self.sampling_logp_BS is not None:
            weight_BS = weight_BS * objective.mismatch_weights(
                old_logp_BS, self.sampling_logp_BS, self.mask_BS, self.objective
            )
        loss_BS = surrogates.surrogate(logp_BS, old_logp_BS, self.advantages_B, self.mask_BS, self.objective)
        if isinstance(self.objective, KlCov) and self.penalised_BS is not None:
            log_rho_BS = self.log_ratio(logp_BS)
            # Of slope 0 about 0, where a first step is: rounding would lower or raise what was just sampled.
            away_BS = jnp.where(jnp.abs(log_rho_BS) > TIED, jnp.sign(log_rho_BS), 0)
            distance_BS = jax.lax.stop_gradient(away_BS) * log_rho_BS
            loss_BS += self.objective.cov_penalty * self.penalised_BS * distance_BS
        return weight_BS * loss_BS

    def kl_loss(self, logp_BS: jax.Array) -> jax.Array:
        """KL estimate of each token [B, S], weighted by its importance ratio if configured."""
        assert self.ref_logp_BS is not None, "`loss` calls this where there is a reference"
        kl_BS = objective.kl_per_token(logp_BS, self.ref_logp_BS, self.mask_BS, self.kl.estimator)
        return kl_BS * jnp.exp(self.log_ratio(logp_BS)) if self.kl.importance_corrected else kl_BS

    def by_token(self) -> "TokenTerms":
        """Of the tokens one after another, [B*S]: the same loss where none of it is of whole sequences."""
        advantages_BS = jnp.broadcast_to(self.advantages_B[:, None], self.mask_BS.shape)
        terms = dataclasses.replace(self, advantages_B=advantages_BS)
        return jax.tree.map(lambda x: x.reshape(-1) if jnp.ndim(x) else x, terms)

    def head_work(self) -> jax.Array:
        """What the LM head has to do for each token [B, S]: see `lm_head.loops`.

        A token whose loss is a constant 0 has no gradient: zero advantage (or outside the top-entropy mask) without KL term,
        entropy bonus and KL-Cov's penalty. Metrics still want its log-probability; those of masked tokens nobody wants.
        """
        real_BS = self.mask_BS != 0
        signal_BS = jnp.broadcast_to((self.advantages_B != 0)[:, None], real_BS.shape)
        if self.penalised_BS is not None:
            signal_BS |= self.penalised_BS != 0
        signal_BS &= self.policy_weight_BS != 0
        if self.ref_logp_BS is not None or self.objective.has_bonus:
            signal_BS = real_BS
        return jnp.where(signal_BS & real_BS, LEARNS, jnp.where(real_BS, MEASURED, IDLE))


def effective_mask(batch: Batch, settings: ObjectiveConfig, dtype) -> jax.Array:
    """Completion mask [B, S], without the completions cut at the cap when `objective.mask_truncated` is set."""
    mask_BS = batch.mask_BS.astype(dtype)
    return mask_BS * batch.stopped_B[:, None].astype(dtype) if settings.mask_truncated else mask_BS


def is_empty(batch: Batch, settings: ObjectiveConfig) -> jax.Array:
    """Whether the batch has no token to train on, bool scalar: its loss is 0 whatever the policy, and its means are of nothing."""
    return ~jnp.any(effective_mask(batch, settings, jnp.float32) != 0)


def token_terms(
    batch: Batch,
    beta: jax.typing.ArrayLike,
    learning: Learning,
    dtype,
    coefficient: jax.typing.ArrayLike | None = None,
    step: jax.typing.ArrayLike = 0,
) -> TokenTerms:
    """Terms of a whole optimiser batch, weights in `dtype`; micro-batches take rows of them.

    `coefficient` is that of the entropy bonus where it moves; None: the config's. `step` numbers what Clip-Cov draws.

    Aggregation, the entropy bonus, the threshold of the top-entropy mask and covariances are over the whole batch and so cannot be
    computed inside a micro-batch; the threshold and covariances are of the policy that made the rollout, which is cached.
    """
    settings = learning.objective
    mask_BS = effective_mask(batch, settings, dtype)
    policy_weight_BS, held_back_BS = mask_BS, None
    if isinstance(settings, ClipCov | KlCov):
        assert batch.old_logp_BS is not None, "the scoring pass caches what covariances are of"
        held_back_BS = covariance.held_back(
            batch.old_logp_BS, batch.advantages_B, mask_BS, settings, learning.seed, step
        )
    if settings.entropy_quantile > 0:
        assert batch.entropy_BS is not None, "the scoring pass caches entropies when entropy_quantile is set"
        policy_weight_BS = objective.top_entropy_mask(batch.entropy_BS, mask_BS, settings.entropy_quantile)
    if isinstance(settings, ClipCov) and held_back_BS is not None:
        policy_weight_BS = policy_weight_BS * (1 - held_back_BS)
    return TokenTerms(
        old_logp_BS=batch.old_logp_BS,
        ref_logp_BS=batch.ref_logp_BS,
        sampling_logp_BS=batch.sampling_logp_BS,
        advantages_B=batch.advantages_B,
        mask_BS=mask_BS,
        weight_BS=objective.aggregation_weights(mask_BS, settings.aggregation, learning.most_tokens),
        policy_weight_BS=policy_weight_BS,
        beta=beta,
        bonus=(settings.entropy_coefficient if coefficient is None else coefficient) / token_count(mask_BS),
        objective=settings,
        kl=learning.kl,
        held_back_BS=held_back_BS,
    )


def mean_kl(
    batch: Batch, logp_BS: jax.Array, ref_logp_BS: jax.Array, settings: ObjectiveConfig, estimator: str
) -> jax.Array:
    """Estimated KL to a reference, mean over the tokens that are trained on, nats; NaN where there are none."""
    mask_BS = effective_mask(batch, settings, logp_BS.dtype)
    kl_BS = objective.kl_per_token(logp_BS, ref_logp_BS, mask_BS, estimator)
    return jnp.where(is_empty(batch, settings), jnp.nan, masked_mean(kl_BS, mask_BS))


def metrics(
    batch: Batch, logp_BS: jax.Array, entropy_BS: jax.Array, learning: Learning, step: jax.typing.ArrayLike = 0
) -> dict[str, jax.Array]:
    """What one optimiser step saw, before it moved: scalars by name. Means are over masked tokens, NaN where there are none.

    `policy_loss` is the loss without the KL and entropy terms. Clip fractions count tokens where the clip is active: the
    ratio is beyond the bound on the side the advantage pushes to.
    """
    terms = token_terms(batch, 0.0, learning, logp_BS.dtype, step=step)
    mask_BS, empty = terms.mask_BS, is_empty(batch, learning.objective)
    log_rho_BS = terms.log_ratio(logp_BS)
    rho_BS = jnp.exp(log_rho_BS)
    low_BS, high_BS = surrogates.clipped(log_rho_BS, logp_BS, batch.advantages_B[:, None], learning.objective)

    def mean(x_BS: jax.Array) -> jax.Array:  # a KL or an entropy of 0 would be acted on
        return jnp.where(empty, jnp.nan, masked_mean(x_BS, mask_BS))

    out = {
        "policy_loss": jnp.sum(terms.weight_BS * terms.policy_loss(logp_BS)),
        "entropy": mean(entropy_BS),
        "ratio/mean": mean(rho_BS),
        # Stale old log-probabilities leave the mean at 1 (the policy that sampled averages it to 1), but not this.
        "ratio/deviation": mean(jnp.abs(rho_BS - 1)),
        "clip_fraction/low": mean(low_BS),
        "clip_fraction/high": mean(high_BS),
    }
    if terms.held_back_BS is not None:
        out["held_back"] = mean(terms.held_back_BS)
    if batch.ref_logp_BS is not None:
        kl_BS = objective.kl_per_token(logp_BS, batch.ref_logp_BS, mask_BS, learning.kl.estimator)
        out["kl/mean"] = mean(kl_BS)
        out["kl/p95"] = masked_quantile(kl_BS, mask_BS, 0.95)
    if batch.sampling_logp_BS is not None:
        mismatch_BS = jnp.abs(masked(terms.old_logp(logp_BS) - batch.sampling_logp_BS, mask_BS))
        out["logp_mismatch/mean"] = mean(mismatch_BS)
        out["logp_mismatch/max"] = jnp.where(empty, jnp.nan, jnp.max(mismatch_BS))
    return out


def update_work(batch: Batch, learning: Learning, window: int | None = None) -> tuple[flops.Work, flops.Work]:
    """What a pass over an iteration's batch has to compute, (forward, backward): of tokens with a gradient, and of those read.

    A completion whose loss is a constant 0 (no advantage, no KL term, no entropy bonus) needs no backward pass, and one that is
    masked whole not even a forward one. Programs skip some of that (`lm_head.loops`) and some not; MFU credits none of them for it.
    """
    assert isinstance(batch.tokens, GroupedTokens), "the trainer's own layout"
    work_BS = token_terms(batch, 0.0, learning, jnp.float32).head_work()
    work_PGC = np.asarray(work_BS).reshape(batch.tokens.completion_mask_PGC.shape)
    return _needed(batch.tokens, work_PGC != IDLE, window), _needed(batch.tokens, work_PGC == LEARNS, window)


def _needed(tokens: GroupedTokens, wanted_PGC: np.ndarray, window: int | None) -> flops.Work:
    """Work for these tokens alone: through the blocks goes every completion that has one, and its group's prompt."""
    completion_mask_PGC = np.asarray(tokens.completion_mask_PGC) * np.any(wanted_PGC, axis=-1, keepdims=True)
    prompt_mask_PT = np.asarray(tokens.prompt_mask_PT) * np.any(wanted_PGC, axis=(1, 2))[:, None]
    return flops.completions_work(prompt_mask_PT, completion_mask_PGC, window)._replace(predicted=int(wanted_PGC.sum()))
