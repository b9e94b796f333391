"""A bar for each program of a run, stacked by what fills the device while it runs, under the line of what the device has."""

from pathlib import Path

from jax_grpo.memory.parts import PARTS
from jax_grpo.memory.report import Report
from jax_grpo.system.memory import GB


def save_picture(report: Report, path: Path, title: str) -> Path:
    """Writes a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    names = [program.name for program in report.programs]
    bottom = [0.0] * len(names)
    colours = plt.get_cmap("tab20").colors  # pyright: ignore[reportAttributeAccessIssue]
    for number, part in enumerate(PARTS):
        heights = [program.parts.get(part, 0) / GB for program in report.programs]
        if any(heights):
            axes.bar(names, heights, bottom=bottom, label=part, color=colours[number], width=0.6)
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    for place, top in enumerate(bottom):
        axes.annotate(f"{top:.2f} GB", (place, top), ha="center", va="bottom")
    if report.device.memory < 2 * max(bottom) * GB:
        axes.axhline(report.device.memory / GB, color="black", linestyle="--", linewidth=1)
        axes.annotate(f"{report.device.kind}", (0, report.device.memory / GB), va="bottom")
    axes.set_ylabel("GB on the device")
    axes.set_ylim(0, 1.15 * max(bottom))
    axes.set_title(f"{title}: {report.device.kind}, {report.spare / GB:.2f} GB to spare", fontsize=10)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path
