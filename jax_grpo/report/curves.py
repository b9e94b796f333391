"""Pictures of a run: training curves, and a page of boards with the model's move and the engine's."""

from collections.abc import Sequence
from pathlib import Path

import chess
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from jax_grpo.report.boards import ENGINE, MODEL, draw_board
from jax_grpo.report.records import read_records, yardsticks_of
from jax_grpo.tasks.base import Prompt

MODES = (("greedy", "o", None), ("sampled", "s", "white"))  # of held-out evaluations: marker and its face
BOARDS = 8  # on their page at most
PANELS = (
    ("reward/mean", "reward", "mean reward of the iteration"),
    ("legal_move_rate", "legal moves", "share of sampled moves"),
    ("kl/mean", "KL to the reference", "nats per token"),
    ("beta", "KL coefficient", "beta"),
    ("entropy", "entropy", "nats per token"),
    ("grad_norm", "gradient norm", "before clipping"),
)


def save_all(run_dir: Path, answers: Sequence[tuple[Prompt, str]]) -> list[Path]:
    """`curves.png`, and `boards.png` where there are moves in answer to prompts of labelled positions."""
    files = [run_dir / "curves.png", run_dir / "boards.png"][: 2 if answers else 1]
    curves(read_records(run_dir / "metrics.jsonl"), files[0])
    if answers:
        prompts, moves = zip(*answers[:BOARDS], strict=True)
        boards(prompts, moves, files[1])
    return files


def curves(records: Sequence[dict], path: Path) -> None:
    """One panel a metric over iterations; held-out legal-move rates as points.

    A run that is paid for what moves are worth has a panel for each such component, with plain players as lines.
    """
    compared = sorted({component for record in records for _, component, _ in yardsticks_of(record)})
    panels = [*PANELS, *(("reward/" + name + "/mean", name, "mean") for name in compared)]
    columns = -(-len(panels) // 2)
    figure, axes = plt.subplots(2, columns, figsize=(4 * columns, 6), layout="constrained")
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")
    for axis, (name, title, unit) in zip(axes.flat, panels, strict=False):
        points = [(r["iteration"], r[name]) for r in records if r.get(name) is not None]
        if points:
            steps, values = zip(*points, strict=True)
            axis.plot(steps, values, color=MODEL, linewidth=0.8, alpha=0.3)
            axis.plot(steps, _smoothed(values), color=MODEL, linewidth=1.5)
        else:
            axis.text(0.5, 0.5, "not part of this run", ha="center", transform=axis.transAxes, color="gray")
        if name == "legal_move_rate":
            _held_out(axis, records, ("legal", "policy/legal"))
            axis.set_ylim(0, 1)
        if title in compared:
            _held_out(axis, records, (title,))
            _plain_players(axis, records, title)
        axis.set_title(title, fontsize=10, loc="left")
        axis.set_ylabel(unit, fontsize=8)
        axis.set_xlabel("iteration", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _smoothed(values: Sequence[float]) -> np.ndarray:
    """Mean of the values around each one, a twentieth of them in all; of fewer at both ends."""
    box = np.ones(2 * (len(values) // 40) + 1)
    return np.convolve(values, box, "same") / np.convolve(np.ones(len(values)), box, "same")


def _held_out(axis: Axes, records: Sequence[dict], components: Sequence[str]) -> None:
    """Points of the held-out evaluations, greedy and sampled."""
    for mode, marker, face in MODES:
        names = [f"eval/{mode}/{component}" for component in components]
        if points := [(r["iteration"], r[n]) for r in records for n in names if n in r]:
            axis.plot(*zip(*points, strict=True), marker, color=ENGINE, mfc=face, label=f"held-out, {mode}")
            axis.legend(frameon=False, fontsize=8)


def _plain_players(axis: Axes, records: Sequence[dict], component: str) -> None:
    """A line a player, with its name."""
    for player, value in {p: v for record in records for p, c, v in yardsticks_of(record) if c == component}.items():
        axis.axhline(value, color="gray", linestyle="--", linewidth=0.8)
        where = {"xycoords": ("axes fraction", "data"), "ha": "center", "va": "center", "zorder": 5}
        behind = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        axis.annotate(player, (0.42, value), fontsize=7, bbox=behind, **where)


def boards(prompts: Sequence[Prompt], moves: Sequence[str], path: Path) -> None:
    """Boards seen from the side to move: the model's move in blue (red if illegal), the engine's first in green."""
    columns = 4
    rows = -(-len(prompts) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(3.1 * columns, 3.5 * rows), layout="constrained", squeeze=False)
    for axis in axes.flat:
        axis.axis("off")
    for axis, prompt, move in zip(axes.flat, prompts, moves, strict=False):
        assert prompt.position is not None
        draw_board(axis, chess.Board(prompt.position.fen), move, prompt.position.moves[0])
    figure.savefig(path, dpi=110)
    plt.close(figure)
