"""Seeded games with Stockfish: labelled positions, tables of every legal move, mates in one and two, packaged or for a user.

Tables have the win probability of every legal move, which the `value` reward and strength are measured by. Whole games are in one
split of them, and the test split is searched deeper: a table's own noise bounds what can be seen with it. Only positions that
are still undecided and where moves differ have one.

Each game is a pure function of (seed, game number), so the result does not depend on the number of processes. Knows nothing
of prompts, models or files.
"""

import bisect
import functools
import itertools
import math
import multiprocessing
import os
import random
import threading
from collections.abc import Callable, Container, Generator, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import chess
import chess.engine
import pyarrow as pa

from jax_grpo.chess.data.shards import Source, row_position
from jax_grpo.chess.games import play_alone, random_move, sparse_start
from jax_grpo.chess.positions.position import mating_keys, mating_moves, position_key, recent_moves
from jax_grpo.chess.positions.table import MOVES
from jax_grpo.chess.positions.values import UNDECIDED, win_probability
from jax_grpo.chess.tasks.engine import engine_name, search, start_engine
from jax_grpo.prompts.table import digest

MAX_PLIES = 160
GAMES_A_BATCH = 4
MATE_GAMES_A_BATCH = 8
SCHEMA = pa.schema({"fen": pa.string(), "history": MOVES, "moves": MOVES, "evaluations": pa.list_(pa.float32())})
TABLE_SCHEMA = SCHEMA.append(pa.field("game", pa.int32()))
OPENING_PLIES = 6  # at most so many random moves begin a game of tables
TEMPERATURE = 0.04  # of the players, who draw a move by softmax(win probability / temperature)
SPREAD = 0.1  # least difference between the best and the worst legal move
VALUED = 0.25  # share of a game's positions whose moves are all valued: neighbours say the same, and games share luck
PLAY_NODES, PLAY_LINES = 1000, 6  # of the search that moves are chosen by elsewhere


def labelled_game(game: int, engine: chess.engine.SimpleEngine, seed: int, nodes: int) -> list[dict]:
    """Rows of one game: the engine's five best moves in every second position or so, best first.

    The players mix random and engine moves, so that positions range from sound to absurd.
    """
    rng = random.Random(f"{seed}/{game}")
    board = sparse_start(rng) if rng.random() < 0.2 else chess.Board()
    blunder = rng.choice([0.1, 0.3, 0.6])
    opening_plies = rng.randint(1, 8)
    rows = []

    def choose(board: chess.Board) -> str:
        if len(board.move_stack) < opening_plies or rng.random() < 0.4:
            return random_move(board, rng)
        moves, evaluations, _ = search(engine, board, nodes=nodes, multipv=5)
        rows.append({"fen": board.fen(), "history": recent_moves(board), "moves": moves, "evaluations": evaluations})
        best_or_other = rng.choices(moves, weights=[0.5**rank for rank in range(len(moves))])[0]
        return random_move(board, rng) if rng.random() < blunder else best_or_other

    play_alone(board, choose, "automatic", MAX_PLIES)
    return rows


def source(path: str, seed: int, nodes: int, processes: int) -> Source:
    """Rows of `labelled_game`, without end: Stockfish at `path`, `nodes` a search, `processes` engines side by side."""
    settings = {"source": "selfplay", "engine": engine_name(path), "nodes": nodes, "seed": seed}
    play = functools.partial(labelled_game, seed=seed, nodes=nodes)
    return Source(SCHEMA, settings, functools.partial(game_batches, play, GAMES_A_BATCH, processes, path), row_position)


class TableOptions(NamedTuple):
    """What decides the rows of tables besides the engine."""

    seed: int
    nodes: int
    test_nodes: int  # of the test split's tables
    random: float  # share of moves that a player draws uniformly
    splits: Mapping[str, int]  # wanted rows by split: games are dealt in these proportions


def split_of_game(game: int, options: TableOptions) -> str:
    """The split that all positions of a game are in."""
    bounds = list(itertools.accumulate(options.splits.values()))
    return list(options.splits)[bisect.bisect(bounds, digest(f"{options.seed}/{game}") % bounds[-1])]


def tabled_game(game: int, engine: chess.engine.SimpleEngine, options: TableOptions) -> list[dict]:
    """Rows of one game, a function of its arguments: `moves`, all legal ones, best first, and their `evaluations` in pawns."""
    rng = random.Random(f"tables/{options.seed}/{game}")
    deep = split_of_game(game, options) == "test"
    opening = rng.randint(1, OPENING_PLIES)
    rows = []

    def choose(board: chess.Board) -> str:
        if len(board.move_stack) < opening:
            return random_move(board, rng)
        legal = board.legal_moves.count()
        if rng.random() < VALUED:
            lines = _lines(engine, board, options.nodes, legal)
            table = _lines(engine, board, options.test_nodes, legal) if deep and _teaches(lines) else lines
            if _teaches(lines) and len(table) == legal:
                moves, evaluations = zip(*table, strict=True)
                row = {"fen": board.fen(), "history": recent_moves(board), "moves": moves, "evaluations": evaluations}
                rows.append({**row, "game": game})
        else:
            lines = _lines(engine, board, PLAY_NODES, PLAY_LINES)
        if rng.random() < options.random:
            return random_move(board, rng)
        best = win_probability(lines[0][1])
        weights = [math.exp((win_probability(pawns) - best) / TEMPERATURE) for _, pawns in lines]
        return rng.choices(lines, weights)[0][0]

    play_alone(chess.Board(), choose, "claimed", MAX_PLIES)
    return rows


def _lines(engine: chess.engine.SimpleEngine, board: chess.Board, nodes: int, count: int) -> list[tuple[str, float]]:
    """(move, pawns), best first: the engine's order is of its last whole iteration, which the node limit cuts."""
    analysis = search(engine, board, nodes=nodes, multipv=count)
    return sorted(zip(analysis.moves, analysis.evaluations, strict=True), key=lambda line: -line[1])


def _teaches(lines: list[tuple[str, float]]) -> bool:
    best, worst = (win_probability(pawns) for _, pawns in (lines[0], lines[-1]))
    return UNDECIDED[0] <= best <= UNDECIDED[1] and best - worst > SPREAD


def table_source(path: str, options: TableOptions, processes: int) -> Source:
    """Rows of `tabled_game`, without end: Stockfish at `path`, `processes` engines side by side."""
    settings = {"source": "tables", "engine": engine_name(path), **options._asdict()}
    play = functools.partial(tabled_game, options=options)
    batches = functools.partial(game_batches, play, GAMES_A_BATCH, processes, path)
    return Source(TABLE_SCHEMA, settings, batches, row_position)


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

    def choose(board: chess.Board) -> str:
        if row := MATES[moves](board, engine, nodes):
            rows.append(row)
        if len(board.move_stack) < opening_plies or rng.random() < blunder[board.turn]:
            return random_move(board, rng)
        played = engine.play(board, chess.engine.Limit(nodes=nodes), game=object()).move
        return played.uci() if played else random_move(board, rng)

    play_alone(board, choose, "automatic", MAX_PLIES)
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
    """A worker whose parent was killed would wait for work for ever, with its engine."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "workers are spawned"

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
