"""The picture of a run: its curves over iterations."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from jax_grpo.report.pictures import saved_figure
from jax_grpo.report.records import yardsticks_of
from jax_grpo.tasks.base import Headline

MODES = (("greedy", "o", None), ("sampled", "s", "white"))  # of held-out evaluations: marker and its face
TRAINED, HELD_OUT = "#2563eb", "#16a34a"  # colours of training and of evaluations
PANELS = (
    ("reward/mean", "reward", "mean reward of the iteration"),
    ("kl/mean", "KL to the reference", "nats per token"),
    ("beta", "KL coefficient", "beta"),
    ("entropy", "entropy", "nats per token"),
    ("grad_norm", "gradient norm", "before clipping"),
)


def curves(records: Sequence[dict], path: Path, headlines: Sequence[Headline] = ()) -> None:
    """Draws a run's records: one panel a metric over iterations, with held-out rewards and headlines, which are shares, as points.

    A run that is paid for what moves are worth has a panel for each such component, with plain players as lines.
    """
    compared = sorted({component for record in records for _, component, _ in yardsticks_of(record)})
    shares = {each.metric: each for each in headlines}
    own = [(each.metric, each.title, each.unit) for each in headlines]
    panels = [PANELS[0], *own, *PANELS[1:], *(("reward/" + name + "/mean", name, "mean") for name in compared)]
    columns = -(-len(panels) // 2)
    with saved_figure(path, 2, columns, (4 * columns, 6), dpi=110) as (_, axes):
        for axis in axes.flat[len(panels) :]:
            axis.axis("off")
        for axis, (name, title, unit) in zip(axes.flat, panels, strict=False):
            points = [(r["iteration"], r[name]) for r in records if r.get(name) is not None]
            if points:
                steps, values = zip(*points, strict=True)
                axis.plot(steps, values, color=TRAINED, linewidth=0.8, alpha=0.3)
                axis.plot(steps, _smoothed(values), color=TRAINED, linewidth=1.5)
            else:
                axis.text(0.5, 0.5, "not part of this run", ha="center", transform=axis.transAxes, color="gray")
            if name == "reward/mean":
                _held_out(axis, records, ("reward",))
            if name in shares:
                known = dict.fromkeys(key.partition("/")[2].partition("/")[2] for record in records for key in record)
                _held_out(axis, records, [key for key in known if key.rpartition("/")[2] == shares[name].component])
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


def _smoothed(values: Sequence[float]) -> np.ndarray:
    """Mean of the values around each one, a twentieth of them in all; of fewer at both ends."""
    box = np.ones(2 * (len(values) // 40) + 1)
    return np.convolve(values, box, "same") / np.convolve(np.ones(len(values)), box, "same")


def _held_out(axis: Axes, records: Sequence[dict], components: Sequence[str]) -> None:
    """Points of the held-out evaluations, greedy and sampled."""
    for mode, marker, face in MODES:
        names = [f"eval/{mode}/{component}" for component in components]
        if points := [(r["iteration"], r[n]) for r in records for n in names if n in r]:
            axis.plot(*zip(*points, strict=True), marker, color=HELD_OUT, mfc=face, label=f"held-out, {mode}")
            axis.legend(frameon=False, fontsize=8)


def _plain_players(axis: Axes, records: Sequence[dict], component: str) -> None:
    """A line a player, with its name."""
    for player, value in {p: v for record in records for p, c, v in yardsticks_of(record) if c == component}.items():
        axis.axhline(value, color="gray", linestyle="--", linewidth=0.8)
        where = {"xycoords": ("axes fraction", "data"), "ha": "center", "va": "center", "zorder": 5}
        behind = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        axis.annotate(player, (0.42, value), fontsize=7, bbox=behind, **where)
