"""Settings against each other: the same run with some settings changed, over seeds; a table and a picture of a metric.

    python -m jax_grpo.bench.variants --config configs/length_toy.yaml --seeds 0,1,2 --out docs/results/shaping \\
        --variant "sum first" --variant "GDPO: --advantage.components gdpo"

Each variant's score stands beside the first one's: a difference whose interval holds 0 has not been shown.

Each run is a process of its own, `python -m jax_grpo.train`, in a folder that is thrown away; what is kept are the metric and the
entropy by iteration. A record is written after each run, and a run that is there is not made again.
"""

import argparse
import itertools
import math
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from jax_grpo.bench.harness import command_of, command_parser, header, line, save, saved
from jax_grpo.bench.machine import line_of, machine
from jax_grpo.bench.score_curves import first_reached
from jax_grpo.config import ConfigError, check_files, load_config
from jax_grpo.report.records import read_records
from jax_grpo.system.process import failure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MODULE = "jax_grpo.bench.variants"
ENTROPY, SECONDS = "entropy", "time/iteration"
CURVES = 8  # more lines in one picture cannot be told apart


class Variant(NamedTuple):
    """Settings under a name: words of a command line, such as `--advantage.scale none`."""

    name: str
    overrides: list[str]


def parse_variant(text: str) -> Variant:
    """`NAME` or `NAME: --section.key value ...`."""
    name, _, settings = text.partition(":")
    return Variant(name.strip(), shlex.split(settings))


def read_variants(file: Path) -> list[Variant]:
    """A YAML mapping from names to settings as on a command line.

    Raises:
        ValueError: it is not one; the message names the file.
    """
    try:
        rows = yaml.safe_load(file.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"{file}: {error}") from None
    if not isinstance(rows, dict) or not all(isinstance(text, str) for pair in rows.items() for text in pair):
        raise ValueError(
            f"{file}: expected a line `name: --section.key value` for each variant, quoted where YAML asks it"
        )
    return [Variant(name, shlex.split(settings)) for name, settings in rows.items()]


