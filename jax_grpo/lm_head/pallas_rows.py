"""Whole rows as Pallas-Triton kernels for NVIDIA cards (sm_80 on): logits become their own gradient in place.

One program a row reads it, evaluates the token's loss and its derivatives, and rewrites it; float32 throughout. Interpreted
where the program is compiled for the CPU: for tests, not for speed.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jax_grpo import triton
from jax_grpo.lm_head import tiles
from jax_grpo.lm_head.tiles import LOWEST, Columns, Partial, RowStatistics, TokenLoss
from jax_grpo.triton import plt

ROW_BLOCK = 2048  # columns that one program holds at a time


def _blocks(width: int) -> int:
    return -(-width // ROW_BLOCK)


def _load_row(logits_ref, block, columns: Columns):
    """(z = logits / temperature of one block of the row [ROW_BLOCK], its tokens, which of them count)."""
    column_V = block * ROW_BLOCK + jnp.arange(ROW_BLOCK, dtype=jnp.int32)
    inside_V = column_V < min(columns.vocab_size, logits_ref.shape[0])
    z_V = plt.load(logits_ref.at[pl.ds(block * ROW_BLOCK, ROW_BLOCK)], mask=inside_V, other=0.0)
    z_V = z_V.astype(jnp.promote_types(z_V.dtype, jnp.float32)) / columns.temperature
    return jnp.where(inside_V, z_V, LOWEST), column_V, inside_V


def _sweep(logits_ref, target, columns: Columns) -> RowStatistics:
    """Statistics of the program's row, each [1]: one pass, online."""

    def merge(block, seen):
        z_V, column_V, inside_V = _load_row(logits_ref, block, columns)
        top = jnp.max(z_V)
        exp_V = jnp.exp(z_V - top)
        at_target_V = jnp.where((column_V == target) & inside_V, z_V, 0)
        return Partial(*seen).merge(Partial(top, jnp.sum(exp_V), jnp.sum(exp_V * z_V), jnp.sum(at_target_V)))

    dtype = jnp.promote_types(logits_ref.dtype, jnp.float32)
    zero = jnp.zeros((), dtype)
    empty = Partial(jnp.full((), LOWEST, dtype), zero, zero, zero)
    seen = jax.lax.fori_loop(0, _blocks(min(columns.vocab_size, logits_ref.shape[0])), merge, empty)
    return RowStatistics(*(x.reshape(1) for x in seen.statistics()))


def _rewrite(logits_ref, out_ref, target, statistics: RowStatistics, to_logp, to_entropy, columns: Columns) -> None:
    """The row's gradient (see `tiles.dlogits`), written where its logits may have stood."""
    width = out_ref.shape[0]

    def block_of(block, carry):
        z_V, column_V, inside_V = _load_row(logits_ref, block, columns)
        d_V = tiles.to_logits(z_V - statistics.lse, column_V == target, to_logp, to_entropy, statistics.entropy)
        d_V = jnp.where(inside_V, d_V / columns.temperature, 0).astype(out_ref.dtype)
        plt.store(out_ref.at[pl.ds(block * ROW_BLOCK, ROW_BLOCK)], d_V, mask=column_V < width)
        return carry

    jax.lax.fori_loop(0, _blocks(width), block_of, 0)


def _put(refs, values) -> None:
    for ref, value in zip(refs, values, strict=True):
        ref[...] = value.astype(ref.dtype)


def _row_spec(x: Any) -> pl.BlockSpec:
    """One row of an array [C, ...] for each program; a scalar as it is."""
    if not x.ndim:
        return pl.BlockSpec((), lambda row: ())
    return pl.BlockSpec((1, *x.shape[1:]), lambda row: (row, *(0 for _ in x.shape[1:])))


