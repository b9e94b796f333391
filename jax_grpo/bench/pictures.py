"""Pictures of the suite's results: throughput and memory against size, and the roofline."""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

COLOURS = {"update": "tab:blue", "rollout": "tab:orange"}


def save_pictures(results: Mapping[str, Mapping[str, Any]], folder: Path) -> list[Path]:
    """Writes those whose data is there; returns their files."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    records = [record for record in results.values() if record.get("points")]  # one suite has one such benchmark
    pictures = {"scaling": _scaling, "throughput": _throughput, "roofline": _roofline}
    for record, (name, draw) in itertools.product(records, pictures.items()):
        figure = draw(record, plt)
        figure.savefig(folder / f"{name}.png", dpi=110)
        plt.close(figure)
    return [folder / f"{name}.png" for name in pictures] if records else []


def _series(record: Mapping[str, Any], program: str, over: str) -> list[dict[str, Any]]:
    return [p for p in record["points"] if p["program"] == program and p["over"] == over]


def _scaling(record: Mapping[str, Any], plt: Any) -> Any:
    """Time and memory over each size, both axes logarithmic: a line's slope is the exponent.

    Dashed is what the formulas say (`scaling`), through the middle point: slopes are compared, not heights.
    """
    overs = list(dict.fromkeys(point["over"] for point in record["points"]))
    figure, axes = plt.subplots(2, len(overs), figsize=(3.4 * len(overs), 6), layout="constrained", squeeze=False)
    costs = (("min_ms", "flops", "ms", 1.0), ("bytes", "expected_bytes", "MB", 1e-6))
    for column, over in enumerate(overs):
        for panel, (what, formula, unit, scale) in zip(axes[:, column], costs, strict=True):
            sizes: list[int] = []
            for program, colour in COLOURS.items():
                series = _series(record, program, over)
                sizes, middle = [p["size"] for p in series], series[len(series) // 2]
                like = [scale * middle[what] * p[formula] / middle[formula] for p in series]
                panel.loglog(sizes, [scale * p[what] for p in series], "o-", color=colour, label=program)
                panel.loglog(sizes, like, "--", color=colour, linewidth=1, alpha=0.6)
            panel.set(xlabel=over, ylabel=unit)
            panel.set_xticks(sizes, [str(size) for size in sizes])
            panel.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
    axes[0][0].legend(frameon=False)
    return figure


def _throughput(record: Mapping[str, Any], plt: Any) -> Any:
    """Tokens per second against the batch, and bytes against the length of a sequence."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.5), layout="constrained")
    for program, colour in COLOURS.items():
        by_batch, by_length = (_series(record, program, over) for over in ("batch", "length"))
        rates = [1e3 * p["tokens"] / p["median_ms"] for p in by_batch]
        left.plot([p["size"] for p in by_batch], rates, "o-", color=colour, label=program)
        right.plot([p["size"] for p in by_length], [p["bytes"] / 1e6 for p in by_length], "o-", color=colour)
    left.set(xlabel="completions", ylabel="tokens per second")
    right.set(xlabel="completion tokens", ylabel="MB, compiled")
    left.legend(frameon=False)
    return figure


def _roofline(record: Mapping[str, Any], plt: Any) -> Any:
    """FLOPs a second against FLOPs a byte that must be read and written at least, under the measured matmul rate and bandwidth."""
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for program, colour in COLOURS.items():
        points = [p for p in record["points"] if p["program"] == program]
        intensity = [p["flops"] / p["traffic_bytes"] for p in points]
        axes.loglog(intensity, [1e-6 * p["flops"] / p["median_ms"] for p in points], "o", color=colour, label=program)
    peak, bandwidth = record["peak_flops"], record["bandwidth"]
    lowest, highest = axes.get_xlim()
    ends = [min(lowest, 0.1), peak / bandwidth, max(highest, 10 * peak / bandwidth)]
    axes.loglog(ends, [1e-9 * min(peak, bandwidth * x) for x in ends], "k--", linewidth=1, label="measured limits")
    axes.set(xlabel="FLOPs per byte", ylabel="GFLOP/s")
    axes.legend(frameon=False)
    return figure
