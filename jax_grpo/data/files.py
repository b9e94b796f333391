"""Positions of a user's file, labelled by the engine: PGN, Lichess puzzles, RookWorld rows, and every format that training reads.

Labels that a file brings are kept. Read as a stream, so that a file may be larger than memory. Knows nothing of models.
"""

import csv
import itertools
from collections.abc import Generator, Iterator
from pathlib import Path

import chess
import pyarrow as pa

from jax_grpo.data.provenance import sha256
from jax_grpo.data.shards import Source
from jax_grpo.position_files import FORMATS, READERS, PositionFileError, text_lines
from jax_grpo.rookworld_rows import RowError, check_fen, legal_uci
from jax_grpo.splits import position_key
from jax_grpo.tasks.base import Position
from jax_grpo.tasks.engine import Analysis, EnginePool

BATCH = 64  # positions analysed together
SCHEMA = pa.schema(
    [
        ("fen", pa.string()),
        ("history", pa.list_(pa.string())),
        ("moves", pa.list_(pa.string())),
        ("evaluations", pa.list_(pa.float32())),
        ("best", pa.string()),
    ]
)
PUZZLE_COLUMNS = ("PuzzleId", "FEN", "Moves")


def row_key(row: dict) -> str:
    """What makes two rows' positions the same; counters do not count."""
    return position_key(chess.Board(row["fen"]))


def read_stream(path: Path) -> Iterator[Position]:
    """Positions of a file one by one.

    Raises:
        PositionFileError: no such file, an unknown ending, or a bad row, which is named with its line.
    """
    if not path.is_file():
        raise PositionFileError(f"{path}: no such file")
    ending = path.suffix.lower()
    if ending not in FORMATS:
        raise PositionFileError(f"{path}: unknown ending {ending!r}; expected {', '.join(FORMATS)} (unpacked)")
    return read_puzzles(path) if ending == ".csv" and _is_puzzles(path) else READERS[FORMATS[ending]](path)


def _is_puzzles(path: Path) -> bool:
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        return file.readline().strip().split(",")[: len(PUZZLE_COLUMNS)] == list(PUZZLE_COLUMNS)


def read_puzzles(path: Path) -> Iterator[Position]:
    """Lichess's puzzle file: the position after the first move, with the second, the solution's first, as `best`."""
    reader = csv.DictReader(text_lines(path))
    try:
        for row in reader:
            yield _puzzle(row, f"{path}:{reader.line_num}")
    except csv.Error as error:
        raise PositionFileError(f"{path}:{reader.line_num + 1}: not CSV ({error})") from error


def _puzzle(row: dict, where: str) -> Position:
    try:
        board = check_fen(" ".join((row["FEN"] or "").split()))
    except RowError as error:
        raise PositionFileError(f"{where}: {error}") from error
    moves = (row["Moves"] or "").split()
    if len(moves) < 2:
        raise PositionFileError(
            f"{where}: Moves {row['Moves']!r}; expected the opponent's move and the solution, in UCI"
        )
    for uci, played in zip(moves[:2], (True, False), strict=True):
        if uci not in legal_uci(board):
            raise PositionFileError(f"{where}: move {uci!r} is not legal in {board.fen()!r}")
        if played:
            board.push_uci(uci)
    return Position(board.fen(), (moves[0],), best=moves[1])


def labelled(path: Path, pool: EnginePool | None, nodes: int) -> Source:
    """Rows of a file in its order.

    Args:
        path: the file.
        pool: analyses positions without labels; None leaves them without.
        nodes: the pool's limit, for the record.

    Raises:
        PositionFileError: see `read_stream`.
    """
    first = read_stream(path)  # refuses a name or first row before the file is hashed
    next(first, None)
    settings = {"source": path.name, "sha256": sha256(path)}
    settings |= {"engine": pool.name, "nodes": nodes} if pool else {"engine": None}

    def batches(start: int) -> Generator[list[dict]]:
        positions = itertools.islice(read_stream(path), start * BATCH, None)
        while batch := list(itertools.islice(positions, BATCH)):
            missing = [position.fen for position in batch if not position.moves] if pool else []
            found = dict(zip(missing, pool.analyse(missing), strict=True)) if pool else {}
            yield [_row(position, found.get(position.fen)) for position in batch]

    return Source(SCHEMA, settings, batches, row_key)


def _row(position: Position, analysis: Analysis | None) -> dict:
    labels = position if analysis is None else analysis
    return {
        "fen": position.fen,
        "history": list(position.history),
        "moves": list(labels.moves),
        "evaluations": list(labels.evaluations),
        "best": position.best,
    }