def _each_row(kernel, name: str, logits_CV: jax.Array, *operands: Any, gradient: Any = None, numbers: int = 0) -> Any:
    """The kernel as one program a row, on its logits without their axis of 1 and on its row of each of `operands`.

    Results: where `gradient` is a dtype, the logits' gradient in it, which stands in their place if it is as wide; then so many
    `numbers` [C] in at least float32.
    """
    logits_spec = pl.BlockSpec((None, logits_CV.shape[1]), lambda row: (row, 0))
    number = jax.ShapeDtypeStruct(logits_CV.shape[:1], jnp.promote_types(logits_CV.dtype, jnp.float32))
    gradients = [] if gradient is None else [jax.ShapeDtypeStruct(logits_CV.shape, gradient)]
    return triton.call(
        kernel,
        f"lm_head_{name}",
        (logits_CV, *operands),
        warps=8,
        stages=1,
        grid=(logits_CV.shape[0],),
        in_specs=[logits_spec, *map(_row_spec, operands)],
        out_specs=[logits_spec for _ in gradients] + [_row_spec(number)] * numbers,
        out_shape=[*gradients, *[number] * numbers],
        input_output_aliases={0: 0} if gradients and logits_CV.dtype == gradient else {},
    )


def measure(logits_CV: jax.Array, targets_C: jax.Array, columns: Columns) -> RowStatistics:
    """See `tiles.measure`."""
    if triton.backend() == "jax_triton":
        from jax_grpo.triton import kernels

        return RowStatistics(*kernels.measure(logits_CV, targets_C, columns))

    def kernel(logits_ref, target_ref, *out_refs):
        _put(out_refs, _sweep(logits_ref, target_ref[0], columns))

    return RowStatistics(*_each_row(kernel, "measure", logits_CV, targets_C, numbers=3))


def _dlogits(
    logits_CV, targets_C, statistics: RowStatistics, to_logp_C, to_entropy_C, columns: Columns, dtype
) -> jax.Array:
    """See `tiles.dlogits`: the row kernel without its first pass."""
    if triton.backend() == "jax_triton":
        from jax_grpo.triton import kernels

        operands = (targets_C, statistics.lse, statistics.entropy, to_logp_C, to_entropy_C)
        return kernels.dlogits(logits_CV, operands, columns, dtype)

    def kernel(logits_ref, target_ref, logp_ref, entropy_ref, lse_ref, g_ref, e_ref, out_ref):
        known = RowStatistics(logp_ref[...], entropy_ref[...], lse_ref[...])
        _rewrite(logits_ref, out_ref, target_ref[0], known, g_ref[...], e_ref[...], columns)

    operands = (targets_C, *statistics, to_logp_C, to_entropy_C)
    return _each_row(kernel, "dlogits", logits_CV, *operands, gradient=dtype)[0]


def differentiate(
    logits_CV, targets_C, rows: Any, token_loss: TokenLoss, columns: Columns, dtype, known: RowStatistics | None = None
) -> tuple[jax.Array, jax.Array, RowStatistics]:
    """See `tiles.differentiate`: one program a row reads it, evaluates `token_loss` and its derivatives, and rewrites it."""
    if (
        known is None and triton.backend() == "jax_triton"
    ):  # whose kernels know no loss: JAX has its derivatives in between
        known = measure(logits_CV, targets_C, columns)
    if known is not None:
        loss_C, to_logp_C, to_entropy_C = tiles.derivatives(token_loss, rows, known.logp, known.entropy)
        return _dlogits(logits_CV, targets_C, known, to_logp_C, to_entropy_C, columns, dtype), loss_C, known
    leaves, tree = jax.tree.flatten(rows)
    flags = [leaf.dtype == bool for leaf in leaves]  # Triton has no memory of single bits
    leaves = [leaf.astype(jnp.int32) if flag else leaf for leaf, flag in zip(leaves, flags, strict=True)]

    def kernel(logits_ref, target_ref, *refs):
        inputs, (out_ref, *out_refs) = refs[: len(leaves)], refs[len(leaves) :]
        values = [ref[...] != 0 if flag else ref[...] for ref, flag in zip(inputs, flags, strict=True)]
        rows_1 = jax.tree.unflatten(tree, values)
        target = target_ref[0]
        statistics = _sweep(logits_ref, target, columns)
        loss, to_logp, to_entropy = tiles.derivatives(token_loss, rows_1, statistics.logp, statistics.entropy)
        _rewrite(logits_ref, out_ref, target, statistics, to_logp, to_entropy, columns)
        _put(out_refs, (loss, *statistics))

    results = _each_row(kernel, "differentiate", logits_CV, targets_C, *leaves, gradient=dtype, numbers=4)
    d_CV, loss_C, *statistics = results
    return d_CV, loss_C, RowStatistics(*statistics)
