"""Attention of one new token a completion as a single Pallas-Triton kernel for NVIDIA cards (sm_80 on).

Over the shared prompt, the completion's own tokens so far and the new one, with one online softmax (Milakov & Gimelshein 2018) in
at least float32; the new token's keys and values are written into the cache in place. Interpreted where the program is compiled
for the CPU: for tests, not for speed. `Decoder.decode` does the same in a dozen XLA kernels.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jax_grpo import triton
from jax_grpo.model.attention import KV
from jax_grpo.triton import plt

BLOCK = 32  # keys that one program holds at a time; with 64 numbers each, 16 a thread of 128


def refusal(head_dim: int) -> str | None:
    """Why the kernel cannot do attention of such heads, or None."""
    if missing := triton.refusal(or_jax_triton=True):
        return missing
    return f"needs heads of a power of two columns, not {head_dim}" if head_dim & (head_dim - 1) else None


def decode(
    qkv_PGXD: jax.Array,
    bias_XD: jax.Array | None,
    prompt_PKTD: KV,
    prompt_mask_PT: jax.Array,
    own_PGKSD: KV,
    place: jax.Array,
    *,
    divisor: float,
    window: int | None,
) -> tuple[jax.Array, KV]:
    """Heads' outputs [P, G, N, D], and the completions' keys and values with the new ones in column `place`.

    `qkv_PGXD` is the tokens' N queries, K keys and K values, X = N + 2 K; the first N / K queries read the first key, and so on.
    `bias_XD`, if any, is still to be added. A query sees the real tokens of its left-padded prompt, columns before `place` and its
    own token, of these the last `window`; scores are q k / divisor.
    """
    if triton.backend() == "jax_triton":
        from jax_grpo.triton import kernels

        given = (qkv_PGXD, bias_XD, prompt_PKTD, prompt_mask_PT, own_PGKSD, place)
        out_PGND, *grown = kernels.decode(*given, divisor=divisor, window=window)
        return out_PGND, KV(*grown)
    (prompts, group, columns, head_dim), kv_heads = qkv_PGXD.shape, own_PGKSD.k.shape[2]
    heads = columns - 2 * kv_heads
    queries = heads // kv_heads
    rows = (lambda n: n), (lambda n: heads + n // queries), (lambda n: heads + kv_heads + n // queries)
    news = [pl.BlockSpec((None, None, None, head_dim), lambda p, g, n, row=row: (p, g, row(n), 0)) for row in rows]
    biases = [pl.BlockSpec((None, head_dim), lambda p, g, n, row=row: (row(n), 0)) for row in rows]
    prompt = pl.BlockSpec((None, None, *prompt_PKTD.k.shape[2:]), lambda p, g, n: (p, n // queries, 0, 0))
    mask = pl.BlockSpec((None, prompt_mask_PT.shape[1]), lambda p, g, n: (p, 0))
    own = pl.BlockSpec((None, None, None, *own_PGKSD.k.shape[3:]), lambda p, g, n: (p, g, n // queries, 0, 0))
    operands = (*[qkv_PGXD] * 3, *prompt_PKTD, prompt_mask_PT, *own_PGKSD, place)
    specs = [*news, prompt, prompt, mask, own, own, pl.BlockSpec((), lambda p, g, n: ())]
    if bias_XD is not None:
        operands, specs = (*operands, *[bias_XD] * 3), [*specs, *biases]
    out = jax.ShapeDtypeStruct((prompts, group, heads, head_dim), qkv_PGXD.dtype)
    out_PGND, *grown = triton.call(
        functools.partial(_kernel, divisor=divisor, window=window),
        "decode_attention",
        operands,
        warps=4,
        stages=2,
        grid=(prompts, group, heads),
        in_specs=specs,
        out_specs=[news[0], own, own],
        out_shape=[out, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in own_PGKSD)],
        input_output_aliases={6: 1, 7: 2},
    )
    return out_PGND, KV(*grown)


def _kernel(*refs, divisor: float, window: int | None):
    """One query: begins with its own token, whose score is therefore finite, then goes through prompt and cache by blocks."""
    *new, prompt_k_ref, prompt_v_ref, mask_ref, own_k_ref, own_v_ref, place_ref = refs[:9]
    *bias_refs, out_ref, grown_k_ref, grown_v_ref = refs[9:]
    dtype, wide, place = out_ref.dtype, jnp.promote_types(out_ref.dtype, jnp.float32), place_ref[...]
    new = [ref[...] for ref in new]
    if bias_refs:  # as `layers.Linear` adds it
        new = [(x.astype(wide) + ref[...].astype(wide)).astype(dtype) for x, ref in zip(new, bias_refs, strict=True)]
    q_D, k_D, v_D = new
    q_D = q_D.astype(wide) / divisor

    def attend(seen, k_ref, v_ref, length, behind, mask_ref=None):
        """The softmax so far (largest score, sum of weights, weighted values) with columns before `length`.

        The query is at column `length` + `behind`.
        """
        first = jnp.int32(0) if window is None else jnp.maximum(length + behind - window + 1, 0)

        def with_block(block, seen):
            top, total, out_D = seen
            columns, column_K = pl.ds(block * BLOCK, BLOCK), block * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)
            counts_K = (column_K >= first) & (column_K < length)
            if mask_ref is not None:
                counts_K &= plt.load(mask_ref.at[columns], mask=counts_K, other=0) != 0
            counts_KD = jnp.broadcast_to(counts_K[:, None], (BLOCK, k_D.shape[0]))
            keys_KD = plt.load(k_ref.at[columns, :], mask=counts_KD, other=0).astype(wide)
            values_KD = plt.load(v_ref.at[columns, :], mask=counts_KD, other=0).astype(wide)
            score_K = jnp.where(counts_K, jnp.sum(keys_KD * q_D[None, :], axis=1), jnp.finfo(wide).min)
            highest = jnp.maximum(top, jnp.max(score_K))
            weight_K = jnp.where(counts_K, jnp.exp(score_K - highest), 0)
            shrink = jnp.exp(top - highest)
            out_D = out_D * shrink + jnp.sum(weight_K[:, None] * values_KD, axis=0)
            return highest, total * shrink + jnp.sum(weight_K), out_D

        blocks = jax.lax.div(length + jnp.int32(BLOCK - 1), jnp.int32(BLOCK))
        return jax.lax.fori_loop(jax.lax.div(first, jnp.int32(BLOCK)), blocks, with_block, seen)

    seen = jnp.sum(k_D.astype(wide) * q_D), jnp.ones((), wide), v_D.astype(wide)
    seen = attend(seen, prompt_k_ref, prompt_v_ref, jnp.int32(mask_ref.shape[0]), place, mask_ref)
    _, total, out_D = attend(seen, own_k_ref, own_v_ref, place, jnp.int32(0))
    out_ref[...] = (out_D / total).astype(out_ref.dtype)
    for grown_ref, new_D in ((grown_k_ref, k_D), (grown_v_ref, v_D)):
        grown_ref[pl.ds(place, 1), :] = new_D[None].astype(grown_ref.dtype)
