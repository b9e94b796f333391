"""Readers of position files: Parquet, JSONL, CSV, PGN and RookWorld text rows. Every bad row is one clear error.

Columns: `fen` (required), and optionally `history`, `moves`, `evaluations` (lists; in CSV separated by spaces) and `best`.
`moves` stand in the engine's order, best first; they are not sorted here (only RookWorld rows, which come shuffled, are).
`game`, a number or a name, says which positions are of one game. `mate`, as `jax_grpo.data mates` writes it, stands for
`moves` and `evaluations`: the one legal move that mates, and what a mate in one is worth.
Arbiter rows have `fen`, `history`, `move`, `next_fen`, `reward`, `terminated` and `truncated`.
"""

import csv
import difflib
import functools
import itertools
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import chess
import pyarrow as pa
import pyarrow.parquet as pq

from jax_grpo.chess.positions import pgn, rookworld
from jax_grpo.chess.positions.position import MATE_PAWNS, UCI, Position, PositionFileError, legal_uci, mating_moves
from jax_grpo.chess.positions.rookworld import RowError
from jax_grpo.chess.positions.table import ROWS_AT_ONCE
from jax_grpo.config.sections import FILE_FORMATS

COLUMNS = ("fen", "history", "moves", "evaluations", "best")
ARBITER_COLUMNS = ("move", "next_fen", "reward", "terminated", "truncated")
FLAGS = {"0": False, "1": True, "False": False, "True": True}
Raw = TypeVar("Raw")
Parsed = TypeVar("Parsed")


def read_positions(path: str | Path) -> list[Position]:
    """Positions of a file, in its order; an empty file is refused as `open_positions` refuses others."""
    positions = list(open_positions(Path(path))[1])
    if not positions:
        raise PositionFileError(f"{path}: no positions in it")
    return positions


def open_positions(path: Path) -> tuple[str, Iterator[Position]]:
    """The format, a key of `READERS`, and the positions one by one, each checked when it is taken; see PositionFileError."""
    if not path.is_file():
        raise PositionFileError(f"{path}: no such file; prompts.source is `packaged`, `selfplay` or a file")
    kind = FILE_FORMATS.get(path.suffix.lower())
    if kind is None:
        raise PositionFileError(
            f"{path}: unknown ending {path.suffix!r}; expected {', '.join(FILE_FORMATS)} (unpacked)"
        )
    return kind, READERS[kind](path)


def parsed(rows: Iterable[tuple[str, Raw]], parse: Callable[[Raw], Parsed]) -> Iterator[Parsed]:
    """Each of the (where, row) parsed; a `RowError` becomes a PositionFileError that says where."""
    for where, row in rows:
        try:
            yield parse(row)
        except RowError as error:
            raise PositionFileError(f"{where}: {error}") from error


def _position(row: Mapping[str, Any]) -> Position:
    """One checked row.

    Labels' legality is checked for every row: a label that cannot be played would silently cap the reward.
    """
    _check_columns(tuple(map(str, row)))
    board = rookworld.check_fen(" ".join(str(row["fen"]).split()))
    fen = board.fen()
    evaluations = rookworld.finite(_list(row, "evaluations"), "evaluations", "numbers in pawns")
    if not any(board.legal_moves):
        raise RowError(f"the game is over in {fen!r}; expected a position with a move to play")
    history, moves = tuple(map(str, _list(row, "history"))), tuple(map(str, _list(row, "moves")))
    if row.get("mate"):
        moves, evaluations = _mate(str(row["mate"]), board, labelled=bool(moves or row.get("best")))
    for move in history:
        if not UCI.fullmatch(move):
            raise RowError(f"{move!r} in history is not a UCI move such as 'e2e4'")
    if len(moves) != len(evaluations):
        raise RowError(f"{len(moves)} moves but {len(evaluations)} evaluations; expected as many of each")
    best = row.get("best") or None
    rookworld.check_legal(moves if best is None else (*moves, str(best)), board, fen)
    move, next_state = (None, None) if row.get("next_fen") is None else _outcome(row, board, fen)
    return Position(fen, history, moves, evaluations, best, move, next_state, _game_number(row.get("game")))


def _mate(mate: str, board: chess.Board, *, labelled: bool) -> tuple[tuple[str], tuple[float]]:
    """The labels of a row of mates in one; another mate would be scored as a miss."""
    if labelled:
        raise RowError("mate beside moves or best; expected one of them")
    if (mates := mating_moves(board)) != [mate]:
        listed = ", ".join(mates) or "none"
        raise RowError(f"mate {mate!r} in {board.fen()!r}; expected the one move that mates, found {listed}")
    return (mate,), (MATE_PAWNS - 0.01,)


def _game_number(game: object) -> int | None:
    """A game's number as it is, and one of 31 bits for any other name: games are only told apart."""
    if game is None or game == "":
        return None
    if isinstance(game, int) and 0 <= game < 2**31:
        return game
    return zlib.crc32(str(game).encode()) & 0x7FFFFFFF


