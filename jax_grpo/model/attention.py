"""Causal attention in four forms: whole sequences, completions grouped by their prompt, and what a completion is continued by,
one token or several.

All but the first compute a prompt's keys and values once for its G completions. Knows nothing of blocks or of what is generated.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jax_grpo.mesh import over_tensor
from jax_grpo.model import decode_kernel
from jax_grpo.model.layers import GPT2Config, inwards, residual, wide_dtype


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


def join_rows(x_PTX: jax.Array, x_PGCX: jax.Array) -> jax.Array:
    """One row a token, [P T + P G C, ...]: those of the prompts, then those of the completions."""
    return jnp.concatenate([x_PTX.reshape(-1, *x_PTX.shape[2:]), x_PGCX.reshape(-1, *x_PGCX.shape[3:])])


def split_rows(x_RX: jax.Array, prompt_PT: jax.Array, completion_PGC: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The inverse of `join_rows`, [P, T, ...] and [P, G, C, ...]; the arrays give the sizes."""
    rest = x_RX.shape[1:]
    return (
        x_RX[: prompt_PT.size].reshape(*prompt_PT.shape, *rest),
        x_RX[prompt_PT.size :].reshape(*completion_PGC.shape, *rest),
    )


def _joint_softmax(sets: Sequence[tuple[jax.Array, jax.Array | bool]], head_dim: int) -> list[jax.Array]:
    """Attention weights of one softmax over several sets of keys, each given as its scores [..., S] and which of them are seen."""
    lowest = jnp.finfo(sets[0][0].dtype).min
    scores = jnp.concatenate([jnp.where(seen, scores, lowest) for scores, seen in sets], axis=-1)
    weights = jax.nn.softmax(scores / math.sqrt(head_dim), axis=-1)
    ends = list(itertools.accumulate(scores.shape[-1] for scores, _ in sets))
    return jnp.split(weights, ends[:-1], axis=-1)


class Past(NamedTuple):
    """What an episode's earlier turns have read, in any order (positions are in the embeddings), and which columns count."""

    caches: list[KV]  # per layer [P, G, N, S, D]
    mask_PGS: jax.Array  # bool


