"""Training runs by name and seed: each a process of its own, recorded, continued where it was stopped, and drawn as curves.

Shared by `variants` (settings against each other) and `time_to_score` (ours beside TRL's). Knows nothing of what makes a score.
"""

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jax_grpo.bench.machine import line_of
from jax_grpo.bench.records import save
from jax_grpo.bench.runner import QUIET
from jax_grpo.report.pictures import saved_figure
from jax_grpo.report.records import read_records
from jax_grpo.system.process import failure

Run = dict[str, Any]  # `error`, or what `measured` gives and whatever its benchmark adds
SECONDS = "time/iteration"


class RunFailed(RuntimeError):
    """A training run has no figures, for the reason that is the message."""


class Point(NamedTuple):
    """A score of a run, after so many iterations and so many seconds of training."""

    iteration: float
    seconds: float
    score: float


def trained(config: str, words: Sequence[str], *, cold: bool = False) -> list[dict[str, Any]]:
    """The metrics of `python -m jax_grpo.train`, in a folder that is thrown away; `cold`: no program was compiled before.

    Raises:
        RunFailed: it ended with an error.
    """
    environment = os.environ | QUIET
    if cold:
        environment.pop("JAX_COMPILATION_CACHE_DIR", None)
        words = [*words, "--compilation_cache", "null"]
    with tempfile.TemporaryDirectory(prefix="run-") as folder:
        run = ["--config", config, *words, "--run_dir", f"{folder}/run", "--logging.progress", "false"]
        command = [sys.executable, "-m", "jax_grpo.train", *run]
        child = subprocess.run(
            command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, env=environment
        )
        if child.returncode:
            raise RunFailed(failure(child.stderr, child.returncode))
        return read_records(Path(folder) / "run" / "metrics.jsonl")


def measured(records: Sequence[Mapping[str, Any]], metric: str) -> Run:
    """A run's `points` [iteration, metric], and the seconds of training before each (`clock`); evaluations are no part of them.

    Raises:
        RunFailed: no record has the metric.
    """
    clocks = itertools.accumulate(record.get(SECONDS, 0.0) for record in records)
    timed = [(record, clock) for record, clock in zip(records, clocks, strict=True) if record.get(metric) is not None]
    if not timed:
        names = sorted({name for record in records for name in record})
        raise RunFailed(f"the run has no {metric}; expected one of {', '.join(names)}")
    points = [[record["iteration"], record[metric]] for record, _ in timed]
    return {"points": points, "clock": [clock for _, clock in timed]}


def curve(run: Run) -> list[Point]:
    """A run's points with the seconds of each."""
    return [Point(step, clock, value) for (step, value), clock in zip(run["points"], run["clock"], strict=True)]


def seeds_of(text: str, parser: argparse.ArgumentParser) -> list[str]:
    """The seeds that `--seeds` lists, none twice; ends the command where one is none."""
    seeds = text.split(",")
    if not all(seed.isdigit() and int(seed) < 2**31 for seed in seeds):
        parser.error(f"--seeds {text!r}: expected whole numbers from 0 to 2147483647 with commas between")
    return list(dict.fromkeys(str(int(seed)) for seed in seeds))


def run_all(
    record: Mapping[str, Any], file: Path, seeds: Sequence[str], train: Mapping[str, Callable[[str], Run]]
) -> None:
    """Makes every run that `record["runs"]` lacks, by `train`'s names and seeds, and writes the record after each."""
    for seed, (name, make) in itertools.product(seeds, train.items()):
        runs = record["runs"].setdefault(name, {})
        if seed not in runs:
            try:
                runs[seed] = make(seed)
            except RunFailed as error:
                runs[seed] = {"error": str(error)}
            save(file, record)
        shown = runs[seed]["error"] if "error" in runs[seed] else f"{runs[seed]['points'][-1][1]:.4f}"
        print(f"seed {seed}, {name}: {shown}", flush=True)


def finished(record: Mapping[str, Any], name: str) -> dict[str, Run]:
    """Runs of that name that did not fail, by seed."""
    return {seed: run for seed, run in record["runs"].get(name, {}).items() if "error" not in run}


def first_reached(points: Sequence[Point], level: float) -> tuple[float, float] | None:
    """The iteration and the seconds at which a curve first reaches the level, between points linearly; None: never.

    A curve that begins there has nothing to reach: it is None too.
    """
    for before, after in itertools.pairwise(points):
        if before.score < level <= after.score:
            share = (level - before.score) / (after.score - before.score)
            iteration = before.iteration + share * (after.iteration - before.iteration)
            return iteration, before.seconds + share * (after.seconds - before.seconds)
    return None


def conclude(record: Mapping[str, Any], table: str, file: Path) -> None:
    """Prints the table, and writes it as Markdown below the command and the machine.

    Raises:
        SystemExit: a run failed.
    """
    file.write_text(f"`{record['command']}`\n\n{line_of(record['machine'])}\n\n{table}\n")
    print(table)
    if failed := [run["error"] for runs in record["runs"].values() for run in runs.values() if "error" in run]:
        raise SystemExit(f"{len(failed)} run(s) failed: {failed[0]}")


def draw(record: Mapping[str, Any], score: str, file: Path) -> None:
    """Two panels: the score against iterations, and against seconds of training; a line a run, a colour a name."""
    with saved_figure(file, 1, 2, (11, 4.5), dpi=110, sharey=True) as (_, (panels,)):
        for axis, (panel, label) in enumerate(zip(panels, ("iterations", "seconds of training"), strict=True)):
            for number, name in enumerate(record["runs"]):
                for run, points in enumerate(map(curve, finished(record, name).values())):
                    x, y = [point[axis] for point in points], [point.score for point in points]
                    style = {"color": f"C{number}", "alpha": 0.8, "linewidth": 1, "markersize": 3}
                    panel.plot(x, y, "o-", label=name if run == 0 else None, **style)
            panel.set(xlabel=label)
            panel.grid(alpha=0.3)
        panels[0].set(ylabel=score)
        if panels[0].lines:
            panels[0].legend(frameon=False)
