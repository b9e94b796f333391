"""The loops over tiles: statistics of rows, and the gradients of their loss in hidden states and embedding, without [T, V].

A tile is some rows, whole (three matmuls: logits, to hidden, to embedding) or, where `Tiling.vocab` says so, some columns at a
time (the logits once more, unless the statistics are known). Who does the arithmetic of a tile is handed in as `Kernels`; rows
that need no work are skipped. Knows nothing of objectives or autodiff.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jax_grpo.lm_head import tiles
from jax_grpo.lm_head.tiles import WHOLE, Columns, Partial, RowStatistics, Tiling, TokenLoss, TokenOrder, put, take

LEARNS, MEASURED, IDLE = 2, 1, 0  # a row's work: gradients; statistics only; none


class Kernels(NamedTuple):
    """The arithmetic of a tile; see the functions of the same names in `tiles`, and `partial` and `tile_dlogits` below."""

    measure: Callable[..., RowStatistics]
    differentiate: Callable[..., tuple[jax.Array, jax.Array, RowStatistics]]
    dlogits: Callable[..., jax.Array]
    partial: Callable[..., Partial]
    tile_dlogits: Callable[..., jax.Array]


def logits(hidden_CH: jax.Array, weights_VH: jax.Array, stored) -> jax.Array:
    """h W^T [C, V], accumulated in at least float32 and stored as `stored`."""
    return jnp.einsum("ch,vh->cv", hidden_CH, weights_VH, preferred_element_type=stored)


def partial(hidden_CH, weights_VH, targets_C, columns: Columns, stored) -> Partial:
    """Softmax sums over the columns of one tile of the embedding."""
    return Partial.of(tiles.scaled(logits(hidden_CH, weights_VH, stored), columns), targets_C, columns)


def tile_dlogits(hidden_CH, weights_VH, targets_C, statistics, to_logp_C, to_entropy_C, columns: Columns, stored):
    """Gradient in the logits of one tile of the embedding, in the hidden states' dtype."""
    logits_CV = logits(hidden_CH, weights_VH, stored)
    return tiles.dlogits(logits_CV, targets_C, statistics, to_logp_C, to_entropy_C, columns, hidden_CH.dtype)


XLA = Kernels(tiles.measure, tiles.differentiate, tiles.dlogits, partial, tile_dlogits)


@functools.cache
def parallel(axis: str) -> Kernels:
    """Kernels of a device that has some of the columns, the others being those of the other devices of a mesh's axis."""

    def measure(logits_CV: jax.Array, targets_C: jax.Array, columns: Columns) -> RowStatistics:
        return Partial.of(tiles.scaled(logits_CV, columns), targets_C, columns).over(axis).statistics()

    differentiate = functools.partial(tiles.differentiate, measure=measure)
    return XLA._replace(measure=measure, differentiate=differentiate)


class Plan(NamedTuple):
    """What a program is compiled for: the columns, the tiling and who does the arithmetic. Hashable."""

    columns: Columns
    tiling: Tiling
    kernels: Kernels = XLA
    vocabulary_axis: str | None = None  # of the mesh, that the embedding's rows are cut over

    @classmethod
    def of(
        cls,
        *,
        vocab_size: int,
        temperature: float,
        tiling: Tiling = WHOLE,
        kernels: Kernels = XLA,
        vocabulary_axis: str | None = None,
    ) -> "Plan":
        """The settings of a head: see `materialised.token_logprobs`."""
        if vocabulary_axis is not None and tiling.vocab is None:
            assert kernels is XLA, "the config refuses the others, whose rows are whole"
            kernels = parallel(vocabulary_axis)
        return cls(Columns(vocab_size, temperature), tiling, kernels, vocabulary_axis)

    def merged(self, seen: Partial) -> RowStatistics:
        """Statistics of rows from the softmax sums over a device's columns."""
        return (seen if self.vocabulary_axis is None else seen.over(self.vocabulary_axis)).statistics()