class Attention(nnx.Module):
    """Causal multi-head attention, `softmax(q k^T / sqrt(D)) v`, softmax in at least float32."""

    def __init__(self, config: GPT2Config, **how: Any):
        self.num_heads, self.head_dim = config.num_heads, config.head_dim
        self.c_attn = inwards(config, 3, **how)
        self.c_proj = residual(config, 1, **how)

    def qkv(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """[..., H] to three arrays [..., N, D]."""
        heads = (*x.shape[:-1], self.num_heads, self.head_dim)
        q, k, v = (over_tensor(x.reshape(heads), axis=-2) for x in jnp.split(self.c_attn(x), 3, axis=-1))
        return q, k, v

    def project(self, heads: jax.Array) -> jax.Array:
        """[..., N, D] to [..., H]."""
        return self.c_proj(heads.reshape(*heads.shape[:-2], self.num_heads * self.head_dim))

    def __call__(self, x_BTH: jax.Array, mask_B1TT: jax.Array) -> tuple[jax.Array, KV]:
        q_BTND, k_BTND, v_BTND = self.qkv(x_BTH)
        return self.project(self._causal(q_BTND, k_BTND, v_BTND, mask_B1TT)), KV(k_BTND, v_BTND)

    def grouped(
        self, x_RH: jax.Array, mask_P1TT: jax.Array, prompt_mask_PT: jax.Array, completion_mask_PGC: jax.Array
    ) -> jax.Array:
        """All tokens of all prompts and of all completions, rows [R, H] as `join_rows` lays them.

        A completion's token sees its prompt's shared keys and its own past. What is done to each row by itself is one product
        for both kinds.
        """
        (q_PTND, q_PGCND), (k_PTND, k_PGCND), (v_PTND, v_PGCND) = (
            split_rows(x_RND, prompt_mask_PT, completion_mask_PGC) for x_RND in self.qkv(x_RH)
        )
        out_PTND = self._causal(q_PTND, k_PTND, v_PTND, mask_P1TT)
        causal_CC = jnp.tril(jnp.ones((q_PGCND.shape[2], q_PGCND.shape[2]), bool))
        own_PGCS = causal_CC & completion_mask_PGC.astype(bool)[:, :, None, :]

        def scores(equation: str, k: jax.Array) -> jax.Array:
            return jnp.einsum(equation, q_PGCND, k, preferred_element_type=wide_dtype(q_PGCND))

        sets = [
            (scores("pgcnd,ptnd->pgnct", k_PTND), prompt_mask_PT.astype(bool)[:, None, None, None, :]),
            (scores("pgcnd,pgsnd->pgncs", k_PGCND), own_PGCS[:, :, None]),
        ]
        on_prompt, on_own = (w.astype(q_PGCND.dtype) for w in _joint_softmax(sets, self.head_dim))
        out_PGCND = jnp.einsum("pgnct,ptnd->pgcnd", on_prompt, v_PTND)
        out_PGCND += jnp.einsum("pgncs,pgsnd->pgcnd", on_own, v_PGCND)
        return self.project(join_rows(out_PTND, out_PGCND))

    def _causal(self, q_BTND: jax.Array, k_BTND: jax.Array, v_BTND: jax.Array, mask_B1TT: jax.Array) -> jax.Array:
        """Heads' outputs [B, T, N, D] where each token sees what the mask lets it."""
        # Written out: `jax.nn.dot_product_attention` takes its softmax in float32 even for float64 inputs.
        dtype = wide_dtype(q_BTND)
        scores_BNTS = jnp.einsum("btnd,bsnd->bnts", q_BTND, k_BTND, preferred_element_type=dtype)
        scores_BNTS = jnp.where(mask_B1TT, scores_BNTS / math.sqrt(self.head_dim), jnp.finfo(dtype).min)
        weights_BNTS = jax.nn.softmax(scores_BNTS, axis=-1).astype(q_BTND.dtype)
        return jnp.einsum("bnts,bsnd->btnd", weights_BNTS, v_BTND)

    def decode(
        self,
        x_PGH: jax.Array,
        prompt: KV,
        prompt_mask_PT: jax.Array,
        own: Sequence[KV],
        step: jax.Array,
        past: KV | None = None,
        past_mask_PGS: jax.Array | None = None,
        kernel: bool = False,
    ) -> tuple[jax.Array, KV]:
        """One token per completion: attends to the shared prompt cache, to earlier turns, and to the completion's tokens 0..step.

        The completion's cache comes in chunks; the token is written into the last, which is returned. With `kernel`, one Pallas
        kernel does all of it, where there is one chunk and no earlier turn.
        """
        *full, last = own
        if kernel and not full and past is None:
            bias_X = self.c_attn.bias[...]  # pyright: ignore[reportOptionalSubscript]
            out_PGH, *grown = decode_kernel.decode(
                self.c_attn.product(x_PGH), bias_X, prompt.k, prompt.v, prompt_mask_PT, last.k, last.v, step
            )
            return self.c_proj(out_PGH), KV(*grown)
        q_PGND, k_PGND, v_PGND = self.qkv(x_PGH)
        place = step - sum(chunk.k.shape[3] for chunk in full)
        last = KV(
            jax.lax.dynamic_update_slice_in_dim(last.k, k_PGND[:, :, :, None], place, axis=3),
            jax.lax.dynamic_update_slice_in_dim(last.v, v_PGND[:, :, :, None], place, axis=3),
        )

        def scores(keys: str, k: jax.Array) -> jax.Array:
            return jnp.einsum(f"pgnd,{keys}->pgns", q_PGND, k, preferred_element_type=wide_dtype(q_PGND))

        chunks, seen = [*full, last], [*[True] * len(full), jnp.arange(last.k.shape[3]) <= place]
        sets = [(scores("pnsd", prompt.k), prompt_mask_PT.astype(bool)[:, None, None, :])]
        if past is not None and past_mask_PGS is not None:
            chunks, seen = [past, *chunks], [past_mask_PGS[:, :, None], *seen]
        sets += [(scores("pgnsd", chunk.k), s) for chunk, s in zip(chunks, seen, strict=True)]
        on_prompt, *on_own = (w.astype(x_PGH.dtype) for w in _joint_softmax(sets, self.head_dim))
        out_PGND = jnp.einsum("pgns,pnsd->pgnd", on_prompt, prompt.v)
        for weights_PGNS, chunk in zip(on_own, chunks, strict=True):
            out_PGND += jnp.einsum("pgns,pgnsd->pgnd", weights_PGNS, chunk.v)
        return self.project(out_PGND), last

    def extend(
        self,
        x_PGEH: jax.Array,
        mask_PGE: jax.Array,
        prompt: KV,
        prompt_mask_PT: jax.Array,
        past: KV,
        past_mask_PGS: jax.Array,
    ) -> tuple[jax.Array, KV]:
        """Several tokens at once that follow what a completion has read; also returns their cache [P, G, N, E, D]."""
        q_PGNED, k_PGNED, v_PGNED = (jnp.swapaxes(x, 2, 3) for x in self.qkv(x_PGEH))
        length = q_PGNED.shape[3]
        own_PGEE = jnp.tril(jnp.ones((length, length), bool)) & mask_PGE.astype(bool)[:, :, None, :]

        def scores(keys: str, k: jax.Array) -> jax.Array:
            return jnp.einsum(f"pgned,{keys}->pgnes", q_PGNED, k, preferred_element_type=wide_dtype(q_PGNED))

        sets = [
            (scores("pnsd", prompt.k), prompt_mask_PT.astype(bool)[:, None, None, None, :]),
            (scores("pgnsd", past.k), past_mask_PGS[:, :, None, None, :]),
            (scores("pgnsd", k_PGNED), own_PGEE[:, :, None]),
        ]
        on_prompt, *on_own = (w.astype(x_PGEH.dtype) for w in _joint_softmax(sets, self.head_dim))
        out_PGNED = jnp.einsum("pgnes,pnsd->pgned", on_prompt, prompt.v)
        for weights_PGNES, v_PGNSD in zip(on_own, (past.v, v_PGNED), strict=True):
            out_PGNED += jnp.einsum("pgnes,pgnsd->pgned", weights_PGNES, v_PGNSD)
        return self.project(jnp.swapaxes(out_PGNED, 2, 3)), KV(k_PGNED, v_PGNED)
