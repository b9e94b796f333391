"""A position as the side to move sees it: it always plays White, from the bottom of the board.

Black to move is shown upside down with colours changed, castling rights and en passant square too; the rules of chess are the same
for both. A small model then learns one side of the game instead of two. Knows nothing of prompts.
"""

import chess

from jax_grpo.chess.positions.position import Position
from jax_grpo.chess.positions.rookworld import UCI
from jax_grpo.chess.settings import OWN_SIDE

_OTHER_RANK = str.maketrans("12345678", "87654321")


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
