"""Command line of the data sets: `python -m jax_grpo.data selfplay|tables|label|arbiter|mates|labels`.

Owns options, progress and locks.
The command that made the packaged positions, `python -m jax_grpo.data --out positions ...`, means `selfplay`.
"""

import argparse
import contextlib
import functools
import itertools
import json
import os
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import chess.engine
import pyarrow.parquet as pq

from jax_grpo.chess.data import arbiter, labels, selfplay
from jax_grpo.chess.data.shards import SPLITS, DataError, Source, Split, begin_set, write_shards
from jax_grpo.chess.positions.files import PositionFileError, text_rows
from jax_grpo.chess.positions.position import ENDINGS, position_key
from jax_grpo.chess.positions.rookworld import parse_policy_row
from jax_grpo.chess.positions.sources import PROVENANCE, packaged_table
from jax_grpo.chess.settings import EngineConfig
from jax_grpo.chess.tasks.engine import EngineError, EnginePool, engine_name, find_engine
from jax_grpo.prompts.table import FILE_SHARE, SHARES, is_heldout
from jax_grpo.system.progress import progress_bar
from jax_grpo.system.terminal import print_tables
from jax_grpo.system.whole_files import file_hash, lock, require_new, write_record


@contextlib.contextmanager
def _only_writer(out: Path) -> Iterator[None]:
    """Makes the folder, for one writer at a time."""
    if out.exists() and not out.is_dir():
        raise DataError(f"--out {out} is a file; expected a folder, new or of the same set")
    out.mkdir(parents=True, exist_ok=True)
    try:
        handle = lock(out / "writer.lock")
    except BlockingIOError as error:
        raise DataError(f"another process is writing --out {out}; wait for it, or give another") from error
    try:
        yield
    finally:
        os.close(handle)


def _make(
    args: argparse.Namespace, source: Source, split_of: Split, wanted: Mapping[str, int | None], command: str
) -> None:
    """Writes a source's rows into `args.out`, shows progress, and completes the record."""
    settings = {**source.settings, **{f"wanted_{k}": v for k, v in wanted.items()}, "shard_rows": args.shard_rows}
    if hasattr(args, "heldout_share"):
        settings["heldout_share"] = args.heldout_share
    started = time.time()
    with _only_writer(args.out):
        record = begin_set(args.out, settings, command)
        if record["finished"]:
            print(f"{args.out} is finished: {record['rows']}")
            return
        counts: dict[str, Any] = {}
        with progress_bar() as bar:
            task = bar.add_task("rows", total=None if None in wanted.values() else sum(filter(None, wanted.values())))
            already = None
            for progress in write_shards(args.out, source, split_of, wanted, args.shard_rows):
                counts["rows"], done = dict(progress.rows), sum(progress.rows.values())
                already = done if already is None else already
                rate = (done - already) / max(time.time() - started, 1e-9)
                progress_line = f"rows, {rate:.0f} a second, {progress.duplicates} duplicates"
                bar.update(task, completed=done, description=progress_line)
        if "kind" in source.schema.names:
            kinds = (pq.read_table(path, columns=["kind"])["kind"].to_pylist() for path in args.out.glob("*.parquet"))
            counts["kinds"] = dict(sorted(Counter(itertools.chain.from_iterable(kinds)).items()))
        write_record(args.out / PROVENANCE, {**record, "finished": True, **counts})
    print(f"{args.out}: {json.dumps(counts)}; {time.time() - started:.0f} s of this start")


def _split_of(key: str, row: Mapping[str, Any], heldout: int, count: int) -> str:
    """Split of a key by its position alone: an arbiter row's goes on with its move, and one position has one split."""
    return "heldout" if is_heldout(" ".join(key.split()[:4]), heldout, count) else "train"


def _selfplay(args: argparse.Namespace, command: str) -> None:
    source = selfplay.source(find_engine(args.engine, "--engine"), args.seed, args.nodes, args.processes)
    split_of = functools.partial(_split_of, heldout=args.heldout, count=args.count)
    _make(args, source, split_of, {"train": args.count, "heldout": args.heldout}, command)


