"""Checked positions as columns: a position is decoded when it is drawn, so that a million rows are not a million Python objects.

Knows neither where positions come from nor which are whose.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from jax_grpo.chess.positions.position import Position, PositionFileError, position_key
from jax_grpo.prompts.table import Rows, batched, digest

ROWS_AT_ONCE = 1024  # as Python objects: a whole file at once would stay in the process's peak
MOVES = pa.list_(pa.string())
SCHEMA = pa.schema(
    {"fen": pa.string(), "history": MOVES, "moves": MOVES, "evaluations": pa.list_(pa.float64())}
    | {name: pa.string() for name in ("best", "move", "next_state")}
    | {"game": pa.int32()}
)
KEY = "key"  # `digest` of the position, where it is known


class PositionTable(Rows[Position]):
    """Columns of `SCHEMA`, and `KEY` where it is known."""

    noun, error = "positions", PositionFileError

    def __init__(self, table: pa.Table, identity: str, apart: int | None = None):
        self.identity, self.apart = identity, apart
        self._table = table.combine_chunks()  # one chunk a column: a row is found without a search
        self._fields = self._table.select([name for name in SCHEMA.names if name in table.column_names])

    def __len__(self) -> int:
        return self._table.num_rows

    def row(self, index: int) -> Position:
        return _position(self._fields.slice(index, 1).to_pylist()[0])

    def __iter__(self) -> Iterator[Position]:
        for batch in self._fields.to_batches(ROWS_AT_ONCE):
            yield from map(_position, batch.to_pylist())

    def keys(self) -> np.ndarray:
        """`digest` of each position, uint64."""
        if KEY in self._table.column_names:
            return self._table[KEY].to_numpy()
        return np.array([digest(position_key(fen)) for fen in self._table["fen"].to_pylist()], np.uint64)

    def where(self, mask: np.ndarray, identity: str) -> "PositionTable":
        """The positions where the mask [len] is true; the others are its source's other split."""
        return PositionTable(self._table.filter(pa.array(mask)), identity, int((~mask).sum()))

    def digest_of_positions(self) -> str:
        """SHA-256 of all positions as text: their identity in checkpoints that were made before it was of the source's bytes."""
        return hashlib.sha256(repr(list(self)).encode()).hexdigest()

    def identity_as_in(self, old: str) -> str:
        """The identity in the form of one that a checkpoint holds: `identity`'s begins with what it is of and a colon."""
        return self.identity if ":" in old else self.digest_of_positions()


def _position(row: Mapping[str, Any]) -> Position:
    """A row's position; what is null is left to the field's default."""
    given: dict[str, Any] = {name: value for name, value in row.items() if value is not None}
    given["evaluations"] = tuple(given.get("evaluations", ()))
    return Position(**given)


def to_columns(positions: Iterable[Position], *, keyed: bool = True) -> pa.Table:
    """Columns of `SCHEMA`, and of `KEY` if wanted, made a thousand positions at a time."""
    schema, batches = SCHEMA.append(pa.field(KEY, pa.uint64())) if keyed else SCHEMA, []
    for batch in batched(positions, ROWS_AT_ONCE):
        columns: dict[str, list] = {name: [getattr(position, name) for position in batch] for name in SCHEMA.names}
        if keyed:
            columns[KEY] = [digest(position_key(position.fen)) for position in batch]
        batches.append(pa.RecordBatch.from_pydict(columns, schema=schema))
    return pa.Table.from_batches(batches, schema)


def joined(tables: Sequence[PositionTable]) -> PositionTable:
    """All positions of the tables, in their order."""
    names = [name for name in (*SCHEMA.names, KEY) if all(name in each._table.column_names for each in tables)]
    identity = hashlib.sha256("\n".join(each.identity for each in tables).encode()).hexdigest()
    return PositionTable(pa.concat_tables([each._table.select(names) for each in tables]), f"files:{identity}")
