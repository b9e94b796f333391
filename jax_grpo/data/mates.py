"""Positions where exactly one legal move mates, from seeded self-play with Stockfish: the packaged mate-in-one suite.

At most one position of a game, half with White to move, none that is in the sets it must stay apart from. Games are pure
functions of (seed, game number). Knows nothing of models.
"""

import random
from collections.abc import Container, Iterator
from typing import NamedTuple

import chess
import chess.engine

from jax_grpo.data.selfplay import in_processes, sparse_start
from jax_grpo.splits import position_key

MAX_PLIES = 160
GAMES_A_BATCH = 8


class Mate(NamedTuple):
    """A position and its one mating move, in UCI."""

    fen: str
    mate: str


def mating_moves(board: chess.Board) -> list[str]:
    """UCI of every legal move that mates, sorted."""
    found = []
    for move in list(board.legal_moves):
        if board.gives_check(move):
            board.push(move)
            if board.is_checkmate():
                found.append(move.uci())
            board.pop()
    return sorted(found)


def play_game(engine: chess.engine.SimpleEngine, seed: int, game: int, nodes: int) -> list[Mate]:
    """The unique mates of one game between players that mix random moves and shallow searches."""
    rng = random.Random(f"mates/{seed}/{game}")
    board = sparse_start(rng) if rng.random() < 0.15 else chess.Board()
    blunder = {chess.WHITE: rng.choice([0.15, 0.4, 0.8]), chess.BLACK: rng.choice([0.15, 0.4, 0.8])}
    opening_plies = rng.randint(2, 10)
    found = []
    while not board.is_game_over() and len(board.move_stack) < MAX_PLIES:
        mates = mating_moves(board)
        if len(mates) == 1:
            found.append(Mate(board.fen(), mates[0]))
        legal = sorted(board.legal_moves, key=chess.Move.uci)
        if len(board.move_stack) < opening_plies or rng.random() < blunder[board.turn]:
            board.push(rng.choice(legal))
            continue
        played = engine.play(board, chess.engine.Limit(nodes=nodes), game=object()).move
        board.push(played or rng.choice(legal))
    return found


def _batch(job: tuple[str, int, int, int]) -> list[dict]:
    path, seed, batch, nodes = job
    rows = []
    with chess.engine.SimpleEngine.popen_uci(path) as engine:
        engine.configure({"Threads": 1, "Hash": 16})
        for game in range(batch * GAMES_A_BATCH, (batch + 1) * GAMES_A_BATCH):
            if found := play_game(engine, seed, game, nodes):
                # one a game: a mate that is missed stands on the board for several moves
                rows.append(random.Random(f"{seed}/{game}").choice(found)._asdict())
    return rows


def make_suite(
    path: str, *, count: int, seed: int, nodes: int, processes: int, apart: Container[str]
) -> Iterator[Mate]:
    """Mates, half for each colour, distinct in board, side, castling and en passant.

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
    batches = in_processes(_batch, lambda batch: (path, seed, batch, nodes), processes, 0)
    for rows in batches:
        for row in rows:
            board = chess.Board(row["fen"])
            key = position_key(board)
            if left[board.turn] and key not in seen and key not in apart:
                seen.add(key)
                left[board.turn] -= 1
                yield Mate(**row)
        if not any(left.values()):
            return
