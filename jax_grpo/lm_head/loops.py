"""The loops over tiles: statistics of rows, and the gradients of their loss in hidden states and embedding, without [T, V].

A tile is some rows, whole (three matmuls: logits, to hidden, to embedding) or, where `Tiling.vocab` says so, some columns at a
time (the logits once more, unless the statistics are known). Who does the arithmetic of a tile is handed in as `Kernels`; rows
that need no work are skipped. Knows nothing of objectives or autodiff.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jax_grpo.arrays.products import contract
from jax_grpo.lm_head import tiles
from jax_grpo.lm_head.tiles import WHOLE, Columns, Partial, RowStatistics, Tiling, TokenLoss, put, take

LEARNS, MEASURED, IDLE = 2, 1, 0  # a row's work: gradients; statistics only; none


class Kernels(NamedTuple):
    """The arithmetic of a tile; see the functions of the same names in `tiles`, and `partial` and `tile_dlogits` below."""

    measure: Callable[..., RowStatistics]
    differentiate: Callable[..., tuple[jax.Array, jax.Array, RowStatistics]]
    partial: Callable[..., Partial]
    tile_dlogits: Callable[..., jax.Array]


def logits(hidden_CH: jax.Array, weights_VH: jax.Array, stored) -> jax.Array:
    """h W^T [C, V], accumulated in at least float32 and stored as `stored`."""
    return jnp.einsum("ch,vh->cv", hidden_CH, weights_VH, preferred_element_type=stored)


def partial(hidden_CH, weights_VH, targets_C, columns: Columns, stored) -> Partial:
    """Softmax sums over the columns of one tile of the embedding."""
    return Partial.of(logits(hidden_CH, weights_VH, stored), targets_C, columns)


def tile_dlogits(hidden_CH, weights_VH, targets_C, statistics, to_logp_C, to_entropy_C, columns: Columns, stored):
    """Gradient in the logits of one tile of the embedding, in the hidden states' dtype."""
    logits_CV = logits(hidden_CH, weights_VH, stored)
    return tiles.dlogits(logits_CV, targets_C, statistics, to_logp_C, to_entropy_C, columns, hidden_CH.dtype)


XLA = Kernels(tiles.measure, tiles.differentiate, partial, tile_dlogits)


class Plan(NamedTuple):
    """What a program is compiled for: the columns, the tiling and who does the arithmetic. Hashable."""

    columns: Columns
    tiling: Tiling
    kernels: Kernels

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
        return cls(Columns(vocab_size, temperature, vocabulary_axis), tiling, kernels)


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


def statistics(plan: Plan, tokens: Tokens) -> RowStatistics:
    """Statistics of every row that is not idle; 0 on the idle ones."""
    return _on_each_device(_statistics, plan, tokens, returned=False)


def gradients(
    plan: Plan, tokens: Tokens, token_loss: TokenLoss, rows: Any, known: RowStatistics | None = None
) -> tuple[Gradients, RowStatistics]:
    """Gradients of `sum(token_loss(rows, logp, entropy))` over the rows that learn, and statistics of all that are not idle.

    `rows` are arrays [N, ...] and scalars; `token_loss` is given some of the rows at a time. `known` are the statistics of all
    rows, if they are known for these very weights: saves the pass that computes them.
    """

    def of_columns(plan: Plan, tokens: Tokens, rows: Any, known: RowStatistics | None):
        return _gradients(plan, tokens, token_loss, rows, known)

    returned = Gradients._make((False, False, True)), False
    return _on_each_device(of_columns, plan, tokens, rows, known, returned=returned)


def _on_each_device(function: Callable[..., Any], plan: Plan, tokens: Tokens, *others: Any, returned: Any) -> Any:
    """`function(plan, tokens, *others)`: where the vocabulary is cut over devices, on each of them with its own columns.

    All else is the same on every one of them, and so are the trip counts of their loops. `returned` says which of the results are
    cut as the embedding is.
    """
    if (axis := plan.columns.axis) is None:
        return function(plan, tokens, *others)
    parts = jax.sharding.get_abstract_mesh().shape[axis]
    count = tokens.weights_VH.shape[0] // parts

    def own(first_1: jax.Array, weights_VH: jax.Array, rest: tuple, others: tuple) -> Any:
        hidden_NH, targets_N, work_N = rest
        own_tokens = Tokens(hidden_NH, weights_VH, targets_N, work_N, tokens.embedding_dtype)
        return function(plan._replace(columns=plan.columns.part(first_1[0], first_1[0])), own_tokens, *others)

    cut, whole = PartitionSpec(axis), PartitionSpec()
    program = jax.shard_map(
        own,
        in_specs=(cut, cut, whole, whole),
        out_specs=jax.tree.map(lambda is_cut: cut if is_cut else whole, returned),
        axis_names={axis},
        check_vma=False,  # loops begin with zeros, which are the same on every device
    )
    firsts = jnp.arange(parts, dtype=jnp.int32) * count
    return program(firsts, tokens.weights_VH, (tokens.hidden_NH, tokens.targets_N, tokens.work_N), others)


