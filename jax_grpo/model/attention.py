"""Attention as one rule: queries look at sets of keys before them, under one softmax over all of them; and rotary positions.

A set is a prompt that a group's completions share, a completion's own tokens, or what an episode has read before. Knows nothing of
layers, parameters or of what is generated.
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_grpo import fused_attention
from jax_grpo.fused_attention import Keys
from jax_grpo.model.architecture import Rope


class KV(NamedTuple):
    """Keys and values of one layer: [P, K, S, D] of prompts, [P, G, K, S, D] of completions.

    Heads come before tokens, so that the products of one token with its past read memory in order.
    """

    k: jax.Array
    v: jax.Array


class EarlierTurns(NamedTuple):
    """The caches of an episode's earlier turns, in the order of its tokens, and which columns count."""

    caches: list[KV]  # per layer [P, G, K, S, D]
    mask_PGS: jax.Array  # bool


class Seen(NamedTuple):
    """Keys that queries look at: a query sees those that are real, at or before its own position, and in its window."""

    kv: KV
    at: jax.Array  # int32 [P, S] of prompts, [P, G, S] of completions: positions
    real: jax.Array | None = None  # bool, broadcast against `at`; None: all
    past: bool = False  # every one is before every query; else they are the queries' own tokens, in the queries' order
    heads_first: bool = True  # as in a cache; else as projections give them, [..., S, K, D]

    def mask(self, at: jax.Array, window: int | None) -> jax.Array | None:
        """Which keys queries at positions [..., E] see: bool, broadcast against [..., E, S]; None: all."""
        keys, real = (x if x is None or x.ndim == at.ndim else x[:, None] for x in (self.at, self.real))
        distance = at[..., :, None] - keys[..., None, :]  # pyright: ignore[reportOptionalSubscript]
        conditions = [
            *([] if real is None else [real[..., None, :]]),
            *([] if self.past else [distance >= 0]),
            *([] if window is None else [distance < window]),  # a token is in its own window
        ]
        return functools.reduce(jnp.logical_and, conditions) if conditions else None

    def until(self, end: int) -> "Seen":
        """The first keys alone."""
        axis = -2 if self.heads_first else -3
        kv = KV(*(jax.lax.slice_in_dim(x, 0, end, axis=axis) for x in self.kv))
        return self._replace(kv=kv, at=self.at[..., :end], real=None if self.real is None else self.real[..., :end])


class Blocks(NamedTuple):
    """More queries than `over` attend `size` at a time, or more where that would be more than `most` blocks."""

    size: int
    over: int
    most: int  # a program has the kernels of each block of each layer


KERNELS = Blocks(0, 0, 0)  # those of `fused_attention`
BLOCKS = {"auto": Blocks(128, 256, 4), "blocks": Blocks(64, 64, 16), "full": None, "pallas": KERNELS}

Turn = tuple[jax.Array, jax.Array]  # cosines and sines of tokens' angles, [..., D / 2]


def wide_dtype(x: jax.Array):
    """The dtype that sums over x's elements are taken in: at least float32."""
    return jnp.promote_types(x.dtype, jnp.float32)


def heads_first(x: jax.Array) -> jax.Array:
    """[..., S, K, D] to [..., K, S, D]."""
    return jnp.swapaxes(x, -3, -2)


