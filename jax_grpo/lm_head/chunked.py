"""Token log-probabilities and fused losses, tile by tile: never a [T, V] array (FLCE, Hsu et al. 2024; Cut Cross-Entropy 2024).

`token_logprobs` is for any loss on top and recomputes the logits in the backward; `fused_loss` is for a loss that is a sum
over tokens and makes its gradients in the forward, where the logits are anyway. Knows nothing of objectives.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jax_grpo.lm_head import loops
from jax_grpo.lm_head.loops import Plan, Tokens
from jax_grpo.lm_head.tiles import RowStatistics, TokenLoss


def _measure(plan: Plan, hidden_NH, embedding_VH, targets_N) -> RowStatistics:
    work_N = jnp.full(targets_N.shape, loops.MEASURED)
    return loops.statistics(plan, Tokens.of(hidden_NH, embedding_VH, targets_N, work_N))


_statistics = jax.custom_vjp(_measure, nondiff_argnums=(0,))


def _statistics_forward(plan: Plan, hidden_NH, embedding_VH, targets_N):
    statistics = _statistics(plan, hidden_NH, embedding_VH, targets_N)
    return statistics, (hidden_NH, embedding_VH, targets_N, statistics)


def _linear(rows, logp_C, entropy_C):
    to_logp_C, to_entropy_C = rows
    return to_logp_C * logp_C + to_entropy_C * entropy_C


def _statistics_backward(plan: Plan, saved, cotangents: RowStatistics):
    hidden_NH, embedding_VH, targets_N, statistics = saved
    rows = cotangents.logp, cotangents.entropy
    work_N = jnp.where((rows[0] != 0) | (rows[1] != 0), loops.LEARNS, loops.IDLE)
    tokens = Tokens.of(hidden_NH, embedding_VH, targets_N, work_N)
    gradients, _ = loops.gradients(plan, tokens, _linear, rows, statistics)
    return gradients.to_hidden_NH, gradients.to_embedding_VH, None


_statistics.defvjp(_statistics_forward, _statistics_backward)


def token_logprobs(
    hidden_BSH: jax.Array, embedding_VH: jax.Array, targets_BS: jax.Array, **settings: Any
) -> tuple[jax.Array, jax.Array]:
    """As `materialised.token_logprobs`: log-probabilities of the targets and entropies, [B, S] in nats; settings: `Plan.of`.

    The backward makes each tile of logits again (four matmuls in all), and leaves out the tokens whose cotangents are 0.
    """
    plan = Plan.of(**settings)
    hidden_NH = hidden_BSH.reshape(-1, hidden_BSH.shape[-1])
    statistics = _statistics(plan, hidden_NH, jnp.asarray(embedding_VH), jnp.asarray(targets_BS, jnp.int32).reshape(-1))
    return statistics.logp.reshape(targets_BS.shape), statistics.entropy.reshape(targets_BS.shape)


def _sum(plan: Plan, token_loss: TokenLoss, hidden_NH, embedding_VH, operands) -> tuple[jax.Array, RowStatistics]:
    """The loss alone, for a call that is not differentiated."""
    targets_N, work_N, rows = operands
    statistics = loops.statistics(plan, Tokens.of(hidden_NH, embedding_VH, targets_N, work_N))
    loss_N = token_loss(rows, statistics.logp, statistics.entropy)
    return jnp.sum(jnp.where(work_N == loops.LEARNS, loss_N, 0)), statistics


_fused = jax.custom_vjp(_sum, nondiff_argnums=(0, 1))


def _fused_forward(plan: Plan, token_loss: TokenLoss, hidden_NH, embedding_VH, operands):
    targets_N, work_N, rows = operands
    tokens = Tokens.of(hidden_NH, embedding_VH, targets_N, work_N)
    gradients, statistics = loops.gradients(plan, tokens, token_loss, rows)
    return (gradients.loss, statistics), (gradients.to_hidden_NH, gradients.to_embedding_VH)


def _fused_backward(plan: Plan, token_loss: TokenLoss, saved, cotangents):
    scale, _ = cotangents
    return *(gradient * scale.astype(gradient.dtype) for gradient in saved), None


_fused.defvjp(_fused_forward, _fused_backward)


def fused_loss(
    hidden_BSH: jax.Array,
    embedding_VH: jax.Array,
    targets_BS: jax.Array,
    work_BS: jax.Array,
    token_loss: TokenLoss,
    rows: Any,
    **settings: Any,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(`sum(token_loss)`, logp_BS, entropy_BS), and its gradients on the way (three matmuls; Liger's FLCE, Hsu et al. 2024).

    All are in at least float32. Only the scalar is differentiable, once, in reverse mode, in hidden states and embedding. A
    token's loss must depend on that token alone and its weight in the sum must be fixed beforehand: see `TokenLoss`. It is called
    with N rows of the arrays [B*S, ...] of `rows`, and with its scalars, N not always B*S.

    `work_BS` is `loops.LEARNS`; `loops.MEASURED` for a token whose loss is a constant 0; `loops.IDLE` for one whose
    log-probability and entropy are not needed either, and returned as 0. A tile of idle tokens costs nothing. Settings: `Plan.of`.
    """
    plan = Plan.of(**settings)
    operands = (jnp.asarray(targets_BS, jnp.int32).reshape(-1), work_BS.reshape(-1), rows)
    hidden_NH = hidden_BSH.reshape(-1, hidden_BSH.shape[-1])
    loss, statistics = _fused(plan, token_loss, hidden_NH, embedding_VH, jax.lax.stop_gradient(operands))
    logp_BS, entropy_BS = (jax.lax.stop_gradient(x).reshape(targets_BS.shape) for x in statistics[:2])
    return loss, logp_BS, entropy_BS
