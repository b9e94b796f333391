"""Positions of sane games with the win probability of every legal move: what the `value` reward and strength are measured by.

Whole games are in one split, and the test split is searched deeper: a table's own noise bounds what can be seen with it. Kept are
positions that are still undecided and where moves differ. Knows nothing of files or models.
"""

import functools
import math
import random
from collections.abc import Mapping
from typing import NamedTuple

import chess
import chess.engine
import pyarrow as pa

from jax_grpo.data.selfplay import game_batches
from jax_grpo.data.shards import Source, row_position
from jax_grpo.positions.position import digest, ending, recent_moves
from jax_grpo.positions.random_play import random_move
from jax_grpo.positions.table import MOVES
from jax_grpo.positions.values import UNDECIDED, win_probability
from jax_grpo.tasks.engine import engine_name, search

GAMES_A_BATCH = 4
MAX_PLIES = 160
OPENING_PLIES = 6  # at most so many random moves begin a game
TEMPERATURE = 0.04  # of the players, who draw a move by softmax(win probability / temperature)
SPREAD = 0.1  # least difference between the best and the worst legal move
ASKED = 0.25  # share of a game's positions whose moves are all valued: neighbours say the same, and games share luck
PLAY_NODES, PLAY_LINES = 1000, 6  # of the search that moves are drawn by elsewhere
SCHEMA = pa.schema(
    {"fen": pa.string(), "history": MOVES, "moves": MOVES, "evaluations": pa.list_(pa.float32()), "game": pa.int32()}
)


class Options(NamedTuple):
    """What decides the rows besides the engine."""

    seed: int
    nodes: int
    test_nodes: int  # of the test split's tables
    random: float  # share of moves that a player draws uniformly
    splits: Mapping[str, int]  # wanted rows by split: games are dealt in these proportions


def split_of_game(game: int, options: Options) -> str:
    """The split that all positions of a game are in."""
    share = digest(f"{options.seed}/{game}") % sum(options.splits.values())
    for split, wanted in options.splits.items():
        if share < wanted:
            return split
        share -= wanted
    raise AssertionError("shares add up")


def tabled_game(game: int, engine: chess.engine.SimpleEngine, options: Options) -> list[dict]:
    """Rows of one game, a function of its arguments: `moves`, all legal ones, best first, and their `evaluations` in pawns."""
    rng = random.Random(f"tables/{options.seed}/{game}")
    deep = split_of_game(game, options) == "test"
    board = chess.Board()
    opening = rng.randint(1, OPENING_PLIES)
    while len(board.move_stack) < opening and not board.is_checkmate():  # which five random half-moves can be
        board.push(random_move(board, rng))
    rows = []
    while ending(board, "claimed") is None and len(board.move_stack) < MAX_PLIES:
        legal = board.legal_moves.count()
        if rng.random() < ASKED:
            lines = _lines(engine, board, options.nodes, legal)
            if _teaches(lines):
                kept = _lines(engine, board, options.test_nodes, legal) if deep else lines
                if len(kept) == legal:
                    moves, evaluations = zip(*kept, strict=True)
                    row = {
                        "fen": board.fen(),
                        "history": recent_moves(board),
                        "moves": moves,
                        "evaluations": evaluations,
                    }
                    rows.append({**row, "game": game})
        else:
            lines = _lines(engine, board, PLAY_NODES, PLAY_LINES)
        if rng.random() < options.random:
            board.push(random_move(board, rng))
        else:
            weights = [
                math.exp((win_probability(pawns) - win_probability(lines[0][1])) / TEMPERATURE) for _, pawns in lines
            ]
            board.push_uci(rng.choices(lines, weights)[0][0])
    return rows


def _lines(engine: chess.engine.SimpleEngine, board: chess.Board, nodes: int, count: int) -> list[tuple[str, float]]:
    """(move, pawns), best first: the engine's order is of its last whole iteration, which the node limit cuts."""
    found = search(engine, board, nodes=nodes, multipv=count)
    return sorted(zip(found.moves, found.evaluations, strict=True), key=lambda line: -line[1])


def _teaches(lines: list[tuple[str, float]]) -> bool:
    best, worst = (win_probability(pawns) for _, pawns in (lines[0], lines[-1]))
    return UNDECIDED[0] <= best <= UNDECIDED[1] and best - worst > SPREAD


def source(path: str, options: Options, processes: int) -> Source:
    """Rows of `tabled_game`, without end: Stockfish at `path`, `processes` engines side by side."""
    settings = {"source": "tables", "engine": engine_name(path), **options._asdict()}
    play = functools.partial(tabled_game, options=options)
    return Source(SCHEMA, settings, functools.partial(game_batches, play, GAMES_A_BATCH, processes, path), row_position)
