"""Decode attention and the LM head's whole rows in Triton's own language, called by jax_triton (the extra `jax-triton`).

For a JAX without Pallas' Triton backend, on NVIDIA cards; a CPU cannot run them. `model.decode_kernel` and `lm_head.pallas_rows`,
which hand their arrays over, are what they compute. Arrays are contiguous; a name with suffixes is a block of numbers here.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# It may not be installed, and pyright takes this folder for the package `triton`.

import os
from typing import Any

import jax
import jax.numpy as jnp
import jax_triton
import triton
import triton.language as tl

# From Hopper on Triton writes for its newest assembler, which JAX's may be older than; for other cards for this one, CUDA 12.9's.
os.environ.setdefault("TRITON_PTXAS_BLACKWELL_PATH", triton.knobs.nvidia.ptxas.path)

LOWEST = tl.constexpr(-1e30)  # the score of what does not count
KEYS, COLUMNS = 32, 2048  # keys, and columns of a row, that one program holds at a time


@triton.jit
def _z(logits, start, VOCAB: tl.constexpr, TEMPERATURE: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr):
    """(logits / temperature of one block of a row [SIZE], its tokens, which of them count)."""
    column_V = start + tl.arange(0, SIZE)
    inside_V = column_V < VOCAB
    z_V = tl.load(logits + column_V, mask=inside_V, other=0.0).to(WIDE) / TEMPERATURE
    return tl.where(inside_V, z_V, LOWEST), column_V, inside_V


@triton.jit
def lm_head_measure(
    logits,
    targets,
    logp,
    entropy,
    lse,
    WIDTH: tl.constexpr,
    VOCAB: tl.constexpr,
    TEMPERATURE: tl.constexpr,
    SIZE: tl.constexpr,
    WIDE: tl.constexpr,
):
    """A row's log-probability of its target, entropy and log-sum-exp: one pass, online."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    top = tl.full((), LOWEST, WIDE)
    mass, weighted, at_target = tl.full((), 0, WIDE), tl.full((), 0, WIDE), tl.full((), 0, WIDE)
    for start in range(0, VOCAB, SIZE):
        z_V, column_V, inside_V = _z(logits + row * WIDTH, start, VOCAB, TEMPERATURE, SIZE, WIDE)
        highest = tl.maximum(top, tl.max(z_V, 0))
        shrink, exp_V = tl.exp(top - highest), tl.exp(z_V - highest)
        mass = mass * shrink + tl.sum(exp_V, 0)
        weighted = weighted * shrink + tl.sum(exp_V * z_V, 0)
        at_target += tl.sum(tl.where((column_V == target) & inside_V, z_V, 0.0), 0)
        top = highest
    total = top + tl.log(mass)
    tl.store(logp + row, at_target - total)
    tl.store(entropy + row, total - weighted / mass)
    tl.store(lse + row, total)


@triton.jit
def lm_head_dlogits(
    logits,
    targets,
    lse,
    entropy,
    to_logp,
    to_entropy,
    out,
    WIDTH: tl.constexpr,
    VOCAB: tl.constexpr,
    TEMPERATURE: tl.constexpr,
    SIZE: tl.constexpr,
    WIDE: tl.constexpr,
):
    """A row's gradient by the formula of `tiles.to_logits`, where its logits may have stood; 0 in padding columns."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    total, mean = tl.load(lse + row), tl.load(entropy + row)
    g, e = tl.load(to_logp + row), tl.load(to_entropy + row)
    for start in range(0, WIDTH, SIZE):
        z_V, column_V, inside_V = _z(logits + row * WIDTH, start, VOCAB, TEMPERATURE, SIZE, WIDE)
        logp_V = z_V - total
        d_V = tl.where(column_V == target, g, 0.0) - tl.exp(logp_V) * (g + e * (logp_V + mean))
        d_V = tl.where(inside_V, d_V / TEMPERATURE, 0.0).to(out.dtype.element_ty)
        tl.store(out + row * WIDTH + column_V, d_V, mask=column_V < WIDTH)


@triton.jit
def _token(qkv, bias, token, row, X: tl.constexpr, D: tl.constexpr, BIASED: tl.constexpr, WIDE: tl.constexpr):
    """One of a token's rows [D] of queries, keys and values, the bias added as `layers.Linear` adds it."""
    column_D = tl.arange(0, D)
    x_D = tl.load(qkv + (token * X + row) * D + column_D)
    if BIASED:
        x_D = (x_D.to(WIDE) + tl.load(bias + row * D + column_D).to(WIDE)).to(x_D.dtype)
    return x_D