def _tables(args: argparse.Namespace, command: str) -> None:
    wanted = {"train": args.count, "heldout": args.heldout, "test": args.test}
    options = selfplay.TableOptions(args.seed, args.nodes, args.test_nodes, args.random, wanted)
    source = selfplay.table_source(find_engine(args.engine, "--engine"), options, args.processes)
    _make(args, source, lambda key, row: selfplay.split_of_game(row["game"], options), wanted, command)


def _by_share(args: argparse.Namespace) -> tuple[Split, dict[str, int | None]]:
    """Split by a hash of the position, and the bounds of both splits."""
    heldout = round(args.heldout_share * SHARES)
    bound: dict[str, int | None] = dict.fromkeys(SPLITS)
    if args.count is not None:
        bound["heldout"] = round(args.count * args.heldout_share)
        bound["train"] = args.count - bound["heldout"]
    elif heldout == 0:
        bound["heldout"] = 0
    return functools.partial(_split_of, heldout=heldout, count=SHARES - heldout), bound


def _pool(args: argparse.Namespace) -> contextlib.AbstractContextManager[EnginePool | None]:
    """The engine asked for; none where --nodes is 0."""
    if not args.nodes:
        return contextlib.nullcontext()
    find_engine(args.engine, "--engine")
    return EnginePool(EngineConfig(path=args.engine, nodes=args.nodes, processes=args.processes))


def _label(args: argparse.Namespace, command: str) -> None:
    with _pool(args) as pool:
        _make(args, labels.source(args.file, pool, args.nodes), *_by_share(args), command)


def _arbiter(args: argparse.Namespace, command: str) -> None:
    options = arbiter.Options(args.seed, args.draws, args.illegal, args.kept)
    ending = args.file and args.file.suffix.lower()
    if ending == ".pgn":
        source = arbiter.from_pgn(args.file, options)
    elif ending == ".txt":
        source = arbiter.from_rookworld(args.file)
    elif args.file:
        raise DataError(f"arbiter: {args.file}: ending {ending!r}; expected .pgn (games) or .txt (RookWorld's A: rows)")
    elif args.count is None:
        raise DataError("arbiter: give --count, or a file to take games from: seeded games have no end")
    else:
        source = arbiter.from_seeded_games(options, args.processes)
    _make(args, source, *_by_share(args), command)


VERIFIED = {  # what holds of every row of `mates`, by its moves
    1: "exactly one legal move mates",
    2: "no move mates, and after exactly one each defence is answered by mate",
}


def _mates(args: argparse.Namespace, command: str) -> None:
    require_new(args.out, "--out")
    path = find_engine(args.engine, "--engine")
    apart = {position_key(position.fen) for split in SPLITS for position in packaged_table(split)}
    started = time.time()
    suite = selfplay.mate_suite(path, args.count, args.seed, args.nodes, args.processes, apart, args.moves)
    with progress_bar() as bar:
        rows = list(bar.track(suite, total=args.count, description="mates"))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    record = {
        "command": command,
        "engine": engine_name(path),
        "positions": len(rows),
        "verified": f"{VERIFIED[args.moves]} (python-chess); in neither split of the packaged positions",
        "sha256": file_hash(args.out),
        "seconds": round(time.time() - started),
        "licence": "positions of generated games; MIT like the repository",
    }
    record_path = args.out.with_suffix(".provenance.json")
    write_record(record_path, record)
    print(f"{args.out}: {len(rows)} positions, {record['seconds']} s; {record_path.name}")


def _labels(args: argparse.Namespace, command: str) -> None:
    rows = list(text_rows(args.file, parse_policy_row, without=("A:",)))

    def show(title: str, counts: labels.Table) -> None:
        lines = [[name, *(str(own[name]) for own in counts.values())] for name in counts["White"]]
        print_tables([(title, ["", *counts], lines)], width=None if sys.stdout.isatty() else 120)

    show(f"{args.file.name}: labels", labels.count(rows))
    with _pool(args) as pool, progress_bar() as bar:
        if pool is not None:
            task = bar.add_task("positions", total=len(rows))
            table = labels.reanalyse(rows, pool, lambda done: bar.update(task, completed=done))
            show(f"re-analysed: {pool.name}, {args.nodes} nodes", table)


