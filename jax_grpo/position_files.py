"""Readers of position files: Parquet, JSONL, CSV, PGN and RookWorld text rows. Every bad row is one clear error.

Columns: `fen` (required), and optionally `history`, `moves`, `evaluations` (lists; in CSV separated by spaces) and `best`.
`moves` stand in the engine's order, best first; they are not sorted here (only RookWorld rows, which come shuffled, are).
Arbiter rows have `fen`, `history`, `move`, `next_fen`, `reward`, `terminated` and `truncated`.
"""

import csv
import difflib
import functools
import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import chess
import chess.pgn
import pyarrow as pa
import pyarrow.parquet as pq

from jax_grpo.rookworld_rows import (
    UCI,
    EnvironmentRow,
    RowError,
    check_fen,
    finite,
    legal_uci,
    parse_environment_row,
    parse_policy_row,
)
from jax_grpo.tasks.base import Position

COLUMNS = ("fen", "history", "moves", "evaluations", "best")
ARBITER_COLUMNS = ("move", "next_fen", "reward", "terminated", "truncated")
ROWS_AT_ONCE = 1024  # as Python objects: a whole file at once would stay in the process's peak
FLAGS = {"0": False, "1": True, "False": False, "True": True}
FORMATS = {".parquet": "parquet", ".jsonl": "jsonl", ".csv": "csv", ".pgn": "pgn", ".txt": "rookworld"}


class PositionFileError(ValueError):
    """A position file cannot be used; names the file, the line or row, the value and what was expected."""


def read_positions(path: str | Path, file_format: str = "auto", *, allow_empty: bool = False) -> list[Position]:
    """Positions of a file, in its order.

    Raises:
        PositionFileError: see the class; also for an unknown ending, a missing and (unless allowed) an empty file.
    """
    positions = list(open_positions(Path(path), file_format)[1])
    if not positions and not allow_empty:
        raise PositionFileError(f"{path}: no positions in it")
    return positions


def open_positions(path: Path, file_format: str = "auto") -> tuple[str, Iterator[Position]]:
    """The format, a key of `READERS`, and the positions one by one, each checked when it is taken.

    Raises:
        PositionFileError: no such file, or an unknown ending; later the iterator's, see the class.
    """
    if not path.is_file():
        raise PositionFileError(f"{path}: no such file; prompts.source is `packaged`, `selfplay` or a file")
    kind = FORMATS.get(path.suffix.lower()) if file_format == "auto" else file_format
    if kind is None:
        raise PositionFileError(
            f"{path}: unknown ending {path.suffix!r}; expected {', '.join(FORMATS)} or prompts.format"
        )
    return kind, READERS[kind](path)


def _position(row: Mapping[str, Any], where: str) -> Position:
    """One checked row.

    Labels' legality is checked for every row: a label that cannot be played would silently cap the reward.
    """
    if (wrong := _wrong_columns(tuple(map(str, row)))) is not None:
        raise PositionFileError(f"{where}: {wrong}")
    fen = " ".join(str(row["fen"]).split())
    try:
        board = check_fen(fen)
        evaluations = finite(_list(row.get("evaluations"), "evaluations", where), "evaluations", "numbers in pawns")
    except RowError as error:
        raise PositionFileError(f"{where}: {error}") from error
    legal = legal_uci(board)
    if not legal:
        raise PositionFileError(f"{where}: the game is over in {fen!r}; expected a position with a move to play")
    history, moves = _words(row, "history", where), _words(row, "moves", where)
    for move in history:
        if not UCI.fullmatch(move):
            raise PositionFileError(f"{where}: {move!r} in history is not a UCI move such as 'e2e4'")
    if len(moves) != len(evaluations):
        raise PositionFileError(
            f"{where}: {len(moves)} moves but {len(evaluations)} evaluations; expected as many of each"
        )
    best = row.get("best") or None
    for move in (*moves, best) if best else moves:
        if str(move) not in legal:
            raise PositionFileError(f"{where}: move {move!r} is not legal in {fen!r}")
    if row.get("next_fen") is None:
        return Position(fen, history, moves, evaluations, best)
    try:
        outcome = _arbiter_row(row, board, fen, history)
    except RowError as error:
        raise PositionFileError(f"{where}: {error}") from error
    return Position(fen, history, moves, evaluations, best, outcome.move, outcome.next_state)


def _arbiter_row(row: Mapping[str, Any], board: chess.Board, fen: str, history: tuple[str, ...]) -> EnvironmentRow:
    """Outcome of a move; what the rules decide alone is checked, since a wrong answer would silently cap the reward.

    Raises:
        RowError: a value is missing, of another kind, or against the rules.
    """
    missing = [name for name in ARBITER_COLUMNS if row.get(name) is None]
    if missing:
        raise RowError(f"{missing[0]!r} is missing; an arbiter row has {', '.join(ARBITER_COLUMNS)}")
    move, next_fen = str(row["move"]), " ".join(str(row["next_fen"]).split())
    (reward,) = finite([row["reward"]], "reward", "number")
    flags = [FLAGS.get(str(row[name])) for name in ("terminated", "truncated")]
    if not UCI.fullmatch(move) or move[:2] == move[2:4]:
        raise RowError(f"move {move!r} is not a UCI move such as 'e2e4'")
    if None in flags:
        found = f"{row['terminated']!r} and {row['truncated']!r}"
        raise RowError(f"terminated and truncated are {found}; expected true or false")
    legal = move in legal_uci(board)
    if legal:
        board.push_uci(move)
    expected = board.fen() if legal else fen
    if next_fen != expected:
        raise RowError(f"next_fen {next_fen!r} after {move} in {fen!r}; expected {expected!r}")
    if bool(flags[1]) == legal:
        raise RowError(f"truncated is {flags[1]} but {move} in {fen!r} is {'legal' if legal else 'illegal'}")
    return EnvironmentRow(fen, move, (*history, move), next_fen, reward, bool(flags[0]), bool(flags[1]))


