"""Runs of two implementations as curves of held-out scores: the time that each took to the same score, a table and a picture.

A run is a record: `points` with `iteration`, `seconds` and scores by name, or an `error`. Knows nothing of what made it.
"""

import itertools
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jax_grpo.bench.harness import header, line
from jax_grpo.bench.trl_settings import NotTheSame

OURS = "jax_grpo"
START_TOLERANCE = 1e-5  # between scores of the same weights
COLOURS = ("tab:blue", "tab:orange", "tab:green")


def of_records(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Points of a run's metrics: seconds are the sum of what the iterations before took."""
    points, seconds, rewards, lengths = [], 0.0, [], []
    for record in records:
        if "loss" in record:
            seconds += record["time/iteration"]
            rewards.append(record["reward/mean"])
            lengths.append(record["completion_length/mean"])
        else:
            scores = {name: value for name, value in record.items() if name.startswith("eval/")}
            points.append({"iteration": record["iteration"], "seconds": seconds, **scores})
    return {"points": points, "rewards": rewards, "completion_lengths": lengths}


def require_same_start(ours: Mapping[str, Any], peer: Mapping[str, Any]) -> None:
    """Before the first iteration both sides are one model, and must have one score.

    Raises:
        NotTheSame: they have not.
    """
    first, other = ours["points"][0], peer["points"][0]
    for name, value in first.items():
        if name.startswith("eval/") and abs(value - other[name]) > START_TOLERANCE:
            raise NotTheSame(
                f"before training {name} is {value} in our run and {other[name]} of TRL's weights; expected one"
            )


def first_reached(points: Sequence[Mapping[str, float]], level: float, score: str, axis: str) -> float | None:
    """Where on the axis (`seconds`, `iteration`) a curve first reaches the level, between points linearly; None: never.

    A curve that begins there has nothing to reach: it is None too.
    """
    for before, after in itertools.pairwise(points):
        low, high = before[score], after[score]
        if low < level <= high:
            return before[axis] + (level - low) / (high - low) * (after[axis] - before[axis])
    return None


def same_score(ours: Mapping[str, Any], peer: Mapping[str, Any], score: str) -> dict[str, float | None]:
    """The lower of the two last scores, when each curve first reached it, and how many times as long the peer took."""
    level = min(ours["points"][-1][score], peer["points"][-1][score])
    found: dict[str, float | None] = {"level": level}
    for axis in ("seconds", "iteration"):
        pair = [first_reached(record["points"], level, score, axis) for record in (ours, peer)]
        found |= {f"{axis}_ours": pair[0], f"{axis}_peer": pair[1]}
        found[f"{axis}_ratio"] = pair[1] / pair[0] if pair[0] and pair[1] is not None else None
    return found


def legality(score: str) -> str:
    """The metric of legal moves in the mode of the score."""
    return score.rpartition("/")[0] + "/legal"


def summary(record: Mapping[str, Any]) -> str:
    """Markdown: every point of every run, then the times to the same score and how far apart the last scores are."""
    score, runs = record["score"], record["runs"]
    loss = score.rpartition("/")[0] + "/value"
    lines = [header("run", "seed", "iterations", "training seconds", score, "legal", "win probability lost")]
    for seed, by_name in runs.items():
        for name, run in by_name.items():
            if "error" in run:
                lines.append(line(name, seed, run["error"], "", "", "", ""))
            for point in run.get("points", []):
                shown = [f"{point[key]:.4f}" if key in point else "-" for key in (score, legality(score))]
                lost = f"{-point[loss]:.4f}" if loss in point else "-"
                lines.append(line(name, seed, point["iteration"], f"{point['seconds']:.1f}", *shown, lost))
    lines += ["", header("peer", "seed", "score reached by both", "ours after", "peer after", "peer / ours")]
    for peer in record["peers"]:
        ratios = []
        for seed, by_name in runs.items():
            if f := by_name.get(peer, {}).get("same_score"):
                ratios.append(f["seconds_ratio"])
                times = [_after(f[f"seconds_{side}"], f[f"iteration_{side}"]) for side in ("ours", "peer")]
                ratio = "-" if f["seconds_ratio"] is None else f"{f['seconds_ratio']:.2f}"
                lines.append(line(peer, seed, f"{f['level']:.4f}", *times, ratio))
        known = [ratio for ratio in ratios if ratio is not None]
        if len(known) > 1:
            lines.append(line(peer, "median", "", "", "", f"{statistics.median(known):.2f}"))
    return "\n".join(lines)


def _after(seconds: float | None, iteration: float | None) -> str:
    return "not" if seconds is None or iteration is None else f"{seconds:.1f} s (iteration {iteration:.1f})"


def draw(record: Mapping[str, Any], file: Path) -> None:
    """Two panels: the score against iterations, and against seconds of training; a line a run."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(10, 4), layout="constrained", sharey=True)
    colours = dict(zip([OURS, *record["peers"]], COLOURS, strict=False))
    for by_name in record["runs"].values():
        for name, run in by_name.items():
            points = run.get("points", [])
            for panel, axis in zip(panels, ("iteration", "seconds"), strict=True):
                x, y = ([point[key] for point in points] for key in (axis, record["score"]))
                panel.plot(x, y, "o-", color=colours[name], markersize=3, label=name)
    for panel, name in zip(panels, ("iterations", "seconds of training"), strict=True):
        panel.set(xlabel=name)
        panel.grid(alpha=0.3)
    panels[0].set(ylabel=f"held-out {record['score'].removeprefix('eval/')}")
    handles, labels = panels[0].get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    panels[0].legend(unique.values(), unique.keys(), frameon=False)
    figure.savefig(file, dpi=110)
    plt.close(figure)
