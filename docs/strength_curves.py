"""Held-out loss by iteration of several ways to spend the quickstart's iterations: docs/strength.md's picture of what was tried.

    python docs/strength_curves.py --out docs/results/strength_curves 'the quickstart=runs/quickstart,runs/quickstart1' \\
        'no KL term=runs/no_kl'

Not part of the package. Reads the `metrics.jsonl` of finished runs: nothing is computed here.
"""

import argparse
import json
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from jax_grpo.report.records import read_records

MODES = ("greedy", "sampled")
PLAYERS = {"uniform": "random legal moves", "greedy_capture": "greedy capture", "two_ply": "two-ply material search"}


def evaluations(run: Path) -> dict[int, dict[str, float]]:
    """What a move loses, in percent, and the share of legal ones, by iteration and mode; players beside them."""
    out = {}
    for row in read_records(run / "metrics.jsonl"):
        if "eval/greedy/value" not in row:
            continue
        found = {mode: -100 * row[f"eval/{mode}/value"] for mode in MODES}
        found |= {f"{mode}, legal": 100 * row[f"eval/{mode}/legal"] for mode in MODES}
        found |= {name: -100 * row[f"yardstick/{name}/value"] for name in PLAYERS if f"yardstick/{name}/value" in row}
        out[row["iteration"]] = found
    return out


def draw(ways: dict[str, list[dict[int, dict[str, float]]]], file: Path) -> None:
    """One line a way: the mean of its runs, shaded from the lowest to the highest."""
    figure, axes = plt.subplots(1, 2, figsize=(12, 5), sharey=True, layout="constrained")
    for axis, mode in zip(axes, MODES, strict=True):
        for way, runs in ways.items():
            at = sorted(set.intersection(*(set(run) for run in runs)))
            values = np.array([[run[iteration][mode] for iteration in at] for run in runs])
            (line,) = axis.plot(at, values.mean(0), marker="o", markersize=3, label=way)
            axis.fill_between(at, values.min(0), values.max(0), color=line.get_color(), alpha=0.2, linewidth=0)
        players = next(found for run in next(iter(ways.values())) for found in run.values() if "uniform" in found)
        for name, said in PLAYERS.items():
            axis.axhline(players[name], color="0.4", linestyle="--", linewidth=0.8)
            axis.text(axis.get_xlim()[1], players[name], f" {said}", va="bottom", ha="right", fontsize=8, color="0.3")
        axis.set(title=mode, xlabel="iteration")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("win probability lost a move, held-out positions, %")
    axes[1].legend(frameon=False, fontsize=8, loc=(0.03, 0.12))
    figure.savefig(file, dpi=110)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("ways", nargs="+", metavar="NAME=RUN,RUN", help="runs' folders, one a seed")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    named = dict(way.split("=", 1) for way in arguments.ways)
    read = {way: [evaluations(Path(run)) for run in runs.split(",")] for way, runs in named.items()}
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "curves.json").write_text(json.dumps(read, indent=1) + "\n")
    draw(read, arguments.out / "curves.png")