@functools.lru_cache(maxsize=64)
def _wrong_columns(found: tuple[str, ...]) -> str | None:
    """What is wrong with a row's columns; a misspelt label column would otherwise leave its rows unlabelled in silence."""
    known = COLUMNS + (ARBITER_COLUMNS if "next_fen" in found else ())
    lower = {name.lower().strip(): name for name in found if name not in known}
    for column in (name for name in COLUMNS if name not in found):
        required = column == "fen"
        close = difflib.get_close_matches(column, lower, n=1, cutoff=0.4 if required else 0.75)
        hint = f"; did you mean it to be {lower[close[0]]!r}?" if close else "."
        if required or close:
            return f"column {column!r} is missing{hint} Found: {', '.join(found)}"
    return None


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
        with pq.ParquetFile(path) as file:
            batches = file.iter_batches(ROWS_AT_ONCE, use_threads=False)
            rows = itertools.chain.from_iterable(batch.to_pylist() for batch in batches)
            for number, row in enumerate(rows):
                yield _position(row, f"{path}: row {number}")
    except (pa.ArrowException, OSError) as error:
        raise PositionFileError(f"{path}: not a readable Parquet file ({error})") from error


def _read_jsonl(path: Path) -> Iterator[Position]:
    for number, line in numbered_lines(path):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:  # also numbers too long, lists too deep
            raise PositionFileError(f"{path}:{number}: not JSON ({error})") from error
        if not isinstance(row, dict):
            raise PositionFileError(f"{path}:{number}: {line[:60]!r}; expected an object with a 'fen'")
        yield _position(row, f"{path}:{number}")


def _read_csv(path: Path) -> Iterator[Position]:
    reader = csv.DictReader(text_lines(path))
    try:
        for row in reader:
            if None in row:  # where DictReader puts what the header has no name for
                raise PositionFileError(
                    f"{path}:{reader.line_num}: {len(row[None])} more fields than the header, {row[None]!r}; "
                    "expected lists separated by spaces, without commas"
                )
            yield _position({k: v for k, v in row.items() if v is not None}, f"{path}:{reader.line_num}")
    except csv.Error as error:
        raise PositionFileError(f"{path}:{reader.line_num + 1}: not CSV ({error})") from error


def _read_rookworld(path: Path) -> Iterator[Position]:
    for number, line in numbered_lines(path):
        try:
            row = parse_environment_row(line) if line.lstrip().startswith("A:") else parse_policy_row(line)
            yield row.position()
        except RowError as error:
            raise PositionFileError(f"{path}:{number}: {error}") from error


class _QuietBuilder(chess.pgn.GameBuilder):
    """Collects a game's errors, as its parent does, without a traceback in the log: they are raised below."""

    def handle_error(self, error: Exception) -> None:
        self.game.errors.append(error)


def read_games(path: Path) -> Iterator[tuple[chess.Board, list[chess.Move]]]:
    """(first position, moves of the main line) of every game of a PGN file.

    Raises:
        PositionFileError: names the game and what is wrong with it.
    """
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        for number in itertools.count(1):
            try:
                game = chess.pgn.read_game(file, Visitor=_QuietBuilder)
            except IndexError as error:  # python-chess's, at a variation that is closed without being opened
                raise PositionFileError(f"{path}: game {number}: brackets of variations do not match") from error
            if game is None:
                return
            if game.errors:
                raise PositionFileError(f"{path}: game {number}: {game.errors[0]}")
            try:
                board = game.board()
            except ValueError as error:  # an unknown variant
                raise PositionFileError(f"{path}: game {number}: {error}") from error
            if board.uci_variant != "chess" or board.chess960:
                variant = game.headers.get("Variant")
                raise PositionFileError(f"{path}: game {number}: variant {variant!r}; expected standard chess")
            if not board.is_valid():
                raise PositionFileError(f"{path}: game {number}: FEN {board.fen()!r} is not a legal position")
            yield board, list(game.mainline_moves())


def _read_pgn(path: Path) -> Iterator[Position]:
    """Every position of every main line that still has a move to play."""
    for board, moves in read_games(path):
        for move in moves:
            if not board.is_game_over():
                yield Position(board.fen(), tuple(m.uci() for m in board.move_stack[-10:]))
            board.push(move)


def text_lines(path: Path) -> Iterator[str]:
    """Lines with their ends; a byte order mark, which spreadsheets write, is dropped."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            yield from file
    except UnicodeDecodeError as error:
        raise PositionFileError(f"{path}: not UTF-8 text ({error})") from error


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """(1-based number, text) of the lines that are not blank."""
    for number, line in enumerate(text_lines(path), start=1):
        if line.strip():
            yield number, line.rstrip("\r\n")


READERS = {
    "parquet": _read_parquet,
    "jsonl": _read_jsonl,
    "csv": _read_csv,
    "pgn": _read_pgn,
    "rookworld": _read_rookworld,
}
