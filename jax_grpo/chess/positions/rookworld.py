"""RookWorld's texts, `P:` (policy) and `A:` (environment): prompts, answers and published rows are written and parsed here.

Fields of a policy row are found by their markers, never by column; moves are not sorted by evaluation.
"""

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import chess

from jax_grpo.chess.positions.position import HISTORY, MATE_PAWNS, UCI, Position, legal_uci

ORDINARY, CHECKMATE, DRAW, ILLEGAL = 0.001, 1.0, 0.5, -1.0  # rewards of a move in the environment
_MARKER = re.compile(r"([PMEB]):")
_PUBLISHED_MATE = 1000.0  # published rows write a mate in n as 1000 - n/100 pawns, `Position` as 100 - n/100


class RowError(ValueError):
    """A row is not what its task's format says; the message names the field, the value and what was expected."""


def policy_prompt(fen: str, field: str) -> str:
    """`P: <FEN>` and the field that the answer begins with: `M:` asks for the whole row, `B:` for the best move alone."""
    return f"P: {fen}    {field}"


def state_prompt(fen: str, uci: str, before: Sequence[str]) -> str:
    """`A: <FEN>+<uci>+<history>+`: the history is the last `HISTORY` moves, ending with the move itself."""
    return _environment_text(fen, uci, [*before[-(HISTORY - 1) :], uci])


def _environment_text(fen: str, uci: str, history: Sequence[str]) -> str:
    return f"A: {fen}+{uci}+{' '.join(history)}+"


def state_text(fen: str, reward: float, terminated: bool, truncated: bool) -> str:
    """The answer to an environment prompt, `<new FEN>+<reward>+<terminated>+<truncated>`."""
    return f"{fen}+{reward}+{int(terminated)}+{int(truncated)}"


class PolicyRow(NamedTuple):
    """A parsed policy row: FEN and moves as published, evaluations in pawns from the side to move."""

    fen: str
    moves: tuple[str, ...]
    evaluations: tuple[float, ...]
    best: str

    def position(self) -> Position:
        """Moves sorted by evaluation, best first, for both colours; the published label stays in `best`.

        The label itself cannot be used for Black: it is the lowest evaluation there. Mates are brought to `Position`'s scale,
        and the FEN to the one text of `check_fen`: published rows write an en passant square after every double step.
        """
        pairs = sorted(zip(self.evaluations, self.moves, strict=True), key=lambda pair: -pair[0])
        evaluations = tuple(_rescale_mate(evaluation) for evaluation, _ in pairs)
        return Position(check_fen(self.fen).fen(), (), tuple(move for _, move in pairs), evaluations, self.best)


class EnvironmentRow(NamedTuple):
    """A parsed environment row; `history` as written, which by the format ends with `move` itself."""

    fen: str
    move: str
    history: tuple[str, ...]
    next_fen: str
    reward: float
    terminated: bool
    truncated: bool

    @property
    def before(self) -> tuple[str, ...]:
        """The moves that led to the state before the move."""
        return self.history[:-1] if self.history[-1:] == (self.move,) else self.history

    @property
    def next_state(self) -> str:
        """See `state_text`."""
        return state_text(self.next_fen, self.reward, self.terminated, self.truncated)

    def position(self) -> Position:
        """The state before the move, the move, and the state after it."""
        return Position(self.fen, self.before, move=self.move, next_state=self.next_state)


def _rescale_mate(pawns: float) -> float:
    distance = _PUBLISHED_MATE - abs(pawns)
    return pawns if distance > MATE_PAWNS else math.copysign(round(MATE_PAWNS - distance, 2), pawns)


def check_fen(fen: str) -> chess.Board:
    """The board of a legal position; RowError for other than six fields.

    Its `fen()` is the one text of the position: prompts are made of that. Others write an en passant square that no pawn can take
    on, as the FEN standard has it, or castling rights in another order.
    """
    if len(fen.split()) != 6:
        raise RowError(
            f"FEN {fen[:100]!r} cannot be read: it has {len(fen.split())} fields; expected 6: "
            "board, side, castling, en passant, halfmoves, move number"
        )
    try:
        board = chess.Board(fen)
    except ValueError as error:
        raise RowError(f"FEN {fen!r} cannot be read: {error}") from error
    if not board.is_valid():
        raise RowError(f"FEN {fen!r} is not a legal position: {board.status()!s}")
    return board