def attend(
    q: jax.Array,
    axes: str,
    at: jax.Array,
    sets: Sequence[Seen],
    divisor: float,
    window: int | None = None,
    blocks: Blocks | None = None,
) -> jax.Array:
    """softmax(q k^T / divisor) v, one softmax in at least float32 over all the sets; the shape of `q`.

    Queries are [..., N, D], at positions `at`, int32; `axes` names what is before: p and g of prompts and completions, e of a
    completion's queries. N heads share K heads of keys, N / K neighbours each.

    In blocks no array has a number for each query and key: a block of queries looks at the keys up to its own end, and its
    backward pass computes its scores again.
    """
    one_query = not axes.endswith("e")
    if blocks == KERNELS and not one_query and not any(one.heads_first for one in sets):
        keys = [Keys(*one.kv, one.at, one.real, not one.past) for one in sets]
        return fused_attention.attend(q, at, keys, divisor, window)
    if one_query or blocks in (None, KERNELS) or at.shape[-1] <= blocks.over:
        return _softmax_of_sets(q, axes, at[..., None] if one_query else at, sets, divisor, window)
    queries, kvs, out = at.shape[-1], [one.kv for one in sets], []
    size = max(blocks.size, -(-queries // blocks.most))
    for begin in range(0, queries, size):
        end = min(begin + size, queries)

        def of_block(q: jax.Array, kvs: list[KV], at: jax.Array, end: int) -> jax.Array:
            seen = [one._replace(kv=kv) for one, kv in zip(sets, kvs, strict=True)]
            seen = [one if one.past else one.until(end) for one in seen]
            return _softmax_of_sets(q, axes, at, seen, divisor, window)

        block = jax.checkpoint(of_block, static_argnums=3)
        out.append(block(q[..., begin:end, :, :], kvs, at[..., begin:end], end))
        # One block after the other: XLA:CPU would begin with all of them.
        kvs, out[-1] = jax.lax.optimization_barrier((kvs, out[-1]))
    return jnp.concatenate(out, axis=-3)


def _softmax_of_sets(
    q: jax.Array, axes: str, at: jax.Array, sets: Sequence[Seen], divisor: float, window: int | None
) -> jax.Array:
    """`attend` with all scores in one array; `at` [..., E], and [..., 1] where `axes` have no e."""
    # Written out: `jax.nn.dot_product_attention` takes its softmax in float32 even for float64 inputs.
    wide, heads = wide_dtype(q), q.shape[-2]
    kv_heads = sets[0].kv.k.shape[-3 if sets[0].heads_first else -2]
    shared = "r" * (kv_heads < heads)  # an axis of size 1 would cost copies
    queries = q.reshape(*q.shape[:-2], kv_heads, heads // kv_heads, q.shape[-1]) if shared else q
    of_queries = f"{axes}k{shared}d"
    of_scores = f"{axes.removesuffix('e')}k{shared}{'e' * axes.endswith('e')}s"
    layouts = [("p" if one.kv.k.ndim == 4 else "pg") + ("ksd" if one.heads_first else "skd") for one in sets]

    def scores(one: Seen, layout: str) -> jax.Array:
        products = jnp.einsum(f"{of_queries},{layout}->{of_scores}", queries, one.kv.k, preferred_element_type=wide)
        products = products / divisor
        if (mask := one.mask(at, window)) is None:
            return products
        mask = jnp.expand_dims(mask, [of_scores.index(axis) for axis in "k" + shared])
        return jnp.where(mask if "e" in axes else mask.squeeze(-2), products, jnp.finfo(wide).min)

    # The sets are never joined: each adds to the softmax's two sums, and the quotient has a row's columns, not its scores.
    by_set = [scores(*pair) for pair in zip(sets, layouts, strict=True)]
    highest = functools.reduce(jnp.maximum, [jnp.max(one, axis=-1, keepdims=True) for one in by_set])
    powers = [jnp.exp(one - jax.lax.stop_gradient(highest)) for one in by_set]
    total = functools.reduce(jnp.add, [jnp.sum(one, axis=-1, keepdims=True) for one in powers])
    of_mixed = of_scores.removesuffix("s") + "d"
    # XLA:CPU has no product of bfloat16s over the tokens of caches with heads first that is float32.
    dtypes = [q.dtype if one.heads_first else wide for one in sets]
    mixed = [
        jnp.einsum(f"{of_scores},{layout}->{of_mixed}", one.astype(q.dtype), seen.kv.v, preferred_element_type=dtype)
        for one, seen, layout, dtype in zip(powers, sets, layouts, dtypes, strict=True)
    ]
    quotient = (functools.reduce(jnp.add, [one.astype(wide) for one in mixed]) / total).astype(q.dtype)
    return jnp.einsum(f"{of_mixed}->{of_queries}", quotient).reshape(q.shape)


def frequencies(rope: Rope, head_dim: int) -> np.ndarray:
    """Radians a position of each pair of a head's numbers, float64 [D / 2]: theta^(-2 i / D), scaled.

    `linear` divides all by the factor (Chen et al. 2023). `llama3` divides those of which fewer than low_freq_factor wavelengths
    fit into the original context, leaves those of more than high_freq_factor, and goes over from one to the other between.
    """
    turns_D = rope.rope_theta ** (-np.arange(0, head_dim, 2) / head_dim)
    unscaled_D, low, high = np.zeros(1), rope.low_freq_factor, rope.high_freq_factor
    if low is not None and high is not None and rope.original_max_position_embeddings is not None:
        waves_D = rope.original_max_position_embeddings * turns_D / (2 * math.pi)  # wavelengths in the original context
        unscaled_D = np.clip((waves_D - low) / (high - low), 0, 1)
    return ((1 - unscaled_D) / (rope.factor or 1) + unscaled_D) * turns_D


def turn_of(rope: Rope, position: jax.Array, head_dim: int, dtype: jax.typing.DTypeLike) -> Turn:
    """Cosines and sines of tokens' angles, [..., D / 2], in `dtype`."""
    angle = position[..., None] * jnp.asarray(frequencies(rope, head_dim), dtype)
    return jnp.cos(angle), jnp.sin(angle)


def turned(x: jax.Array, turn: Turn) -> jax.Array:
    """Rotary positions of x [..., N, D]: pairs (i, i + D / 2) turned by their angles, as Hugging Face's weights lay them."""
    cos, sin = (part[..., None, :] for part in turn)
    a, b = jnp.split(x.astype(cos.dtype), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