def _order(plan: Plan, work_N: jax.Array) -> jax.Array:
    """Rows of each tile, int32 [K, C]: most work first, in their order among equals; filled up with numbers that no row has."""
    total, tile = work_N.shape[0], plan.tiling.rows(work_N.shape[0])
    order_N = jnp.argsort(-work_N.astype(jnp.int32), stable=True).astype(jnp.int32)
    beyond = jnp.arange(total, total + -total % tile, dtype=jnp.int32)  # each once: rows of a tile are unique
    return jnp.concatenate([order_N, beyond]).reshape(-1, tile)


def _tiles_of(order_KC: jax.Array, are_first_N: jax.Array) -> jax.Array:
    """How many tiles hold these rows (bool), which come first in the order."""
    return -(-jnp.sum(are_first_N) // order_KC.shape[1])


def _statistics(plan: Plan, tokens: Tokens) -> RowStatistics:
    order_KC = _order(plan, tokens.work_N)
    stop = _tiles_of(order_KC, tokens.work_N != IDLE)
    return _fill(plan, tokens, order_KC, 0, stop, tokens.no_statistics())


def _gradients(
    plan: Plan, tokens: Tokens, token_loss: TokenLoss, rows: Any, known: RowStatistics | None
) -> tuple[Gradients, RowStatistics]:
    order_KC = _order(plan, tokens.work_N)
    learning = _tiles_of(order_KC, tokens.work_N == LEARNS)
    of_tiles = _gradients_of_rows if plan.tiling.vocab is None else _gradients_of_columns
    summed, measured = of_tiles(plan, tokens, order_KC, learning, token_loss, rows, known)
    if known is None:
        stop = _tiles_of(order_KC, tokens.work_N != IDLE)
        measured = _fill(plan, tokens, order_KC, learning, stop, measured)
    if plan.columns.axis is not None:
        wide_NH = summed.to_hidden_NH.astype(tokens.accumulator)  # a sum rounded after each device would drift
        to_hidden_NH = jax.lax.psum(wide_NH, plan.columns.axis).astype(tokens.hidden_NH.dtype)
        summed = summed._replace(to_hidden_NH=to_hidden_NH)
    return summed, measured


def _fill(plan: Plan, tokens: Tokens, order_KC: jax.Array, start: Any, stop: Any, into: RowStatistics) -> RowStatistics:
    """`into` with the statistics of tiles start..stop - 1 of the order filled in."""
    of_tile = _statistics_of_rows if plan.tiling.vocab is None else _statistics_of_columns

    def tile(number, statistics):
        index_C = jax.lax.dynamic_index_in_dim(order_KC, number, keepdims=False)
        return put(statistics, index_C, of_tile(plan, tokens, index_C))

    return jax.lax.fori_loop(start, stop, tile, into)


def _statistics_of_rows(plan: Plan, tokens: Tokens, index_C: jax.Array) -> RowStatistics:
    hidden_CH, targets_C = take((tokens.hidden_NH, tokens.targets_N), index_C)
    logits_CV = logits(hidden_CH, tokens.weights_VH, plan.tiling.stored(hidden_CH.dtype))
    return plan.kernels.measure(logits_CV, targets_C, plan.columns)


def _statistics_of_columns(plan: Plan, tokens: Tokens, index_C: jax.Array) -> RowStatistics:
    """The same, some columns at a time."""
    hidden_CH, targets_C = take((tokens.hidden_NH, tokens.targets_N), index_C)
    stored = plan.tiling.stored(hidden_CH.dtype)
    count, vocabulary_tile = _vocabulary_tiles(plan, tokens)

    def merge(number, seen: Partial) -> Partial:
        _, weights_VH, columns = vocabulary_tile(number)
        return seen.merge(plan.kernels.partial(hidden_CH, weights_VH, targets_C, columns, stored))

    seen = jax.lax.fori_loop(0, count, merge, Partial.empty(index_C.shape[0], tokens.accumulator))
    return seen.statistics(plan.columns.axis)


def _vocabulary_tiles(plan: Plan, tokens: Tokens) -> tuple[int, Callable[[Any], tuple[Any, jax.Array, Columns]]]:
    """(number of tiles, a function of i that gives the first row, the rows of the weights and the columns of tile i).

    The last tile reaches back so that all are whole.
    """
    total = tokens.weights_VH.shape[0]
    width = min(plan.tiling.vocab or total, total)

    def tile(number):
        start = jnp.minimum(number * width, total - width)
        weights_VH = jax.lax.dynamic_slice_in_dim(tokens.weights_VH, start, width)
        return start, weights_VH, plan.columns.part(start, number * width)

    return -(-total // width), tile


def _gradients_of_rows(plan: Plan, tokens: Tokens, order_KC: jax.Array, stop, token_loss, rows, known):
    """Gradients and statistics of the first `stop` tiles, whole rows at a time; see `gradients`."""
    stored, dtype = plan.tiling.stored(tokens.hidden_NH.dtype), tokens.hidden_NH.dtype

    def tile(number, carry):
        (loss, to_hidden_NH, to_embedding_VH), statistics = carry
        index_C = jax.lax.dynamic_index_in_dim(order_KC, number, keepdims=False)
        hidden_CH, targets_C, rows_C, known_C = take((tokens.hidden_NH, tokens.targets_N, rows, known), index_C)
        logits_CV = logits(hidden_CH, tokens.weights_VH, stored)
        d_CV, loss_C, measured = plan.kernels.differentiate(
            logits_CV, targets_C, rows_C, token_loss, plan.columns, dtype, known_C
        )
        if known is None:
            statistics = put(statistics, index_C, measured)
        to_hidden_CH = contract(d_CV, tokens.weights_VH, (1, 0), dtype)
        # Accumulated in float32 whatever the operands: a sum rounded to bfloat16 after each tile drifts.
        to_embedding_VH += contract(d_CV, hidden_CH, (0, 0), tokens.accumulator)
        done = Gradients(loss + jnp.sum(loss_C), put(to_hidden_NH, index_C, to_hidden_CH), to_embedding_VH)
        return done, statistics

    nothing = Gradients(
        jnp.zeros((), tokens.accumulator),
        jnp.zeros_like(tokens.hidden_NH),
        jnp.zeros(tokens.weights_VH.shape, tokens.accumulator),
    )
    total, statistics = jax.lax.fori_loop(0, stop, tile, (nothing, known or tokens.no_statistics()))
    return total._replace(to_embedding_VH=total.to_embedding_VH.astype(tokens.embedding_dtype)), statistics


def _gradients_of_columns(plan: Plan, tokens: Tokens, order_KC: jax.Array, stop, token_loss, rows, known):
    """The same, some columns at a time: the embedding's gradient is finished tile by tile and needs no second copy."""
    stored, dtype = plan.tiling.stored(tokens.hidden_NH.dtype), tokens.hidden_NH.dtype
    count, vocabulary_tile = _vocabulary_tiles(plan, tokens)
    statistics = known or _fill(plan, tokens, order_KC, 0, stop, tokens.no_statistics())
    loss_N, *to_rows_N = tiles.derivatives(token_loss, rows, statistics.logp, statistics.entropy)
    learns_N = tokens.work_N == LEARNS
    per_row = (tokens.hidden_NH, tokens.targets_N, statistics, *to_rows_N)

    def column_tile(number, carry):
        to_hidden_NH, to_embedding_VH = carry
        start, weights_VH, columns = vocabulary_tile(number)

        def row_tile(row_number, inner):
            to_hidden_NH, to_weights_VH = inner
            index_C = jax.lax.dynamic_index_in_dim(order_KC, row_number, keepdims=False)
            hidden_CH, targets_C, measured, *to_row = take(per_row, index_C)
            d_CV = plan.kernels.tile_dlogits(hidden_CH, weights_VH, targets_C, measured, *to_row, columns, stored)
            to_hidden_CH = contract(d_CV, weights_VH, (1, 0), tokens.accumulator)
            to_weights_VH += contract(d_CV, hidden_CH, (0, 0), tokens.accumulator)
            return to_hidden_NH.at[index_C].add(to_hidden_CH, mode="drop", unique_indices=True), to_weights_VH

        nothing = jnp.zeros(weights_VH.shape, tokens.accumulator)
        to_hidden_NH, to_weights_VH = jax.lax.fori_loop(0, stop, row_tile, (to_hidden_NH, nothing))
        # Columns of an earlier tile are 0 here, so adding leaves their finished sums as they are.
        before_VH = jax.lax.dynamic_slice_in_dim(to_embedding_VH, start, len(weights_VH))
        after_VH = before_VH + to_weights_VH.astype(tokens.embedding_dtype)
        return to_hidden_NH, jax.lax.dynamic_update_slice_in_dim(to_embedding_VH, after_VH, start, 0)

    nothing = (
        jnp.zeros(tokens.hidden_NH.shape, tokens.accumulator),
        jnp.zeros(tokens.weights_VH.shape, tokens.embedding_dtype),
    )
    to_hidden_NH, to_embedding_VH = jax.lax.fori_loop(0, count, column_tile, nothing)
    loss = jnp.sum(jnp.where(learns_N, loss_N, 0))
    return Gradients(loss, to_hidden_NH.astype(dtype), to_embedding_VH), statistics
