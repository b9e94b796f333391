"""A chess position: what is known about it, what makes two the same, its legal moves, whether a game has ended there, and the
position as the side to move sees it, which always plays White, from the bottom of the board.

So Black to move is shown upside down with colours changed, castling rights and en passant square too; the rules of chess are the
same for both. A small model then learns one side of the game instead of two. The split is a hash of the position itself, so no
position is ever in two, whatever file it stands in: data sets and files are split alike. Knows no files, nor prompts.
"""

import dataclasses
import re
import sys
from collections.abc import Callable

import chess

from jax_grpo.chess.settings import OWN_SIDE
from jax_grpo.prompts.table import SourceError

HISTORY = 10  # half-moves remembered before a position
UCI = re.compile(r"[a-h][1-8][a-h][1-8][qrbn]?")
MATE_PAWNS = 100.0  # a mate in n moves is +-(100 - n/100) pawns
_OTHER_RANK = str.maketrans("12345678", "87654321")


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


def legal_uci(board: chess.Board) -> set[str]:
    """The legal moves in UCI: what a move must be among to be legal here.

    `board.is_legal` and `move in board.legal_moves` also accept castling as king takes rook (`e1h1`), which no list of legal
    moves has: one move would be drawn as illegal and answered as legal.
    """
    return {move.uci() for move in board.legal_moves}


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


def as_white(fen: str) -> str:
    """The FEN itself where White is to move, else that of the position with colours changed."""
    return chess.Board(fen).mirror().fen() if is_black(fen) else fen


def turned(uci: str, fen: str) -> str:
    """A move of the position `fen`, from the board to its own side's view and back; what is no move stays as it is."""
    return uci.translate(_OTHER_RANK) if is_black(fen) and UCI.fullmatch(uci) else uci


def mirrored(position: Position) -> Position:
    """The same position with colours changed: the board upside down, the other side to move, every move on the other side."""
    moves = tuple(move.translate(_OTHER_RANK) for move in position.moves)
    return Position(chess.Board(position.fen).mirror().fen(), moves=moves, evaluations=position.evaluations)


def is_black(fen: str) -> bool:
    """Whether Black is to move."""
    return fen.split(" ")[1:2] == ["b"]


def in_style(style: str, uci: str, fen: str) -> str:
    """A move of the board as a style writes it, and back again; any text that is no move is left as it is."""
    return turned(uci, fen) if style == OWN_SIDE else uci
