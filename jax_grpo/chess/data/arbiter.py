"""Rows of the environment task from whole games: a state, a move, the state after it, its reward and flags.

Games are seeded play whose players steer to what random games reach rarely (mates, each kind of draw), or a PGN's, or
RookWorld's `A:` rows. A share of the moves is illegal. Knows nothing of models.
"""

import functools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import chess
import pyarrow as pa

from jax_grpo.chess.data.selfplay import game_batches
from jax_grpo.chess.data.shards import Source, of_file, row_position
from jax_grpo.chess.games import LENGTH, Game, random_move, sparse_start
from jax_grpo.chess.positions.files import read_games, text_rows
from jax_grpo.chess.positions.position import ending, mating_moves, recent_moves
from jax_grpo.chess.positions.rookworld import CHECKMATE, DRAW, ILLEGAL, ORDINARY, parse_environment_row
from jax_grpo.chess.positions.table import MOVES
from jax_grpo.chess.tasks.environment import draw_move

GAMES_A_BATCH = 16
LINES_A_BATCH = 256
MAX_PLIES = 300
SCHEMA = pa.schema(
    {"fen": pa.string(), "history": MOVES, "move": pa.string(), "next_fen": pa.string(), "reward": pa.float64()}
    | {"terminated": pa.bool_(), "truncated": pa.bool_(), "kind": pa.string()}
)
REWARDS = {"ordinary": ORDINARY, "checkmate": CHECKMATE, "illegal": ILLEGAL}  # every other kind is a draw


class Options(NamedTuple):
    """What decides the rows of games."""

    seed: int  # of everything random
    draws: str  # a key of `ENDINGS`
    illegal: float  # share of rows whose move is illegal
    kept: float  # share of ordinary moves that become rows; the move that ends a game always does


def row_key(row: dict) -> str:
    """Position without counters, move and kind: the same mate is kept once, but an ordinary move and a draw both."""
    return f"{row_position(row)} {row['move']} {row['kind']}"


def game_rows(board: chess.Board, moves: Iterator[str], options: Options, rng: random.Random) -> list[dict]:
    """Rows of one game, up to its first ending; `moves` may look at the board, which is played on."""
    game, rows = Game(board, ended=ending(board, options.draws)), []
    while game.ended is None and (move := next(moves, None)):
        before, history = board.copy(stack=False), recent_moves(board)
        game.push(move, options.draws, MAX_PLIES)
        kind = "ordinary" if game.ended in (None, LENGTH) else game.ended
        if kind == "ordinary" and rng.random() >= options.kept:
            continue
        rows.append(_row(before, history, move, board, kind))
        if rng.random() < options.illegal / (1 - options.illegal):
            rows.append(_row(before, history, illegal_move(before, rng).uci(), before, "illegal"))
    return rows


def _row(before: chess.Board, history: Sequence[str], move: str, after: chess.Board, kind: str) -> dict:
    return {
        "fen": before.fen(),
        "history": list(history),
        "move": move,
        "next_fen": after.fen(),
        "reward": REWARDS.get(kind, DRAW),
        "terminated": kind not in ("ordinary", "illegal"),
        "truncated": kind == "illegal",
        "kind": kind,
    }


def illegal_move(board: chess.Board, rng: random.Random) -> chess.Move:
    """Every second time, where there is one, a move that only leaves the king in check; else any two squares."""
    exposing = sorted((m for m in board.pseudo_legal_moves if not board.is_legal(m)), key=chess.Move.uci)
    if exposing and rng.random() < 0.5:
        return rng.choice(exposing)
    return draw_move(board, rng, illegal_fraction=1.0)


def _mating(board: chess.Board, rng: random.Random) -> str:
    """A mate in one where there is one."""
    mates = mating_moves(board)
    return mates[0] if mates else random_move(board, rng)


def _quiet(board: chess.Board, rng: random.Random) -> str:
    """A move that captures nothing and moves no pawn, where there is one: games go on to the fifty-move rule."""
    quiet = sorted(move.uci() for move in board.legal_moves if not board.is_zeroing(move))
    return rng.choice(quiet) if quiet else random_move(board, rng)


def _undoing(board: chess.Board, rng: random.Random) -> str:
    """Mostly takes the player's last move back, so that positions repeat."""
    if len(board.move_stack) >= 2 and rng.random() < 0.9:
        last = board.move_stack[-2]
        if board.is_legal(back := chess.Move(last.to_square, last.from_square)):
            return back.uci()
    return random_move(board, rng)


def _late_clock(rng: random.Random) -> chess.Board:
    """Few pieces and a clock shortly before one of its limits."""
    board = sparse_start(rng)
    board.halfmove_clock = rng.choice([90, 140]) + rng.randint(0, 7)
    board.fullmove_number = max(board.fullmove_number, board.halfmove_clock)
    return board


STYLES = (  # (first position, None: the usual one; player), each as likely
    (None, random_move),
    (None, _mating),
    (None, _undoing),
    (sparse_start, _mating),
    (sparse_start, random_move),
    (sparse_start, _undoing),
    (_late_clock, _quiet),
)


def seeded_game(game: int, options: Options) -> list[dict]:
    """Rows of one game; a function of its arguments."""
    rng = random.Random(f"{options.seed}/{game}")
    start, player = rng.choice(STYLES)
    board = start(rng) if start else chess.Board()
    return game_rows(board, iter(lambda: player(board, rng), None), options, rng)  # endless: no legal move is an ending


def from_seeded_games(options: Options, processes: int) -> Source:
    """Rows of seeded play, without end."""
    play = functools.partial(seeded_game, options=options)
    batches = functools.partial(game_batches, play, GAMES_A_BATCH, processes, None)
    return Source(SCHEMA, {"source": "seeded games", **options._asdict()}, batches, row_key)


def from_pgn(path: Path, options: Options) -> Source:
    """Rows of a PGN's main lines, each up to where the rules end it."""

    def rows(games: Sequence[tuple[int, tuple[chess.Board, list[chess.Move]]]]) -> list[dict]:
        return [
            row
            for number, (board, moves) in games
            for row in game_rows(
                board, (move.uci() for move in moves), options, random.Random(f"{options.seed}/{number}")
            )
        ]

    return of_file(path, SCHEMA, options._asdict(), lambda: enumerate(read_games(path)), GAMES_A_BATCH, rows, row_key)


def from_rookworld(path: Path) -> Source:
    """Published `A:` rows as they stand; `P:` rows between them are left out, any other is refused with its line."""

    def rows() -> Iterator[dict]:
        for row in text_rows(path, parse_environment_row, without=("P:",)):
            kind = "illegal" if row.truncated else "terminated" if row.terminated else "ordinary"
            yield row._asdict() | {"history": list(row.before), "kind": kind}

    return of_file(path, SCHEMA, {}, rows, LINES_A_BATCH, list, row_key)
