"""A chess position: what is known about it, what makes two the same, which split it is in, and whether a game has ended there.

The split is a hash of the position itself, so no position is ever in two, whatever file it stands in: data sets and files are
split alike. Knows no files.
"""

import dataclasses
import sys
from collections.abc import Callable

import chess

from jax_grpo.prompts.table import SourceError

HISTORY = 10  # half-moves remembered before a position
MATE_PAWNS = 100.0  # a mate in n moves is +-(100 - n/100) pawns


class PositionFileError(SourceError):
    """Positions cannot be used; names the file, line or key, what is there and what was expected."""


@dataclasses.dataclass(frozen=True, slots=True)
class Position:
    """A chess position and what is known about it."""

    fen: str  # Forsyth-Edwards notation, six fields
    history: tuple[str, ...] = ()  # up to `HISTORY` UCI moves that led here, oldest first
    moves: tuple[str, ...] = ()  # the engine's best moves, best first; empty where unlabelled
    evaluations: tuple[float, ...] = ()  # in pawns from the side to move, aligned with `moves`; see `MATE_PAWNS`
    best: str | None = None  # the move a published row calls best, where it differs from `moves[0]` on purpose
    move: str | None = None  # the move whose outcome the environment task asks for; None: one is drawn
    next_state: str | None = None  # given with `move`: the answer, `<new FEN>+<reward>+<terminated>+<truncated>`
    # The one it was played in: positions of a game share luck. Not in `repr`, which old checkpoints identify data by.
    game: int | None = dataclasses.field(default=None, repr=False)

    def __post_init__(self) -> None:
        # Some 1,900 moves can be written: one string for each, not fifteen for every position of a data set.
        object.__setattr__(self, "history", tuple(map(sys.intern, self.history)))
        object.__setattr__(self, "moves", tuple(map(sys.intern, self.moves)))

    @property
    def prompt(self) -> str:
        """The text that stands for it where a task does not ask about positions: its FEN."""
        return self.fen

    @classmethod
    def of_board(cls, board: chess.Board) -> "Position":
        """The position on a board, with the moves that led to it and without labels."""
        return cls(board.fen(), recent_moves(board))


def recent_moves(board: chess.Board) -> tuple[str, ...]:
    """UCI of the last `HISTORY` half-moves, oldest first."""
    return tuple(move.uci() for move in board.move_stack[-HISTORY:])


def position_key(fen: str) -> str:
    """Board, side to move, castling rights and en passant square (if it can be taken on): what makes two positions the same."""
    return chess.Board(fen).epd()


# What ends a game, in the order asked. `claimed`: a player claims a draw as soon as the rules let them, as in most play;
# `automatic`: only what ends a game without a claim, which is what the environment task's own prompts mean.
_DECIDED: dict[str, Callable[[chess.Board], bool]] = {
    "checkmate": chess.Board.is_checkmate,
    "stalemate": chess.Board.is_stalemate,
    "insufficient_material": chess.Board.is_insufficient_material,
}
ENDINGS = {
    "claimed": _DECIDED
    | {"fifty_moves": chess.Board.is_fifty_moves, "threefold": lambda board: board.is_repetition(3)},
    "automatic": _DECIDED
    | {"seventyfive_moves": chess.Board.is_seventyfive_moves, "fivefold": chess.Board.is_fivefold_repetition},
}


def ending(board: chess.Board, draws: str | None) -> str | None:
    """Kind of the ending the board has reached, by the rules of `ENDINGS[draws]`; None: no draw by repetition or counting moves."""
    rules = ENDINGS[draws] if draws else _DECIDED
    return next((kind for kind, reached in rules.items() if reached(board)), None)


def mating_moves(board: chess.Board) -> list[str]:
    """UCI of every legal move that mates, sorted."""
    mates = []
    for move in list(board.legal_moves):
        if board.gives_check(move):
            board.push(move)
            if board.is_checkmate():
                mates.append(move.uci())
            board.pop()
    return sorted(mates)


def mating_keys(board: chess.Board) -> list[str]:
    """UCI of every legal move that does not mate, but after which each of the opponent's moves can be answered by mate, sorted."""
    keys = []
    for move in list(board.legal_moves):
        board.push(move)
        defences = list(board.legal_moves)
        if defences and all(_answered_by_mate(board, defence) for defence in defences):
            keys.append(move.uci())
        board.pop()
    return sorted(keys)


def _answered_by_mate(board: chess.Board, defence: chess.Move) -> bool:
    board.push(defence)
    mated = bool(mating_moves(board))
    board.pop()
    return mated
