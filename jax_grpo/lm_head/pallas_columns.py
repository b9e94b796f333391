"""The minimum-memory mode's tile as Pallas-Triton matmuls whose logits never leave the registers.

Each program makes one block of logits in float32, walking the width in steps, and turns it into softmax sums or into its
gradient. Whole widths as one block, as an earlier public kernel had them, do not fit shared memory.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jax_grpo import triton
from jax_grpo.lm_head import loops
from jax_grpo.lm_head.tiles import LOWEST, Columns, Partial, RowStatistics, to_logits
from jax_grpo.triton import plt

# No registers spill and two programs share a core on sm_89; rows are a multiple of `tiles.ROW_MULTIPLE`.
BLOCK_C, BLOCK_V, BLOCK_H = 64, 128, 64


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


def _each_block(compute, name: str, hidden_CH, weights_VH, columns: Columns, *operands, out_shape):
    """The results of `compute(block, *refs)`, one program a block of the logits: see `_block`; refs of operands and results."""
    # Bounds change from tile to tile without a recompile.
    bounds = jnp.stack([jnp.asarray(x, jnp.int32) for x in (columns.first, columns.fresh)])
    static = columns._replace(first=0, fresh=0)

    def kernel(hidden_ref, weights_ref, bounds_ref, *refs):
        compute(_block(hidden_ref, weights_ref, bounds_ref, static), *refs)

    return triton.call(
        kernel,
        f"lm_head_{name}",
        (hidden_CH, weights_VH, bounds, *operands),
        grid=(-(-weights_VH.shape[0] // BLOCK_V), hidden_CH.shape[0] // BLOCK_C),
        out_shape=out_shape,
        warps=4,
        stages=3,
    )


def partial(hidden_CH, weights_VH, targets_C, columns: Columns, stored) -> Partial:
    """See `loops.partial`; logits are in float32 whatever `stored`."""
    if triton.backend() == "jax_triton":  # which has no kernel of columns
        return loops.partial(hidden_CH, weights_VH, targets_C, columns, stored)

    def compute(block, target_ref, *out_refs):
        z_CV, rows, token_V, inside_V = block
        is_target_CV = (token_V[None, :] == target_ref[rows][:, None]) & inside_V[None, :]
        for ref, value_C in zip(out_refs, Partial.of_scaled(z_CV, is_target_CV), strict=True):
            plt.store(ref.at[pl.program_id(0), rows], value_C)

    dtype = jnp.promote_types(hidden_CH.dtype, jnp.float32)
    of_blocks = jax.ShapeDtypeStruct((-(-weights_VH.shape[0] // BLOCK_V), hidden_CH.shape[0]), dtype)
    shapes = [of_blocks] * len(Partial._fields)
    blocks = Partial(*_each_block(compute, "partial", hidden_CH, weights_VH, columns, targets_C, out_shape=shapes))
    top_C = jnp.max(blocks.top, axis=0)
    scale_KC = jnp.exp(blocks.top - top_C)
    mass_C, weighted_C = (jnp.sum(x * scale_KC, axis=0) for x in (blocks.mass, blocks.weighted))
    return Partial(top_C, mass_C, weighted_C, jnp.sum(blocks.target, axis=0))


def tile_dlogits(
    hidden_CH, weights_VH, targets_C, statistics: RowStatistics, to_logp_C, to_entropy_C, columns: Columns, stored
) -> jax.Array:
    """See `loops.tile_dlogits`; logits are in float32 whatever `stored`."""
    if triton.backend() == "jax_triton":
        given = (hidden_CH, weights_VH, targets_C, statistics, to_logp_C, to_entropy_C, columns, stored)
        return loops.tile_dlogits(*given)
    width = weights_VH.shape[0]

    def compute(block, target_ref, entropy_ref, lse_ref, g_ref, e_ref, out_ref):
        z_CV, rows, token_V, inside_V = block
        is_target_CV = token_V[None, :] == target_ref[rows][:, None]
        lse_C1, *to_C1 = (ref[rows][:, None] for ref in (lse_ref, g_ref, e_ref, entropy_ref))
        d_CV = to_logits(z_CV - lse_C1, is_target_CV, *to_C1)
        d_CV = jnp.where(inside_V[None, :], d_CV / columns.temperature, 0).astype(out_ref.dtype)
        first_column = pl.program_id(0) * BLOCK_V
        within_V = first_column + jnp.arange(BLOCK_V, dtype=jnp.int32) < width
        plt.store(out_ref.at[rows, pl.ds(first_column, BLOCK_V)], d_CV, mask=within_V[None, :])

    operands = (targets_C, statistics.entropy, statistics.lse, to_logp_C, to_entropy_C)
    shape = jax.ShapeDtypeStruct((hidden_CH.shape[0], width), hidden_CH.dtype)
    return _each_block(compute, "tile_dlogits", hidden_CH, weights_VH, columns, *operands, out_shape=shape)