def train(config: str, overrides: Sequence[str], metric: str) -> dict[str, Any]:
    """One run's points [iteration, metric], the seconds of training before each (`clock`) and in all, its last entropy in nats.

    `error` where it fails. Evaluations are no part of the seconds.
    """
    with tempfile.TemporaryDirectory(prefix="variants-") as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "jax_grpo.train", "--config", config, *overrides, "--run_dir", str(run)]
        child = subprocess.run(
            [*command, "--logging.progress", "false"],
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        if child.returncode:
            return {"error": failure(child.stderr, child.returncode)}
        records = read_records(run / "metrics.jsonl")
    clocks = itertools.accumulate(record.get(SECONDS, 0.0) for record in records)
    measured = [
        (record, clock) for record, clock in zip(records, clocks, strict=True) if record.get(metric) is not None
    ]
    if not measured:
        named = sorted({name for record in records for name in record})
        return {"error": f"the run has no {metric}; expected one of {', '.join(named)}"}
    entropies = [record[ENTROPY] for record in records if record.get(ENTROPY) is not None]
    return {
        "points": [[record["iteration"], record[metric]] for record, _ in measured],
        "clock": [clock for _, clock in measured],
        "entropy": entropies[-1] if entropies else None,
        "seconds": sum(record.get(SECONDS, 0.0) for record in records),
    }


def finished(record: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """A variant's runs that did not fail."""
    return [run for run in record["runs"].get(name, {}).values() if "error" not in run]


def scores(record: Mapping[str, Any], name: str) -> list[float]:
    """Of each finished run of a variant: the mean of the metric's last `record["last"]` points."""
    return [statistics.mean(value for _, value in run["points"][-record["last"] :]) for run in finished(record, name)]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the mean over seeds, by Student's t; NaN with fewer than two."""
    from scipy import stats

    if len(values) < 2:
        return math.nan, math.nan
    half = float(stats.t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.mean(values) - half, statistics.mean(values) + half


def beyond(values: Sequence[float], first: Sequence[float]) -> str:
    """Difference of the means from the first variant's with its 95 % interval, by Welch's t."""
    from scipy import stats

    difference = f"{statistics.mean(values) - statistics.mean(first):+.3f}"
    if min(len(values), len(first)) < 2 or not statistics.pstdev([*values]) + statistics.pstdev([*first]):
        return difference
    low, high = stats.ttest_ind(values, first, equal_var=False).confidence_interval()
    return f"{difference} ({low:+.3f} to {high:+.3f})"


def arrival(run: Mapping[str, Any], score: float) -> tuple[float, float] | None:
    """(iterations, seconds) until a run's metric is `score`, see `first_reached`; None where it never is."""
    points = zip(run["points"], run["clock"], strict=True)
    marks = [{"iteration": step, "seconds": clock, "score": value} for (step, value), clock in points]
    steps, seconds = (first_reached(marks, score, "score", axis) for axis in ("iteration", "seconds"))
    return None if steps is None or seconds is None else (steps, seconds)


def arrivals(record: Mapping[str, Any], score: float) -> str:
    """Markdown: for each variant, iterations and seconds until the metric is `score`, and the first variant's over them.

    Means over seeds; the ratios are means of the seeds' own, both runs of one seed, with the lowest and the highest.
    """
    lines = [
        header("variant", f"iterations until {record['metric']} {score:g}", "the first's over them", "seconds", "ratio")
    ]
    first = record["runs"].get(next(iter(record["variants"])), {})
    for name in record["variants"]:
        came, ratios, missed = [], [], []
        for seed, run in record["runs"].get(name, {}).items():
            if "error" in run or (reached := arrival(run, score)) is None:
                missed.append(seed)
                continue
            came.append(reached)
            beside = None if seed not in first or "error" in first[seed] else arrival(first[seed], score)
            if beside is not None:
                ratios.append([theirs / max(ours, 1e-9) for theirs, ours in zip(beside, reached, strict=True)])
        never = f"not by seed {', '.join(missed)}" if missed else ""
        if not came:
            lines.append(line(name, never or "not run", "", "", ""))
            continue
        steps, seconds = (statistics.mean(column) for column in zip(*came, strict=True))
        shown = [f"{statistics.mean(r):.2f} ({min(r):.2f} to {max(r):.2f})" for r in zip(*ratios, strict=True)]
        by_steps, by_seconds = shown or ("-", "-")
        lines.append(line(name, f"{steps:.0f} {never}".strip(), by_steps, f"{seconds:.0f}", by_seconds))
    return "\n".join(lines)


def summary(record: Mapping[str, Any]) -> str:
    """Markdown: each variant's score over the seeds, beside the first variant's, its entropy and its seconds."""
    metric = record["metric"] if record["last"] == 1 else f"{record['metric']}, mean of the last {record['last']}"
    lines = [
        header(
            *("variant", "settings", metric, "95 % interval", "minus the first", "entropy at the end, nats"),
            *("seconds", "seeds"),
        )
    ]
    first = scores(record, next(iter(record["variants"])))
    for name, settings in record["variants"].items():
        done = finished(record, name)
        shown = f"`{shlex.join(settings)}`" if settings else "as the config has them"
        runs = record["runs"].get(name, {}).items()
        failed = "; ".join(f"seed {seed}: {run['error']}" for seed, run in runs if "error" in run)
        if not done:
            lines.append(line(name, shown, failed or "not run", "", "", "", "", "0"))
            continue
        reached = scores(record, name)
        entropies = [run["entropy"] for run in done if run["entropy"] is not None]
        entropy = f"{statistics.mean(entropies):.2f}" if entropies else "-"
        seconds = f"{statistics.mean(run['seconds'] for run in done):.0f}"
        spread = "{:.3f} to {:.3f}".format(*interval(reached)) if len(reached) > 1 else "-"
        difference = beyond(reached, first) if first and lines[1:] else "-"
        cells = (f"{statistics.mean(reached):.3f}", spread, difference, entropy, seconds)
        lines.append(line(name, shown, *cells, f"{len(done)} {failed}".strip()))
    return "\n".join(lines)


def draw(record: Mapping[str, Any], file: Path) -> None:
    """Few variants: the metric over iterations; many: their scores beside each other."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    many = len(record["variants"]) > CURVES
    figure, axis = plt.subplots(figsize=(8, 1 + len(record["variants"]) / 4.5 if many else 4.5), layout="constrained")
    (_draw_scores if many else _draw_curves)(axis, record)
    figure.savefig(file, dpi=110)
    plt.close(figure)


def _draw_scores(axis: "Axes", record: Mapping[str, Any]) -> None:
    """A row a variant: each seed a small point, the mean a large one, its 95 % interval a line; down the page, the first's mean."""
    names = [name for name in record["variants"] if scores(record, name)]
    for row, name in enumerate(names):
        reached = scores(record, name)
        colour = "black" if row == 0 else "tab:blue"
        axis.plot(interval(reached), [row, row], color=colour, linewidth=1)
        axis.plot(reached, [row] * len(reached), ".", color=colour, markersize=4)
        axis.plot(statistics.mean(reached), row, "o", color=colour, markersize=6)
        if row == 0:
            axis.axvline(statistics.mean(reached), color="black", linestyle=":", linewidth=1)
    axis.set_yticks(range(len(names)), names, fontsize=8)
    axis.invert_yaxis()
    axis.margins(y=0.01)
    axis.set(xlabel=record["metric"])
    axis.grid(axis="x", alpha=0.3)


def _draw_curves(axis: "Axes", record: Mapping[str, Any]) -> None:
    """A line a variant: the seeds' mean of the metric over iterations, and between the lowest and the highest a shade."""
    import numpy as np
    from matplotlib.ticker import MaxNLocator

    for name in record["variants"]:
        runs = [run["points"] for run in finished(record, name)]
        if not runs:
            continue
        points_RN2 = np.array([run[: min(map(len, runs))] for run in runs], np.float64)
        steps_N, values_RN = points_RN2[0, :, 0], points_RN2[..., 1]
        (drawn,) = axis.plot(steps_N, values_RN.mean(0), marker="o", markersize=3, label=name)
        axis.fill_between(steps_N, values_RN.min(0), values_RN.max(0), color=drawn.get_color(), alpha=0.15)
    axis.set(xlabel="iteration", ylabel=record["metric"])
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.grid(alpha=0.3)
    if axis.lines:
        axis.legend(frameon=False)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Every variant's settings are checked before anything is started."""
    parser = command_parser(MODULE, __doc__)
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
    arguments.variants = [*listed, *map(parse_variant, arguments.variant)]
    if not arguments.variants:
        parser.error("expected --variant or --variants")
    names = [variant.name for variant in arguments.variants]
    if twice := [name for name in names if names.count(name) > 1 or not name]:
        parser.error(f"--variant {twice[0]!r}: expected a name for each, and no name twice")
    seeds = arguments.seeds.split(",")
    if not all(seed.isdigit() and int(seed) < 2**31 for seed in seeds):
        parser.error(f"--seeds {arguments.seeds!r}: expected whole numbers from 0 to 2147483647 with commas between")
    arguments.seeds = list(dict.fromkeys(seeds))
    for variant in arguments.variants:
        try:
            check_files(load_config(arguments.config, variant.overrides))
        except ConfigError as error:
            parser.error(f"--variant {variant.name!r}: {error}")
    return arguments


def main(argv: list[str] | None = None) -> None:
    arguments = _arguments(argv)
    arguments.out.mkdir(parents=True, exist_ok=True)
    file = arguments.out / "variants.json"
    record: dict[str, Any] = {
        "command": command_of(MODULE, argv),
        "metric": arguments.metric,
        "last": arguments.last,
        "config": load_config(arguments.config).model_dump(),
        "machine": machine(),
        "variants": {variant.name: variant.overrides for variant in arguments.variants},
        "runs": {},
    }
    earlier = saved(file)
    if earlier.get("config") == record["config"] and earlier.get("metric") == record["metric"]:
        record["runs"] = {
            name: {seed: run for seed, run in runs.items() if "error" not in run}
            for name, runs in earlier["runs"].items()
            if earlier["variants"][name] == record["variants"].get(name)
        }
    print(f"# {record['command']}\n# {line_of(record['machine'])}", flush=True)
    for seed in arguments.seeds:
        for variant in arguments.variants:
            runs = record["runs"].setdefault(variant.name, {})
            if seed not in runs:
                runs[seed] = train(arguments.config, [*variant.overrides, "--seed", seed], arguments.metric)
                save(file, record)
            said = runs[seed].get("error") or f"{record['metric']} {runs[seed]['points'][-1][1]:.4f}"
            print(f"seed {seed}, {variant.name}: {said}", flush=True)
    table = summary(record)
    if arguments.reach is not None:
        table += f"\n\n{arrivals(record, arguments.reach)}"
    (arguments.out / "variants.md").write_text(f"`{record['command']}`\n\n{line_of(record['machine'])}\n\n{table}\n")
    draw(record, arguments.out / "variants.png")
    print(table)
    if failed := [run["error"] for runs in record["runs"].values() for run in runs.values() if "error" in run]:
        raise SystemExit(f"{len(failed)} run(s) failed: {failed[0]}")


if __name__ == "__main__":
    main()
