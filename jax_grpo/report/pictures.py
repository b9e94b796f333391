"""A new picture's panels, and what several pictures draw on them. Knows nothing of what it means."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np


@contextlib.contextmanager
def saved_figure(
    path: Path, rows: int, columns: int, size: tuple[float, float], dpi: int = 100, **options: Any
) -> Iterator[tuple]:
    """A figure of `size` in inches and its axes [rows, columns], saved at the end."""
    import matplotlib  # slow to import

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained", **options)
    yield figure, axes
    figure.savefig(path, dpi=dpi)
    plt.close(figure)


def draw_band(axis: Any, x: Sequence[float], values_RN: np.ndarray, *, color: str, label: str) -> None:
    """A line through the means of R runs' values at each of N places, shaded from the lowest to the highest."""
    axis.plot(x, values_RN.mean(0), color=color, marker="o", markersize=3, label=label)
    axis.fill_between(x, values_RN.min(0), values_RN.max(0), color=color, alpha=0.2, linewidth=0)
