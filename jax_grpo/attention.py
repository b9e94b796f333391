"""Causal attention in three forms: whole sequences, completions grouped by their prompt, and one token a completion.

The last two compute a prompt's keys and values once for its G completions. Knows nothing of blocks or of what is generated.
"""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jax_grpo.layers import GPT2Config, Linear, normal, wide_dtype


class KV(NamedTuple):
    """Keys and values of one layer. In a cache [P, N, T, D] (prompts) or [P, G, N, S, D] (S tokens of each completion).

    Heads come before tokens there, so that the products of one token with its past read memory in order.
    """

    k: jax.Array
    v: jax.Array


def causal_mask(attention_mask_BT: jax.Array) -> jax.Array:
    """[B, 1, T, T] boolean: query t sees key s when s <= t and s is a real token."""
    length = attention_mask_BT.shape[-1]
    causal_TT = jnp.tril(jnp.ones((length, length), bool))
    return causal_TT[None, None] & attention_mask_BT.astype(bool)[:, None, None, :]


def _joint_softmax(parts: Sequence[tuple[jax.Array, jax.Array | bool]], head_dim: int) -> list[jax.Array]:
    """Attention weights of one softmax over several sets of keys, each given as its scores [..., S] and which of them are seen."""
    lowest = jnp.finfo(parts[0][0].dtype).min
    scores = jnp.concatenate([jnp.where(seen, scores, lowest) for scores, seen in parts], axis=-1)
    weights = jax.nn.softmax(scores / math.sqrt(head_dim), axis=-1)
    ends = list(itertools.accumulate(scores.shape[-1] for scores, _ in parts))
    return jnp.split(weights, ends[:-1], axis=-1)


class Attention(nnx.Module):
    """Causal multi-head attention, `softmax(q k^T / sqrt(D)) v`, softmax in at least float32."""

    def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs, param_dtype, compute_dtype):
        width = config.hidden_size
        self.num_heads, self.head_dim = config.num_heads, config.head_dim
        self.c_attn = Linear(
            width, 3 * width, kernel_init=normal(0.02), dtype=compute_dtype, param_dtype=param_dtype, rngs=rngs
        )
        # GPT-2 scales the residual projections by 1/sqrt(2 L): 2 L of them add up in the residual stream.
        self.c_proj = Linear(
            width,
            width,
            kernel_init=normal(0.02 / math.sqrt(2 * config.num_layers)),
            dtype=compute_dtype,
            param_dtype=param_dtype,
            rngs=rngs,
        )

    def qkv(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """[..., H] to three arrays [..., N, D]."""
        q, k, v = (
            part.reshape(*part.shape[:-1], self.num_heads, self.head_dim)
            for part in jnp.split(self.c_attn(x), 3, axis=-1)
        )
        return q, k, v

    def project(self, heads: jax.Array) -> jax.Array:
        """[..., N, D] to [..., H]."""
        return self.c_proj(heads.reshape(*heads.shape[:-2], self.num_heads * self.head_dim))

    def __call__(self, x_BTH: jax.Array, mask_B1TT: jax.Array) -> tuple[jax.Array, KV]:
        q_BTND, k_BTND, v_BTND = self.qkv(x_BTH)
        # Written out: `jax.nn.dot_product_attention` takes its softmax in float32 even for float64 inputs.
        dtype = wide_dtype(x_BTH)
        scores_BNTS = jnp.einsum("btnd,bsnd->bnts", q_BTND, k_BTND, preferred_element_type=dtype)
        scores_BNTS = jnp.where(mask_B1TT, scores_BNTS / math.sqrt(self.head_dim), jnp.finfo(dtype).min)
        weights_BNTS = jax.nn.softmax(scores_BNTS, axis=-1).astype(x_BTH.dtype)
        out_BTND = jnp.einsum("bnts,bsnd->btnd", weights_BNTS, v_BTND)
        return self.project(out_BTND), KV(k_BTND, v_BTND)

    def grouped(
        self, x_PGCH: jax.Array, prompt: KV, prompt_mask_PT: jax.Array, completion_mask_PGC: jax.Array
    ) -> jax.Array:
        """All tokens of all completions at once: each sees its prompt's shared keys [P, T, N, D] and its own past."""
        q, k, v = self.qkv(x_PGCH)
        causal_CC = jnp.tril(jnp.ones((q.shape[2], q.shape[2]), bool))
        own_PGCS = causal_CC & completion_mask_PGC.astype(bool)[:, :, None, :]
        weights = _joint_softmax(
            [
                (
                    jnp.einsum("pgcnd,ptnd->pgnct", q, prompt.k, preferred_element_type=wide_dtype(q)),
                    prompt_mask_PT.astype(bool)[:, None, None, None, :],
                ),
                (
                    jnp.einsum("pgcnd,pgsnd->pgncs", q, k, preferred_element_type=wide_dtype(q)),
                    own_PGCS[:, :, None],
                ),
            ],
            self.head_dim,
        )
        on_prompt, on_own = (w.astype(q.dtype) for w in weights)
        return self.project(
            jnp.einsum("pgnct,ptnd->pgcnd", on_prompt, prompt.v) + jnp.einsum("pgncs,pgsnd->pgcnd", on_own, v)
        )

    def decode(
        self, x_PGH: jax.Array, prompt: KV, prompt_mask_PT: jax.Array, own: Sequence[KV], step: jax.Array
    ) -> tuple[jax.Array, KV]:
        """One token per completion: attends to the shared prompt cache and to the completion's tokens 0..step.

        The completion's cache comes in chunks; the token is written into the last, which is returned.
        """
        q_PGND, k_PGND, v_PGND = self.qkv(x_PGH)
        *full, last = own
        place = step - sum(chunk.k.shape[3] for chunk in full)
        last = KV(
            jax.lax.dynamic_update_slice_in_dim(last.k, k_PGND[:, :, :, None], place, axis=3),
            jax.lax.dynamic_update_slice_in_dim(last.v, v_PGND[:, :, :, None], place, axis=3),
        )

        def scores(keys: str, k: jax.Array) -> jax.Array:
            return jnp.einsum(f"pgnd,{keys}->pgns", q_PGND, k, preferred_element_type=wide_dtype(q_PGND))

        seen = [True] * len(full) + [jnp.arange(last.k.shape[3]) <= place]
        chunks = [*full, last]
        weights = _joint_softmax(
            [
                (scores("pnsd", prompt.k), prompt_mask_PT.astype(bool)[:, None, None, :]),
                *((scores("pgnsd", chunk.k), s) for chunk, s in zip(chunks, seen, strict=True)),
            ],
            self.head_dim,
        )
        on_prompt, *on_own = (w.astype(x_PGH.dtype) for w in weights)
        out_PGND = jnp.einsum("pgns,pnsd->pgnd", on_prompt, prompt.v)
        for weights_PGNS, chunk in zip(on_own, chunks, strict=True):
            out_PGND += jnp.einsum("pgns,pgnsd->pgnd", weights_PGNS, chunk.v)
        return self.project(out_PGND), last
