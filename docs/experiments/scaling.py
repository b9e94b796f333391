"""Time and memory of the update and the rollout over batch, length, width and depth, with the exponents of the fitted powers.

    python docs/experiments/scaling.py --out docs/results/CARD

One size at a time is varied by a factor of 16 while the others stay. Memory is that of the compiled program's buffers, which is
exact; the time is that of the fastest step. Beside each exponent stands that of a formula: FLOPs for time, `expected_bytes` for
memory. Writes `scaling.json` and pictures of its points: `scaling.png`, `throughput.png`, `roofline.png`. Not part of the package.
"""

import argparse
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_grpo.bench import problems
from jax_grpo.bench.machine import finished, line_of, machine, milliseconds, selected, speeds
from jax_grpo.bench.problems import Problem
from jax_grpo.memory.compile import memory_of
from jax_grpo.memory.programs import Program, Run, run_of
from jax_grpo.model import flops
from jax_grpo.report.pictures import saved_figure
from jax_grpo.system.whole_files import write_record

FACTORS = (0.25, 1, 4)  # of the size that is varied; none gets below 1
VOCABULARY, PROMPT, GROUP, HEAD_WIDTH = 1024, 16, 4, 32
STEPS = 3
PROGRAMS = {"rollout": "tab:orange", "update": "tab:blue"}  # and their colours
FLOAT32 = 4  # bytes
# What is compared: a cost's name, the point's key, the key of what it should grow like, and the unit and scale of a picture.
COSTS = (("time", "min_ms", "flops", "ms", 1.0), ("memory", "bytes", "expected_bytes", "MB", 1e-6))


