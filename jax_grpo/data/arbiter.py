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

from jax_grpo.data.selfplay import in_processes
from jax_grpo.data.shards import Source, of_file, row_position
from jax_grpo.positions.endings import ending, mating_moves
from jax_grpo.positions.files import numbered_lines, parsed, read_games
from jax_grpo.positions.position import recent_moves
from jax_grpo.positions.random_play import sparse_start
from jax_grpo.positions.rookworld import CHECKMATE, DRAW, ILLEGAL, ORDINARY, parse_environment_row
from jax_grpo.tasks.environment import draw_move

GAMES_A_BATCH = 16
LINES_A_BATCH = 256
MAX_PLIES = 300
SCHEMA = pa.schema(
    [
        ("fen", pa.string()),
        ("history", pa.list_(pa.string())),
        ("move", pa.string()),
        ("next_fen", pa.string()),
        ("reward", pa.float64()),
        ("terminated", pa.bool_()),
        ("truncated", pa.bool_()),
        ("kind", pa.string()),
    ]
)
REWARDS = {"ordinary": ORDINARY, "checkmate": CHECKMATE, "illegal": ILLEGAL}  # every other kind is a draw


class Options(NamedTuple):
    """What decides the rows of games.

    Attributes:
        seed: of everything random.
        draws: a key of `ENDINGS`.
        illegal: share of rows whose move is illegal.
        kept: share of ordinary moves that become rows; the move that ends a game always does.
    """

    seed: int
    draws: str
    illegal: float
    kept: float


def row_key(row: dict) -> str:
    """Position without counters, move and kind: the same mate is kept once, but an ordinary move and a draw both."""
    return f"{row_position(row)} {row['move']} {row['kind']}"


def game_rows(start: chess.Board, moves: Iterator[chess.Move], options: Options, rng: random.Random) -> list[dict]:
    """Rows of one game, up to its first ending; `moves` may look at `start`, which is played on."""
    rows = []
    board = start
    while ending(board, options.draws) is None and len(board.move_stack) < MAX_PLIES:
        move = next(moves, None)
        if move is None:
            break
        before, history = board.copy(stack=False), recent_moves(board)
        board.push(move)
        kind = ending(board, options.draws) or "ordinary"
        if kind == "ordinary" and rng.random() >= options.kept:
            continue
        rows.append(_row(before, history, move, board, kind))
        if rng.random() < options.illegal / (1 - options.illegal):
            rows.append(_row(before, history, illegal_move(before, rng), before, "illegal"))
    return rows


def _row(before: chess.Board, history: Sequence[str], move: chess.Move, after: chess.Board, kind: str) -> dict:
    return {
        "fen": before.fen(),
        "history": list(history),
        "move": move.uci(),
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


def _uniform(board: chess.Board, rng: random.Random) -> chess.Move:
    return rng.choice(sorted(board.legal_moves, key=chess.Move.uci))


def _mating(board: chess.Board, rng: random.Random) -> chess.Move:
    """A mate in one where there is one."""
    mates = mating_moves(board)
    return chess.Move.from_uci(mates[0]) if mates else _uniform(board, rng)


def _quiet(board: chess.Board, rng: random.Random) -> chess.Move:
    """No capture and no pawn move where possible: to the fifty-move rule."""
    quiet = sorted((m for m in board.legal_moves if not board.is_zeroing(m)), key=chess.Move.uci)
    return rng.choice(quiet) if quiet else _uniform(board, rng)


def _undoing(board: chess.Board, rng: random.Random) -> chess.Move:
    """Mostly takes the player's last move back: to repetition."""
    if len(board.move_stack) >= 2 and rng.random() < 0.9:
        last = board.move_stack[-2]
        back = chess.Move(last.to_square, last.from_square)
        if board.is_legal(back):
            return back
    return _uniform(board, rng)


def _full_board(rng: random.Random) -> chess.Board:
    return chess.Board()


def _late_clock(rng: random.Random) -> chess.Board:
    """Few pieces and a clock shortly before one of its limits."""
    board = sparse_start(rng)
    board.halfmove_clock = rng.choice([90, 140]) + rng.randint(0, 7)
    board.fullmove_number = max(board.fullmove_number, board.halfmove_clock)
    return board


STYLES = (  # (first position, player), drawn alike
    (_full_board, _uniform),
    (_full_board, _mating),
    (_full_board, _undoing),
    (sparse_start, _mating),
    (sparse_start, _uniform),
    (sparse_start, _undoing),
    (_late_clock, _quiet),
)


def seeded_game(game: int, options: Options) -> list[dict]:
    """Rows of one game; a function of its arguments."""
    rng = random.Random(f"{options.seed}/{game}")
    start, player = rng.choice(STYLES)
    board = start(rng)

    def moves() -> Iterator[chess.Move]:
        while any(board.legal_moves):
            yield player(board, rng)

    return game_rows(board, moves(), options, rng)


def _seeded_games(options: Options, batch: int) -> list[dict]:
    first = batch * GAMES_A_BATCH
    return [row for game in range(first, first + GAMES_A_BATCH) for row in seeded_game(game, options)]


def from_seeded_games(options: Options, processes: int) -> Source:
    """Rows of seeded play, without end."""
    batches = functools.partial(in_processes, functools.partial(_seeded_games, options), processes)
    return Source(SCHEMA, {"source": "seeded games", **options._asdict()}, batches, row_key)


def from_pgn(path: Path, options: Options) -> Source:
    """Rows of a PGN's main lines, each up to where the rules end it."""

    def rows(games: Sequence[tuple[int, tuple[chess.Board, list[chess.Move]]]]) -> list[dict]:
        return [
            row
            for number, (board, moves) in games
            for row in game_rows(board, iter(moves), options, random.Random(f"{options.seed}/{number}"))
        ]

    return of_file(path, SCHEMA, options._asdict(), lambda: enumerate(read_games(path)), GAMES_A_BATCH, rows, row_key)


def from_rookworld(path: Path) -> Source:
    """Published `A:` rows as they stand; `P:` rows between them are left out.

    Raises:
        PositionFileError: a row that is neither, or bad; its line is named.
    """

    def rows() -> Iterator[dict]:
        lines = ((where, line) for where, line in numbered_lines(path) if not line.lstrip().startswith("P:"))
        for row in parsed(lines, parse_environment_row):
            kind = "illegal" if row.truncated else "terminated" if row.terminated else "ordinary"
            values = {name: value for name, value in row._asdict().items() if name in SCHEMA.names}
            yield values | {"history": list(row.before), "kind": kind}

    return of_file(path, SCHEMA, {}, rows, LINES_A_BATCH, list, row_key)
