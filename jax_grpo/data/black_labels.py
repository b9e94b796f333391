"""What a file of published policy rows teaches each colour: is `B:` the best of the listed moves, or the worst?

`count` reads it off the rows' own evaluations, `reanalyse` asks an engine. Found with it: docs/black_labels.md.
"""

from collections.abc import Callable, Sequence

from jax_grpo.positions.rookworld import PolicyRow
from jax_grpo.positions.table import batched
from jax_grpo.tasks.engine import EnginePool

COLOURS = ("White", "Black")
CLEAR = 0.5  # pawns: below it the sign of an evaluation says little
ROWS_AT_ONCE = 16  # analysed before the next report

Table = dict[str, dict[str, int]]  # colour -> what -> rows


def count(rows: Sequence[PolicyRow]) -> Table:
    """By colour: rows, those whose evaluations differ, and of these how often `B:` has the highest and the lowest."""

    def facts(row: PolicyRow) -> dict[str, bool]:
        differ = len(set(row.evaluations)) > 1
        label = dict(zip(row.moves, row.evaluations, strict=True)).get(row.best)
        return {
            "rows": True,
            "evaluations differ": differ,
            "B: is the highest": differ and label == max(row.evaluations),
            "B: is the lowest": differ and label == min(row.evaluations),
        }

    return _tabulate(rows, [facts(row) for row in rows])


def reanalyse(rows: Sequence[PolicyRow], pool: EnginePool, report: Callable[[int], None]) -> Table:
    """By colour: how often the engine agrees with `B:`, and whose side the published evaluations take.

    The pool has as many lines as a row has moves; `report` is called with the number of rows done.
    """
    facts = []
    for batch in batched(rows, ROWS_AT_ONCE):
        for row, analysis in zip(batch, pool.analyse([row.fen for row in batch]), strict=True):
            best = max(row.evaluations)
            highest = {move for move, value in zip(row.moves, row.evaluations, strict=True) if value == best}
            clear = abs(analysis.score) >= CLEAR
            facts.append(
                {
                    "analysed": True,
                    "B: is the engine's first": row.best in analysis.moves[:1],
                    "B: is the engine's last of its lines": len(analysis.moves) > 1 and row.best in analysis.moves[-1:],
                    "highest published move is the engine's first": not highest.isdisjoint(analysis.moves[:1]),
                    "engine sees a side ahead": clear,
                    "of these, best evaluation has the mover's sign": clear and best * analysis.score > 0,
                }
            )
        report(len(facts))
    return _tabulate(rows, facts)


def _tabulate(rows: Sequence[PolicyRow], facts: Sequence[dict[str, bool]]) -> Table:
    table = {colour: dict.fromkeys(facts[0] if facts else (), 0) for colour in COLOURS}
    for row, fact in zip(rows, facts, strict=True):
        colour = "White" if " w " in row.fen else "Black"
        for name, holds in fact.items():
            table[colour][name] += holds
    return table
