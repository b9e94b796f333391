"""Mate in one: positions with a mating move, from our own JSONL or BIG-bench's `checkmate_in_one` task.json, and their judging.

Every row is checked with python-chess as it is read: a suite whose answer does not mate would cap the score in silence.
"""

import contextlib
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import chess
import chess.pgn

from jax_grpo.evaluate import EvaluationError
from jax_grpo.positions.checked_files import PACKAGED
from jax_grpo.positions.files import text_lines
from jax_grpo.positions.position import Position, mating_moves
from jax_grpo.positions.rookworld import legal_uci

PACKAGED_MATES = PACKAGED / "mate_in_one.jsonl"


class Mate(NamedTuple):
    """A position and the move (UCI) that the suite lists as mating; a BIG-bench position may have others."""

    position: Position
    move: str


def read_mates(path: Path = PACKAGED_MATES) -> list[Mate]:
    """The suite of a file: `.jsonl` lines `{"fen": ..., "mate": "<uci>"}` with one mate each, or BIG-bench's task.json.

    Raises:
        EvaluationError: names the file, the line or example, what was found and what was expected.
    """
    if not path.is_file():
        raise EvaluationError(f"--mates {path}: no such file; expected .jsonl lines or BIG-bench's task.json")
    suite = []
    for where, board, uci in (_lines if path.suffix == ".jsonl" else _bigbench)(path):
        if uci not in legal_uci(board):
            raise EvaluationError(
                f"{where}: {uci!r} is not a legal move in {board.fen()!r}; expected UCI such as 'h5f7'"
            )
        if uci not in (mates := mating_moves(board)):
            raise EvaluationError(f"{where}: {uci} does not give checkmate in {board.fen()!r}")
        if len(mates) > 1 and path.suffix == ".jsonl":
            raise EvaluationError(f"{where}: {uci} is not the one mate in {board.fen()!r}; found {', '.join(mates)}")
        suite.append(Mate(Position.of_board(board), uci))
    if not suite:
        raise EvaluationError(f"--mates {path}: no positions in it")
    return suite


def mate_rows(suite: Sequence[Mate], moves: Sequence[str]) -> list[dict[str, Any]]:
    """Booleans `legal`, `mate` (the move gives checkmate, listed or not) and `listed` (it is the suite's own move)."""
    rows = []
    for (position, listed), uci in zip(suite, moves, strict=True):
        board = chess.Board(position.fen)
        rows.append({"legal": uci in legal_uci(board), "mate": uci in mating_moves(board), "listed": uci == listed})
    return rows


@contextlib.contextmanager
def _expecting(expected: str, where: str) -> Iterator[None]:
    """Turns what is wrong with a row inside into one clear error."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise EvaluationError(f"{where} ({type(error).__name__}: {error}); expected {expected}") from error


def _lines(path: Path) -> Iterator[tuple[str, chess.Board, str]]:
    """Where a row stands, its position and its move."""
    for number, line in enumerate(text_lines(path), start=1):
        if line.strip():
            where = f"{path}:{number}"
            with _expecting("an object with 'fen' and 'mate'", f"{where}: {line.rstrip()[:80]!r}"):
                row = json.loads(line)
                board, uci = chess.Board(row["fen"]), str(row["mate"])
            yield where, board, uci


def _bigbench(path: Path) -> Iterator[tuple[str, chess.Board, str]]:
    """`input`: the game so far in SAN; `target_scores`: score by move in SAN, the highest is the mate."""
    with _expecting("an object with 'examples'", f"{path}: not BIG-bench's task.json"):
        examples = json.loads(path.read_text(encoding="utf-8"))["examples"]
    for number, example in enumerate(examples):
        where = f"{path}: example {number}"
        with _expecting("'input' (moves in SAN) and 'target_scores'", where):
            game = chess.pgn.read_game(io.StringIO(example["input"]))
            scores = example["target_scores"]
            target = max(scores, key=lambda move: scores[move])
        if game is None or game.errors:
            raise EvaluationError(f"{where}: {game.errors[0] if game else 'no moves'} in {example['input'][:60]!r}")
        board = game.end().board()
        with _expecting(f"a move in {board.fen()!r}", f"{where}: target {target!r}"):
            uci = board.parse_san(target).uci()
        yield where, board, uci
