"""The minimum-memory mode's tile as Pallas-Triton matmuls whose logits never leave the registers.

Each program makes one block of logits in float32, walking the width in steps, and turns it into softmax sums or into its
gradient. Whole widths as one block, as an earlier public kernel had them, do not fit shared memory.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from jax_grpo.lm_head.pallas_rows import pallas_call
from jax_grpo.lm_head.tiles import LOWEST, Columns, Partial, RowStatistics

BLOCK_C, BLOCK_V, BLOCK_H = (
    64,
    128,
    64,
)  # rows a multiple of `tiles.ROW_MULTIPLE`; no spills, two programs a core on sm_89
WARPS, STAGES = 4, 3


def _block(hidden_ref, weights_ref, bounds_ref, columns: Columns):
    """(z = logits / temperature of the program's block [BLOCK_C, BLOCK_V], its rows, its tokens, which columns count)."""
    rows = pl.ds(pl.program_id(1) * BLOCK_C, BLOCK_C)
    first_column = pl.program_id(0) * BLOCK_V
    width, depth = weights_ref.shape
    within_V = first_column + jnp.arange(BLOCK_V, dtype=jnp.int32)
    token_V = bounds_ref[0] + within_V
    inside_V = (within_V < width) & (token_V < columns.vocab_size) & (token_V >= bounds_ref[1])
    accumulator = jnp.promote_types(hidden_ref.dtype, jnp.float32)

    def step(number, z_CV):
        depths = pl.ds(number * BLOCK_H, BLOCK_H)
        inside_H = number * BLOCK_H + jnp.arange(BLOCK_H, dtype=jnp.int32) < depth
        hidden_CH = plt.load(hidden_ref.at[rows, depths], mask=inside_H[None, :], other=0.0)
        weights_VH = plt.load(
            weights_ref.at[pl.ds(first_column, BLOCK_V), depths],
            mask=(within_V < width)[:, None] & inside_H[None, :],
            other=0.0,
        )
        return z_CV + plt.dot(hidden_CH, weights_VH, trans_b=True).astype(accumulator)

    z_CV = jax.lax.fori_loop(0, -(-depth // BLOCK_H), step, jnp.zeros((BLOCK_C, BLOCK_V), accumulator))
    return jnp.where(inside_V[None, :], z_CV / columns.temperature, LOWEST), rows, token_V, inside_V


def _operands(hidden_CH, weights_VH, columns: Columns):
    """(arrays every kernel takes, compile-time columns, grid): bounds change from tile to tile without a recompile."""
    bounds = jnp.stack([jnp.asarray(x, jnp.int32) for x in (columns.first, columns.fresh)])
    grid = (-(-weights_VH.shape[0] // BLOCK_V), hidden_CH.shape[0] // BLOCK_C)
    return (hidden_CH, weights_VH, bounds), columns._replace(first=0, fresh=0), grid


def partial(hidden_CH, weights_VH, targets_C, columns: Columns, stored) -> Partial:
    """See `loops.partial`; logits are in float32 whatever `stored`."""
    operands, static, grid = _operands(hidden_CH, weights_VH, columns)

    def kernel(hidden_ref, weights_ref, bounds_ref, target_ref, *out_refs):
        z_CV, rows, token_V, inside_V = _block(hidden_ref, weights_ref, bounds_ref, static)
        top_C = jnp.max(z_CV, axis=1)
        exp_CV = jnp.exp(z_CV - top_C[:, None])
        at_target_CV = (token_V[None, :] == target_ref[rows][:, None]) & inside_V[None, :]
        sums = (exp_CV, exp_CV * z_CV, jnp.where(at_target_CV, z_CV, 0))
        for ref, value_C in zip(out_refs, (top_C, *(jnp.sum(x, axis=1) for x in sums)), strict=True):
            plt.store(ref.at[pl.program_id(0), rows], value_C)

    dtype = jnp.promote_types(hidden_CH.dtype, jnp.float32)
    shape = jax.ShapeDtypeStruct((grid[0], hidden_CH.shape[0]), dtype)
    blocks = Partial(
        *pallas_call(
            kernel,
            "partial",
            *operands,
            targets_C,
            grid=grid,
            out_shape=[shape] * len(Partial._fields),
            warps=WARPS,
            stages=STAGES,
        )
    )
    top_C = jnp.max(blocks.top, axis=0)
    scale_KC = jnp.exp(blocks.top - top_C)
    return Partial(
        top_C,
        jnp.sum(blocks.mass * scale_KC, axis=0),
        jnp.sum(blocks.weighted * scale_KC, axis=0),
        jnp.sum(blocks.target, axis=0),
    )


def tile_dlogits(
    hidden_CH, weights_VH, targets_C, statistics: RowStatistics, to_logp_C, to_entropy_C, columns: Columns, stored
) -> jax.Array:
    """See `loops.tile_dlogits`; logits are in float32 whatever `stored`."""
    operands, static, grid = _operands(hidden_CH, weights_VH, columns)
    width = weights_VH.shape[0]

    def kernel(hidden_ref, weights_ref, bounds_ref, target_ref, entropy_ref, lse_ref, g_ref, e_ref, out_ref):
        z_CV, rows, token_V, inside_V = _block(hidden_ref, weights_ref, bounds_ref, static)
        logp_CV = z_CV - lse_ref[rows][:, None]
        g_C1, e_C1 = g_ref[rows][:, None], e_ref[rows][:, None]
        at_target_CV = jnp.where(token_V[None, :] == target_ref[rows][:, None], g_C1, 0)
        d_CV = at_target_CV - jnp.exp(logp_CV) * (g_C1 + e_C1 * (logp_CV + entropy_ref[rows][:, None]))
        d_CV = jnp.where(inside_V[None, :], d_CV / static.temperature, 0).astype(out_ref.dtype)
        first_column = pl.program_id(0) * BLOCK_V
        within_V = first_column + jnp.arange(BLOCK_V, dtype=jnp.int32) < width
        plt.store(out_ref.at[rows, pl.ds(first_column, BLOCK_V)], d_CV, mask=within_V[None, :])

    return pallas_call(
        kernel,
        "tile_dlogits",
        *operands,
        targets_C,
        statistics.entropy,
        statistics.lse,
        to_logp_C,
        to_entropy_C,
        grid=grid,
        out_shape=jax.ShapeDtypeStruct((hidden_CH.shape[0], width), hidden_CH.dtype),
        warps=WARPS,
        stages=STAGES,
    )
