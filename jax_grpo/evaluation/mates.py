"""Mate in one: positions with a mating move, from our own JSONL or BIG-bench's `checkmate_in_one` task.json, and their judging.

Every row is checked with python-chess as it is read: a suite whose answer does not mate would cap the score in silence.
"""

import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import chess
import chess.pgn

from jax_grpo.checked_files import PACKAGED
from jax_grpo.evaluation.generation import EvaluationError
from jax_grpo.tasks.base import Position

PACKAGED_MATES = PACKAGED / "mate_in_one.jsonl"


class Mate(NamedTuple):
    """A position and the move (UCI) that the suite lists as mating; a BIG-bench position may have others."""

    position: Position
    move: str


def read_mates(path: Path) -> list[Mate]:
    """The suite of a file: `.jsonl` lines `{"fen": ..., "mate": "<uci>"}`, or BIG-bench's task.json.

    Raises:
        EvaluationError: names the file, the line or example, what was found and what was expected.
    """
    if not path.is_file():
        raise EvaluationError(f"--mates {path}: no such file; expected .jsonl lines or BIG-bench's task.json")
    found = list((_lines if path.suffix == ".jsonl" else _bigbench)(path))
    if not found:
        raise EvaluationError(f"--mates {path}: no positions in it")
    return found


def mate_rows(suite: Sequence[Mate], moves: Sequence[str]) -> list[dict[str, Any]]:
    """Booleans `legal`, `mate` (the move gives checkmate, listed or not) and `listed` (it is the suite's own move)."""
    rows = []
    for (position, listed), uci in zip(suite, moves, strict=True):
        board = chess.Board(position.fen)
        legal = uci in {move.uci() for move in board.legal_moves}
        rows.append({"legal": legal, "mate": legal and _mates(board, uci), "listed": uci == listed})
    return rows


def _mates(board: chess.Board, uci: str) -> bool:
    after = board.copy(stack=False)
    after.push_uci(uci)
    return after.is_checkmate()


def _checked(board: chess.Board, uci: str, where: str) -> Mate:
    if uci not in {move.uci() for move in board.legal_moves}:
        raise EvaluationError(f"{where}: {uci!r} is not a legal move in {board.fen()!r}; expected UCI such as 'h5f7'")
    if not _mates(board, uci):
        raise EvaluationError(f"{where}: {uci} does not give checkmate in {board.fen()!r}")
    return Mate(Position(board.fen(), tuple(move.uci() for move in board.move_stack[-10:])), uci)


def _lines(path: Path) -> Iterator[Mate]:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = json.loads(line)
            board, uci = chess.Board(row["fen"]), str(row["mate"])
        except (ValueError, KeyError, TypeError) as error:
            raise EvaluationError(
                f"{where}: {line[:80]!r} ({type(error).__name__}: {error}); expected an object with 'fen' and 'mate'"
            ) from error
        yield _checked(board, uci, where)


def _bigbench(path: Path) -> Iterator[Mate]:
    """`input`: the game so far in SAN; `target_scores`: score by move in SAN, the highest is the mate."""
    try:
        examples = json.loads(path.read_text(encoding="utf-8"))["examples"]
    except (ValueError, KeyError, TypeError) as error:
        raise EvaluationError(
            f"{path}: not BIG-bench's task.json ({type(error).__name__}: {error}); expected an object with 'examples'"
        ) from error
    for number, example in enumerate(examples):
        where = f"{path}: example {number}"
        try:
            game = chess.pgn.read_game(io.StringIO(example["input"]))
            scores = example["target_scores"]
            target = max(scores, key=lambda move: scores[move])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise EvaluationError(
                f"{where}: {type(error).__name__}: {error}; expected 'input' (moves in SAN) and 'target_scores'"
            ) from error
        if game is None or game.errors:
            raise EvaluationError(f"{where}: {game.errors[0] if game else 'no moves'} in {example['input'][:60]!r}")
        board = game.end().board()
        try:
            uci = board.parse_san(target).uci()
        except ValueError as error:
            raise EvaluationError(f"{where}: target {target!r} is not a move in {board.fen()!r}") from error
        yield _checked(board, uci, where)
