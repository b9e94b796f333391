"""Attention in Pallas-Triton kernels for NVIDIA cards (sm_80 on): no score leaves the registers, forwards or backwards.

FlashAttention-2 (Dao 2023) over several sets of keys under one softmax: a prompt that a group's completions share, and the queries'
own tokens. One kernel forwards; backwards one for the queries and one a set for its keys and values. Interpreted where the program
is compiled for the CPU: for tests, not for speed. Knows no model: `model.attention.attend` is the definition.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from jax_grpo import triton
from jax_grpo.triton import plt

UNSEEN = np.iinfo(np.int32).max  # the position of keys that nobody sees
_call = functools.partial(triton.call, warps=4, stages=2)


class Keys(NamedTuple):
    """Keys and values [..., S, K, D] of prompts or completions, which queries of neighbouring rows share where there are fewer."""

    k: jax.Array
    v: jax.Array
    at: jax.Array  # int32 positions [..., S]; a query sees those up to its own, in its window
    real: jax.Array | None  # bool, broadcast against `at`: which are seen at all; None: all
    own: bool  # they are the queries' tokens, in the queries' order: none behind a query's place is looked at


class Plan(NamedTuple):
    """What is static of a call: of each set, how many neighbours share it and whether it is the queries' own."""

    scale: float
    window: int | None
    shared: tuple[int, ...]
    own: tuple[bool, ...]


def refusal(head_dim: int) -> str | None:
    """Why the kernels cannot do heads of this size, or None."""
    if missing := triton.refusal(or_jax_triton=False):
        return missing
    fits = 16 <= head_dim <= 256 and head_dim & (head_dim - 1) == 0
    return None if fits else f"needs heads of 16, 32, 64, 128 or 256 columns, not {head_dim}"


