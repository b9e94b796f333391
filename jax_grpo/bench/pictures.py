"""Pictures of the suite's results: throughput and memory against size, and the roofline."""

from pathlib import Path
from typing import Any

PROGRAM_COLOURS = {"update": "tab:blue", "rollout": "tab:orange"}


def save_pictures(results: dict[str, dict[str, Any]], folder: Path) -> list[Path]:
    """Writes those whose data is there; returns their files."""
    import matplotlib

    matplotlib.use("Agg")
    made = []
    points = results.get("scaling", {}).get("points")
    if points:
        made += [_scaling(points, folder / "scaling.png"), _throughput(points, folder / "throughput.png")]
        made.append(_roofline(points, results["scaling"], folder / "roofline.png"))
    return made


def _scaling(points: list[dict[str, Any]], path: Path) -> Path:
    """Time and memory over each size, both axes logarithmic: a line's slope is the exponent.

    Dashed is what the formulas say (`fits`), through the middle point: slopes are compared, not heights.
    """
    import matplotlib.pyplot as plt

    sizes = list(dict.fromkeys(point["over"] for point in points))
    figure, axes = plt.subplots(2, len(sizes), figsize=(3.4 * len(sizes), 6), layout="constrained", squeeze=False)
    for column, over in enumerate(sizes):
        measured = sorted({point["size"] for point in points if point["over"] == over})
        for row, (what, formula, unit, scale) in enumerate(
            (
                ("min_ms", "flops", "ms", 1.0),
                ("bytes", "expected_bytes", "MB", 1e-6),
            )
        ):
            for program, colour in PROGRAM_COLOURS.items():
                chosen = [p for p in points if p["over"] == over and p["program"] == program]
                at, middle = [p["size"] for p in chosen], chosen[len(chosen) // 2]
                costs = [scale * p[what] for p in chosen]
                like = [scale * middle[what] * p[formula] / middle[formula] for p in chosen]
                axes[row][column].loglog(at, costs, "o-", color=colour, label=program)
                axes[row][column].loglog(at, like, "--", color=colour, linewidth=1, alpha=0.6)
            axes[row][column].set_xlabel(over)
            axes[row][column].set_xticks(measured, [str(size) for size in measured])
            axes[row][column].tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
            axes[row][column].set_ylabel(unit)
    axes[0][0].legend(frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def _throughput(points: list[dict[str, Any]], path: Path) -> Path:
    """Tokens per second against the batch, and bytes against the length of a sequence."""
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.5), layout="constrained")
    for program, colour in PROGRAM_COLOURS.items():
        by_batch = [p for p in points if p["over"] == "batch" and p["program"] == program]
        rates = [1e3 * p["tokens"] / p["median_ms"] for p in by_batch]
        left.plot([p["size"] for p in by_batch], rates, "o-", color=colour, label=program)
        by_length = [p for p in points if p["over"] == "length" and p["program"] == program]
        right.plot([p["size"] for p in by_length], [p["bytes"] / 1e6 for p in by_length], "o-", color=colour)
    left.set_xlabel("completions")
    left.set_ylabel("tokens per second")
    right.set_xlabel("completion tokens")
    right.set_ylabel("MB, compiled")
    left.legend(frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def _roofline(points: list[dict[str, Any]], record: dict[str, Any], path: Path) -> Path:
    """FLOPs a second against FLOPs a byte that must be read and written at least, under the measured matmul rate and bandwidth."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for program, colour in PROGRAM_COLOURS.items():
        chosen = [p for p in points if p["program"] == program]
        intensity = [p["flops"] / p["traffic_bytes"] for p in chosen]
        rate = [1e-6 * p["flops"] / p["median_ms"] for p in chosen]
        axes.loglog(intensity, rate, "o", color=colour, label=program)
    peak, bandwidth = record["peak_flops"], record["bandwidth"]
    lowest, highest = axes.get_xlim()
    ends = [min(lowest, 0.1), peak / bandwidth, max(highest, 10 * peak / bandwidth)]
    axes.loglog(ends, [1e-9 * min(peak, bandwidth * x) for x in ends], "k--", linewidth=1, label="measured limits")
    axes.set_xlabel("FLOPs per byte")
    axes.set_ylabel("GFLOP/s")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path