def _parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m jax_grpo.data", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True)

    def command(name: str, run: Callable, help: str, nodes: int | None, count: int | None) -> Callable[..., Any]:
        parser = commands.add_parser(name, help=help, description=help)
        parser.set_defaults(run=run)
        option = parser.add_argument
        if nodes is not None:
            option("--engine", help="path of Stockfish; default: on the PATH, or in /usr/games")
            option("--nodes", type=_count, default=nodes, help=f"search nodes a position ({nodes})")
        option("--processes", type=_positive, default=2, help="side by side; rows do not depend on it (2)")
        if name != "labels":
            option("--out", type=Path, required=True, help="folder, or with `mates` file, to write")
            option("--count", type=_positive, default=count, help=f"rows ({count or 'until the file ends'})")
            option("--seed", type=int, default=1, help="of everything random (1)")
        if name in ("selfplay", "tables", "label", "arbiter"):
            option("--shard-rows", type=_positive, default=5000, help="rows of a Parquet file, about (5000)")
        if name in ("label", "arbiter"):
            option("--heldout-share", type=_share, default=FILE_SHARE, help="share of positions held out (0.1)")
        return option

    option = command("selfplay", _selfplay, "positions of games against itself, labelled by Stockfish", 3000, 24_000)
    option("--heldout", type=_count, default=2000, help="held-out positions, beside --count (2000)")
    option = command("tables", _tables, "positions of sane games with the value of every legal move", 5000, 20_000)
    option("--heldout", type=_count, default=2000, help="positions to choose settings by, beside --count (2000)")
    option("--test", type=_count, default=2000, help="positions of the last split, for what is published (2000)")
    option("--test-nodes", type=_positive, default=15_000, help="search nodes of those (15000)")
    option("--random", type=_share, default=0.1, help="share of random moves in the games (0.1)")
    option = command("label", _label, "positions of a file, labelled by Stockfish where it has no labels", 3000, None)
    option("file", type=_file, help=".pgn, .csv (Lichess puzzles too), .jsonl, .parquet, .txt (RookWorld)")
    option = command("arbiter", _arbiter, "the environment task's rows, from games", None, None)
    option("file", type=_file, nargs="?", help=".pgn of games or .txt of RookWorld's A: rows; none: seeded play")
    option("--illegal", type=_share, default=0.05, help="share of rows with an illegal move (0.05)")
    option("--kept", type=_share, default=0.3, help="share of ordinary moves kept; less: more endings (0.3)")
    draws = "claimed: fifty moves and threefold repetition end a game; automatic: as the environment task's own prompts"
    option("--draws", choices=list(ENDINGS), default="claimed", help=draws)
    option = command(
        "mates", _mates, "positions with exactly one mating move, or key of a mate in two, as JSONL", 200, 600
    )
    option("--moves", type=int, choices=sorted(selfplay.MATES), default=1, help="the solver's (1)")
    option = command("labels", _labels, "is B: of published policy rows the best or the worst move? by colour", 0, None)
    option("file", type=_file, help="RookWorld text rows; --nodes above 0 asks Stockfish too")
    return top


def _file(text: str) -> Path:
    if not (path := Path(text)).is_file():
        raise argparse.ArgumentTypeError(f"{text}: no such file")
    return path


def _count(text: str, least: int = 0) -> int:
    if (value := int(text)) < least:
        raise argparse.ArgumentTypeError(f"{text}: expected {least} or more")
    return value


def _positive(text: str) -> int:
    return _count(text, least=1)


def _share(text: str) -> float:
    if not 0 <= (value := float(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected a share, at least 0 and below 1")
    return value


def main(argv: list[str] | None = None) -> None:
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] and argv[0].startswith("--") and argv[0] != "--help":
        argv.insert(0, "selfplay")
    args = _parser().parse_args(argv)
    try:
        args.run(args, shlex.join(["python", "-m", "jax_grpo.data", *argv]))
    except (DataError, PositionFileError, EngineError, chess.engine.EngineError, FileExistsError) as error:
        raise SystemExit(str(error)) from error
    except OSError as error:
        raise SystemExit(f"{error}; finished shards are kept: give the same command to go on") from error
    except KeyboardInterrupt as error:
        raise SystemExit("\nstopped; finished shards are kept: give the same command to go on") from error


if __name__ == "__main__":
    main()
