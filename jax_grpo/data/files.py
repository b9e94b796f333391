"""Positions of a user's file, labelled by the engine: PGN, Lichess puzzles, RookWorld rows, and every format that training reads.

Labels that a file brings are kept. Read as a stream, so that a file may be larger than memory. Knows nothing of models.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa

from jax_grpo.data import selfplay
from jax_grpo.data.shards import Source, of_file
from jax_grpo.positions.files import csv_rows, open_positions, parsed
from jax_grpo.positions.position import Position
from jax_grpo.positions.rookworld import RowError, check_fen, check_legal
from jax_grpo.tasks.engine import EnginePool
from jax_grpo.tasks.policy import labelled

BATCH = 64  # positions analysed together
SCHEMA = selfplay.SCHEMA.append(pa.field("best", pa.string()))
PUZZLE_COLUMNS = ["PuzzleId", "FEN", "Moves"]


def read_stream(path: Path) -> Iterator[Position]:
    """Positions of a file one by one, as `open_positions` gives them; of Lichess's puzzles, those that the solver sees."""
    if path.suffix.lower() == ".csv" and path.is_file():
        with path.open(encoding="utf-8-sig", errors="replace") as file:
            if file.readline().strip().split(",")[:3] == PUZZLE_COLUMNS:
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
