"""Settings against each other: the same run with some settings changed, over seeds; a table and a picture of a metric.

    python -m jax_grpo.bench.variants --config configs/length_toy.yaml --seeds 0,1,2 --out docs/results/shaping \\
        --variant "sum first" --variant "GDPO: --advantage.components gdpo"

Each variant's score stands beside the first one's: a difference whose interval holds 0 has not been shown.

Each run is a process of its own, and its metric and entropy by iteration are recorded; a run that the record has is not made again.
"""

import argparse
import math
import shlex
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import yaml

from jax_grpo.bench import curves
from jax_grpo.bench.curves import curve, finished, first_reached
from jax_grpo.bench.records import command_parser, header, line, new_record, saved
from jax_grpo.config import ConfigError, check_files, load_config
from jax_grpo.report.pictures import saved_figure

MODULE = "jax_grpo.bench.variants"
ENTROPY = "entropy"
CURVES = 8  # more names in one picture cannot be distinguished
Variant = tuple[str, list[str]]  # a name, and settings as words of a command line, such as `--advantage.scale none`


def parse_variant(text: str) -> Variant:
    """`NAME` or `NAME: --section.key value ...`."""
    name, _, settings = text.partition(":")
    return name.strip(), shlex.split(settings)


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
    return [(name, shlex.split(settings)) for name, settings in rows.items()]


def train(config: str, overrides: Sequence[str], metric: str) -> dict[str, Any]:
    """One run's `curves.measured`, its seconds of training in all, and its last entropy in nats.

    Raises:
        RunFailed: it ended with an error, or has no such metric.
    """
    records = curves.trained(config, overrides)
    entropies = [record[ENTROPY] for record in records if record.get(ENTROPY) is not None]
    seconds = sum(record.get(curves.SECONDS, 0.0) for record in records)
    about = {"entropy": entropies[-1] if entropies else None, "seconds": seconds}
    return curves.measured(records, metric) | about


def scores(record: Mapping[str, Any], name: str) -> list[float]:
    """Of each finished run of a variant: the mean of the metric's last `record["last"]` points."""
    runs = finished(record, name).values()
    return [mean(value for _, value in run["points"][-record["last"] :]) for run in runs]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the mean over seeds, by Student's t; NaN with fewer than two."""
    from scipy import stats

    if len(values) < 2:
        return math.nan, math.nan
    half = float(stats.t.ppf(0.975, len(values) - 1) * stats.sem(values))
    return mean(values) - half, mean(values) + half


def beyond(values: Sequence[float], first: Sequence[float]) -> str:
    """Difference of the means from the first variant's with its 95 % interval, by Welch's t."""
    from scipy import stats

    difference = f"{mean(values) - mean(first):+.3f}"
    if min(len(values), len(first)) < 2 or len({*values}) == len({*first}) == 1:
        return difference
    low, high = stats.ttest_ind(values, first, equal_var=False).confidence_interval()
    return f"{difference} ({low:+.3f} to {high:+.3f})"


def arrivals(record: Mapping[str, Any], score: float) -> str:
    """Markdown: for each variant, iterations and seconds until the metric is `score`, and the first variant's over them.

    Means over seeds; the ratios are means of the seeds' own, both runs of one seed, with the lowest and the highest.
    """
    until = f"iterations until {record['metric']} {score:g}"
    lines, first = [header("variant", until, "the first's over them", "seconds", "ratio")], None
    for name in record["variants"]:
        reached = {seed: first_reached(curve(run), score) for seed, run in finished(record, name).items()}
        arrived = {seed: np.array(arrival) for seed, arrival in reached.items() if arrival}
        missed = [seed for seed in record["runs"].get(name, {}) if seed not in arrived]
        never = f"not by seed {', '.join(missed)}" if missed else ""
        first = arrived if first is None else first
        if not arrived:
            lines.append(line(name, never or "not run", "", "", ""))
            continue
        steps, seconds = np.mean([*arrived.values()], axis=0)
        both = arrived.keys() & first.keys()
        ratios = np.array([first[seed] / np.maximum(arrived[seed], 1e-9) for seed in both])
        shown = [f"{r.mean():.2f} ({r.min():.2f} to {r.max():.2f})" for r in ratios.T] or ["-", "-"]
        lines.append(line(name, f"{steps:.0f} {never}".strip(), shown[0], f"{seconds:.0f}", shown[1]))
    return "\n".join(lines)


