"""What recorded training runs say: scores and times of each variant beside the first one's, as tables and as pictures.

A record has `metric`, `last` (how many last points a score is the mean of), `variants` (settings by name) and `runs` by name and
seed: `points` [iteration, metric], the seconds of training before each (`clock`), `entropy` and `seconds`, or an `error`.
"""

import itertools
import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from jax_grpo.report.pictures import saved_figure
from jax_grpo.system.markdown import table

Run = dict[str, Any]
CURVES = 8  # more names in one picture cannot be distinguished


class RunFailed(RuntimeError):
    """A training run has no figures, for the reason that is the message."""


class Point(NamedTuple):
    """A score of a run, after so many iterations and so many seconds of training."""

    iteration: float
    seconds: float
    score: float


def curve(run: Run) -> list[Point]:
    """A run's points with the seconds of each."""
    return [Point(step, clock, value) for (step, value), clock in zip(run["points"], run["clock"], strict=True)]


def finished(record: Mapping[str, Any], name: str) -> dict[str, Run]:
    """Runs of that name that did not fail, by seed."""
    return {seed: run for seed, run in record["runs"].get(name, {}).items() if "error" not in run}


def failures(record: Mapping[str, Any], name: str) -> list[str]:
    """Why runs of that name failed, each with its seed."""
    runs = record["runs"].get(name, {})
    return [f"seed {seed}: {run['error']}" for seed, run in runs.items() if "error" in run]


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


def scores(record: Mapping[str, Any], name: str) -> list[float]:
    """Of each finished run of a variant: the mean of the metric's last `record["last"]` points."""
    runs = finished(record, name).values()
    return [mean(value for _, value in run["points"][-record["last"] :]) for run in runs]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the mean over seeds, by Student's t; NaN with fewer than two."""
    if len(values) < 2:
        return math.nan, math.nan
    half = float(stats.t.ppf(0.975, len(values) - 1) * stats.sem(values))
    return mean(values) - half, mean(values) + half


def beyond(values: Sequence[float], first: Sequence[float]) -> str:
    """Difference of the means from the first variant's with its 95 % interval, by Welch's t."""
    difference = f"{mean(values) - mean(first):+.3f}"
    if min(len(values), len(first)) < 2 or len({*values}) == len({*first}) == 1:
        return difference
    low, high = stats.ttest_ind(values, first, equal_var=False).confidence_interval()
    return f"{difference} ({low:+.3f} to {high:+.3f})"


def arrivals(record: Mapping[str, Any], score: float) -> str:
    """Markdown: for each variant, iterations and seconds until the metric is `score`, and the first variant's over them.

    Means over seeds; the ratios are means of the seeds' own, both runs of one seed, with the lowest and the highest.
    """
    until, first, rows = f"iterations until {record['metric']} {score:g}", None, []
    for name in record["variants"]:
        reached = {seed: first_reached(curve(run), score) for seed, run in finished(record, name).items()}
        arrived = {seed: np.array(arrival) for seed, arrival in reached.items() if arrival}
        missed = [seed for seed in record["runs"].get(name, {}) if seed not in arrived]
        never = f"not by seed {', '.join(missed)}" if missed else ""
        first = arrived if first is None else first
        if not arrived:
            rows.append((name, never or "not run", "", "", ""))
            continue
        steps, seconds = np.mean([*arrived.values()], axis=0)
        both = arrived.keys() & first.keys()
        ratios = np.array([first[seed] / np.maximum(arrived[seed], 1e-9) for seed in both])
        shown = [f"{r.mean():.2f} ({r.min():.2f} to {r.max():.2f})" for r in ratios.T] or ["-", "-"]
        rows.append((name, f"{steps:.0f} {never}".strip(), shown[0], f"{seconds:.0f}", shown[1]))
    return "\n".join(table(("variant", until, "the first's over them", "seconds", "ratio"), rows))


def summary(record: Mapping[str, Any]) -> str:
    """Markdown: each variant's score over the seeds, beside the first variant's, its entropy and its seconds."""
    metric = record["metric"] if record["last"] == 1 else f"{record['metric']}, mean of the last {record['last']}"
    about = ("entropy at the end, nats", "seconds", "seeds")
    head, rows = ("variant", "settings", metric, "95 % interval", "minus the first", *about), []
    first = scores(record, next(iter(record["variants"])))
    for number, (name, settings) in enumerate(record["variants"].items()):
        done, reached, failed = finished(record, name).values(), scores(record, name), failures(record, name)
        shown = f"`{shlex.join(settings)}`" if settings else "as the config has them"
        if not done:
            rows.append((name, shown, "; ".join(failed) or "not run", "", "", "", "", "0"))
            continue
        entropies = [run["entropy"] for run in done if run["entropy"] is not None]
        spread = "{:.3f} to {:.3f}".format(*interval(reached)) if len(reached) > 1 else "-"
        difference = beyond(reached, first) if first and number else "-"
        entropy, seconds = f"{mean(entropies):.2f}" if entropies else "-", f"{mean(run['seconds'] for run in done):.0f}"
        cells = (f"{mean(reached):.3f}", spread, difference, entropy, seconds)
        rows.append((name, shown, *cells, f"{len(done)} {'; '.join(failed)}".strip()))
    return "\n".join(table(head, rows))


def draw(record: Mapping[str, Any], file: Path) -> None:
    """The picture of a record: its curves, or where they are too many its scores."""
    (_draw_scores if len(record["variants"]) > CURVES else _draw_curves)(record, file)


def _draw_curves(record: Mapping[str, Any], file: Path) -> None:
    """Two panels: the metric against iterations, and against seconds of training; a line a run, a colour a name."""
    with saved_figure(file, 1, 2, (11, 4.5), dpi=110, sharey=True) as (_, (panels,)):
        for axis, (panel, label) in enumerate(zip(panels, ("iterations", "seconds of training"), strict=True)):
            for number, name in enumerate(record["runs"]):
                for run, points in enumerate(map(curve, finished(record, name).values())):
                    x, y = [point[axis] for point in points], [point.score for point in points]
                    style = {"color": f"C{number}", "alpha": 0.8, "linewidth": 1, "markersize": 3}
                    panel.plot(x, y, "o-", label=name if run == 0 else None, **style)
            panel.set(xlabel=label)
            panel.grid(alpha=0.3)
        panels[0].set(ylabel=record["metric"])
        if panels[0].lines:
            panels[0].legend(frameon=False)


def _draw_scores(record: Mapping[str, Any], file: Path) -> None:
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
