"""RookWorld's published text rows: `P:` (policy) and `A:` (environment), parsed by field and written in both spacings.

Fields of a policy row are found by their markers, never by column; moves are not sorted by evaluation.
"""

import re
from typing import NamedTuple

import chess

from jax_grpo.tasks.base import Position

_POLICY = re.compile(
    r"P:\s*(?P<fen>\S+ [wb] \S+ \S+ \d+ \d+)\s+M:\s*(?P<moves>.*?)\s+E:\s*(?P<evaluations>.*?)\s+B:\s*(?P<best>\S+)\s*"
)
_UCI = re.compile(r"[a-h][1-8][a-h][1-8][qrbn]?")


class RowError(ValueError):
    """A row is not what its task's format says; the message names the field, the value and what was expected."""


class PolicyRow(NamedTuple):
    """A parsed policy row: moves in their published order, evaluations in pawns from the side to move."""

    fen: str
    moves: tuple[str, ...]
    evaluations: tuple[float, ...]
    best: str

    def position(self) -> Position:
        """Moves sorted by evaluation, best first, for both colours; the published label stays in `best`.

        The label itself cannot be used for Black: it is the lowest evaluation there.
        """
        order = sorted(range(len(self.moves)), key=lambda i: -self.evaluations[i])
        return Position(
            self.fen,
            moves=tuple(self.moves[i] for i in order),
            evaluations=tuple(self.evaluations[i] for i in order),
            best=self.best,
        )


class EnvironmentRow(NamedTuple):
    """A parsed environment row."""

    fen: str
    move: str
    history: tuple[str, ...]
    next_fen: str
    reward: float
    terminated: bool
    truncated: bool


def check_fen(fen: str) -> chess.Board:
    """The board of a legal position.

    Raises:
        RowError: not FEN, or an impossible position.
    """
    try:
        board = chess.Board(fen)
    except ValueError as error:
        raise RowError(f"FEN {fen!r} cannot be read: {error}") from error
    if not board.is_valid():
        raise RowError(f"FEN {fen!r} is not a legal position: {board.status()!s}")
    return board


def parse_policy_row(row: str) -> PolicyRow:
    """Raises RowError for a missing field, a bad FEN, an illegal move or a count that does not match."""
    match = _POLICY.fullmatch(row.strip())
    if match is None:
        raise RowError(f"policy row {row[:80]!r}; expected `P: <FEN> M: <moves> E: <evaluations> B: <move>`")
    board = check_fen(match["fen"])
    moves, numbers, best = match["moves"].split(), match["evaluations"].split(), match["best"]
    if len(moves) != len(numbers) or not moves:
        raise RowError(f"{len(moves)} moves but {len(numbers)} evaluations in {row[:80]!r}; expected as many of each")
    legal = {move.uci() for move in board.legal_moves}
    for move in (*moves, best):
        if move not in legal:
            raise RowError(f"move {move!r} is not legal in {match['fen']!r}")
    try:
        evaluations = tuple(float(number) for number in numbers)
    except ValueError as error:
        raise RowError(f"evaluations {match['evaluations']!r}; expected numbers in pawns") from error
    return PolicyRow(match["fen"], tuple(moves), evaluations, best)


def format_policy_row(row: PolicyRow, *, padded: bool = False) -> str:
    """The row with four spaces between fields, or padded to the published columns (90, 30, 40)."""
    moves, evaluations = " ".join(row.moves), " ".join(str(e) for e in row.evaluations)
    if padded:
        return f"{'P: ' + row.fen:<92}M: {moves:<30}E: {evaluations:<40}B: {row.best}"
    return f"P: {row.fen}    M: {moves}    E: {evaluations}    B: {row.best}"


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
    check_fen(fen)
    for uci in (move, *history.split()):
        if not _UCI.fullmatch(uci):
            raise RowError(f"move {uci!r} in {row[:80]!r} is not UCI")
    if terminated not in ("0", "1") or truncated not in ("0", "1"):
        raise RowError(f"flags {terminated!r} and {truncated!r} in {row[:80]!r}; expected 0 or 1")
    try:
        number = float(reward)
    except ValueError as error:
        raise RowError(f"reward {reward!r} in {row[:80]!r}; expected a number") from error
    return EnvironmentRow(fen, move, tuple(history.split()), next_fen, number, terminated == "1", truncated == "1")


def format_environment_row(row: EnvironmentRow) -> str:
    """The row as published; rewards 0.001, 1.0, 0.5 and -1.0."""
    flags = f"{int(row.terminated)}+{int(row.truncated)}"
    return f"A: {row.fen}+{row.move}+{' '.join(row.history)}+{row.next_fen}+{row.reward}+{flags}"