class Sizes(NamedTuple):
    """Completions, their tokens, the model's width and its blocks."""

    batch: int
    length: int
    width: int
    depth: int

    def problem(self, longest: int) -> Problem:
        """A batch of these sizes, for a model with positions for completions of `longest` tokens."""
        model = (self.depth, max(1, self.width // HEAD_WIDTH), self.width, VOCABULARY)
        batch = (self.batch // GROUP, GROUP, PROMPT, self.length)
        return Problem(*model, *batch, positions=PROMPT + longest)


BASE = Sizes(32, 32, 128, 2)


def expected_bytes(program: str, run: Run, problem: Problem) -> float:
    """Bytes of a program in float32 by formula: all arrays of it, for N parameters.

        update   4 (4 N + tokens * 16 L H + 2 L heads * scores + 2 V * predicted)
        rollout  4 (N + 2 L H * tokens + 2 V * rows)

    An optimiser step that recomputes nothing holds weights, gradients, two moments, and of each block the activations of
    Korthikanti et al. 2022 (Reducing Activation Recomputation), section 4.1, without dropout; `scores` are of one head: its
    (query, key) pairs, masked ones included, since they take memory too. Generation holds weights, keys and values, and one
    step's logits.
    """
    sizes, work = run.architecture, problems.work_of(problem)
    parameters, layers, vocabulary = run.resident["parameters"] // FLOAT32, sizes.num_layers, 2 * sizes.vocab_size
    if program == "rollout":
        cache = 2 * layers * sizes.hidden_size * work.tokens
        return FLOAT32 * (parameters + cache + vocabulary * problem.rows)
    keys = problem.prompt + problem.completion
    scores = problem.prompts * problem.prompt**2 + problem.rows * problem.completion * keys
    block = 16 * sizes.hidden_size * work.tokens + 2 * sizes.num_heads * scores
    return FLOAT32 * (4 * parameters + layers * block + vocabulary * work.predicted)


def exponents(points: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Exponents found and expected, of each program's time and memory over each size that has two points or more.

    An exponent is the slope of log(cost) over log(size), by least squares. Those expected are local ones: the formula's own
    slope over the same sizes. Terms that do not grow with the size (the LM head over depth, weights over the batch) make both
    smaller than the highest power in the formula.
    """

    def slope(series: Sequence[Mapping[str, Any]], key: str) -> float:
        return float(np.polyfit(np.log([p["size"] for p in series]), np.log([p[key] for p in series]), 1)[0])

    results = []
    for program, over in dict.fromkeys((p["program"], p["over"]) for p in points):
        series = series_of(points, program, over)
        about = {"program": program, "over": over, "sizes": [p["size"] for p in series]}
        for what, key, formula, *_ in COSTS if len(series) > 1 else ():
            results.append(about | {"what": what, "found": slope(series, key), "expected": slope(series, formula)})
    return results


def filled(leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """Small random weights; ones for ids, masks and seeds."""
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        normal = np.random.default_rng(0).standard_normal(leaf.shape, np.float32)
        return jnp.asarray(0.02 * np.abs(normal), leaf.dtype)  # not negative: second moments are among them
    return jnp.ones(leaf.shape, leaf.dtype)


def costs(program: Program, problem: Problem, run: Run) -> dict[str, Any]:
    """Milliseconds of the program, its compiled bytes, what both should be like, and the least bytes it must move."""
    rollout = program.name == "rollout"
    compiled = program.function.lower(*program.arguments).compile()
    memory = memory_of(compiled)
    arguments = list(jax.tree.map(filled, program.arguments))
    if rollout:
        arguments[-1] = jnp.full_like(arguments[-1], problem.completion)  # the caps

    def step() -> None:
        out = finished(compiled(*arguments))
        if rollout:
            assert int(out.completion_mask_PGC.sum(-1).max()) == problem.completion, "the loop goes to the cap"
        else:
            arguments[0] = out[0]  # the state is donated

    step()  # warms up
    times = milliseconds(step, STEPS)
    forward = flops.forward(run.architecture, problems.work_of(problem))
    return {
        "program": program.name,
        "median_ms": statistics.median(times),
        "min_ms": min(times),
        "bytes": memory.total,
        "expected_bytes": expected_bytes(program.name, run, problem),
        "flops": forward if rollout else (1 + flops.BACKWARD) * forward,
        # A rollout reads the weights once a token; an update reads and writes them, their moments and gradients once.
        "traffic_bytes": (problem.completion if rollout else 2) * memory.arguments,
        "tokens": problem.rows * problem.completion,
    }


def varied(over: str, base: Sizes) -> list[dict[str, Any]]:
    """A point of each program for each value of one size."""
    points, longest = [], int(FACTORS[-1] * base.length)
    for size in (max(1, int(factor * getattr(base, over))) for factor in FACTORS):
        problem = base._replace(**{over: size}).problem(longest)
        # The task's stop rule is not met by random weights: completions have full length.
        settings = {"model": {"tokenizer": "chess"}, "task": {"prompt_style": "full"}}
        run = run_of(problems.config_of(problem, **settings))
        for name in PROGRAMS:
            points.append(costs(run.program(name), problem, run) | {"over": over, "size": size})
    return points


def series_of(points: Sequence[Mapping[str, Any]], program: str, over: str) -> list[Mapping[str, Any]]:
    """The program's points over one size."""
    return [point for point in points if (point["program"], point["over"]) == (program, over)]


def _draw_scaling(points: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Time and memory over each size, both axes logarithmic: a line's slope is the exponent.

    Dashed is what the formulas say, through the middle point: slopes are compared, not heights.
    """
    overs = list(dict.fromkeys(point["over"] for point in points))
    with saved_figure(file, 2, len(overs), (3.4 * len(overs), 6), dpi=110) as (_, panels):
        for column, over in enumerate(overs):
            for panel, (_, cost, formula, unit, scale) in zip(panels[:, column], COSTS, strict=True):
                for program, colour in PROGRAMS.items():
                    series = series_of(points, program, over)
                    sizes, middle = [p["size"] for p in series], series[len(series) // 2]
                    like = [scale * middle[cost] * p[formula] / middle[formula] for p in series]
                    panel.loglog(sizes, [scale * p[cost] for p in series], "o-", color=colour, label=program)
                    panel.loglog(sizes, like, "--", color=colour, linewidth=1, alpha=0.6)
                    panel.set_xticks(sizes, [str(size) for size in sizes])
                panel.set(xlabel=over, ylabel=unit)
                panel.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
        panels[0][0].legend(frameon=False)


def _draw_throughput(points: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Tokens per second against the batch, and bytes against the length of a sequence."""
    with saved_figure(file, 1, 2, (8, 3.5), dpi=110) as (_, ((left, right),)):
        for program, colour in PROGRAMS.items():
            by_batch, by_length = (series_of(points, program, over) for over in ("batch", "length"))
            rates = [1e3 * p["tokens"] / p["median_ms"] for p in by_batch]
            left.plot([p["size"] for p in by_batch], rates, "o-", color=colour, label=program)
            right.plot([p["size"] for p in by_length], [p["bytes"] / 1e6 for p in by_length], "o-", color=colour)
        left.set(xlabel="completions", ylabel="tokens per second")
        right.set(xlabel="completion tokens", ylabel="MB, compiled")
        left.legend(frameon=False)


def _draw_roofline(points: Sequence[Mapping[str, Any]], peak: float, bandwidth: float, file: Path) -> None:
    """FLOPs a second against FLOPs a byte that must be read and written at least, under the measured matmul rate and bandwidth."""
    with saved_figure(file, 1, 1, (6, 4), dpi=110) as (_, ((panel,),)):
        for program, colour in PROGRAMS.items():
            of_program = [p for p in points if p["program"] == program]
            intensity = [p["flops"] / p["traffic_bytes"] for p in of_program]
            rates = [1e-6 * p["flops"] / p["median_ms"] for p in of_program]
            panel.loglog(intensity, rates, "o", color=colour, label=program)
        lowest, highest = panel.get_xlim()
        ends = [min(lowest, 0.1), peak / bandwidth, max(highest, 10 * peak / bandwidth)]
        limits = [1e-9 * min(peak, bandwidth * x) for x in ends]
        panel.loglog(ends, limits, "k--", linewidth=1, label="measured limits")
        panel.set(xlabel="FLOPs per byte", ylabel="GFLOP/s")
        panel.legend(frameon=False)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--over", help=f"of {', '.join(Sizes._fields)}; all of them otherwise")
    parser.add_argument("--out", required=True, type=Path, help="folder of the JSON and the pictures")
    arguments = parser.parse_args(argv)
    points: list[dict[str, Any]] = []
    about = machine() | speeds()
    record = {"command": shlex.join(["python", *sys.argv]), "machine": about, "points": points}
    print(line_of(about))
    for over in selected("--over", arguments.over, Sizes._fields):
        points += varied(over, BASE)
        record["exponents"] = exponents(points)
        write_record(arguments.out / "scaling.json", record)
    for fit in record["exponents"]:
        sizes = f"{fit['sizes'][0]} to {fit['sizes'][-1]}"
        about_fit = f"{fit['found']:.2f} (formula {fit['expected']:.2f})"
        print(f"{fit['program']}'s {fit['what']} over {fit['over']} {sizes}: {about_fit}")
    _draw_scaling(points, arguments.out / "scaling.png")
    _draw_throughput(points, arguments.out / "throughput.png")
    _draw_roofline(points, about["peak_flops"], about["bandwidth"], arguments.out / "roofline.png")


if __name__ == "__main__":
    main()
