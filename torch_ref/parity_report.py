"""Pictures and a Markdown page from the parity command's results; computes nothing but maxima."""

import re
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from torch_ref import compare
from torch_ref.compare import TOLERANCES, logits_tolerance

COLOURS = {"float64": "#16a34a", "float32": "#2563eb", "bfloat16": "#d97706"}
BLOCK = re.compile(r"\b(?:h|layers)\.(\d+)\.")  # of GPT-2, of the others
SIDES = {"jax_grpo": ("#2563eb", "-", 3.0), "torch_ref": ("#111827", "--", 1.2)}


class Row(NamedTuple):
    """One measured error beside its tolerance; a tolerance of None is reported only."""

    what: str
    dtype: str
    error: float
    worst: str
    tolerance: float | None
    floor: str = ""
    """Of relative errors: what a smaller reference counts as."""

    @property
    def passed(self) -> bool:
        return self.tolerance is None or self.error <= self.tolerance


def rows_of(results: dict[str, Any]) -> list[Row]:
    """The table's rows: the largest error of each kind at each precision, over both batches."""
    rows = []
    for dtype, allowed in TOLERANCES.items():
        steps = results["one_step"][dtype]

        def largest(kind: str, steps=steps) -> tuple[float, str]:
            where, error = compare.largest(
                {f"{name}, {batch}": x for batch, e in steps.items() for name, x in _named(e[kind], kind)}
            )
            return error, where

        for what, kind, tolerance in (
            ("logits, absolute", "logits", logits_tolerance(dtype, max(e["largest_logit"] for e in steps.values()))),
            ("logp, absolute, nats", "logp", allowed.logp),
            ("loss and every metric, relative", "scalars", allowed.scalars),
            ("every gradient, relative L2", "gradients", allowed.gradients),
        ):
            floor = _floor(allowed.floor, [e["floors"] for e in steps.values()]) if kind == "scalars" else ""
            rows.append(Row(what, dtype, *largest(kind), tolerance, floor))
        change = results["change"][dtype]
        worst, error = compare.largest(change)
        rows.append(Row("change after AdamW steps, relative L2", dtype, error, _short(worst), allowed.change))
    return rows + _several_rows(results["several"])


def _several_rows(several: dict[str, Any]) -> list[Row]:
    """Of the iterations of several optimiser steps."""
    allowed = TOLERANCES["float64"]
    named = {f"{n}, iteration {i}": x for i, errors in enumerate(several["iterations"]) for n, x in errors.items()}
    where, error = compare.largest(named)
    worst, change = compare.largest(several["change"])
    return [
        Row("several steps an iteration: metrics", "float64", error, where, allowed.scalars),
        Row("several steps an iteration: change", "float64", change, _short(worst), allowed.change),
    ]


def _floor(of_metrics: float, of_losses: list[dict[str, float]]) -> str:
    highest = max(floor for batch in of_losses for floor in batch.values())
    return f"{of_metrics:g}" + (f"; the two losses {highest:.2g}" if highest > of_metrics else "")


def _named(errors: float | dict[str, float], kind: str) -> list[tuple[str, float]]:
    return [(_short(n), x) for n, x in errors.items()] if isinstance(errors, dict) else [(kind, errors)]


def _short(name: str) -> str:
    return name.removeprefix("grad/").removeprefix("transformer.")


def write(results: dict[str, Any], out: Path) -> list[Row]:
    """Writes README.md, gradients.png, curves.png and sampling.png into `out`; returns the table's rows."""
    rows = rows_of(results)
    _gradients(results, out / "gradients.png")
    _curves(results, out / "curves.png")
    _sampling(results, out / "sampling.png")
    (out / "README.md").write_text(_page(results, rows))
    return rows


