"""Labelled position sets from seeded self-play: what the repository packages, and what a user makes for themselves.

    python -m jax_grpo.data --out positions --count 24000 --heldout 2000 --seed 1 --nodes 3000

Each game is a pure function of (seed, game number), so the result does not depend on the number of processes. A position
is kept once (by board, side, castling and en passant), and its split is a hash of that key. Knows nothing of prompts or models.
"""

import argparse
import hashlib
import json
import random
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import chess
import chess.engine
import pyarrow as pa
import pyarrow.parquet as pq
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from jax_grpo.tasks.engine import EngineError, find_engine, pawns

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


def position_key(board: chess.Board) -> str:
    """Board, side to move, castling rights and en passant square: what makes two positions the same."""
    return board.epd()


def is_heldout(key: str, heldout: int, count: int) -> bool:
    """Whether the position belongs to the held-out split: a hash of the position, so never in both."""
    digest = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")
    return digest % (count + heldout) < heldout


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
                "key": position_key(board),
            }
        )
        best_or_other = rng.choices(moves, weights=[0.5**rank for rank in range(len(moves))])[0]
        board.push(rng.choice(legal) if rng.random() < blunder else best_or_other)
    return rows


def _play_batch(job: tuple[str, int, int, int]) -> list[dict]:
    path, seed, first_game, nodes = job
    with chess.engine.SimpleEngine.popen_uci(path) as engine:
        engine.configure({"Threads": 1, "Hash": 16})
        return [
            row
            for game in range(first_game, first_game + GAMES_A_BATCH)
            for row in play_game(engine, seed, game, nodes)
        ]


def generate(path: str, seed: int, nodes: int, processes: int) -> Iterator[list[dict]]:
    """Batches of rows in game order, without end, from a pool of engine processes."""
    with ProcessPoolExecutor(processes) as pool:
        pending = []
        next_game = 0
        try:
            while True:
                while len(pending) < 2 * processes:
                    pending.append(pool.submit(_play_batch, (path, seed, next_game, nodes)))
                    next_game += GAMES_A_BATCH
                yield pending.pop(0).result()
        finally:
            for future in pending:
                future.cancel()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m jax_grpo.data", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for train.parquet, heldout.parquet, provenance.json"
    )
    parser.add_argument("--count", type=int, default=24000, help="training positions")
    parser.add_argument("--heldout", type=int, default=2000, help="held-out positions")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--nodes", type=int, default=3000, help="search nodes a position (five lines)")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--engine", default=None, help="path of Stockfish")
    args = parser.parse_args(argv)
    try:
        path = find_engine(args.engine, "--engine")
    except EngineError as error:
        raise SystemExit(str(error)) from error
    with chess.engine.SimpleEngine.popen_uci(path) as engine:
        engine_name = engine.id["name"]

    args.out.mkdir(parents=True, exist_ok=True)
    wanted = {"train": args.count, "heldout": args.heldout}
    splits: dict[str, list[dict]] = {"train": [], "heldout": []}
    seen: set[str] = set()
    started = time.time()
    columns = (
        TextColumn("positions"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns) as progress:
        bar = progress.add_task("", total=args.count + args.heldout)
        for rows in generate(path, args.seed, args.nodes, args.processes):
            for row in rows:
                key = row.pop("key")
                split = "heldout" if is_heldout(key, args.heldout, args.count) else "train"
                if key not in seen and len(splits[split]) < wanted[split]:
                    seen.add(key)
                    splits[split].append(row)
            done = sum(len(rows) for rows in splits.values())
            progress.update(bar, completed=done)
            if done == args.count + args.heldout:
                break
    for split, rows in splits.items():
        pq.write_table(
            pa.Table.from_pylist(rows, SCHEMA),
            args.out / f"{split}.parquet",
            compression="zstd",
            compression_level=19,
        )
    provenance = {
        "command": f"python -m jax_grpo.data --out {args.out.name} --count {args.count} --heldout {args.heldout} "
        f"--seed {args.seed} --nodes {args.nodes}",
        "engine": engine_name,
        "positions": {split: len(rows) for split, rows in splits.items()},
        "seconds": round(time.time() - started),
        "licence": "generated for this repository; MIT like the rest of it",
    }
    (args.out / "provenance.json").write_text(json.dumps(provenance, indent=1) + "\n")


if __name__ == "__main__":
    main()
