"""What moves are worth: win probabilities, and tables, which have every legal move's. Knows nothing of where they come from."""

import functools
import math
from collections.abc import Mapping
from typing import NamedTuple

import chess

from jax_grpo.positions.position import Position
from jax_grpo.positions.rookworld import legal_uci

UNDECIDED = (0.1, 0.9)  # where the best move's win probability lies in a position that is not decided yet


class NotATable(ValueError):
    """A position does not have every legal move's evaluation; names the position, and a move that lacks one."""


def win_probability(pawns: float) -> float:
    """Expected score of an evaluation in pawns, in [0, 1]: 1 / (1 + exp(-0.368208 pawns)).

    The curve fitted by Lichess to games of 2300-rated players (lichess.org/page/accuracy).
    """
    return 1 / (1 + math.exp(-0.368208 * max(-50.0, min(50.0, pawns))))


class MoveTable(NamedTuple):
    """The win probability of every legal move of a position, for the player who moves."""

    wins: Mapping[str, float]  # by UCI
    best: float
    worst: float

    def loss(self, move: str) -> float:
        """Win probability given away against the best move, in [0, 1]; what is no legal move counts as the worst of them."""
        return self.best - self.wins.get(move, self.worst)


@functools.lru_cache(maxsize=65536)
def move_table(position: Position) -> MoveTable:
    """The table of a position whose labels cover every legal move, in any order.

    Raises:
        NotATable: they do not.
    """
    wins = {move: win_probability(pawns) for move, pawns in zip(position.moves, position.evaluations, strict=True)}
    if missing := sorted(legal_uci(chess.Board(position.fen)) - wins.keys()):
        raise NotATable(
            f"{position.fen!r} has values for {len(wins)} moves and none for {missing[0]}; expected one for each legal move"
        )
    return MoveTable(wins, max(wins.values()), min(wins.values()))
