"""Training runs against each other over seeds: one config with some settings changed; a table and a picture.

    python -m jax_grpo.bench.variants --config configs/length_toy.yaml --seeds 0,1,2 --out docs/results/shaping \\
        --variant "sum first" --variant "GDPO: --advantage.components gdpo"

Each variant's score stands beside the first one's: a difference whose interval holds 0 has not been shown. Each run is a process of
its own, recorded when it is done; a run that the record has is not made again.
"""

import argparse
import itertools
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from jax_grpo.bench.curves import Run, RunFailed, arrivals, draw, failures, finished, summary
from jax_grpo.bench.machine import line_of, new_record, saved
from jax_grpo.bench.runner import QUIET
from jax_grpo.config import ConfigError, check_files, load_config
from jax_grpo.report.records import read_records
from jax_grpo.system.process import failure
from jax_grpo.system.whole_files import write_record

MODULE = "jax_grpo.bench.variants"
ENTROPY, SECONDS = "entropy", "time/iteration"
Variant = tuple[str, list[str]]  # a name, and settings as words of a command line, such as `--advantage.scale none`


def parse_variant(text: str) -> Variant:
    """`NAME` or `NAME: --section.key value ...`."""
    name, _, settings = text.partition(":")
    return name.strip(), shlex.split(settings)


def read_variants(file: Path) -> list[Variant]:
    """A YAML mapping from names to settings as on a command line. Raises ValueError: it is not one; names the file."""
    try:
        rows = yaml.safe_load(file.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"{file}: {error}") from None
    if not isinstance(rows, dict) or not all(isinstance(text, str) for pair in rows.items() for text in pair):
        raise ValueError(
            f"{file}: expected a line `name: --section.key value` for each variant, quoted where YAML asks it"
        )
    return [(name, shlex.split(settings)) for name, settings in rows.items()]


def train(config: str, words: Sequence[str], metric: str) -> Run:
    """`measured` of a run of `jax_grpo.train` in a folder that is thrown away.

    Raises RunFailed: it ended with an error, or has no such metric.
    """
    with tempfile.TemporaryDirectory(prefix="run-") as folder:
        run = ["--config", config, *words, "--run_dir", f"{folder}/run", "--logging.progress", "false"]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        command = [sys.executable, "-m", "jax_grpo.train", *run]
        child = subprocess.run(command, **pipes, check=False, env=os.environ | QUIET)
        if child.returncode:
            raise RunFailed(failure(child.stderr, child.returncode))
        return measured(read_records(Path(folder) / "run" / "metrics.jsonl"), metric)


def measured(records: Sequence[Mapping[str, Any]], metric: str) -> Run:
    """A run's `points` [iteration, metric] and the seconds of training before each (`clock`), of which evaluations are no part.

    Also its `seconds` of training in all, its last `entropy` in nats, and the `scores` of each evaluation. Raises RunFailed: no
    record has the metric.
    """
    clocks = list(itertools.accumulate(record.get(SECONDS, 0.0) for record in records))
    timed = [(record, clock) for record, clock in zip(records, clocks, strict=True) if record.get(metric) is not None]
    if not timed:
        names = sorted({name for record in records for name in record})
        raise RunFailed(f"the run has no {metric}; expected one of {', '.join(names)}")
    entropies = [record[ENTROPY] for record in records if record.get(ENTROPY) is not None]
    evaluations = [record for record in records if "loss" not in record]
    return {
        "points": [[record["iteration"], record[metric]] for record, _ in timed],
        "clock": [clock for _, clock in timed],
        "seconds": clocks[-1],
        "entropy": entropies[-1] if entropies else None,
        "scores": [{name: x for name, x in record.items() if name.startswith("eval/")} for record in evaluations],
    }


def seeds_of(text: str, parser: argparse.ArgumentParser) -> list[str]:
    """The seeds that `--seeds` lists, none twice; ends the command where one is none."""
    seeds = text.split(",")
    if not all(seed.isdigit() and int(seed) < 2**31 for seed in seeds):
        parser.error(f"--seeds {text!r}: expected whole numbers from 0 to 2147483647 with commas between")
    return list(dict.fromkeys(str(int(seed)) for seed in seeds))


