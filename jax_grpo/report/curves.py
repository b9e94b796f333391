"""Pictures of a run: training curves, and a page of boards with the model's move and the engine's."""

from collections.abc import Sequence
from pathlib import Path

import chess
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from jax_grpo.report.boards import ENGINE, MODEL, draw_board
from jax_grpo.report.records import read_records
from jax_grpo.tasks.base import Prompt

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
    """One panel a metric over iterations; held-out legal-move rates as points."""
    figure, axes = plt.subplots(2, 3, figsize=(12, 6), layout="constrained")
    for axis, (name, title, unit) in zip(axes.flat, PANELS, strict=True):
        points = [(r["iteration"], r[name]) for r in records if r.get(name) is not None]
        if points:
            axis.plot(*zip(*points, strict=True), color=MODEL, linewidth=1.2)
        else:
            axis.text(0.5, 0.5, "not part of this run", ha="center", transform=axis.transAxes, color="gray")
        if name == "legal_move_rate":
            for mode, marker, face in (("greedy", "o", None), ("sampled", "s", "white")):
                names = (f"eval/{mode}/legal", f"eval/{mode}/policy/legal")
                if points := [(r["iteration"], r[n]) for r in records for n in names if n in r]:
                    axis.plot(*zip(*points, strict=True), marker, color=ENGINE, mfc=face, label=f"held-out, {mode}")
                    axis.legend(frameon=False, fontsize=8)
            axis.set_ylim(0, 1)
        axis.set_title(title, fontsize=10, loc="left")
        axis.set_ylabel(unit, fontsize=8)
        axis.set_xlabel("iteration", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    figure.savefig(path, dpi=110)
    plt.close(figure)


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
