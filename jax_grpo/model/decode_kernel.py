"""Attention of one new token a completion as a single Pallas-Triton kernel for NVIDIA cards (sm_80 on).

Over the shared prompt, the completion's own tokens so far and the new one, with one online softmax (Milakov & Gimelshein 2018) in
at least float32; the new token's keys and values are written into the cache in place. Interpreted where the program is compiled
for the CPU: for tests, not for speed. `Decoder.decode` does the same in a dozen XLA kernels.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from jax_grpo.model.architecture import Architecture

BLOCK = 32  # keys that one program holds at a time; with 64 numbers each, 16 a thread of 128
WARPS = 4


def refusal(architecture: Architecture) -> str | None:
    """Why the kernel cannot do a model's attention, or None."""
    sizes, plain = architecture, Architecture(1, 1, 1, 1, 1)
    if sizes.kv_heads != sizes.num_heads:
        return f"has no grouped queries (num_kv_heads {sizes.kv_heads} of {sizes.num_heads})"
    for name in ("rope", "window", "qk_norm", "query_scale", "qkv_bias"):
        if getattr(sizes, name) != getattr(plain, name):
            return f"cannot do {name} {getattr(sizes, name)}"
    if sizes.head_dim & (sizes.head_dim - 1):
        return f"needs heads of a power of two columns, not {sizes.head_dim}"
    return None


def decode(
    product_PGX: jax.Array,
    bias_X: jax.Array,
    prompt_k_PNTD: jax.Array,
    prompt_v_PNTD: jax.Array,
    prompt_mask_PT: jax.Array,
    own_k_PGNSD: jax.Array,
    own_v_PGNSD: jax.Array,
    place: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Heads' outputs side by side [P, G, H], and the completions' keys and values with the new ones in column `place`.

    `product_PGX` is the tokens' hidden states times the matrix of queries, keys and values, X = 3 H, to which their bias is still
    to be added. A query sees its prompt's real tokens, columns before `place`, and its own token.
    """
    prompts, heads, _, head_dim = prompt_k_PNTD.shape
    group = product_PGX.shape[1]
    # Of the 3 N blocks of D columns, those of a head's query, keys and values.
    products = [
        pl.BlockSpec((None, None, head_dim), lambda p, g, n, first=first: (p, g, first + n))
        for first in (0, heads, 2 * heads)
    ]
    biases = [pl.BlockSpec((head_dim,), lambda p, g, n, first=first: (first + n,)) for first in (0, heads, 2 * heads)]
    prompt = pl.BlockSpec((None, None, *prompt_k_PNTD.shape[2:]), lambda p, g, n: (p, n, 0, 0))
    mask = pl.BlockSpec((None, prompt_mask_PT.shape[1]), lambda p, g, n: (p, 0))
    own = pl.BlockSpec((None, None, None, *own_k_PGNSD.shape[3:]), lambda p, g, n: (p, g, n, 0, 0))
    operands = (*[product_PGX] * 3, *[bias_X] * 3, prompt_k_PNTD, prompt_v_PNTD, prompt_mask_PT)
    operands += (own_k_PGNSD, own_v_PGNSD, place)
    out = jax.ShapeDtypeStruct((prompts, group, heads * head_dim), product_PGX.dtype)

    def on(interpret: bool):
        return pl.pallas_call(
            functools.partial(_kernel, scale=1 / math.sqrt(head_dim)),
            name="decode_attention",
            interpret=interpret,
            compiler_params=plt.CompilerParams(num_warps=WARPS, num_stages=2),  # also what chooses Triton in JAX 0.10
            grid=(prompts, group, heads),
            in_specs=[*products, *biases, prompt, prompt, mask, own, own, pl.BlockSpec((), lambda p, g, n: ())],
            out_specs=[products[0], own, own],
            out_shape=[out, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (own_k_PGNSD, own_v_PGNSD))],
            input_output_aliases={9: 1, 10: 2},
        )

    return jax.lax.platform_dependent(*operands, cpu=on(True), default=on(False))


def _kernel(*refs, scale: float):
    """One query: begins with its own token, whose score is therefore finite, then goes through prompt and cache by blocks."""
    *new, prompt_k_ref, prompt_v_ref, mask_ref, own_k_ref, own_v_ref, place_ref, out_ref, grown_k_ref, grown_v_ref = (
        refs
    )
    dtype, wide = out_ref.dtype, jnp.promote_types(out_ref.dtype, jnp.float32)
    # As `layers.Linear` adds its bias.
    q_D, k_D, v_D = (
        (product_ref[...].astype(wide) + bias_ref[...].astype(wide)).astype(dtype)
        for product_ref, bias_ref in zip(new[:3], new[3:], strict=True)
    )
    place, q_D = place_ref[...], q_D.astype(wide) * scale

    def attend(block, seen, k_ref, v_ref, length, mask_ref=None):
        """The softmax so far (largest score, sum of weights, weighted values) with one block more of columns before `length`."""
        top, total, out_D = seen
        first = block * BLOCK
        counts_K = first + jnp.arange(BLOCK, dtype=jnp.int32) < length
        columns = pl.ds(first, BLOCK)
        if mask_ref is not None:
            counts_K &= plt.load(mask_ref.at[columns], mask=counts_K, other=0) != 0
        counts_KD = jnp.broadcast_to(counts_K[:, None], (BLOCK, k_D.shape[0]))
        keys_KD = plt.load(k_ref.at[columns, :], mask=counts_KD, other=0).astype(wide)
        values_KD = plt.load(v_ref.at[columns, :], mask=counts_KD, other=0).astype(wide)
        score_K = jnp.where(counts_K, jnp.sum(keys_KD * q_D[None, :], axis=1), jnp.finfo(wide).min)
        highest = jnp.maximum(top, jnp.max(score_K))
        weight_K = jnp.where(counts_K, jnp.exp(score_K - highest), 0)
        shrink = jnp.exp(top - highest)
        return (
            highest,
            total * shrink + jnp.sum(weight_K),
            out_D * shrink + jnp.sum(weight_K[:, None] * values_KD, axis=0),
        )

    seen = jnp.sum(k_D.astype(wide) * q_D), jnp.ones((), wide), v_D.astype(wide)
    length = mask_ref.shape[0]
    seen = jax.lax.fori_loop(
        0,
        pl.cdiv(length, BLOCK),
        lambda block, seen: attend(block, seen, prompt_k_ref, prompt_v_ref, length, mask_ref),
        seen,
    )
    blocks = jax.lax.div(place + (BLOCK - 1), jnp.int32(BLOCK))
    _, total, out_D = jax.lax.fori_loop(
        0, blocks, lambda block, seen: attend(block, seen, own_k_ref, own_v_ref, place), seen
    )
    out_ref[...] = (out_D / total).astype(out_ref.dtype)
    for grown_ref, new_D in ((grown_k_ref, k_D), (grown_v_ref, v_D)):
        grown_ref[pl.ds(place, 1), :] = new_D[None].astype(grown_ref.dtype)
