"""How a game of chess has ended, by either of two rules for draws, and the moves that end it by mate."""

from collections.abc import Callable

import chess

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


def ending(board: chess.Board, draws: str) -> str | None:
    """Kind of the ending the board has reached, by the rules of `ENDINGS[draws]`."""
    return next((kind for kind, reached in ENDINGS[draws].items() if reached(board)), None)


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
