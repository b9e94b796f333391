"""A model judged on held-out positions: `python -m jax_grpo.evaluate --weights W --out DIR`, or two evaluations `--compare A B`.

Writes evaluation.json (the same for the same weights, data and seed), evaluation.md, pictures and the self-play games. Reads the
command line and files; the suites are in `suites`.
"""

import argparse
import contextlib
import dataclasses
import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jax_grpo.chess.evaluate import endgame, tables
from jax_grpo.chess.evaluate.puzzles import PACKAGED_MATES, PACKAGED_PUZZLES, Mate, Puzzle, read_mates, read_puzzles
from jax_grpo.chess.evaluate.selfplay import pgn
from jax_grpo.chess.evaluate.side_by_side import save_side_by_side
from jax_grpo.chess.evaluate.suites import (
    OF_POSITIONS,
    SHORT_GAME,
    SUITES,
    BeginPart,
    Data,
    OurModel,
    Results,
    run_suites,
)
from jax_grpo.chess.positions.files import read_positions
from jax_grpo.chess.positions.position import Position
from jax_grpo.chess.positions.sources import PACKAGED_SOURCES, read_packaged, read_set
from jax_grpo.chess.positions.values import NotATable, move_table
from jax_grpo.chess.settings import EngineConfig
from jax_grpo.chess.style import find_style, require_chess
from jax_grpo.chess.tasks.engine import EngineError, EnginePool, find_engine, skill_zero
from jax_grpo.config.files import read_settings, require_weights, weights_directory
from jax_grpo.evaluate import MODES, EvaluationError
from jax_grpo.policy.named import describe_model, load_named
from jax_grpo.run.files import CheckpointError, is_checkpoint
from jax_grpo.system.progress import timed_parts
from jax_grpo.system.terminal import print_tables
from jax_grpo.system.whole_files import require_new, write_whole

TABLES = "packaged:tables"


def evaluate(
    weights: str, suites: Sequence[str], data: Data, temperature: float, steps: BeginPart
) -> tuple[dict, Results]:
    """The JSON-ready report of an evaluation, without anything that changes from one run to the next, and its results."""
    policy = load_named(weights)
    results = run_suites(suites, OurModel(policy, temperature, data.seed, data.style), data, steps)
    folder = weights_directory(weights)
    settings = {} if is_checkpoint(folder) else read_settings(folder / "config.json")
    report = {
        "format": tables.FORMAT,
        "model": describe_model(weights, policy),
        "data": _describe(data, suites),
        "seed": data.seed,
        "temperature": temperature,
        "estimates": {path: dataclasses.asdict(estimate) for path, estimate in results.estimates.items()},
        "games": {
            key: {"half_moves": [game.half_moves for game in games], "ended": [game.end for game in games]}
            for key, games in results.games.items()
        },
        "endgames": {
            key: {
                "mate_in": list(map(endgame.mate_in, games)),
                "moves": [game.moves for game in games],
                "ended": list(map(endgame.end_of, games)),
            }
            for key, games in results.endgames.items()
        },
        "boards": results.boards,
        "published": tables.published_figures(weights, settings),
    }
    return report, results


def _describe(data: Data, suites: Sequence[str]) -> dict[str, str]:
    """The data of the suites that ran, in words and checksums; without file names, which differ from place to place."""
    out = {}
    if OF_POSITIONS & set(suites):
        engine = f"moves without a label scored by {data.engine.name}" if data.engine else "no engine: labels only"
        out["positions"] = f"{_counted(data.positions)}, {engine}"
    if "mates" in suites:
        out["mates"] = _counted(data.mates)
    if "selfplay" in suites:
        out["self-play"] = f"{data.games} games of each kind, at most {data.half_moves} half-moves of the model"
    if "endgame" in suites:
        out["endgames"] = f"{data.endgames} won positions of each ending, classes of the test split; a perfect defender"
    if "short_games" in suites:
        out["short games"] = f"{SHORT_GAME} moves of the model's from each position; an illegal one scores 0"
    if "strength" in suites:
        games = len({position.game for position in data.tables if position.game is not None})
        out["tables"] = f"{_counted(data.tables)}, {data.tables_of}, of {games:,} games"
    if "puzzles" in suites:
        out["puzzles"] = _counted(data.puzzles)
    return out