class Tokens(NamedTuple):
    """The rows of a head: hidden states, the embedding in the hidden states' dtype, targets, and the work of each row."""

    hidden_NH: jax.Array
    weights_VH: jax.Array
    targets_N: jax.Array
    work_N: jax.Array
    embedding_dtype: Any  # of the embedding itself, and so of its gradient

    @classmethod
    def of(cls, hidden_NH, embedding_VH, targets_N, work_N) -> "Tokens":
        return cls(hidden_NH, embedding_VH.astype(hidden_NH.dtype), targets_N, work_N, embedding_VH.dtype)

    @property
    def accumulator(self):
        return jnp.promote_types(self.hidden_NH.dtype, jnp.float32)

    def no_statistics(self) -> RowStatistics:
        zeros_N = jnp.zeros(self.targets_N.shape, self.accumulator)
        return RowStatistics(zeros_N, zeros_N, zeros_N)


class Gradients(NamedTuple):
    """Of the summed loss: its value, and its gradients; `to_hidden_NH` is 0 on rows that do not learn."""

    loss: jax.Array
    to_hidden_NH: jax.Array
    to_embedding_VH: jax.Array


def _on_own_columns(function: Callable[..., Any], plan: Plan, tokens: Tokens, others: Any, returned: Any) -> Any:
    """`function(plan, tokens, others)` on each device of `plan.vocabulary_axis`, with the columns that it has.

    All else is the same on every one of them, and so are the trip counts of their loops. `returned` says which of the results are
    cut as the embedding is.
    """
    cut, whole = PartitionSpec(plan.vocabulary_axis), PartitionSpec()
    parts = jax.sharding.get_abstract_mesh().shape[plan.vocabulary_axis]
    count = tokens.weights_VH.shape[0] // parts

    def own(first_1: jax.Array, weights_VH: jax.Array, rest: tuple, others: Any) -> Any:
        hidden_NH, targets_N, work_N = rest
        mine = Tokens(hidden_NH, weights_VH, targets_N, work_N, tokens.embedding_dtype)
        return function(plan._replace(columns=plan.columns.beginning_at(first_1[0])), mine, others)

    program = jax.shard_map(
        own,
        in_specs=(cut, cut, whole, whole),
        out_specs=jax.tree.map(lambda is_cut: cut if is_cut else whole, returned),
        axis_names={plan.vocabulary_axis},
        check_vma=False,  # loops begin with zeros, which are nobody's own
    )
    firsts = jnp.arange(parts, dtype=jnp.int32) * count
    return program(firsts, tokens.weights_VH, (tokens.hidden_NH, tokens.targets_N, tokens.work_N), others)


def statistics(plan: Plan, tokens: Tokens) -> RowStatistics:
    """Statistics of every row that is not idle; 0 on the idle ones."""
    if plan.vocabulary_axis is not None:
        return _on_own_columns(lambda plan, tokens, _: _statistics(plan, tokens), plan, tokens, (), False)
    return _statistics(plan, tokens)


def _statistics(plan: Plan, tokens: Tokens) -> RowStatistics:
    order = TokenOrder.by(tokens.work_N, plan.tiling.rows(tokens.work_N.shape[0]))
    stop = order.tiles(jnp.sum(tokens.work_N != IDLE))
    return _fill(plan, tokens, order, 0, stop, tokens.no_statistics())


def gradients(
    plan: Plan, tokens: Tokens, token_loss: TokenLoss, rows: Any, known: RowStatistics | None = None
) -> tuple[Gradients, RowStatistics]:
    """Gradients of `sum(token_loss(rows, logp, entropy))` over the rows that learn, and statistics of all that are not idle.

    `rows` are arrays [N, ...] and scalars; `token_loss` is given some of the rows at a time. `known` are the statistics of all
    rows, if they are known for these very weights: saves the pass that finds them.
    """
    if plan.vocabulary_axis is None:
        return _gradients(plan, tokens, token_loss, rows, known)

    def of_own(plan: Plan, tokens: Tokens, others: Any) -> tuple[Gradients, RowStatistics]:
        of_columns, statistics = _gradients(plan, tokens, token_loss, *others)
        wide_NH = of_columns.to_hidden_NH.astype(tokens.accumulator)  # a sum rounded after each device would drift
        to_hidden_NH = jax.lax.psum(wide_NH, plan.vocabulary_axis).astype(tokens.hidden_NH.dtype)
        return of_columns._replace(to_hidden_NH=to_hidden_NH), statistics

    returned = Gradients._make((False, False, True)), False
    return _on_own_columns(of_own, plan, tokens, (rows, known), returned)