def _page(results: dict[str, Any], rows: list[Row]) -> str:
    model, versions = results["config"]["model"], results["versions"]
    name = model["weights"] or f"random weights, {model['num_layers']} layers of width {model['hidden_size']}"
    verdict = "everything within its tolerance" if all(row.passed for row in rows) else "NOT within tolerance"
    table = ["| what | precision | largest error | where | tolerance | floor | |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        allowed = "reported" if row.tolerance is None else f"{row.tolerance:.0e}"
        table.append(
            f"| {row.what} | {row.dtype} | {row.error:.1e} | {row.worst} | {allowed} | {row.floor} | {_mark(row)} |"
        )
    off, sampling = results["off_policy"], results["sampling"]
    return "\n".join(
        [
            f"# Parity: {name}",
            "",
            f"`jax_grpo` against `torch_ref`: {verdict}.",
            "",
            f"{results['sequences']} sequences a batch, {results['tokens']} completion tokens in {len(results['recorded'])} "
            "recorded iterations. *On policy* is the first batch with the run's first weights, *off policy* the same one with its "
            f"last ones: the mean ratio is {off['ratio/mean']:.3f}, {off['clip_fraction/low']:.1%} and "
            f"{off['clip_fraction/high']:.1%} of the tokens are beyond the lower and the upper clip bound, and the KL is "
            f"{off.get('kl/mean', 0.0):.3f} nats per token.",
            "",
            *table,
            "",
            "A relative error is of the reference's value, or of the floor where the value is smaller. In bfloat16 the two "
            "losses' floor is the batch's mean |advantage|: the size of the terms whose sum cancels.",
            "",
            "Rollout against trainer, the same tokens: mean and largest difference of the log-probability "
            + ", ".join(f"{side} {gap['mean']:.1e} and {gap['max']:.1e}" for side, gap in sampling.items())
            + " nats.",
            "",
            _several_line(results["several"]),
            "",
            "![relative error of every gradient by layer](gradients.png)",
            "![loss and KL of both implementations on the same rollouts](curves.png)",
            "![rollout log-probabilities against both trainers](sampling.png)",
            "",
            f"    {results['command']}",
            "",
            f"{results['machine']}, {results['device']}; "
            + ", ".join(f"{package} {version}" for package, version in versions.items())
            + f"; {results['seconds']} s.",
            "",
        ]
    )


def _several_line(several: dict[str, Any]) -> str:
    shape, steps = several["config"], int(several["metrics"][-1]["optimizer_step"])
    beta = [metrics["beta"] for metrics in several["metrics"]]
    moves = f"an adaptive beta, {beta[0]:.3g} to {beta[-1]:.3g}" if shape["adaptive"] else "a constant beta"
    return (
        f"*Several steps an iteration*: both trainers through {len(beta)} iterations of {shape['epochs']} epochs x "
        f"{shape['minibatches']} minibatches x {shape['micro_batches']} micro-batches, {steps} optimiser steps, with {moves}; the "
        "reference is given tokens, masks and rewards, and finds everything else itself."
    )


def _mark(row: Row) -> str:
    if row.tolerance is None:
        return ""
    return "yes" if row.passed else "**NO**"


def _layer(name: str, layers: int) -> float:
    """Where a tensor stands on the axis: embeddings 0, blocks 1 to L, last norm and a head of its own L + 1."""
    block = BLOCK.search(name)
    if block:
        return 1 + int(block[1])
    return 0 if "wte" in name or "wpe" in name or "embed_tokens" in name else layers + 1


def _gradients(results: dict[str, Any], path: Path) -> None:
    names = list(results["one_step"]["float32"]["on policy"]["gradients"])
    layers = 1 + max(int(block[1]) for name in names if (block := BLOCK.search(name)))
    figure, axis = plt.subplots(figsize=(9, 4.2), layout="constrained")
    for dtype, steps in results["one_step"].items():
        for offset, marker, (batch, errors) in zip((-0.12, 0.12), "ox", steps.items(), strict=True):
            points = [(_layer(name, layers) + offset, max(x, 1e-18)) for name, x in errors["gradients"].items()]
            x, y = zip(*points, strict=True)
            axis.scatter(
                x, y, s=14, marker=marker, color=COLOURS[dtype], alpha=0.7, linewidth=1, label=f"{dtype}, {batch}"
            )
        axis.axhline(TOLERANCES[dtype].gradients, color=COLOURS[dtype], linewidth=0.8, linestyle=":")
    axis.set_yscale("log")
    axis.set_xticks(range(layers + 2), ["embeddings", *map(str, range(layers)), "last"], fontsize=8)
    axis.set_xlabel("block")
    axis.set_ylabel("relative L2 error")
    axis.set_title(
        f"Each of the {len(names)} gradients, jax_grpo against torch_ref; dotted: tolerance", loc="left", fontsize=10
    )
    axis.legend(fontsize=7, ncols=3, frameon=False, loc="center left", bbox_to_anchor=(0, 0.3))
    _save(figure, [axis], path)


def _curves(results: dict[str, Any], path: Path) -> None:
    figure, axes = plt.subplots(2, 3, figsize=(12, 5.6), layout="constrained", sharex="col")
    for column, (dtype, sides) in zip(axes.T, results["curves"].items(), strict=True):
        for axis, (name, title) in zip(column, (("loss", "loss"), ("kl/mean", "KL, nats per token")), strict=True):
            for side, (colour, style, width) in SIDES.items():
                axis.plot(sides[side][name], style, color=colour, linewidth=width, label=side)
            gap = np.abs(np.subtract(sides["jax_grpo"][name], sides["torch_ref"][name])).max()
            axis.set_title(f"{title}, {dtype}: {gap:.1e} apart", fontsize=9, loc="left")
        column[1].set_xlabel("optimiser step, the same rollouts")
    axes[0, 0].legend(frameon=False, fontsize=8)
    _save(figure, list(axes.flat), path)


def _sampling(results: dict[str, Any], path: Path) -> None:
    figure, axis = plt.subplots(figsize=(6, 3.2), layout="constrained")
    for side, gap in results["sampling"].items():
        sizes = np.maximum(gap["all"], 1e-9)
        colour, style, width = SIDES[side]
        axis.plot(sizes, np.linspace(0, 1, len(sizes)), style, color=colour, linewidth=width, label=side)
    axis.set_xscale("log")
    axis.set_xlabel("|sampling logp - trainer's logp|, nats, float32")
    axis.set_ylabel("share of tokens")
    axis.legend(frameon=False, fontsize=8)
    _save(figure, [axis], path)


def _save(figure, axes, path: Path) -> None:
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    figure.savefig(path, dpi=110)
    plt.close(figure)
