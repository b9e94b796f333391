"""The positions that packaged:rook-deep was taught: sane games and won games labelled by Stockfish, and exact endings.

    python docs/experiments/rook_deep_positions.py games --out labelled --worker 0 # and 1: a process each, 140 positions a second
    python docs/experiments/rook_deep_positions.py wins --out labelled --worker 0 # and 1: won games to their mates, 200 a second
    python docs/experiments/rook_deep_positions.py endings --out labelled

Every position is written with White to move. What is made of them: [rook_deep.py](rook_deep.py).
"""

import argparse
import itertools
import math
import pickle
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import chess
import chess.engine
import numpy as np

from jax_grpo.chess.games import greedy_capture
from jax_grpo.chess.positions.endings import LONGEST, ending, spread_sample, won_position
from jax_grpo.chess.positions.position import MATE_PAWNS, as_white, turned
from jax_grpo.chess.positions.values import win_probability
from jax_grpo.chess.tasks.engine import find_engine, search

KINDS = ("games", "endings", "wins")  # of positions, by the first word of their file
NODES, LINES = 2500, 6  # of the search that labels and plays
TEMPERATURE = 0.04  # of the softmax over win probabilities that moves are drawn by
WIN_NODES = 1200  # of the search in games that are won
ROWS_A_FILE = 5000


class Row(NamedTuple):
    """A position with White to move."""

    fen: str
    moves: list[str]  # all legal ones
    values: dict[str, float]  # of those that have a line: win probability; in endings technique, in wins `_utility`
    attacked: tuple[int, int]  # squares attacked by Black and by White, as bits
    captures: list[str]  # among which greedy capture draws


def row(fen: str, lines: dict[str, float]) -> Row:
    """A row of any position: Black to move is turned round."""
    board = chess.Board(as_white(fen))
    attacked = []
    for colour in (chess.BLACK, chess.WHITE):
        squares = 0
        for square in chess.scan_forward(board.occupied_co[colour]):
            squares |= board.attacks_mask(square)
        attacked.append(squares)
    values = {turned(move, fen): value for move, value in lines.items()}
    moves = [move.uci() for move in board.legal_moves]
    return Row(board.fen(), moves, values, (attacked[0], attacked[1]), greedy_capture(board))


def save(rows: list[Row], out: Path, name: str) -> None:
    working = out / f"{name}.tmp"
    working.write_bytes(pickle.dumps([tuple(each) for each in rows]))
    working.rename(out / f"{name}.pkl")


def load(file: Path) -> list[Row]:
    return [Row(*fields) for fields in pickle.loads(file.read_bytes())]


Play = Callable[[chess.engine.SimpleEngine, random.Random], Iterator[Row]]


def write(kind: str, seed: str, play: Play, out: Path, count: int, worker: int) -> None:
    """At least `count` rows of one game after another, in files of `ROWS_A_FILE` or a few more."""
    rows: list[Row] = []
    done = 0
    with chess.engine.SimpleEngine.popen_uci(find_engine(None, "stockfish")) as engine:
        for game in itertools.count():
            rows += play(engine, random.Random(f"{seed}/{worker}/{game}"))
            if len(rows) >= ROWS_A_FILE or done + len(rows) >= count:
                save(rows, out, f"{kind}_{worker}_{game}")
                done, rows = done + len(rows), []
                print(done, flush=True)
                if done >= count:
                    return


def sane_game(engine: chess.engine.SimpleEngine, rng: random.Random) -> Iterator[Row]:
    """Up to six random moves, then moves drawn among the best, with 6, 12 or 25 % random ones."""
    board, blunder = chess.Board(), rng.choice([0.06, 0.12, 0.25])
    for _ in range(rng.randint(1, 6)):
        board.push(rng.choice(list(board.legal_moves) or [chess.Move.null()]))
    while not board.is_game_over() and board.ply() < 160 and not board.is_repetition(3):
        actual = search(engine, board, nodes=NODES, multipv=LINES)
        wins = {move: win_probability(e) for move, e in zip(actual.moves, actual.evaluations, strict=True)}
        if rng.random() < 0.85:
            yield row(board.fen(), wins)
        if rng.random() < blunder:
            board.push(rng.choice(list(board.legal_moves)))
        else:
            best = max(wins.values())
            weights = [math.exp((win - best) / TEMPERATURE) for win in wins.values()]
            board.push_uci(rng.choices(list(wins), weights)[0])


def _utility(pawns: float) -> float:
    """In 0.6 pawns; mates above all else, each move sooner worth one."""
    return 1000 - 100 * (MATE_PAWNS - pawns) if pawns > 90 else pawns / 0.6


def won_game(engine: chess.engine.SimpleEngine, rng: random.Random) -> Iterator[Row]:
    """Positions won by 3 pawns or more, of a game against random moves that goes on to the mate, put off in half of them."""
    board, strong, late = chess.Board(), rng.random() < 0.5, rng.random() < 0.5
    noise, greed = rng.choice([0.05, 0.2, 0.4]), rng.choice([0, 0.3])
    for _ in range(rng.randint(2, 6)):
        board.push(rng.choice(list(board.legal_moves)))
    while not board.is_game_over() and board.ply() < 240 and board.halfmove_clock < 70:
        moves = list(board.legal_moves)
        if board.turn != strong:
            captures = list(board.generate_legal_captures())
            board.push(rng.choice(captures if captures and rng.random() < greed else moves))
            continue
        actual = search(engine, board, nodes=WIN_NODES, multipv=LINES)
        lines = dict(zip(actual.moves, map(_utility, actual.evaluations), strict=True))
        best = max(lines.values())
        if best > 5 and rng.random() < 0.8 and (not late or best > 15 or rng.random() < 0.2):
            yield row(board.fen(), lines)
        if rng.random() < noise or (late and best > 900 and rng.random() < 0.8):
            board.push(rng.choice(moves))
        else:
            weights = [math.exp(max(-60.0, (value - best) / 2)) for value in lines.values()]
            board.push_uci(rng.choices(list(lines), weights)[0])


def endings(out: Path, rooks: int, queens: int) -> None:
    """So many won positions with a rook and with a queen, of the training split; a move's value is its technique."""
    rng, rows = np.random.default_rng(5), []
    for men, count in (("KRK", rooks), ("KQK", queens)):
        for squares, strong in spread_sample(men, "train", count, seed=7):
            left = LONGEST - int(ending(men).mates_in_KPW[squares])
            position = won_position(men, squares, strong, int(rng.random() * (left + 1)))
            best = max(position.evaluations)
            lost = [round(100 * (best - pawns)) for pawns in position.evaluations]
            technique = [0.7**more if pawns else 0.0 for more, pawns in zip(lost, position.evaluations, strict=True)]
            rows.append(row(position.fen, dict(zip(position.moves, technique, strict=True))))
    save(rows, out, "endings")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=115_000, help="of a worker's games")
    parser.add_argument("--worker", type=int, default=0)
    parser.add_argument("--rooks", type=int, default=30_000, help="endings of king and rook")
    parser.add_argument("--queens", type=int, default=20_000)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.kind == "endings":
        endings(args.out, args.rooks, args.queens)
    else:
        seed, play = {"games": ("start/1", sane_game), "wins": ("conv", won_game)}[args.kind]
        write(args.kind, seed, play, args.out, args.count, args.worker)


if __name__ == "__main__":
    main()