def _gradients(
    plan: Plan, tokens: Tokens, token_loss: TokenLoss, rows: Any, known: RowStatistics | None
) -> tuple[Gradients, RowStatistics]:
    order = TokenOrder.by(tokens.work_N, plan.tiling.rows(tokens.work_N.shape[0]))
    learning = order.tiles(jnp.sum(tokens.work_N == LEARNS))
    of_tiles = _gradients_of_rows if plan.tiling.vocab is None else _gradients_of_columns
    summed, measured = of_tiles(plan, tokens, order, learning, token_loss, rows, known)
    if known is None:
        stop = order.tiles(jnp.sum(tokens.work_N != IDLE))
        measured = _fill(plan, tokens, order, learning, stop, measured)
    return summed, measured


def _fill(plan: Plan, tokens: Tokens, order: TokenOrder, start: Any, stop: Any, into: RowStatistics) -> RowStatistics:
    """`into` with the statistics of tiles start..stop - 1 of `order` filled in."""
    of_tile = _statistics_of_rows if plan.tiling.vocab is None else _statistics_of_columns

    def tile(number, statistics):
        index_C = order[number]
        return put(statistics, index_C, of_tile(plan, tokens, index_C))

    return jax.lax.fori_loop(start, stop, tile, into)


def _statistics_of_rows(plan: Plan, tokens: Tokens, index_C: jax.Array) -> RowStatistics:
    stored = plan.tiling.stored(tokens.hidden_NH.dtype)
    logits_CV = logits(take(tokens.hidden_NH, index_C), tokens.weights_VH, stored)
    return plan.kernels.measure(logits_CV, take(tokens.targets_N, index_C), plan.columns)


def _statistics_of_columns(plan: Plan, tokens: Tokens, index_C: jax.Array) -> RowStatistics:
    """The same, some columns at a time."""
    stored = plan.tiling.stored(tokens.hidden_NH.dtype)
    width, count, columns_of = _vocabulary_tiles(plan, tokens)
    hidden_CH, targets_C = take((tokens.hidden_NH, tokens.targets_N), index_C)

    def merge(number, seen: Partial) -> Partial:
        start, columns = columns_of(number)
        weights_VH = jax.lax.dynamic_slice_in_dim(tokens.weights_VH, start, width)
        return seen.merge(plan.kernels.partial(hidden_CH, weights_VH, targets_C, columns, stored))

    return plan.merged(jax.lax.fori_loop(0, count, merge, Partial.empty(index_C.shape[0], tokens.accumulator)))


