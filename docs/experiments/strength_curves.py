"""Held-out loss by iteration of several ways to spend the quickstart's iterations: docs/strength.md's picture of what was tried.

    python docs/experiments/strength_curves.py --out docs/results/strength_curves \\
        'the quickstart=runs/quickstart,runs/quickstart1' 'no KL term=runs/no_kl'

Not part of the package. Reads the `metrics.jsonl` of finished runs: nothing is computed here.
"""

import argparse
import json
from pathlib import Path

import numpy as np

from jax_grpo.report.pictures import draw_band, saved_figure
from jax_grpo.report.records import read_records

MODES = ("greedy", "sampled")
PLAYERS = {"uniform": "random legal moves", "greedy_capture": "greedy capture", "two_ply": "two-ply material search"}


def evaluations(run: Path) -> dict[int, dict[str, float]]:
    """What a move loses, in percent, and the share of legal ones, by iteration and mode; players beside them."""
    out = {}
    for row in read_records(run / "metrics.jsonl"):
        if "eval/greedy/value" not in row:
            continue
        shares = {mode: -100 * row[f"eval/{mode}/value"] for mode in MODES}
        shares |= {f"{mode}, legal": 100 * row[f"eval/{mode}/legal"] for mode in MODES}
        shares |= {name: -100 * row[f"yardstick/{name}/value"] for name in PLAYERS if f"yardstick/{name}/value" in row}
        out[row["iteration"]] = shares
    return out


def draw(ways: dict[str, list[dict[int, dict[str, float]]]], file: Path) -> None:
    """One line a way: the mean of its runs, shaded from the lowest to the highest."""
    players = next(row for run in next(iter(ways.values())) for row in run.values() if "uniform" in row)
    with saved_figure(file, 1, 2, (12, 5), dpi=110, sharey=True) as (_, (axes,)):
        for axis, mode in zip(axes, MODES, strict=True):
            for number, (way, runs) in enumerate(ways.items()):
                at = sorted(set.intersection(*map(set, runs)))
                values = np.array([[run[iteration][mode] for iteration in at] for run in runs])
                draw_band(axis, at, values, color=f"C{number}", label=way)
            for name, words in PLAYERS.items():
                axis.axhline(players[name], color="0.4", linestyle="--", linewidth=0.8)
                where = {"va": "bottom", "ha": "right", "fontsize": 8, "color": "0.3"}
                axis.text(axis.get_xlim()[1], players[name], f" {words}", **where)
            axis.set(title=mode, xlabel="iteration")
            axis.grid(alpha=0.3)
        axes[0].set_ylabel("win probability lost a move, held-out positions, %")
        axes[1].legend(frameon=False, fontsize=8, loc=(0.03, 0.12))


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
