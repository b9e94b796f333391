"""Token log-probabilities by way of the full logits: the plain implementation, and the reference of the others."""

import jax
import jax.numpy as jnp


def token_logprobs(
    hidden_BSH: jax.Array,
    embedding_VH: jax.Array,
    targets_BS: jax.Array,
    *,
    vocab_size: int,
    temperature: float,
) -> tuple[jax.Array, jax.Array]:
    """log softmax(h W^T / temperature) at the target, and the entropy of that distribution, both [B, S] in nats.

    Matmul in the hidden states' dtype, everything after it in at least float32. The target is picked by comparing column
    numbers: a gather's transpose would be a scatter over [B, S, V].

    Args:
        hidden_BSH: hidden states aligned with the tokens they predict.
        embedding_VH: tied embedding, padded to V rows.
        targets_BS: the tokens.
        vocab_size: columns beyond it take no probability.
        temperature: divides the logits; > 0.
    """
    dtype = jnp.promote_types(hidden_BSH.dtype, jnp.float32)
    logits_BSV = jnp.einsum("bsh,vh->bsv", hidden_BSH, embedding_VH.astype(hidden_BSH.dtype)).astype(dtype)
    column_V = jnp.arange(embedding_VH.shape[0])
    # A large negative number rather than -inf: probabilities underflow to 0 and p log p stays finite.
    logits_BSV = jnp.where(column_V < vocab_size, logits_BSV / temperature, -1e30)
    lse_BS = jax.nn.logsumexp(logits_BSV, axis=-1)
    target_BS = jnp.sum(jnp.where(column_V == targets_BS[..., None], logits_BSV, 0), axis=-1)
    probs_BSV = jnp.exp(logits_BSV - lse_BS[..., None])
    entropy_BS = lse_BS - jnp.sum(jnp.where(column_V < vocab_size, probs_BSV * logits_BSV, 0), axis=-1)
    return target_BS - lse_BS, entropy_BS
