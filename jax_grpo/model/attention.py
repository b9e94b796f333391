"""Attention as one rule: queries look at sets of keys through masks, under one softmax over all of them; and rotary positions.

A set is a prompt that a group's completions share, a completion's own tokens, or what an episode has read before. Knows nothing of
layers, parameters or of what is generated.
"""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

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
    """Keys that queries look at, and through which mask: bool, broadcast against scores [P, E, S] or [P, G, E, S]."""

    kv: KV
    mask: jax.Array
    heads_first: bool = True  # as in a cache; else as projections give them, [..., S, K, D]


Turn = tuple[jax.Array, jax.Array]  # cosines and sines of tokens' angles, [..., D / 2]


def wide_dtype(x: jax.Array):
    """The dtype that sums over x's elements are taken in: at least float32."""
    return jnp.promote_types(x.dtype, jnp.float32)


def heads_first(x: jax.Array) -> jax.Array:
    """[..., S, K, D] to [..., K, S, D]."""
    return jnp.swapaxes(x, -3, -2)


def causal(real: jax.Array) -> jax.Array:
    """Query t sees key s when s <= t and s is a real token: bool [..., S] to [..., T, S]."""
    length = real.shape[-1]
    return jnp.tril(jnp.ones((length, length), bool)) & real.astype(bool)[..., None, :]


def near(query: jax.Array, key: jax.Array, window: int | None) -> jax.Array | bool:
    """Whether key positions [..., S] lie in the window of query positions [..., T]: [..., T, S]. A token is in its own window."""
    return True if window is None else query[..., :, None] - key[..., None, :] < window


def attend(q: jax.Array, axes: str, sets: Sequence[Seen], divisor: float) -> jax.Array:
    """softmax(q k^T / divisor) v, one softmax in at least float32 over all the sets; the shape of `q`.

    Queries are [..., N, D], and `axes` names what is before: p and g of prompts and completions, e of a completion's queries. N
    heads share K heads of keys, N / K neighbours each.
    """
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
        mask = jnp.expand_dims(one.mask, [of_scores.index(axis) for axis in "k" + shared])
        mask = mask if "e" in axes else mask.squeeze(-2)
        return jnp.where(mask, products / divisor if len(sets) == 1 else products, jnp.finfo(wide).min)

    pairs = list(zip(sets, layouts, strict=True))
    # XLA fuses the division best before the mask of one set, and behind the joining of several.
    joined = scores(*pairs[0]) if len(sets) == 1 else jnp.concatenate([scores(*pair) for pair in pairs], -1) / divisor
    weights = jax.nn.softmax(joined, axis=-1)
    ends = list(itertools.accumulate(one.mask.shape[-1] for one in sets))
    parts = jnp.split(weights.astype(q.dtype), ends[:-1], axis=-1)
    mixed = [
        jnp.einsum(f"{of_scores},{layout}->{of_queries}", part, one.kv.v)
        for part, (one, layout) in zip(parts, pairs, strict=True)
    ]
    return sum(mixed[1:], mixed[0]).reshape(q.shape)


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
