"""Token log-probabilities by way of the full logits: the plain implementation, and the reference of the others."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jax_grpo.arrays.products import contract
from jax_grpo.lm_head.tiles import WHOLE, Tiling


def _matmul(stored: Any, hidden_BSH: jax.Array, embedding_VH: jax.Array) -> jax.Array:
    """h W^T [B, S, V]: operands in the hidden states' dtype, accumulated in at least float32, returned as `stored`.

    Rounding the logits to bfloat16 costs up to 0.25 nats where they are around -100, as GPT-2's are, and the rollout does
    not. The backward is written out because JAX's own transpose of this product would run both of its matmuls on float32
    copies; here they take the logits' gradient in the hidden states' dtype, and the embedding's gradient is accumulated in
    its own (float32 masters: never rounded to bfloat16 on the way).
    """
    weights_VH = embedding_VH.astype(hidden_BSH.dtype)
    return jnp.einsum("bsh,vh->bsv", hidden_BSH, weights_VH, preferred_element_type=stored)


_logits = jax.custom_vjp(_matmul, nondiff_argnums=(0,))


def _logits_forward(stored: Any, hidden_BSH: jax.Array, embedding_VH: jax.Array):
    return _logits(stored, hidden_BSH, embedding_VH), (hidden_BSH, embedding_VH)


def _logits_backward(stored: Any, saved, gradient_BSV: jax.Array) -> tuple[jax.Array, jax.Array]:
    hidden_BSH, embedding_VH = saved
    dtype = hidden_BSH.dtype
    gradient_NV, hidden_NH = (x.astype(dtype).reshape(-1, x.shape[-1]) for x in (gradient_BSV, hidden_BSH))
    to_hidden_NH = contract(gradient_NV, embedding_VH.astype(dtype), (1, 0), dtype)
    to_embedding_VH = contract(gradient_NV, hidden_NH, (0, 0), jnp.promote_types(dtype, jnp.float32))
    return to_hidden_NH.reshape(hidden_BSH.shape), to_embedding_VH.astype(embedding_VH.dtype)


_logits.defvjp(_logits_forward, _logits_backward)


def token_logprobs(
    hidden_BSH: jax.Array,
    embedding_VH: jax.Array,
    targets_BS: jax.Array,
    *,
    vocab_size: int,
    temperature: float,
    tiling: Tiling = WHOLE,
    vocabulary_axis: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """log softmax(h W^T / temperature) at the target, and the entropy of that distribution, both [B, S] in nats.

    Matmul operands in the hidden states' dtype, everything after it in at least float32. The target is picked by comparing column
    numbers: a gather's transpose would be a scatter over [B, S, V]. Reverse-mode differentiable in both arrays, through the
    entropy too; not in forward mode.

    Hidden states are aligned with the tokens they predict. Of the embedding's V rows, those from `vocab_size` on take no
    probability and no gradient. The temperature is > 0. Of the tiling only `logits_dtype` matters here: there is one tile.
    `vocabulary_axis` is the mesh's axis that the embedding's rows are cut over, within a program that is cut over it: then so are
    the logits, and the partitioner combines the sums over them.
    """
    logits_BSV = _logits(tiling.stored(hidden_BSH.dtype), hidden_BSH, embedding_VH)
    if vocabulary_axis is not None:
        logits_BSV = jax.lax.with_sharding_constraint(logits_BSV, PartitionSpec(None, None, vocabulary_axis))
    logits_BSV = logits_BSV.astype(jnp.promote_types(logits_BSV.dtype, jnp.float32))
    column_V = jnp.arange(embedding_VH.shape[0])
    # A large negative number rather than -inf: probabilities underflow to 0 and p log p stays finite.
    logits_BSV = jnp.where(column_V < vocab_size, logits_BSV / temperature, -1e30)
    lse_BS = jax.nn.logsumexp(logits_BSV, axis=-1)
    target_BS = jnp.sum(jnp.where(column_V == targets_BS[..., None], logits_BSV, 0), axis=-1)
    probs_BSV = jnp.exp(logits_BSV - lse_BS[..., None])
    entropy_BS = lse_BS - jnp.sum(jnp.where(column_V < vocab_size, probs_BSV * logits_BSV, 0), axis=-1)
    return target_BS - lse_BS, entropy_BS
