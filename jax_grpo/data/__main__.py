"""Command line of the data sets: `python -m jax_grpo.data selfplay|label|arbiter|mates|labels`. Owns options, progress and locks.

The command that made the packaged positions, `python -m jax_grpo.data --out positions ...`, means `selfplay`.
"""

import argparse
import contextlib
import fcntl
import json
import os
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import chess
import chess.engine
import pyarrow.parquet as pq
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table

from jax_grpo.checked_files import PACKAGED
from jax_grpo.config_sections import EngineConfig
from jax_grpo.data import arbiter, black_labels, files, mates, provenance, selfplay
from jax_grpo.data.shards import SPLITS, DataError, Progress, Source, write_shards
from jax_grpo.position_files import PositionFileError, read_positions
from jax_grpo.splits import FILE_SHARE, SHARES, is_heldout, position_key
from jax_grpo.tasks.engine import EngineError, EnginePool, find_engine

LOCK = "writer.lock"


def _engine_name(path: str) -> str:
    with chess.engine.SimpleEngine.popen_uci(path) as engine:
        return engine.id["name"]


@contextlib.contextmanager
def _locked(out: Path) -> Iterator[None]:
    """One writer a folder; the lock is the kernel's and dies with its process."""
    if out.exists() and not out.is_dir():
        raise DataError(f"--out {out} is a file; expected a folder, new or of the same set")
    out.mkdir(parents=True, exist_ok=True)
    handle = os.open(out / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        raise DataError(f"another process is writing --out {out}; wait for it, or give another") from error
    try:
        yield
    finally:
        os.close(handle)


def _make(
    args: argparse.Namespace, source: Source, split_of: Callable[[str], str], wanted: Mapping[str, int | None], command
) -> None:
    """Runs a source into `args.out`, shows progress, and completes the provenance."""
    settings = {**source.settings, **{f"wanted_{k}": v for k, v in wanted.items()}, "shard_rows": args.shard_rows}
    if hasattr(args, "heldout_share"):
        settings["heldout_share"] = args.heldout_share
    with _locked(args.out):
        record = provenance.begin(args.out, settings, command)
        if record["finished"]:
            print(f"{args.out} is finished: {record['rows']}")
            return
        started, last = time.time(), [0.0]
        bounds = [bound for bound in wanted.values() if bound is not None]
        known = sum(bounds) if len(bounds) == len(wanted) else None
        columns = (
            TextColumn("rows"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
        )
        begun: list[int] = []
        with Bar(*columns, disable=not sys.stdout.isatty()) as bar:
            task = bar.add_task("", total=known)

            def report(progress: Progress) -> None:
                done, now = sum(progress.rows.values()), time.time()
                begun[:] = begun or [done]
                rate = (done - begun[0]) / max(now - started, 1e-9)
                bar.update(task, completed=done, description=f"{rate:.0f} rows/s, {progress.duplicates} duplicates")
                if not sys.stdout.isatty() and (now - last[0] > 10 or progress.finished):
                    last[0] = now
                    print(f"{done} rows, {rate:.0f} rows/s, {progress.duplicates} duplicates", flush=True)

            result = write_shards(args.out, source, split_of, wanted, args.shard_rows, report)
        counts: dict[str, object] = {"rows": dict(result.rows)}
        if "kind" in source.schema.names:
            kinds = (pq.read_table(path, columns=["kind"])["kind"].to_pylist() for path in args.out.glob("*.parquet"))
            counts["kinds"] = dict(sorted(Counter(kind for part in kinds for kind in part).items()))
        provenance.finish(args.out, record, counts)
    print(f"{args.out}: {json.dumps(counts)}; {time.time() - started:.0f} s of this start")


def _selfplay(args: argparse.Namespace, command: list[str]) -> None:
    path = find_engine(args.engine, "--engine")
    settings = {"source": "selfplay", "engine": _engine_name(path), "nodes": args.nodes, "seed": args.seed}
    source = Source(
        selfplay.SCHEMA,
        settings,
        lambda start: selfplay.generate(path, args.seed, args.nodes, args.processes, start),
        files.row_key,
    )
    wanted = {"train": args.count, "heldout": args.heldout}

    def split_of(key: str) -> str:
        return "heldout" if is_heldout(key, args.heldout, args.count) else "train"

    _make(args, source, split_of, wanted, command)


def _by_share(args: argparse.Namespace) -> tuple[Callable[[str], str], dict[str, int | None]]:
    """Split by a hash of the position, and the bounds of both splits."""
    parts = round(args.heldout_share * SHARES)
    bound: dict[str, int | None] = dict.fromkeys(SPLITS)
    if args.count is not None:
        held = round(args.count * args.heldout_share)
        bound = {"heldout": held, "train": args.count - held}
    elif parts == 0:
        bound["heldout"] = 0

    def split_of(key: str) -> str:
        position = " ".join(key.split()[:4])  # an arbiter row's key goes on with its move: one position, one split
        return "heldout" if is_heldout(position, parts, SHARES - parts) else "train"

    return split_of, bound


def _label(args: argparse.Namespace, command: list[str]) -> None:
    split_of, wanted = _by_share(args)
    with contextlib.ExitStack() as stack:
        pool = None
        if args.nodes:
            find_engine(args.engine, "--engine")
            pool = EnginePool(EngineConfig(path=args.engine, nodes=args.nodes, processes=args.processes))
            stack.callback(pool.close)
        _make(args, files.labelled(args.file, pool, args.nodes), split_of, wanted, command)


def _arbiter(args: argparse.Namespace, command: list[str]) -> None:
    split_of, wanted = _by_share(args)
    options = arbiter.Options(args.seed, args.draws, args.illegal, args.kept)
    if args.file is None and args.count is None:
        raise DataError("arbiter: give --count, or a file to take games from: seeded games have no end")
    if args.file is not None and not args.file.is_file():
        raise DataError(f"arbiter: {args.file}: no such file; expected a .pgn of games or a .txt of RookWorld rows")
    kinds = {
        None: lambda _: arbiter.from_seeded_games(options, args.processes),
        ".pgn": lambda path: arbiter.from_pgn(path, options),
        ".txt": arbiter.from_rookworld,
    }
    ending = args.file and args.file.suffix.lower()
    if ending not in kinds:
        raise DataError(f"arbiter: {args.file}: ending {ending!r}; expected .pgn (games) or .txt (RookWorld's A: rows)")
    _make(args, kinds[ending](args.file), split_of, wanted, command)


def _mates(args: argparse.Namespace, command: list[str]) -> None:
    path = find_engine(args.engine, "--engine")
    kept = {split: read_positions(PACKAGED / f"{split}.parquet") for split in SPLITS}
    apart = {position_key(chess.Board(p.fen)) for positions in kept.values() for p in positions}
    started, found = time.time(), []
    suite = mates.make_suite(
        path, count=args.count, seed=args.seed, nodes=args.nodes, processes=args.processes, apart=apart
    )
    with Bar(TextColumn("mates"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()) as bar:
        for mate in bar.track(suite, total=args.count):
            found.append(mate)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text("".join(json.dumps(mate._asdict()) + "\n" for mate in found), encoding="utf-8")
    record = {
        "command": shlex.join(["python", "-m", "jax_grpo.data", *command]),
        "engine": _engine_name(path),
        "positions": len(found),
        "verified": "exactly one legal move mates (python-chess); in neither split of the packaged positions",
        "sha256": provenance.sha256(args.out),
        "seconds": round(time.time() - started),
        "licence": "positions of generated games; MIT like the repository",
    }
    told = args.out.with_suffix(".provenance.json")
    told.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"{args.out}: {len(found)} positions, {record['seconds']} s; {told.name}")


def _labels(args: argparse.Namespace, command: list[str]) -> None:
    rows = black_labels.read_rows(args.file)
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(_table(f"{args.file.name}: labels", black_labels.count(rows)))
    if args.nodes:
        find_engine(args.engine, "--engine")
        config = EngineConfig(path=args.engine, nodes=args.nodes, processes=args.processes)
        with EnginePool(config) as pool, Bar(disable=not sys.stdout.isatty()) as bar:
            task = bar.add_task("positions", total=len(rows))
            table = black_labels.reanalyse(rows, pool, lambda done: bar.update(task, completed=done))
            console.print(_table(f"re-analysed: {pool.name}, {args.nodes} nodes", table))


def _table(title: str, counts: black_labels.Table) -> Table:
    table = Table("", *counts, title=title, title_justify="left")
    for name in counts[black_labels.COLOURS[0]]:
        table.add_row(name, *(str(counts[colour][name]) for colour in counts))
    return table


def _parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m jax_grpo.data", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True)

    def command(name: str, run: Callable, help: str, nodes: int | None, count: int | None) -> argparse.ArgumentParser:
        parser = commands.add_parser(name, help=help, description=help)
        parser.set_defaults(run=run)
        if nodes is not None:
            parser.add_argument("--engine", help="path of Stockfish; default: on the PATH, or in /usr/games")
            parser.add_argument("--nodes", type=_count, default=nodes, help=f"search nodes a position ({nodes})")
        parser.add_argument("--processes", type=_positive, default=2, help="side by side; rows do not depend on it (2)")
        if name != "labels":
            parser.add_argument("--out", type=Path, required=True, help="folder, or with `mates` file, to write")
            parser.add_argument(
                "--count", type=_positive, default=count, help=f"rows ({count or 'until the file ends'})"
            )
            parser.add_argument("--seed", type=int, default=1, help="of everything random (1)")
        if name in ("selfplay", "label", "arbiter"):
            parser.add_argument(
                "--shard-rows", type=_positive, default=5000, help="rows of a Parquet file, about (5000)"
            )
        return parser

    parser = command("selfplay", _selfplay, "positions of games against itself, labelled by Stockfish", 3000, 24_000)
    parser.add_argument("--heldout", type=_count, default=2000, help="held-out positions, beside --count (2000)")
    parser = command("label", _label, "positions of a file, labelled by Stockfish where it has no labels", 3000, None)
    parser.add_argument("file", type=Path, help=".pgn, .csv (Lichess puzzles too), .jsonl, .parquet, .txt (RookWorld)")
    parser.add_argument("--heldout-share", type=_share, default=FILE_SHARE, help="share of positions held out (0.1)")
    parser = command("arbiter", _arbiter, "the environment task's rows, from games", None, None)
    parser.add_argument(
        "file", type=Path, nargs="?", help=".pgn of games or .txt of RookWorld's A: rows; none: seeded play"
    )
    parser.add_argument("--heldout-share", type=_share, default=FILE_SHARE, help="share of positions held out (0.1)")
    parser.add_argument("--illegal", type=_share, default=0.05, help="share of rows with an illegal move (0.05)")
    parser.add_argument(
        "--kept", type=_share, default=0.3, help="share of ordinary moves kept; less: more endings (0.3)"
    )
    parser.add_argument(
        "--draws",
        choices=list(arbiter.ENDINGS),
        default="claimed",
        help="claimed: fifty moves and threefold repetition end a game; automatic: as the environment task's own prompts",
    )
    command("mates", _mates, "positions with exactly one mating move, as JSONL", 200, 600)
    parser = command("labels", _labels, "is B: of published policy rows the best or the worst move? by colour", 0, None)
    parser.add_argument("file", type=Path, help="RookWorld text rows; --nodes above 0 asks Stockfish too")
    return top


def _count(text: str) -> int:
    if (value := int(text)) < 0:
        raise argparse.ArgumentTypeError(f"{text}: expected 0 or more")
    return value


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected 1 or more")
    return value


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
        args.run(args, argv)
    except (DataError, PositionFileError, EngineError) as error:
        raise SystemExit(str(error)) from error
    except OSError as error:
        raise SystemExit(f"{error}; finished shards are kept: give the same command to go on") from error
    except KeyboardInterrupt as error:
        raise SystemExit("\nstopped; finished shards are kept: give the same command to go on") from error


if __name__ == "__main__":
    main()