def attend(q: jax.Array, at: jax.Array, sets: Sequence[Keys], divisor: float, window: int | None = None) -> jax.Array:
    """softmax(q k^T / divisor) v over all the sets, the softmax in at least float32; shape and dtype of `q`.

    Queries are [..., R, N, D] at positions [..., R], int32; keys [..., S, K, D], of which a head serves N / K neighbours. A query
    that sees no key gets 0.
    """
    q_BRND, at_BR, flat = q.reshape(-1, *q.shape[-3:]), at.reshape(-1, at.shape[-1]).astype(jnp.int32), []
    for one in sets:
        at_S = jnp.where(True if one.real is None else one.real, one.at, UNSEEN)
        k_LSKD, v_LSKD = (x.reshape(-1, *x.shape[-3:]) for x in (one.k, one.v))
        flat.append((k_LSKD, v_LSKD, at_S.reshape(-1, at_S.shape[-1]).astype(jnp.int32)))
    shared = tuple(len(q_BRND) // len(k_LSKD) for k_LSKD, *_ in flat)
    plan = Plan(1 / divisor, window, shared, tuple(one.own for one in sets))
    return _attend(plan, q_BRND, at_BR, flat).reshape(q.shape)


def _result(plan: Plan, q_BRND: jax.Array, at_BR: jax.Array, sets: list[tuple[jax.Array, ...]]) -> jax.Array:
    return _forward(plan, q_BRND, at_BR, sets)[0]


_attend = jax.custom_vjp(_result, nondiff_argnums=(0,))


def _forward(plan: Plan, q_BRND, at_BR, sets) -> tuple[jax.Array, jax.Array]:
    """The result, and the logarithm of each query's sum of weights [B, N, R]."""
    rows, specs, grid = _of_queries(plan, q_BRND, sets, False)
    sums = jax.ShapeDtypeStruct((len(q_BRND), q_BRND.shape[2], q_BRND.shape[1]), _wide(q_BRND.dtype))
    kernel = functools.partial(_forward_kernel, plan)
    out = jax.ShapeDtypeStruct(q_BRND.shape, q_BRND.dtype)
    operands = (q_BRND, at_BR, *(x for one in sets for x in one))
    results = {"out_specs": [rows, _sums(sums)], "out_shape": [out, sums]}
    return _call(kernel, "attention_forward", operands, grid=grid, in_specs=[rows, *specs], **results)


def _forwards(plan, q_BRND, at_BR, sets):
    out_BRND, lse_BNR = _forward(plan, q_BRND, at_BR, sets)
    return out_BRND, (q_BRND, at_BR, sets, out_BRND, lse_BNR)


def _backwards(plan: Plan, saved, to_out_BRND):
    q_BRND, at_BR, sets, out_BRND, lse_BNR = saved
    rows, specs, grid = _of_queries(plan, q_BRND, sets, True)
    sums = jax.ShapeDtypeStruct(lse_BNR.shape, lse_BNR.dtype)
    to_q_BRND, along_BNR = _call(
        functools.partial(_queries_kernel, plan),
        "attention_queries",
        (out_BRND, to_out_BRND, lse_BNR, q_BRND, at_BR, *(x for one in sets for x in one)),
        grid=grid,
        in_specs=[rows, rows, _sums(sums), rows, *specs],
        out_specs=[rows, _sums(sums)],
        out_shape=[jax.ShapeDtypeStruct(q_BRND.shape, q_BRND.dtype), sums],
    )
    to_sets = []
    for number, one in enumerate(sets):
        to_k, to_v = _to_keys(plan, number, one, (q_BRND, at_BR, to_out_BRND, lse_BNR, along_BNR))
        to_sets.append((to_k, to_v, None))
    return to_q_BRND, None, to_sets


_attend.defvjp(_forwards, _backwards)


def _to_keys(plan: Plan, number: int, keys: tuple[jax.Array, ...], of_queries) -> tuple[jax.Array, jax.Array]:
    """Gradients of a set's keys and values: a program for each block of them, which goes through all queries that share it."""
    k_LSKD = keys[0]
    count, length, kv_heads, head_dim = k_LSKD.shape
    q_BRND, at_BR, to_out_BRND, lse_BNR, along_BNR = of_queries
    neighbours, queries, heads = plan.shared[number], *q_BRND.shape[1:3]
    each = heads // kv_heads

    def by_set(x: jax.Array) -> jax.Array:
        return x.reshape(count, neighbours, *x.shape[1:])

    rows = pl.BlockSpec((None, neighbours, queries, each, head_dim), lambda c, k, s: (c, 0, 0, k, 0))
    sums = pl.BlockSpec((None, neighbours, each, queries), lambda c, k, s: (c, 0, k, 0))
    places = pl.BlockSpec((None, neighbours, queries), lambda c, k, s: (c, 0, 0))
    columns = pl.BlockSpec((None, length, None, head_dim), lambda c, k, s: (c, 0, k, 0))
    positions = pl.BlockSpec((None, length), lambda c, k, s: (c, 0))
    return _call(
        functools.partial(_keys_kernel, plan.scale, plan.window, plan.own[number]),
        "attention_keys",
        (*map(by_set, (q_BRND, at_BR, to_out_BRND, lse_BNR, along_BNR)), *keys),
        grid=(count, kv_heads, pl.cdiv(length, _block(k_LSKD, True))),
        in_specs=[rows, places, rows, sums, sums, columns, columns, positions],
        out_specs=[columns, columns],
        out_shape=[jax.ShapeDtypeStruct(k_LSKD.shape, k_LSKD.dtype)] * 2,
    )


def _sums(shape: jax.ShapeDtypeStruct) -> pl.BlockSpec:
    return pl.BlockSpec((None, None, shape.shape[2]), lambda b, n, r: (b, n, 0))


def _of_queries(plan: Plan, q_BRND, sets, backwards: bool) -> tuple[pl.BlockSpec, list[pl.BlockSpec], tuple[int, ...]]:
    """A head's rows of one b; then specs of positions and of each set; and the grid of a program for each block of queries."""
    _, queries, heads, head_dim = q_BRND.shape
    rows = pl.BlockSpec((None, queries, None, head_dim), lambda b, n, r: (b, 0, n, 0))
    specs = [pl.BlockSpec((None, queries), lambda b, n, r: (b, 0))]
    for (k_LSKD, *_), shared in zip(sets, plan.shared, strict=True):
        length, each = k_LSKD.shape[1], heads // k_LSKD.shape[2]
        columns = pl.BlockSpec(
            (None, length, None, head_dim), lambda b, n, r, s=shared, e=each: (_div(b, s), 0, _div(n, e), 0)
        )
        specs += [columns, columns, pl.BlockSpec((None, length), lambda b, n, r, s=shared: (_div(b, s), 0))]
    return rows, specs, (len(q_BRND), heads, pl.cdiv(queries, _block(q_BRND, backwards)))


def _div(a, b: int):
    return a if b == 1 else jax.lax.div(a, jnp.asarray(b, a.dtype))


def _block(x, backwards: bool) -> int:
    """Queries, and keys, that one program holds at a time of an array or ref [..., D].

    On sm_89 no register spills at 64 and 128 columns in bfloat16; backwards some do at 256 columns in float32.
    """
    return max(16, min(32 if backwards else 64, 8192 // (x.shape[-1] * x.dtype.itemsize)))


def _wide(dtype):
    return jnp.promote_types(dtype, jnp.float32)


def _columns(ref) -> pl.Slice:
    """All of a head's; in interpreted kernels of float64 Python's 0 would be an index of 64 bits beside others of 32."""
    return pl.ds(np.int32(0), ref.shape[-1])  # pyright: ignore[reportArgumentType, reportReturnType]


def _rows(ref, place, first, length: int, size: int) -> jax.Array:
    """Rows [size, D] of `ref.at[place]` from `first` on; 0 behind its end."""
    before, after = place
    inside = first + jnp.arange(size, dtype=jnp.int32) < length
    mask = jnp.broadcast_to(inside[:, None], (size, ref.shape[-1]))
    return plt.load(ref.at[(*before, pl.ds(first, size), *after, _columns(ref))], mask=mask, other=0)


def _numbers(ref, place, first, length: int, size: int, other) -> jax.Array:
    inside = first + jnp.arange(size, dtype=jnp.int32) < length
    return plt.load(ref.at[(*place, pl.ds(first, size))], mask=inside, other=other)


def _visible(at_query: jax.Array, at_key: jax.Array, window: int | None) -> jax.Array:
    """Which keys queries see; positions broadcast against each other."""
    visible = at_key <= at_query
    return visible if window is None else visible & (at_query - at_key < window)


WHOLE = ((), ())


def _over_keys(plan: Plan, size: int, first, refs: Sequence, step: Callable, carry):
    """`step(carry, keys, values, positions)` for each block of each set that a block of queries from `first` on may see."""
    for own, (k_ref, v_ref, at_ref) in zip(plan.own, zip(*[iter(refs)] * 3, strict=True), strict=True):
        length = k_ref.shape[0]

        def block(number, carry, k_ref=k_ref, v_ref=v_ref, at_ref=at_ref, length=length):
            begin = number * size
            k_KD, v_KD = (_rows(ref, WHOLE, begin, length, size) for ref in (k_ref, v_ref))
            return step(carry, k_KD, v_KD, _numbers(at_ref, (), begin, length, size, UNSEEN))

        blocks = pl.cdiv(length, size)
        # Of the queries' own tokens those up to this block; both are cut alike.
        carry = jax.lax.fori_loop(0, jnp.minimum(_div(first, size) + 1, blocks) if own else blocks, block, carry)
    return carry


def _forward_kernel(plan: Plan, q_ref, at_ref, *refs):
    """A block of queries of one head: an online softmax over all blocks of keys (Milakov & Gimelshein 2018)."""
    *sets, out_ref, lse_ref = refs
    (length, head_dim), wide = q_ref.shape, _wide(q_ref.dtype)
    size = _block(q_ref, False)
    first, lowest = pl.program_id(2) * size, jnp.finfo(wide).min
    q_QD, at_Q = _rows(q_ref, WHOLE, first, length, size), _numbers(at_ref, (), first, length, size, -1)

    def step(seen, k_KD, v_KD, at_K):
        top_Q, total_Q, out_QD = seen
        visible = _visible(at_Q[:, None], at_K[None, :], plan.window)
        score_QK = jnp.where(visible, plt.dot(q_QD, k_KD, trans_b=True).astype(wide) * plan.scale, lowest)
        highest_Q = jnp.maximum(top_Q, jnp.max(score_QK, axis=1))
        weight_QK = jnp.where(visible, jnp.exp(score_QK - highest_Q[:, None]), 0)
        shrink_Q = jnp.exp(top_Q - highest_Q)
        out_QD = out_QD * shrink_Q[:, None] + plt.dot(weight_QK.astype(v_KD.dtype), v_KD).astype(wide)
        return highest_Q, total_Q * shrink_Q + jnp.sum(weight_QK, axis=1), out_QD

    nothing = jnp.full((size,), lowest, wide), jnp.zeros((size,), wide), jnp.zeros((size, head_dim), wide)
    top_Q, total_Q, out_QD = _over_keys(plan, size, first, sets, step, nothing)
    total_Q = jnp.where(total_Q > 0, total_Q, 1)
    rows, inside = pl.ds(first, size), first + jnp.arange(size, dtype=jnp.int32) < length
    plt.store(lse_ref.at[rows], top_Q + jnp.log(total_Q), mask=inside)
    plt.store(
        out_ref.at[rows, _columns(out_ref)], (out_QD / total_Q[:, None]).astype(out_ref.dtype), mask=inside[:, None]
    )


def _queries_kernel(plan: Plan, out_ref, to_out_ref, lse_ref, q_ref, at_ref, *refs):
    """Gradients of a block of queries, and what each result's gradient is along the result, which keys' gradients need too."""
    *sets, to_q_ref, along_ref = refs
    (length, head_dim), wide = q_ref.shape, _wide(q_ref.dtype)
    size = _block(q_ref, True)
    first = pl.program_id(2) * size
    q_QD, out_QD, to_out_QD = (_rows(ref, WHOLE, first, length, size) for ref in (q_ref, out_ref, to_out_ref))
    at_Q, lse_Q = (_numbers(ref, (), first, length, size, other) for ref, other in ((at_ref, -1), (lse_ref, 0)))
    along_Q = jnp.sum(out_QD.astype(wide) * to_out_QD.astype(wide), axis=1)

    def step(to_q_QD, k_KD, v_KD, at_K):
        score_QK = plt.dot(q_QD, k_KD, trans_b=True).astype(wide) * plan.scale
        weight_QK = jnp.where(
            _visible(at_Q[:, None], at_K[None, :], plan.window), jnp.exp(score_QK - lse_Q[:, None]), 0
        )
        to_weight_QK = plt.dot(to_out_QD, v_KD, trans_b=True).astype(wide)
        to_score_QK = weight_QK * (to_weight_QK - along_Q[:, None]) * plan.scale
        return to_q_QD + plt.dot(to_score_QK.astype(k_KD.dtype), k_KD).astype(wide)

    to_q_QD = _over_keys(plan, size, first, sets, step, jnp.zeros((size, head_dim), wide))
    rows, inside = pl.ds(first, size), first + jnp.arange(size, dtype=jnp.int32) < length
    plt.store(along_ref.at[rows], along_Q, mask=inside)
    plt.store(to_q_ref.at[rows, _columns(to_q_ref)], to_q_QD.astype(to_q_ref.dtype), mask=inside[:, None])


def _keys_kernel(scale: float, window: int | None, own: bool, *refs):
    """Gradients of a block of keys and values of one head, over the queries of all neighbours and of all heads that share it."""
    q_ref, at_ref, to_out_ref, lse_ref, along_ref, k_ref, v_ref, key_at_ref, to_k_ref, to_v_ref = refs
    neighbours, queries, each, head_dim = q_ref.shape
    length, wide, size = k_ref.shape[0], _wide(q_ref.dtype), _block(q_ref, True)
    first = pl.program_id(2) * size
    k_KD, v_KD = (_rows(ref, WHOLE, first, length, size) for ref in (k_ref, v_ref))
    at_K = _numbers(key_at_ref, (), first, length, size, UNSEEN)

    def of_head(number, to_both):
        neighbour, head = _div(number, each), jax.lax.rem(number, jnp.asarray(each, number.dtype))

        def step(block, to_both):
            to_k_KD, to_v_KD = to_both
            begin, place = block * size, ((neighbour,), (head,))
            q_QD, to_out_QD = (_rows(ref, place, begin, queries, size) for ref in (q_ref, to_out_ref))
            at_Q = _numbers(at_ref, (neighbour,), begin, queries, size, -1)
            lse_Q, along_Q = (_numbers(x, (neighbour, head), begin, queries, size, 0) for x in (lse_ref, along_ref))
            score_KQ = plt.dot(k_KD, q_QD, trans_b=True).astype(wide) * scale
            visible = _visible(at_Q[None, :], at_K[:, None], window)
            weight_KQ = jnp.where(visible, jnp.exp(score_KQ - lse_Q[None, :]), 0)
            to_v_KD += plt.dot(weight_KQ.astype(to_out_QD.dtype), to_out_QD).astype(wide)
            to_weight_KQ = plt.dot(v_KD, to_out_QD, trans_b=True).astype(wide)
            to_score_KQ = weight_KQ * (to_weight_KQ - along_Q[None, :]) * scale
            return to_k_KD + plt.dot(to_score_KQ.astype(q_QD.dtype), q_QD).astype(wide), to_v_KD

        return jax.lax.fori_loop(_div(first, size) if own else 0, pl.cdiv(queries, size), step, to_both)

    nothing = jnp.zeros((size, head_dim), wide)
    to_both = jax.lax.fori_loop(0, neighbours * each, of_head, (nothing, nothing))
    inside = first + jnp.arange(size, dtype=jnp.int32) < length
    for ref, to_KD in zip((to_k_ref, to_v_ref), to_both, strict=True):
        plt.store(ref.at[pl.ds(first, size), _columns(ref)], to_KD.astype(ref.dtype), mask=inside[:, None])
