"""Readers of position files: Parquet, JSONL, CSV, PGN and RookWorld text rows. Every bad row is one clear error.

Columns: `fen` (required), and optionally `history`, `moves`, `evaluations` (lists; in CSV separated by spaces) and `best`.
"""

import csv
import difflib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import chess
import chess.pgn
import pyarrow as pa
import pyarrow.parquet as pq

from jax_grpo.rookworld_rows import RowError, check_fen, parse_environment_row, parse_policy_row
from jax_grpo.tasks.base import Position

COLUMNS = ("fen", "history", "moves", "evaluations", "best")
FORMATS = {".parquet": "parquet", ".jsonl": "jsonl", ".csv": "csv", ".pgn": "pgn", ".txt": "rookworld"}


class PositionFileError(ValueError):
    """A position file cannot be used; names the file, the line or row, the value and what was expected."""


def read_positions(path: str | Path, file_format: str = "auto") -> list[Position]:
    """Positions of a file, in its order.

    Raises:
        PositionFileError: see the class; also for an unknown ending, a missing and an empty file.
    """
    path = Path(path)
    if not path.is_file():
        raise PositionFileError(f"{path}: no such file; prompts.source is `packaged`, `selfplay` or a file")
    kind = FORMATS.get(path.suffix.lower()) if file_format == "auto" else file_format
    if kind is None:
        raise PositionFileError(
            f"{path}: unknown ending {path.suffix!r}; expected {', '.join(FORMATS)} or prompts.format"
        )
    positions = list(READERS[kind](path))
    if not positions:
        raise PositionFileError(f"{path}: no positions in it")
    return positions


def _position(row: Mapping[str, Any], where: str) -> Position:
    """One checked row.

    Labels' legality is checked for every row: a label that cannot be played would silently cap the reward.
    """
    if "fen" not in row:
        close = difflib.get_close_matches("fen", [str(key) for key in row], n=1, cutoff=0.4)
        hint = f"; did you mean it to be {close[0]!r}?" if close else ""
        raise PositionFileError(f"{where}: column 'fen' is missing{hint} Found: {', '.join(map(str, row))}")
    try:
        board = check_fen(str(row["fen"]))
    except RowError as error:
        raise PositionFileError(f"{where}: {error}") from error
    history, moves = _words(row, "history", where), _words(row, "moves", where)
    try:
        evaluations = tuple(float(e) for e in _list(row.get("evaluations"), "evaluations", where))
    except (TypeError, ValueError) as error:
        raise PositionFileError(
            f"{where}: evaluations {row.get('evaluations')!r}; expected numbers in pawns"
        ) from error
    if len(moves) != len(evaluations):
        raise PositionFileError(
            f"{where}: {len(moves)} moves but {len(evaluations)} evaluations; expected as many of each"
        )
    best = row.get("best") or None
    for move in (*moves, best) if best else moves:
        if not _is_legal(board, str(move)):
            raise PositionFileError(f"{where}: move {move!r} is not legal in {row['fen']!r}")
    return Position(str(row["fen"]), history, moves, evaluations, best)


def _is_legal(board: chess.Board, uci: str) -> bool:
    try:
        return board.is_legal(chess.Move.from_uci(uci))
    except ValueError:
        return False


def _list(value: Any, name: str, where: str) -> list:
    if value is None:
        return []
    if isinstance(value, str):
        return value.split()
    if isinstance(value, list):
        return value
    raise PositionFileError(f"{where}: {name} is {value!r}; expected a list or a text separated by spaces")


def _words(row: Mapping[str, Any], name: str, where: str) -> tuple[str, ...]:
    return tuple(str(word) for word in _list(row.get(name), name, where))


def _read_parquet(path: Path) -> Iterator[Position]:
    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise PositionFileError(f"{path}: not a readable Parquet file ({error})") from error
    for number, row in enumerate(table.to_pylist()):
        yield _position(row, f"{path}: row {number}")


def _read_jsonl(path: Path) -> Iterator[Position]:
    for number, line in _lines(path):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise PositionFileError(f"{path}:{number}: not JSON ({error})") from error
        if not isinstance(row, dict):
            raise PositionFileError(f"{path}:{number}: {line[:60]!r}; expected an object with a 'fen'")
        yield _position(row, f"{path}:{number}")


def _read_csv(path: Path) -> Iterator[Position]:
    reader = csv.DictReader(line for _, line in _lines(path))
    for row in reader:
        yield _position({k: v for k, v in row.items() if v is not None}, f"{path}:{reader.line_num}")


def _read_rookworld(path: Path) -> Iterator[Position]:
    for number, line in _lines(path):
        try:
            if line.startswith("A:"):
                row = parse_environment_row(line)
                yield Position(row.fen, row.history[:-1])
            else:
                yield parse_policy_row(line).position()
        except RowError as error:
            raise PositionFileError(f"{path}:{number}: {error}") from error


def _read_pgn(path: Path) -> Iterator[Position]:
    """Every position of every main line that still has a move to play."""
    with path.open(encoding="utf-8", errors="replace") as file:
        number = 0
        while (game := chess.pgn.read_game(file)) is not None:
            number += 1
            if game.errors:
                raise PositionFileError(f"{path}: game {number}: {game.errors[0]}")
            board = game.board()
            for move in game.mainline_moves():
                if not board.is_game_over():
                    yield Position(board.fen(), tuple(m.uci() for m in board.move_stack[-10:]))
                board.push(move)


def _lines(path: Path) -> Iterable[tuple[int, str]]:
    """(1-based number, text) of the lines that are not blank."""
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line.rstrip("\n")
    except UnicodeDecodeError as error:
        raise PositionFileError(f"{path}: not UTF-8 text ({error})") from error


READERS = {
    "parquet": _read_parquet,
    "jsonl": _read_jsonl,
    "csv": _read_csv,
    "pgn": _read_pgn,
    "rookworld": _read_rookworld,
}
