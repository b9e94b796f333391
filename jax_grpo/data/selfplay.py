"""Labelled positions from seeded self-play with Stockfish: the packaged positions, and what a user makes for themselves.

Each game is a pure function of (seed, game number), so the result does not depend on the number of processes. Knows nothing
of prompts, models or files.
"""

import functools
import multiprocessing
import os
import random
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import ProcessPoolExecutor

import chess
import chess.engine
import pyarrow as pa

from jax_grpo.data.shards import Source, row_position
from jax_grpo.positions.position import recent_moves
from jax_grpo.positions.random_play import sparse_start
from jax_grpo.tasks.engine import engine_name, search, start_engine

MAX_PLIES = 160
GAMES_A_BATCH = 4

SCHEMA = pa.schema(
    [
        ("fen", pa.string()),
        ("history", pa.list_(pa.string())),
        ("moves", pa.list_(pa.string())),
        ("evaluations", pa.list_(pa.float32())),
    ]
)
PlayGame = Callable[[chess.engine.SimpleEngine, int, int, int], list[dict]]  # (engine, seed, game, nodes) to rows


def play_game(engine: chess.engine.SimpleEngine, seed: int, game: int, nodes: int) -> list[dict]:
    """Rows of one game: the engine's five best moves in every second position or so, best first.

    The players mix random and engine moves, so that positions range from sound to absurd.
    """
    rng = random.Random(f"{seed}/{game}")
    board = sparse_start(rng) if rng.random() < 0.2 else chess.Board()
    blunder = rng.choice([0.1, 0.3, 0.6])
    opening_plies = rng.randint(1, 8)
    rows = []
    while not board.is_game_over() and len(board.move_stack) < MAX_PLIES:
        legal = sorted(board.legal_moves, key=chess.Move.uci)
        if len(board.move_stack) < opening_plies or rng.random() < 0.4:
            board.push(rng.choice(legal))
            continue
        moves, evaluations, _ = search(engine, board, nodes=nodes, multipv=5)
        rows.append({"fen": board.fen(), "history": recent_moves(board), "moves": moves, "evaluations": evaluations})
        best_or_other = rng.choices(moves, weights=[0.5**rank for rank in range(len(moves))])[0]
        board.push(rng.choice(legal) if rng.random() < blunder else chess.Move.from_uci(best_or_other))
    return rows


def source(path: str, seed: int, nodes: int, processes: int) -> Source:
    """Rows of self-play, without end.

    Args:
        path: Stockfish.
        seed: of all games.
        nodes: of a search.
        processes: engines side by side.
    """
    settings = {"source": "selfplay", "engine": engine_name(path), "nodes": nodes, "seed": seed}
    batches = functools.partial(engine_games, play_game, path, seed, nodes, GAMES_A_BATCH, processes)
    return Source(SCHEMA, settings, batches, row_position)


def engine_games(
    play: PlayGame, path: str, seed: int, nodes: int, games: int, processes: int, start: int = 0
) -> Generator[list[dict]]:
    """Batches of the rows of `games` games each, from batch `start` on, in order and without end."""
    return in_processes(functools.partial(_play_batch, play, path, seed, nodes, games), processes, start)


def _play_batch(play: PlayGame, path: str, seed: int, nodes: int, games: int, batch: int) -> list[dict]:
    with start_engine(path) as engine:
        return [row for game in range(batch * games, (batch + 1) * games) for row in play(engine, seed, game, nodes)]


def in_processes(rows: Callable[[int], list[dict]], processes: int, start: int) -> Generator[list[dict]]:
    """`rows(n)` for batch n = start, start + 1, ... in order, computed ahead by a pool of processes."""
    spawn = multiprocessing.get_context("spawn")  # a fork would copy the progress display's locks
    with ProcessPoolExecutor(processes, mp_context=spawn, initializer=_leave_with_parent) as pool:
        ahead = 2 * processes
        pending = [pool.submit(rows, start + batch) for batch in range(ahead)]
        try:
            while True:
                yield pending.pop(0).result()
                pending.append(pool.submit(rows, start + ahead))
                start += 1
        finally:
            for future in pending:
                future.cancel()


def _leave_with_parent() -> None:
    """A worker whose parent was killed would wait for work for ever, with its engine: it looks once a second."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
