"""Positions where exactly one legal move mates, from seeded self-play with Stockfish: the packaged mate-in-one suite.

At most one position of a game, half with White to move, none that is in the sets it must stay apart from. Games are pure
functions of (seed, game number). Knows nothing of models.
"""

import random
from collections.abc import Container, Iterator

import chess
import chess.engine

from jax_grpo.data.selfplay import engine_games
from jax_grpo.positions.endings import mating_moves
from jax_grpo.positions.position import position_key
from jax_grpo.positions.random_play import sparse_start

MAX_PLIES = 160
GAMES_A_BATCH = 8


def play_game(engine: chess.engine.SimpleEngine, seed: int, game: int, nodes: int) -> list[dict]:
    """A position with one mate, `fen` and `mate` (UCI), of a game between players that mix random moves and shallow searches.

    One of a game at most: a mate that is missed stands on the board for several moves.
    """
    rng = random.Random(f"mates/{seed}/{game}")
    board = sparse_start(rng) if rng.random() < 0.15 else chess.Board()
    blunder = {chess.WHITE: rng.choice([0.15, 0.4, 0.8]), chess.BLACK: rng.choice([0.15, 0.4, 0.8])}
    opening_plies = rng.randint(2, 10)
    rows = []
    while not board.is_game_over() and len(board.move_stack) < MAX_PLIES:
        mates = mating_moves(board)
        if len(mates) == 1:
            rows.append({"fen": board.fen(), "mate": mates[0]})
        legal = sorted(board.legal_moves, key=chess.Move.uci)
        if len(board.move_stack) < opening_plies or rng.random() < blunder[board.turn]:
            board.push(rng.choice(legal))
        else:
            played = engine.play(board, chess.engine.Limit(nodes=nodes), game=object()).move
            board.push(played or rng.choice(legal))
    return [random.Random(f"{seed}/{game}").choice(rows)] if rows else []


def make_suite(
    path: str, *, count: int, seed: int, nodes: int, processes: int, apart: Container[str]
) -> Iterator[dict[str, str]]:
    """Rows of `play_game`, half for each colour, distinct in board, side, castling and en passant.

    Args:
        path: Stockfish.
        count: positions; even.
        seed: of all games.
        nodes: of a search.
        processes: engines side by side.
        apart: keys (`position_key`) that must not occur.
    """
    left = {chess.WHITE: count // 2, chess.BLACK: count // 2}
    seen: set[str] = set()
    for rows in engine_games(play_game, path, seed, nodes, GAMES_A_BATCH, processes):
        for row in rows:
            board = chess.Board(row["fen"])
            key = position_key(board)
            if left[board.turn] and key not in seen and key not in apart:
                seen.add(key)
                left[board.turn] -= 1
                yield row
        if not any(left.values()):
            return
