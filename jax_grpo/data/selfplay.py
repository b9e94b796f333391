"""Seeded games with Stockfish: the packaged positions, mates in one and two, and those that a user makes.

Each game is a pure function of (seed, game number), so the result does not depend on the number of processes. Knows nothing
of prompts, models or files.
"""

import functools
import itertools
import multiprocessing
import os
import random
import threading
import time
from collections.abc import Callable, Container, Generator, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import chess
import chess.engine
import pyarrow as pa

from jax_grpo.data.shards import Source, row_position
from jax_grpo.positions.position import mating_keys, mating_moves, position_key, recent_moves
from jax_grpo.positions.random_play import random_move, sparse_start
from jax_grpo.positions.table import MOVES
from jax_grpo.tasks.engine import engine_name, search, start_engine

MAX_PLIES = 160
GAMES_A_BATCH = 4
MATE_GAMES_A_BATCH = 8
SCHEMA = pa.schema({"fen": pa.string(), "history": MOVES, "moves": MOVES, "evaluations": pa.list_(pa.float32())})


def labelled_game(game: int, engine: chess.engine.SimpleEngine, seed: int, nodes: int) -> list[dict]:
    """Rows of one game: the engine's five best moves in every second position or so, best first.

    The players mix random and engine moves, so that positions range from sound to absurd.
    """
    rng = random.Random(f"{seed}/{game}")
    board = sparse_start(rng) if rng.random() < 0.2 else chess.Board()
    blunder = rng.choice([0.1, 0.3, 0.6])
    opening_plies = rng.randint(1, 8)
    rows = []
    while not board.is_game_over() and len(board.move_stack) < MAX_PLIES:
        if len(board.move_stack) < opening_plies or rng.random() < 0.4:
            board.push(random_move(board, rng))
            continue
        moves, evaluations, _ = search(engine, board, nodes=nodes, multipv=5)
        rows.append({"fen": board.fen(), "history": recent_moves(board), "moves": moves, "evaluations": evaluations})
        best_or_other = rng.choices(moves, weights=[0.5**rank for rank in range(len(moves))])[0]
        board.push(random_move(board, rng) if rng.random() < blunder else chess.Move.from_uci(best_or_other))
    return rows


def source(path: str, seed: int, nodes: int, processes: int) -> Source:
    """Rows of `labelled_game`, without end: Stockfish at `path`, `nodes` a search, `processes` engines side by side."""
    settings = {"source": "selfplay", "engine": engine_name(path), "nodes": nodes, "seed": seed}
    play = functools.partial(labelled_game, seed=seed, nodes=nodes)
    return Source(SCHEMA, settings, functools.partial(game_batches, play, GAMES_A_BATCH, processes, path), row_position)


def _mate_in_one(board: chess.Board, engine: chess.engine.SimpleEngine, nodes: int) -> dict[str, Any] | None:
    """`fen` and `mate` (UCI), where exactly one legal move mates."""
    mates = mating_moves(board)
    return {"fen": board.fen(), "mate": mates[0]} if len(mates) == 1 else None


def _mate_in_two(board: chess.Board, engine: chess.engine.SimpleEngine, nodes: int) -> dict[str, Any] | None:
    """`fen` and `line` (the key, a defence, a mate), where no move mates and exactly one forces mate by the next.

    Positions that the engine sees no mate in two in are passed over; what it sees is not believed: every defence is tried.
    """
    score = engine.analyse(board, chess.engine.Limit(nodes=nodes), game=object()).get("score")
    if score is None or score.relative.mate() != 2 or mating_moves(board) or len(keys := mating_keys(board)) != 1:
        return None
    after = board.copy(stack=False)
    after.push_uci(keys[0])
    defence = min(after.legal_moves, key=lambda move: random.Random(f"{after.fen()}/{move.uci()}").random())
    after.push(defence)
    return {"fen": board.fen(), "line": [keys[0], defence.uci(), mating_moves(after)[0]]}


MATES = {1: _mate_in_one, 2: _mate_in_two}  # by the number of moves


def mate_game(game: int, engine: chess.engine.SimpleEngine, seed: int, nodes: int, moves: int = 1) -> list[dict]:
    """A position with one mate in so many `moves`, of a game between players that mix random moves and shallow searches.

    One of a game at most: a mate that is missed stands on the board for several moves. See `MATES` for the row.
    """
    rng = random.Random(f"mates/{seed}/{game}")
    board = sparse_start(rng) if rng.random() < 0.15 else chess.Board()
    blunder = {chess.WHITE: rng.choice([0.15, 0.4, 0.8]), chess.BLACK: rng.choice([0.15, 0.4, 0.8])}
    opening_plies = rng.randint(2, 10)
    rows = []
    while not board.is_game_over() and len(board.move_stack) < MAX_PLIES:
        if row := MATES[moves](board, engine, nodes):
            rows.append(row)
        if len(board.move_stack) < opening_plies or rng.random() < blunder[board.turn]:
            board.push(random_move(board, rng))
        else:
            played = engine.play(board, chess.engine.Limit(nodes=nodes), game=object()).move
            board.push(played or random_move(board, rng))
    return [random.Random(f"{seed}/{game}").choice(rows)] if rows else []


def mate_suite(
    path: str, count: int, seed: int, nodes: int, processes: int, apart: Container[str], moves: int = 1
) -> Iterator[dict[str, Any]]:
    """`count` rows of `mate_game`, half for each colour, of different positions, none with its `position_key` in `apart`."""
    left = {"w": count // 2, "b": count // 2}
    seen: set[str] = set()
    play = functools.partial(mate_game, seed=seed, nodes=nodes, moves=moves)
    batches = game_batches(play, MATE_GAMES_A_BATCH, processes, path, 0)
    for row in itertools.chain.from_iterable(batches):
        key = position_key(row["fen"])
        side = key.split()[1]
        if left[side] and key not in seen and key not in apart:
            seen.add(key)
            left[side] -= 1
            yield row
        if not any(left.values()):
            return


def game_batches(
    play: Callable[..., list[dict]], games: int, processes: int, engine: str | None, start: int
) -> Generator[list[dict]]:
    """Batches `start`, `start + 1`, ... without end, each the rows of `games` games, computed ahead by processes.

    A game's rows are `play(game)`; with the path of an engine, `play(game, engine)`.
    """
    spawn = multiprocessing.get_context("spawn")  # a fork would copy the progress display's locks
    pool = ProcessPoolExecutor(processes, mp_context=spawn, initializer=_leave_with_parent)
    try:
        pending = [pool.submit(_rows, play, games, engine, start + ahead) for ahead in range(2 * processes)]
        for batch in itertools.count(start + len(pending)):
            yield pending.pop(0).result()
            pending.append(pool.submit(_rows, play, games, engine, batch))
    finally:
        pool.shutdown(cancel_futures=True)


def _rows(play: Callable[..., list[dict]], games: int, path: str | None, batch: int) -> list[dict]:
    numbers = range(batch * games, (batch + 1) * games)
    if path is None:
        return [row for game in numbers for row in play(game)]
    with start_engine(path) as engine:
        return [row for game in numbers for row in play(game, engine)]


def _leave_with_parent() -> None:
    """A worker whose parent was killed would wait for work for ever, with its engine: it looks once a second."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