@triton.jit
def _attend(
    top,
    total,
    out_D,
    q_D,
    keys,
    values,
    mask,
    length,
    behind,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    SIZE: tl.constexpr,
    D: tl.constexpr,
    WIDE: tl.constexpr,
):
    """The softmax so far with columns before `length`, from a query at column `length` + `behind`; no WINDOW: 0."""
    first = tl.maximum(length + behind - WINDOW + 1, 0) if WINDOW else length * 0
    for block in range(first // SIZE, tl.cdiv(length, SIZE)):
        column_K = block * SIZE + tl.arange(0, SIZE)
        counts_K = (column_K >= first) & (column_K < length)
        if MASKED:
            counts_K = counts_K & (tl.load(mask + column_K, mask=counts_K, other=0) != 0)
        at_KD = column_K[:, None] * D + tl.arange(0, D)[None, :]
        k_KD = tl.load(keys + at_KD, mask=counts_K[:, None], other=0.0).to(WIDE)
        v_KD = tl.load(values + at_KD, mask=counts_K[:, None], other=0.0).to(WIDE)
        score_K = tl.where(counts_K, tl.sum(k_KD * q_D[None, :], 1), LOWEST)
        highest = tl.maximum(top, tl.max(score_K, 0))
        shrink, weight_K = tl.exp(top - highest), tl.where(counts_K, tl.exp(score_K - highest), 0.0)
        out_D = out_D * shrink + tl.sum(weight_K[:, None] * v_KD, 0)
        total = total * shrink + tl.sum(weight_K, 0)
        top = highest
    return top, total, out_D


@triton.jit
def decode_attention(
    qkv,
    bias,
    prompt_k,
    prompt_v,
    mask,
    own_k,
    own_v,
    place,
    out,
    grown_k,
    grown_v,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    T: tl.constexpr,
    S: tl.constexpr,
    BIASED: tl.constexpr,
    WINDOW: tl.constexpr,
    DIVISOR: tl.constexpr,
    SIZE: tl.constexpr,
    D: tl.constexpr,
    WIDE: tl.constexpr,
):
    """One query: begins with its own token, whose score is therefore finite, then goes through prompt and cache by blocks."""
    prompt, head = tl.program_id(0).to(tl.int64), tl.program_id(2)
    token, at = prompt * tl.num_programs(1) + tl.program_id(1), tl.load(place)
    kv_head = head // (HEADS // KV_HEADS)
    X: tl.constexpr = HEADS + 2 * KV_HEADS
    q_D = _token(qkv, bias, token, head, X, D, BIASED, WIDE).to(WIDE) / DIVISOR
    k_D = _token(qkv, bias, token, HEADS + kv_head, X, D, BIASED, WIDE)
    v_D = _token(qkv, bias, token, HEADS + KV_HEADS + kv_head, X, D, BIASED, WIDE)
    shared, own = (prompt * KV_HEADS + kv_head) * T * D, (token * KV_HEADS + kv_head) * S * D
    top, total, out_D = tl.sum(k_D.to(WIDE) * q_D, 0), tl.full((), 1, WIDE), v_D.to(WIDE)
    top, total, out_D = _attend(
        top, total, out_D, q_D, prompt_k + shared, prompt_v + shared, mask + prompt * T, T, at, True, WINDOW, SIZE, D, WIDE
    )  # fmt: skip
    top, total, out_D = _attend(
        top, total, out_D, q_D, own_k + own, own_v + own, mask, at, 0, False, WINDOW, SIZE, D, WIDE
    )
    column_D = tl.arange(0, D)
    tl.store(out + (token * HEADS + head) * D + column_D, (out_D / total).to(out.dtype.element_ty))
    tl.store(grown_k + own + at * D + column_D, k_D.to(grown_k.dtype.element_ty))
    tl.store(grown_v + own + at * D + column_D, v_D.to(grown_v.dtype.element_ty))


def _call(kernel: Any, operands: Any, out_shape: Any, dtype: Any, **settings: Any) -> Any:
    """Results of the kernel, compiled for the card that JAX's default device is: it need not be there."""
    capability = getattr(jax.config.jax_default_device, "compute_capability", None)
    return jax_triton.triton_call(
        *operands,
        kernel=kernel,
        out_shape=out_shape,
        compute_capability=None if capability is None else int(capability.replace(".", "")),  # None: of the card here
        WIDE=tl.float64 if jnp.promote_types(dtype, jnp.float32) == jnp.float64 else tl.float32,
        **settings,
    )


def _of_rows(kernel: Any, logits_CV: jax.Array, operands: Any, out_shape: Any, columns: Any, **settings: Any) -> Any:
    rows, width = logits_CV.shape
    sizes = {"WIDTH": width, "VOCAB": min(columns.vocab_size, width), "TEMPERATURE": float(columns.temperature)}
    how = {"grid": (rows,), "num_warps": 8, "num_stages": 1, "SIZE": COLUMNS, **sizes}
    return _call(kernel, (logits_CV, *operands), out_shape, logits_CV.dtype, **how, **settings)


def measure(logits_CV: jax.Array, targets_C: jax.Array, columns: Any) -> list[jax.Array]:
    """(logp_C, entropy_C, lse_C) in at least float32: see `lm_head.tiles.measure`."""
    number = jax.ShapeDtypeStruct(logits_CV.shape[:1], jnp.promote_types(logits_CV.dtype, jnp.float32))
    return _of_rows(lm_head_measure, logits_CV, (targets_C,), [number] * 3, columns)


def dlogits(logits_CV: jax.Array, operands: tuple[jax.Array, ...], columns: Any, dtype: Any) -> jax.Array:
    """See `lm_head.tiles.dlogits`; `operands` [C]: targets, log-sum-exps, entropies, derivatives in log-probability and entropy."""
    aliases = {0: 0} if logits_CV.dtype == dtype else {}
    out = jax.ShapeDtypeStruct(logits_CV.shape, dtype)
    return _of_rows(lm_head_dlogits, logits_CV, operands, out, columns, input_output_aliases=aliases)


def decode(
    qkv_PGXD: jax.Array,
    bias_XD: jax.Array | None,
    prompt_PKTD: tuple[jax.Array, jax.Array],
    mask_PT: jax.Array,
    own_PGKSD: tuple[jax.Array, jax.Array],
    place: jax.Array,
    *,
    divisor: float,
    window: int | None,
) -> list[jax.Array]:
    """(out_PGND, keys_PGKSD, values_PGKSD): see `model.decode_kernel.decode`."""
    (prompts, group, columns, head_dim), (*_, kv_heads, total, _) = qkv_PGXD.shape, own_PGKSD[0].shape
    heads, dtype = columns - 2 * kv_heads, qkv_PGXD.dtype
    shapes = [(prompts, group, heads, head_dim), *(x.shape for x in own_PGKSD)]
    dtypes = [dtype, *(x.dtype for x in own_PGKSD)]
    bias = qkv_PGXD if bias_XD is None else bias_XD  # one that is not read
    return _call(
        decode_attention,
        (qkv_PGXD, bias, *prompt_PKTD, mask_PT.astype(jnp.int32), *own_PGKSD, place),
        [jax.ShapeDtypeStruct(*one) for one in zip(shapes, dtypes, strict=True)],
        dtype,
        grid=(prompts, group, heads),
        num_warps=4,
        num_stages=2,
        input_output_aliases={5: 1, 6: 2},
        HEADS=heads,
        KV_HEADS=kv_heads,
        T=mask_PT.shape[1],
        S=total,
        BIASED=bias_XD is not None,
        WINDOW=window or 0,
        DIVISOR=float(divisor),
        SIZE=KEYS,
        D=head_dim,
    )
