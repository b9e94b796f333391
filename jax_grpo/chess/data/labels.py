"""Labels: positions of a user's file, labelled by the engine, and what published labels teach each colour.

Files are PGN, Lichess puzzles, RookWorld rows, and every format that training reads; labels that a file brings stay. They are read
as a stream, so that a file may be larger than memory. Of published policy rows, `count` reads off the rows' own evaluations whether
`B:` is the best of the listed moves or the worst, and `reanalyse` asks an engine (docs/black_labels.md). Knows nothing of models.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa

from jax_grpo.chess.data import selfplay
from jax_grpo.chess.data.shards import Source, of_file
from jax_grpo.chess.positions.files import csv_rows, open_positions, parsed
from jax_grpo.chess.positions.position import Position
from jax_grpo.chess.positions.rookworld import PolicyRow, RowError, check_fen, check_legal
from jax_grpo.chess.tasks.engine import EnginePool
from jax_grpo.chess.tasks.policy import labelled
from jax_grpo.prompts.table import batched

BATCH = 64  # positions analysed together
SCHEMA = selfplay.SCHEMA.append(pa.field("best", pa.string()))
PUZZLE_COLUMNS = {"PuzzleId", "FEN", "Moves"}
COLOURS = ("White", "Black")
CLEAR = 0.5  # pawns: below it the sign of an evaluation says little
ROWS_AT_ONCE = 16  # analysed before the next report

Table = dict[str, dict[str, int]]  # colour -> what -> rows


def read_stream(path: Path) -> Iterator[Position]:
    """Positions of a file one by one, as `open_positions` gives them; of Lichess's puzzles, those that the solver sees."""
    if path.suffix.lower() == ".csv" and path.is_file():
        with path.open(encoding="utf-8-sig", errors="replace") as file:
            if set(file.readline().strip().split(",")) >= PUZZLE_COLUMNS:
                return parsed(csv_rows(path), _puzzle)
    return open_positions(path)[1]


def _puzzle(row: dict[str, str]) -> Position:
    """The position after the first move, with the second, the solution's first, as `best`."""
    board = check_fen(" ".join(row.get("FEN", "").split()))
    moves = row.get("Moves", "").split()
    if len(moves) < 2:
        raise RowError(f"Moves {row.get('Moves')!r}; expected the opponent's move and the solution, in UCI")
    check_legal(moves[:1], board, board.fen())
    board.push_uci(moves[0])
    check_legal(moves[1:2], board, board.fen())
    return Position(board.fen(), (moves[0],), best=moves[1])


def source(path: Path, pool: EnginePool | None, nodes: int) -> Source:
    """Rows of `read_stream`; without a pool, whose limit is `nodes`, positions without labels stay so."""
    next(read_stream(path), None)  # refuses a name or first row before the file is hashed

    def rows(positions: Sequence[Position]) -> list[dict]:
        return [{name: getattr(position, name) for name in SCHEMA.names} for position in labelled(positions, pool)]

    settings = {"engine": pool.name, "nodes": nodes} if pool else {"engine": None}
    return of_file(path, SCHEMA, settings, lambda: read_stream(path), BATCH, rows)


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