def _counted(rows: Sequence[Position] | Sequence[Mate] | Sequence[Puzzle]) -> str:
    """How many rows, and a checksum of them as a set: their order does not matter to any number."""
    checksum = hashlib.sha256("\n".join(sorted(map(repr, rows))).encode()).hexdigest()[:12]
    return f"{len(rows):,} (checksum {checksum})"


def save(report: dict, results: Results, data: Data, folder: Path) -> list[Path]:
    """Writes the report, its tables, pictures and games; returns the files."""
    from jax_grpo.chess.evaluate.pictures import save_pictures  # matplotlib is slow to import

    name = report["model"]["name"]
    texts = {tables.REPORT: json.dumps(report, indent=1) + "\n", "evaluation.md": tables.evaluation_page(report)}
    if results.games:
        texts["selfplay.pgn"] = pgn(results.games, name)
    if results.endgames:
        own = {key: games for key, games in results.endgames.items() if key.partition("/")[2] in MODES}
        texts["endgame.pgn"] = endgame.pgn(own, name)
    return _write(texts, folder) + save_pictures(results, data, name, folder)


def _write(texts: dict[str, str], folder: Path) -> list[Path]:
    for name, text in texts.items():
        write_whole(folder / name, text)
    return [folder / name for name in texts]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Checked arguments; argparse words what is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m jax_grpo.evaluate",
        description="A model judged on held-out positions. With a run's folder alone, `python -m jax_grpo.evaluate RUN`: "
        "the held-out prompts of a run of any task, by its own rewards.",
        allow_abbrev=False,
    )
    option, suites = parser.add_argument, ",".join(SUITES)
    option("--weights", metavar="W", help="packaged:rook-small, a run folder, a Hugging Face folder, a checkpoint")
    option("--out", type=Path, metavar="DIR", help="folder to write into")
    option("--suite", default="all", metavar="S", help=f"all, or of {suites} (default: all)")
    option("--positions", type=_count, metavar="N", help="first N of the data, and of the tables (1000; all tables)")
    data = "file or set to ask about; of the suite puzzles Lichess's CSV (default: the packaged held-out positions, mates in two)"
    option("--data", metavar="FILE", help=data)
    option(
        "--tables", default=TABLES, metavar="SET", help=f"of the strength suite, a set or a file (default: {TABLES})"
    )
    option("--split", choices=("test", "heldout"), help="of a set (default: test, which no setting is chosen by)")
    option("--mates", type=Path, metavar="FILE", help="mate-in-one .jsonl, or BIG-bench's task.json")
    option("--games", type=_count, default=64, metavar="N", help="self-play games of each kind (default: 64)")
    option("--half-moves", type=_count, default=100, metavar="N", help="most in one game (default: 100)")
    option("--endgames", type=_count, default=100, metavar="N", help="games of each ending (default: 100)")
    option("--temperature", type=_positive, default=1.0, metavar="T", help="when sampled (default: 1)")
    option("--engine", metavar="PATH", help="Stockfish (a path, or `stockfish`) to score moves without a label")
    option("--nodes", type=_count, default=3000, metavar="N", help="the engine's limit (default: 3000)")
    option("--seed", type=int, default=0, help="of sampling, openings and resampling (default: 0)")
    option("--compare", nargs=2, type=Path, metavar=("A", "B"), help="two folders of evaluations, B against A")
    arguments = parser.parse_args(argv)
    if arguments.compare is None and (arguments.weights is None or arguments.out is None):
        parser.error("give --weights W and --out DIR, or --compare DIR_A DIR_B")
    if not 0 <= arguments.seed < 2**31:
        parser.error(f"--seed {arguments.seed}: expected 0 to 2147483647")
    arguments.suite = list(SUITES) if arguments.suite == "all" else arguments.suite.split(",")
    if unknown := [name for name in arguments.suite if name not in SUITES]:
        parser.error(f"--suite {unknown[0]!r}: expected all, or of {', '.join(SUITES)}, with commas between")
    # `all` asks the packaged puzzles beside any data, as its other suites are of positions.
    named = "puzzles" in arguments.suite and arguments.suite != list(SUITES)
    arguments.puzzles = Path(arguments.data) if named and arguments.data else PACKAGED_PUZZLES
    if named and arguments.data and (others := {"policy", "environment"} & set(arguments.suite)):
        parser.error(
            f"--data {arguments.data}: puzzles and {min(others)} read other files; give each suite its own command"
        )
    return arguments


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a whole number of at least 1")
    return int(text)


