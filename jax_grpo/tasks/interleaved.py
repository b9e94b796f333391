"""Several tables as one: their rows in turn, by shares, so that an epoch has every row of each at least once.

Knows nothing of what the rows are.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from jax_grpo.prompts.table import Rows


class TableRow(NamedTuple):
    """A row, and the name of the table that it is of."""

    table: str
    row: Any


class Interleaved(Rows[TableRow]):
    """Row `i` is of one of the tables, by shares that every beginning of the sequence keeps to within a row or two.

    It ends when the table that takes longest has been gone through once; the others begin again meanwhile.
    """

    noun = "prompts"

    def __init__(self, tables: Mapping[str, Any], shares: Mapping[str, float]):
        self._tables, total = dict(tables), sum(shares.values())
        share = {name: shares[name] / total for name in tables}
        length = max(math.ceil(len(table) / share[name]) for name, table in tables.items()) + len(tables)
        # The j-th row of a table with share s is due at (j + 1/2) / s.
        counts = {name: math.ceil(length * share[name]) + len(tables) for name in tables}
        due = np.concatenate([(np.arange(counts[name]) + 0.5) / share[name] for name in tables])
        order = np.argsort(due, kind="stable")[:length]
        self._names = list(tables)
        self._table = np.repeat(np.arange(len(tables), dtype=np.int8), list(counts.values()))[order]
        rows = np.concatenate([np.arange(counts[name]) % len(table) for name, table in tables.items()])
        self._row = rows[order]
        self.identity = "; ".join(f"{name}, {share[name]!r}: {table.identity}" for name, table in tables.items())
        self.apart = None if any(t.apart is None for t in tables.values()) else sum(t.apart for t in tables.values())

    def __len__(self) -> int:
        return len(self._row)

    def row(self, index: int) -> TableRow:
        name = self._names[self._table[index]]
        return TableRow(name, self._tables[name][int(self._row[index])])