def make_runs(record: Mapping[str, Any], file: Path, seeds: Sequence[str], make: Callable[[str, str], Run]) -> None:
    """Makes the runs, of a name in `record["variants"]` and a seed, that `record["runs"]` lacks; writes the record after each."""
    for seed, name in itertools.product(seeds, record["variants"]):
        runs = record["runs"].setdefault(name, {})
        if seed not in runs:
            try:
                runs[seed] = make(name, seed)
            except RunFailed as error:
                runs[seed] = {"error": str(error)}
            write_record(file, record)
        run = runs[seed]
        print(f"seed {seed}, {name}: {run.get('error') or format(run['points'][-1][1], '.4f')}", flush=True)


def conclude(record: Mapping[str, Any], file: Path, table: str) -> None:
    """Draws the record, prints the table, and writes it as Markdown below the command and the machine.

    Raises SystemExit: a run failed.
    """
    draw(record, file.with_suffix(".png"))
    file.with_suffix(".md").write_text(f"`{record['command']}`\n\n{line_of(record['machine'])}\n\n{table}\n")
    print(table)
    if failed := [reason for name in record["runs"] for reason in failures(record, name)]:
        raise SystemExit(f"{len(failed)} run(s) failed: {failed[0]}")


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Every variant's settings are checked before anything is started."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=(__doc__ or "").splitlines()[0])
    option = parser.add_argument
    option("--config", required=True, metavar="FILE", help="what all variants share")
    option("--variant", action="append", default=[], metavar="'NAME: --section.key value'", help="once for each")
    option("--variants", type=Path, metavar="FILE", help="YAML, `NAME: --section.key value` a line, before --variant's")
    option("--seeds", default="0,1,2", help="with commas between (default: 0,1,2)")
    option("--metric", default="reward/mean", help="of metrics.jsonl (default: reward/mean)")
    option("--last", type=int, default=1, metavar="N", help="a run's score is the mean of its last N points (1)")
    option("--reach", type=float, metavar="SCORE", help="also: iterations and seconds until the metric is SCORE")
    option("--out", required=True, type=Path, metavar="DIR", help="variants.json, .md and .png")
    arguments = parser.parse_args(argv)
    if arguments.last < 1:
        parser.error(f"--last {arguments.last}: expected a number of points from 1")
    try:
        listed = read_variants(arguments.variants) if arguments.variants else []
    except ValueError as error:
        parser.error(f"--variants {error}")
    listed += map(parse_variant, arguments.variant)
    if not listed:
        parser.error("expected --variant or --variants")
    arguments.variants, arguments.seeds = dict(listed), seeds_of(arguments.seeds, parser)
    names = [name for name, _ in listed]
    if twice := [name for name in names if names.count(name) > 1 or not name]:
        parser.error(f"--variant {twice[0]!r}: expected a name for each, and no name twice")
    for name, overrides in listed:
        try:
            check_files(load_config(arguments.config, overrides))
        except ConfigError as error:
            parser.error(f"--variant {name!r}: {error}")
    return arguments


def main(argv: list[str] | None = None) -> None:
    arguments = _arguments(argv)
    arguments.out.mkdir(parents=True, exist_ok=True)
    file, config, variants = arguments.out / "variants.json", arguments.config, arguments.variants
    facts = {"metric": arguments.metric, "config": load_config(config).model_dump(mode="json")}
    record = new_record(MODULE, argv, **facts, last=arguments.last, variants=variants)
    earlier = saved(file)
    before = earlier["variants"] if all(earlier.get(name) == value for name, value in facts.items()) else {}
    unchanged = {name for name, words in variants.items() if before.get(name) == words}
    record["runs"] = {name: finished(earlier, name) if name in unchanged else {} for name in variants}

    def make(name: str, seed: str) -> Run:
        return train(config, [*variants[name], "--seed", seed], arguments.metric)

    make_runs(record, file, arguments.seeds, make)
    reached = "" if arguments.reach is None else f"\n\n{arrivals(record, arguments.reach)}"
    conclude(record, file, summary(record) + reached)


if __name__ == "__main__":
    main()