def _outcome(row: Mapping[str, Any], board: chess.Board, fen: str) -> tuple[str, str]:
    """An arbiter row's move and answer; what the rules decide is checked: a wrong answer would silently cap the reward."""
    for name in ARBITER_COLUMNS:
        if row.get(name) is None:
            raise RowError(f"{name!r} is missing; an arbiter row has {', '.join(ARBITER_COLUMNS)}")
    move, next_fen = str(row["move"]), rookworld.check_fen(" ".join(str(row["next_fen"]).split())).fen()
    (reward,) = rookworld.finite([row["reward"]], "reward", "number")
    terminated, truncated = (FLAGS.get(str(row[name])) for name in ("terminated", "truncated"))
    if not UCI.fullmatch(move) or move[:2] == move[2:4]:
        raise RowError(f"move {move!r} is not a UCI move such as 'e2e4'")
    if terminated is None or truncated is None:
        values = f"{row['terminated']!r} and {row['truncated']!r}"
        raise RowError(f"terminated and truncated are {values}; expected true or false")
    legal = move in legal_uci(board)
    if legal:
        board.push_uci(move)
    expected = board.fen() if legal else fen
    if next_fen != expected:
        raise RowError(f"next_fen {next_fen!r} after {move} in {fen!r}; expected {expected!r}")
    if truncated == legal:
        raise RowError(f"truncated is {truncated} but {move} in {fen!r} is {'legal' if legal else 'illegal'}")
    return move, rookworld.state_text(next_fen, reward, terminated, truncated)


@functools.lru_cache(maxsize=64)
def _check_columns(names: tuple[str, ...]) -> None:
    """Raises RowError for a column that is missing or misspelt: labels would otherwise be left out in silence."""
    known = COLUMNS + (ARBITER_COLUMNS if "next_fen" in names else ())
    others = {name.lower().strip(): name for name in names if name not in known}
    if {"puzzleid", "moves"} <= {*others, *names}:
        raise RowError(
            "these are Lichess's puzzles, whose FEN is the position before the opponent's move; make positions of them by "
            "`python -m jax_grpo.data label` (a .csv with the columns PuzzleId, FEN and Moves)"
        )
    if "fen" not in names and "prompt" in others:
        raise RowError(
            "these rows have a 'prompt' and no 'fen'; rows of prompts are read by task.name: prompts, with task.rewards_from"
        )
    for column in (name for name in COLUMNS if name not in names):
        required = column == "fen"
        close = difflib.get_close_matches(column, others, n=1, cutoff=0.4 if required else 0.75)
        if required or close:
            hint = f"; did you mean it to be {others[close[0]]!r}?" if close else "."
            raise RowError(f"column {column!r} is missing{hint} Found: {', '.join(names)}")


def _list(row: Mapping[str, Any], name: str) -> list:
    value = row.get(name)
    if isinstance(value, list):
        return value
    if value is None or isinstance(value, str):
        return (value or "").split()
    raise RowError(f"{name} is {value!r}; expected a list or a text separated by spaces")


def _parquet_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        with pq.ParquetFile(path) as file:
            batches = file.iter_batches(ROWS_AT_ONCE, use_threads=False)
            rows = itertools.chain.from_iterable(batch.to_pylist() for batch in batches)
            yield from ((f"{path}: row {number}", row) for number, row in enumerate(rows))
    except (pa.ArrowException, OSError) as error:
        raise PositionFileError(f"{path}: not a readable Parquet file ({error})") from error


def _json_position(line: str) -> Position:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # also numbers too long, lists too deep
        raise RowError(f"not JSON ({error})") from error
    if not isinstance(row, dict):
        raise RowError(f"{line[:60]!r}; expected an object with a 'fen'")
    return _position(row)


def csv_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, row) of a CSV file with a header; a field that a short row lacks is left out, one too many is refused."""
    reader = csv.DictReader(text_lines(path))
    try:
        for row in reader:
            where = f"{path}:{reader.line_num}"
            if None in row:  # where DictReader puts what the header has no name for
                raise PositionFileError(
                    f"{where}: {len(row[None])} more fields than the header, {row[None]!r}; "
                    "expected lists separated by spaces, without commas"
                )
            yield where, {name: value for name, value in row.items() if value is not None}
    except csv.Error as error:
        raise PositionFileError(f"{path}:{reader.line_num + 1}: not CSV ({error})") from error


def _rookworld_position(line: str) -> Position:
    is_arbiter = line.lstrip().startswith("A:")
    return (rookworld.parse_environment_row if is_arbiter else rookworld.parse_policy_row)(line).position()


def read_games(path: Path) -> Iterator[tuple[chess.Board, list[chess.Move]]]:
    """(first position, moves of the main line) of every game of a PGN file; a bad game is named in a PositionFileError."""
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        try:
            yield from pgn.read_games(file)
        except RowError as error:
            raise PositionFileError(f"{path}: {error}") from error


def _read_pgn(path: Path) -> Iterator[Position]:
    """Every position of every main line that still has a move to play."""
    for board, moves in read_games(path):
        for move in moves:
            if not board.is_game_over():
                yield Position.of_board(board)
            board.push(move)


def text_lines(path: Path) -> Iterator[str]:
    """Lines with their ends; a byte order mark, which spreadsheets write, is dropped."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            yield from file
    except UnicodeDecodeError as error:
        raise PositionFileError(f"{path}: not UTF-8 text ({error})") from error


def text_rows(path: Path, parse: Callable[[str], Parsed], without: tuple[str, ...] = ()) -> Iterator[Parsed]:
    """What each line of a text file says, blank ones and those that begin with one of `without` left out."""

    def rows() -> Iterator[tuple[str, str]]:
        for number, line in enumerate(text_lines(path), start=1):
            if line.strip() and not line.lstrip().startswith(without):
                yield f"{path}:{number}", line.rstrip("\r\n")

    return parsed(rows(), parse)


READERS: dict[str, Callable[[Path], Iterator[Position]]] = {
    "parquet": lambda path: parsed(_parquet_rows(path), _position),
    "jsonl": lambda path: text_rows(path, _json_position),
    "csv": lambda path: parsed(csv_rows(path), _position),
    "pgn": _read_pgn,
    "rookworld": lambda path: text_rows(path, _rookworld_position),
}
