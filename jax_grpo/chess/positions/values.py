"""What moves are worth: win probabilities, and tables, which have every legal move's. Knows nothing of where they come from."""

import functools
import math
from collections.abc import Mapping
from typing import NamedTuple

import chess

from jax_grpo.chess.positions.position import MATE_PAWNS, Position, legal_uci
from jax_grpo.prompts.table import UnsuitableRow

UNDECIDED = (0.1, 0.9)  # where the best move's win probability lies in a position that is not decided yet


class NotATable(UnsuitableRow):
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
    """The table of a position whose labels cover every legal move, in any order. Raises NotATable: they do not."""
    wins = {move: win_probability(pawns) for move, pawns in zip(position.moves, position.evaluations, strict=True)}
    if missing := sorted(legal_uci(chess.Board(position.fen)) - wins.keys()):
        raise NotATable(
            f"{position.fen!r} has values for {len(wins)} moves and none for {missing[0]}; expected one for each legal move"
        )
    return MoveTable(wins, max(wins.values()), min(wins.values()))


@functools.lru_cache(maxsize=65536)
def moves_lost(position: Position) -> Mapping[str, int]:
    """Of a won position with an exact table, by UCI of each move that still wins: moves to mate more than the shortest has.

    Raises:
        NotATable: an evaluation is neither a mate's nor 0, a legal move has none, or no move wins.
    """
    move_table(position)
    values = dict(zip(position.moves, position.evaluations, strict=True))
    mates_in = {move: round(100 * (MATE_PAWNS - pawns)) for move, pawns in values.items() if pawns > MATE_PAWNS - 1}
    others = [f"{move} at {pawns:g} pawns" for move, pawns in values.items() if move not in mates_in and pawns != 0]
    if others or not mates_in:
        raise NotATable(
            f"{position.fen!r} has {others[0] if others else 'no move that wins'}; the component `technique` is of won positions "
            "with exact tables, a mate in n at 100 - n/100 pawns and any other move at 0: take prompts.source endings:KRK,KQK"
        )
    return {move: mate_in - min(mates_in.values()) for move, mate_in in mates_in.items()}
