"""Technique: won endings played out against a perfect defender. Does the model mate, how much longer does it take than it must?

The defender takes the piece if it can, else puts off the mate for as long as possible; ties by seed. It claims no draw by
repetition: who repeats runs out of moves. Two players stand beside the model: random legal moves, and the shortest mate. Knows
nothing of generation.
"""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import chess

from jax_grpo.chess import games
from jax_grpo.chess.games import ILLEGAL, LENGTH, Game, Player
from jax_grpo.chess.positions import endings
from jax_grpo.chess.positions.endings import LONGEST, men_of, squares_of, won_position
from jax_grpo.evaluate.statistics import Estimate, summarise
from jax_grpo.rollout.texts import Tick

ENDINGS = tuple(endings.PIECES)
ENDS = {  # by `Game.ended`: name in evaluation.json, and words
    "checkmate": ("mated", "checkmate"),
    ILLEGAL: ("illegal", "the model's move is not legal, or not a move"),
    "insufficient_material": ("piece_lost", "the rook or queen is taken"),
    "stalemate": ("stalemate", "stalemate"),
    LENGTH: ("unmated", f"no mate in {LONGEST} moves"),
}


def starts(men: str, count: int, seed: int) -> list[Game]:
    """Games about to begin, the strong side's being the first player, from positions of the test split.

    There are as many of each distance to mate as there can be.
    """
    squares = endings.spread_sample(men, "test", count, seed)
    boards = [chess.Board(won_position(men, *each).fen) for each in squares]
    return [Game(board, number, board.turn) for number, board in enumerate(boards)]


def end_of(game: Game) -> str:
    """How the game ended, as evaluation.json calls it."""
    return ENDS[game.ended or LENGTH][0]


def mate_in(game: Game) -> int:
    """Moves to the shortest mate from the game's first position."""
    board = game.board.root()
    return int(endings.ending(men_of(board)).mates_in_KPW[squares_of(board, board.turn)])


def perfect(played: Sequence[Game]) -> list[str]:
    """Plays the shortest mate; of moves that are equally good, the first by name."""
    boards = [game.board for game in played]
    return [won_position(men_of(board), squares_of(board, board.turn), board.turn).moves[0] for board in boards]


def play(begun: Sequence[Game], attack: Player, seed: int, tick: Tick) -> None:
    """Plays all games to their ends, side by side, in place; each tick is one more move of each side."""
    defence = games.seeded(best_defence, lambda game: f"defence/{seed}/{game.number}/{game.turn}")
    games.play(begun, attack, defence, draws=None, most=2 * LONGEST, after=lambda moved: tick(moved[0].turn))


def best_defence(board: chess.Board, rng: random.Random) -> str:
    """The weak side's move that takes the piece, else one of those after which the mate is furthest."""
    table, resistance = endings.ending(men_of(board)), {}
    king, piece, _ = squares_of(board, not board.turn)
    for move in sorted(board.legal_moves, key=chess.Move.uci):
        mates_in = int(table.mates_in_KPW[king, piece, move.to_square])
        assert (mates_in == endings.NEVER) == (move.to_square == piece), "only taking the piece saves the weak side"
        resistance[move.uci()] = LONGEST + 1 if mates_in == endings.NEVER else mates_in
    longest = max(resistance.values())
    return rng.choice([move for move, moves in resistance.items() if moves == longest])


def estimates(played: Sequence[Game]) -> dict[str, Estimate]:
    """`group/name` estimates, of all games and by the strong side's colour.

    Shares of games: `mated` within `LONGEST` moves, `slipped` (the piece is lost, or stalemate), `illegal`, `unmated` in time.
    `excess`: moves beyond the shortest mate from the start, mean over the games that ended in mate.
    """
    rows: list[dict[str, Any]] = [
        {
            "mated": (end := end_of(game)) == "mated",
            "excess": float(game.moves - mate_in(game)) if end == "mated" else None,
            "slipped": end in ("piece_lost", "stalemate"),
            "illegal": end == "illegal",
            "unmated": end == "unmated",
        }
        for game in played
    ]
    sides = {name: [game.colour == color for game in played] for name, color in (("white", True), ("black", False))}
    return summarise(rows, sides)


def pgn(games_of: Mapping[str, Sequence[Game]], name: str) -> str:
    """Of each set (such as `KRK/greedy`) the first game of those with the longest way to mate; every evaluation's is the same."""
    texts = []
    for key, played in games_of.items():
        game = max(played, key=mate_in)
        _, why = ENDS[game.ended or LENGTH]
        headers = {"Event": f"{key.replace('/', ', ')}, mate in {mate_in(game)}", "Site": "jax_grpo"}
        comment = "".join(f"{why}: {' '.join(text.split())!r}" for text in game.illegal.values())
        sides = (name, "perfect defender")
        texts.append(str(games.to_pgn(game, sides, headers | {"Termination": why}, comment)))
    return "\n\n".join(texts) + "\n"