def summary(record: Mapping[str, Any]) -> str:
    """Markdown: each variant's score over the seeds, beside the first variant's, its entropy and its seconds."""
    metric = record["metric"] if record["last"] == 1 else f"{record['metric']}, mean of the last {record['last']}"
    about = ("entropy at the end, nats", "seconds", "seeds")
    lines = [header("variant", "settings", metric, "95 % interval", "minus the first", *about)]
    first = scores(record, next(iter(record["variants"])))
    for number, (name, settings) in enumerate(record["variants"].items()):
        done, reached = finished(record, name).values(), scores(record, name)
        shown = f"`{shlex.join(settings)}`" if settings else "as the config has them"
        runs = record["runs"].get(name, {}).items()
        failed = "; ".join(f"seed {seed}: {run['error']}" for seed, run in runs if "error" in run)
        if not done:
            lines.append(line(name, shown, failed or "not run", "", "", "", "", "0"))
            continue
        entropies = [run["entropy"] for run in done if run["entropy"] is not None]
        spread = "{:.3f} to {:.3f}".format(*interval(reached)) if len(reached) > 1 else "-"
        difference = beyond(reached, first) if first and number else "-"
        entropy, seconds = f"{mean(entropies):.2f}" if entropies else "-", f"{mean(run['seconds'] for run in done):.0f}"
        cells = (f"{mean(reached):.3f}", spread, difference, entropy, seconds)
        lines.append(line(name, shown, *cells, f"{len(done)} {failed}".strip()))
    return "\n".join(lines)


def draw_scores(record: Mapping[str, Any], file: Path) -> None:
    """A row a variant: each seed a small point, the mean a large one, its 95 % interval a line; down the page, the first's mean."""
    reached = {name: values for name in record["variants"] if (values := scores(record, name))}
    with saved_figure(file, 1, 1, (8, 1 + len(reached) / 4.5), dpi=110) as (_, ((panel,),)):
        for row, values in enumerate(reached.values()):
            colour = "tab:blue" if row else "black"
            panel.plot(interval(values), [row, row], color=colour, linewidth=1)
            panel.plot(values, [row] * len(values), ".", color=colour, markersize=4)
            panel.plot(mean(values), row, "o", color=colour, markersize=6)
            if row == 0:
                panel.axvline(mean(values), color="black", linestyle=":", linewidth=1)
        panel.set_yticks(range(len(reached)), list(reached), fontsize=8)
        panel.invert_yaxis()
        panel.margins(y=0.01)
        panel.set(xlabel=record["metric"])
        panel.grid(axis="x", alpha=0.3)


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
    listed += map(parse_variant, arguments.variant)
    if not listed:
        parser.error("expected --variant or --variants")
    arguments.variants, arguments.seeds = dict(listed), curves.seeds_of(arguments.seeds, parser)
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
    file, config, metric = arguments.out / "variants.json", arguments.config, arguments.metric
    facts = {"metric": metric, "last": arguments.last, "config": load_config(config).model_dump(mode="json")}
    record = new_record(MODULE, argv, **facts, variants=arguments.variants)
    earlier = saved(file)
    same = all(earlier.get(name) == record[name] for name in ("metric", "config"))
    before = earlier["variants"] if same else {}
    record["runs"] = {
        name: finished(earlier, name) if before.get(name) == words else {} for name, words in arguments.variants.items()
    }

    def one_run(overrides: Sequence[str], seed: str) -> dict[str, Any]:
        return train(config, [*overrides, "--seed", seed], metric)

    train_each = {name: partial(one_run, words) for name, words in arguments.variants.items()}
    curves.run_all(record, file, arguments.seeds, train_each)
    table = summary(record)
    if arguments.reach is not None:
        table += f"\n\n{arrivals(record, arguments.reach)}"
    if len(record["variants"]) > CURVES:
        draw_scores(record, file.with_suffix(".png"))
    else:
        curves.draw(record, metric, file.with_suffix(".png"))
    curves.conclude(record, table, file.with_suffix(".md"))


if __name__ == "__main__":
    main()
