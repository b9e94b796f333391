"""Labelled positions from seeded self-play with Stockfish: the packaged positions, and what a user makes for themselves.

Each game is a pure function of (seed, game number), so the result does not depend on the number of processes. Knows nothing
of prompts, models or files.
"""

import multiprocessing
import os
import random
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import chess
import chess.engine
import pyarrow as pa

from jax_grpo.tasks.engine import pawns

HISTORY = 10  # half-moves kept before a position, what the environment task's prompt shows
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


def sparse_start(rng: random.Random) -> chess.Board:
    """A legal position with few pieces: endgames, promotions and checks, which self-play from move one reaches rarely."""
    while True:
        board = chess.Board(None)
        squares = rng.sample(range(64), 12)
        board.set_piece_at(squares[0], chess.Piece(chess.KING, chess.WHITE))
        board.set_piece_at(squares[1], chess.Piece(chess.KING, chess.BLACK))
        for square in squares[2 : rng.randint(4, 12)]:
            kind = rng.choice([1, 1, 1, 1, 2, 3, 4, 5])
            color = rng.random() < 0.5
            if kind == chess.PAWN and chess.square_rank(square) in (0, 7):
                near = chess.square(chess.square_file(square), 6 if color else 1)  # one step from promotion
                board.set_piece_at(near, chess.Piece(kind, color))
            else:
                board.set_piece_at(square, chess.Piece(kind, color))
        board.turn = rng.random() < 0.5
        board.fullmove_number = rng.randint(30, 90)
        if board.is_valid() and not board.is_game_over():
            return board


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
        # A fresh `game` makes the engine forget its hash table: a label depends on the position and limit alone.
        lines = engine.analyse(board, chess.engine.Limit(nodes=nodes), multipv=5, game=object())
        lines = [line for line in lines if line.get("pv") and "score" in line]
        moves = [line.get("pv", [])[0] for line in lines]
        rows.append(
            {
                "fen": board.fen(),
                "history": [move.uci() for move in board.move_stack[-HISTORY:]],
                "moves": [move.uci() for move in moves],
                "evaluations": [pawns(line["score"]) for line in lines if "score" in line],
            }
        )
        best_or_other = rng.choices(moves, weights=[0.5**rank for rank in range(len(moves))])[0]
        board.push(rng.choice(legal) if rng.random() < blunder else best_or_other)
    return rows


def _play_batch(job: tuple[str, int, int, int]) -> list[dict]:
    path, seed, batch, nodes = job
    with chess.engine.SimpleEngine.popen_uci(path) as engine:
        engine.configure({"Threads": 1, "Hash": 16})
        first = batch * GAMES_A_BATCH
        return [row for game in range(first, first + GAMES_A_BATCH) for row in play_game(engine, seed, game, nodes)]


def generate(path: str, seed: int, nodes: int, processes: int, start: int = 0) -> Generator[list[dict]]:
    """Batches of rows of `GAMES_A_BATCH` games each, from batch `start` on, in order and without end."""
    return in_processes(_play_batch, lambda batch: (path, seed, batch, nodes), processes, start)


def in_processes(
    work: Callable[[Any], list[dict]], job: Callable[[int], Any], processes: int, start: int
) -> Generator[list[dict]]:
    """`work(job(n))` for n = start, start + 1, ... in order, computed ahead by a pool of processes."""
    spawn = multiprocessing.get_context("spawn")  # a fork would copy the progress display's locks
    with ProcessPoolExecutor(processes, mp_context=spawn, initializer=_leave_with_parent) as pool:
        pending = []
        number = start
        try:
            while True:
                while len(pending) < 2 * processes:
                    pending.append(pool.submit(work, job(number)))
                    number += 1
                yield pending.pop(0).result()
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