def check_legal(moves: Sequence[str], board: chess.Board, fen: str) -> None:
    """Raises RowError for the first of the moves that is not legal on the board; `fen` is what the row calls it."""
    legal = legal_uci(board)
    for move in moves:
        if move not in legal:
            raise RowError(f"move {move!r} is not legal in {fen!r}")


def finite(values: Sequence[Any], name: str, expected: str) -> tuple[float, ...]:
    """The values as numbers; RowError for one that is none, or not finite: a NaN here would become a NaN reward."""
    shown = repr(" ".join(map(str, values))[:80])
    try:
        numbers = tuple(float(value) for value in values)
    except (TypeError, ValueError, OverflowError) as error:
        raise RowError(f"{name} {shown}; expected {expected}") from error
    if not all(map(math.isfinite, numbers)):
        raise RowError(f"{name} {shown}; expected finite {expected}")
    return numbers


def parse_policy_row(row: str) -> PolicyRow:
    """Raises RowError for a missing field, a bad FEN, an illegal move or a count that does not match."""
    before, *fields = _MARKER.split(row.strip())
    names = fields[::2]
    if before or names != ["P", "M", "E", "B"]:
        raise RowError(
            f"policy row {row[:80]!r}; expected `P: <FEN> M: <moves> E: <evaluations> B: <move>`, "
            f"found the fields {', '.join(names) or 'none'}"
        )
    position, moves, numbers, best = (text.split() for text in fields[1::2])
    fen = " ".join(position)
    board = check_fen(fen)
    if len(moves) != len(numbers) or not moves:
        raise RowError(f"{len(moves)} moves but {len(numbers)} evaluations in {row[:80]!r}; expected as many of each")
    if len(best) != 1:
        raise RowError(f"field B: of {row[:80]!r} is {' '.join(best)!r}; expected one move")
    check_legal((*moves, *best), board, fen)
    return PolicyRow(fen, tuple(moves), finite(numbers, "evaluations", "numbers in pawns"), best[0])


def format_policy_row(row: PolicyRow, *, padded: bool = False) -> str:
    """The row with four spaces between fields, or padded to the published columns (90, 30, 40)."""
    moves, evaluations = " ".join(row.moves), " ".join(map(str, row.evaluations))
    if padded:
        # the space inside each width keeps fields apart when one outgrows its columns
        return f"{f'P: {row.fen} ':<92}M: {f'{moves} ':<30}E: {f'{evaluations} ':<40}B: {row.best}"
    return f"{policy_prompt(row.fen, 'M:')} {moves}    E: {evaluations}    B: {row.best}"


def parse_environment_row(row: str) -> EnvironmentRow:
    """Raises RowError for a wrong number of fields, a bad FEN, move, reward or flag."""
    text = row.strip()
    fields = text.removeprefix("A:").strip().removesuffix("+").split("+")
    if not text.startswith("A:") or len(fields) != 7:
        raise RowError(
            f"environment row {row[:80]!r} has {len(fields)} fields; expected 7: "
            "`A: <FEN>+<uci>+<history>+<new FEN>+<reward>+<terminated>+<truncated>`"
        )
    fen, move, history, next_fen, reward, terminated, truncated = (field.strip() for field in fields)
    fen, next_fen = check_fen(fen).fen(), check_fen(next_fen).fen()
    for uci in (move, *history.split()):
        if not UCI.fullmatch(uci):
            raise RowError(f"move {uci!r} in {row[:80]!r} is not UCI")
    if terminated not in ("0", "1") or truncated not in ("0", "1"):
        raise RowError(f"flags {terminated!r} and {truncated!r} in {row[:80]!r}; expected 0 or 1")
    (number,) = finite([reward], "reward", "number")
    return EnvironmentRow(fen, move, tuple(history.split()), next_fen, number, terminated == "1", truncated == "1")


def format_environment_row(row: EnvironmentRow) -> str:
    """The row as published."""
    return _environment_text(row.fen, row.move, row.history) + row.next_state