def _positive(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) < 100:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r}; expected a number above 0 (greedy is always measured)")


def run(arguments: argparse.Namespace) -> list[Path]:
    """What the command line asks for; returns the files written."""
    if arguments.compare:
        reports = [tables.read_report(folder) for folder in arguments.compare]
        pairs = json.dumps(tables.compare(*reports), indent=1) + "\n"
        print_tables(tables.compared(*reports, brief=True))
        out = arguments.out or arguments.compare[1]
        out.mkdir(parents=True, exist_ok=True)
        pictures = save_side_by_side(reports, arguments.compare, out)
        shown = "".join(f"\n![{path.stem}]({path.name})\n" for path in pictures)
        texts = {"comparison.json": pairs, "comparison.md": tables.comparison_page(*reports) + shown}
        return _write(texts, out) + pictures
    require_weights(arguments.weights)
    if arguments.suite == list(SUITES):
        require_chess(arguments.weights)
    require_new(arguments.out / tables.REPORT, "--out")
    arguments.out.mkdir(parents=True, exist_ok=True)  # fails now rather than after minutes of work
    with contextlib.ExitStack() as cleanup:
        positions, mates, suites, count = [], [], arguments.suite, arguments.positions or 1000
        more: dict[str, Any] = {"endgames": arguments.endgames, "style": find_style(arguments.weights)}
        if arguments.engine:
            path = find_engine(None if arguments.engine == "stockfish" else arguments.engine, "--engine")
            more["engine"] = cleanup.enter_context(EnginePool(EngineConfig(path=path, nodes=arguments.nodes)))
        if OF_POSITIONS & set(suites):
            positions = _positions(arguments.data or "packaged", arguments.split or "test")[:count]
        if "mates" in suites:
            mates = read_mates(arguments.mates or PACKAGED_MATES)
        if "puzzles" in suites:
            more["puzzles"] = read_puzzles(arguments.puzzles, count)
        if "strength" in suites:
            more |= _tables(arguments)
            if arguments.engine:
                more["skill_zero"] = cleanup.enter_context(skill_zero(path))
        data = Data(positions, mates, arguments.games, arguments.half_moves, arguments.seed, **more)
        steps = cleanup.enter_context(timed_parts())
        report, results = evaluate(arguments.weights, suites, data, arguments.temperature, steps)
    print_tables(tables.summary(report))
    return save(report, results, data, arguments.out)


def _positions(source: str, split: str) -> list[Position]:
    """The split of the packaged tables or of a data set's folder, or a whole file; other packaged positions have no test split."""
    if source in PACKAGED_SOURCES:
        return read_packaged(split if source == TABLES else "heldout", source)
    return list(read_set(Path(source), split)) if Path(source).is_dir() else read_positions(source)


def _tables(arguments: argparse.Namespace) -> dict[str, Any]:
    """`Data`'s fields of the strength suite; every position has all its values."""
    source, split = arguments.tables, arguments.split
    if split and Path(source).is_file():
        raise EvaluationError(
            f"--split {split}: {source} is a file, which has no splits; expected {TABLES} or a folder"
        )
    positions = _positions(source, split or "test")[: arguments.positions]
    try:
        for position in positions:
            move_table(position)
    except NotATable as error:
        raise EvaluationError(f"--tables {source}: {error}; make tables with python -m jax_grpo.data tables") from error
    return {"tables": positions, "tables_of": "a file" if Path(source).is_file() else f"the {split or 'test'} split"}


def main(argv: list[str] | None = None) -> None:
    arguments = parse(sys.argv[1:] if argv is None else argv)
    try:
        files = run(arguments)
    except (CheckpointError, EngineError, ValueError, OSError) as error:  # the project's input errors are ValueErrors
        raise SystemExit(f"{type(error).__name__}: {error}") from error
    print("saved:", ", ".join(map(str, files)))


if __name__ == "__main__":
    main()