def _vocabulary_tiles(plan: Plan, tokens: Tokens) -> tuple[int, int, Callable[[Any], tuple[jax.Array, Columns]]]:
    """(columns of a tile, number of tiles, first row of the weights and columns of tile i).

    The last tile reaches back so that all are whole.
    """
    total = tokens.weights_VH.shape[0]
    width = min(plan.tiling.vocab or total, total)

    def columns(number) -> tuple[jax.Array, Columns]:
        start = jnp.minimum(number * width, total - width)
        tile = plan.columns._replace(first=start, fresh=number * width)
        return start, tile if plan.vocabulary_axis is None else tile.beginning_at(jnp.asarray(plan.columns.first))

    return width, -(-total // width), columns


def _gradients_of_rows(plan: Plan, tokens: Tokens, order: TokenOrder, stop, token_loss, rows, known):
    """Gradients and statistics of tiles 0..stop - 1 of `order`, whole rows at a time; see `gradients`."""
    stored, dtype = plan.tiling.stored(tokens.hidden_NH.dtype), tokens.hidden_NH.dtype

    def tile(number, carry):
        (loss, to_hidden_NH, to_embedding_VH), statistics = carry
        index_C = order[number]
        hidden_CH, targets_C, rows_C = take((tokens.hidden_NH, tokens.targets_N, rows), index_C)
        logits_CV = logits(hidden_CH, tokens.weights_VH, stored)
        if known is None:
            d_CV, loss_C, measured = plan.kernels.differentiate(
                logits_CV, targets_C, rows_C, token_loss, plan.columns, dtype
            )
            statistics = put(statistics, index_C, measured)
        else:
            measured = take(known, index_C)
            loss_C, *to_row = tiles.derivatives(token_loss, rows_C, measured.logp, measured.entropy)
            d_CV = plan.kernels.dlogits(logits_CV, targets_C, measured, *to_row, plan.columns, dtype)
        to_hidden_CH = jnp.einsum("cv,vh->ch", d_CV, tokens.weights_VH, preferred_element_type=dtype)
        # Accumulated in float32 whatever the operands: a sum rounded to bfloat16 after each tile drifts.
        to_embedding_VH += jnp.einsum("cv,ch->vh", d_CV, hidden_CH, preferred_element_type=tokens.accumulator)
        done = Gradients(loss + jnp.sum(loss_C), put(to_hidden_NH, index_C, to_hidden_CH), to_embedding_VH)
        return done, statistics

    nothing = Gradients(
        jnp.zeros((), tokens.accumulator),
        jnp.zeros_like(tokens.hidden_NH),
        jnp.zeros(tokens.weights_VH.shape, tokens.accumulator),
    )
    total, statistics = jax.lax.fori_loop(0, stop, tile, (nothing, known or tokens.no_statistics()))
    return total._replace(to_embedding_VH=total.to_embedding_VH.astype(tokens.embedding_dtype)), statistics


def _gradients_of_columns(plan: Plan, tokens: Tokens, order: TokenOrder, stop, token_loss, rows, known):
    """The same, some columns at a time: the embedding's gradient is finished tile by tile and needs no second copy."""
    stored, dtype = plan.tiling.stored(tokens.hidden_NH.dtype), tokens.hidden_NH.dtype
    width, count, columns_of = _vocabulary_tiles(plan, tokens)
    statistics = known or _fill(plan, tokens, order, 0, stop, tokens.no_statistics())
    loss_N, *to_rows_N = tiles.derivatives(token_loss, rows, statistics.logp, statistics.entropy)
    learns_N = tokens.work_N == LEARNS
    per_row = (tokens.hidden_NH, tokens.targets_N, statistics, *to_rows_N)

    def column_tile(number, carry):
        to_hidden_NH, to_embedding_VH = carry
        start, columns = columns_of(number)
        weights_VH = jax.lax.dynamic_slice_in_dim(tokens.weights_VH, start, width)

        def row_tile(row_number, inner):
            to_hidden_NH, to_weights_VH = inner
            index_C = order[row_number]
            hidden_CH, targets_C, measured, *to_row = take(per_row, index_C)
            d_CV = plan.kernels.tile_dlogits(hidden_CH, weights_VH, targets_C, measured, *to_row, columns, stored)
            to_hidden_CH = jnp.einsum("cv,vh->ch", d_CV, weights_VH, preferred_element_type=tokens.accumulator)
            to_weights_VH += jnp.einsum("cv,ch->vh", d_CV, hidden_CH, preferred_element_type=tokens.accumulator)
            return to_hidden_NH.at[index_C].add(to_hidden_CH, mode="drop", unique_indices=True), to_weights_VH

        nothing = jnp.zeros(weights_VH.shape, tokens.accumulator)
        to_hidden_NH, to_weights_VH = jax.lax.fori_loop(0, stop, row_tile, (to_hidden_NH, nothing))
        # Columns of an earlier tile are 0 here, so adding leaves their finished sums as they are.
        before_VH = jax.lax.dynamic_slice_in_dim(to_embedding_VH, start, width)
        after_VH = before_VH + to_weights_VH.astype(tokens.embedding_dtype)
        return to_hidden_NH, jax.lax.dynamic_update_slice_in_dim(to_embedding_VH, after_VH, start, 0)

    nothing = (
        jnp.zeros(tokens.hidden_NH.shape, tokens.accumulator),
        jnp.zeros(tokens.weights_VH.shape, tokens.embedding_dtype),
    )
    to_hidden_NH, to_embedding_VH = jax.lax.fori_loop(0, count, column_tile, nothing)
    loss = jnp.sum(jnp.where(learns_N, loss_N, 0))
    return Gradients(loss, to_hidden_NH.astype(dtype), to_embedding_VH), statistics
