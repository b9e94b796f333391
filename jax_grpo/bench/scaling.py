"""Time and memory of the update and the rollout over batch, length, width and depth, with the exponents of the fitted powers.

    python -m jax_grpo.bench.scaling --json scaling.json

One size varies while the others stay. Memory is that of the compiled program's buffers, which is exact; the time is that of
the fastest step. Beside each exponent stands that of a formula: FLOPs for time, `expected_bytes` for memory.
"""

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_grpo.bench import harness, problems
from jax_grpo.bench.harness import header, line
from jax_grpo.bench.machine import machine, milliseconds, speeds
from jax_grpo.bench.problems import Problem
from jax_grpo.memory.compile import memory_of
from jax_grpo.memory.programs import Program, Run, run_of
from jax_grpo.model import flops

BASE = {"batch": 32, "length": 32, "width": 128, "depth": 2}
SIZES = {"batch": (8, 32, 128), "length": (8, 32, 128), "width": (32, 128, 512), "depth": (1, 2, 8)}
VOCABULARY, PROMPT, GROUP, HEAD_WIDTH = 1024, 16, 4, 32
STEPS = 3
PROGRAMS = ("rollout", "update")
FLOAT32 = 4  # bytes
# What is compared: a cost's name, the point's key, and the key of what it should grow like.
COSTS = (("time", "min_ms", "flops"), ("memory", "bytes", "expected_bytes"))


def expected_bytes(program: str, run: Run, problem: Problem) -> float:
    """Bytes of a program in float32 by formula: all that is held, for N parameters.

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
        series = [p for p in points if (p["program"], p["over"]) == (program, over)]
        about = {"program": program, "over": over, "sizes": [p["size"] for p in series]}
        for what, key, formula in COSTS if len(series) > 1 else ():
            results.append(about | {"what": what, "found": slope(series, key), "expected": slope(series, formula)})
    return results


def exponent_lines(fits: Sequence[Mapping[str, Any]]) -> list[str]:
    """A Markdown table; empty where there are none."""
    lines = [header("program", "over", "cost", "exponent found", "by the formula")] if fits else []
    for fit in fits:
        span = f"{fit['over']} {fit['sizes'][0]} to {fit['sizes'][-1]}"
        lines.append(line(fit["program"], span, fit["what"], f"{fit['found']:.2f}", f"{fit['expected']:.2f}"))
    return [*lines, ""] if fits else []


def problem_of(sizes: Mapping[str, int]) -> Problem:
    """A batch of these sizes; `batch` counts completions, `length` their tokens."""
    model = (sizes["depth"], max(1, sizes["width"] // HEAD_WIDTH), sizes["width"], VOCABULARY)
    batch = (sizes["batch"] // GROUP, GROUP, PROMPT, sizes["length"])
    return Problem(*model, *batch, positions=PROMPT + max(SIZES["length"]))


def filled(leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """Small random weights; ones for ids, masks and seeds."""
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        drawn = np.random.default_rng(0).standard_normal(leaf.shape, np.float32)
        return jnp.asarray(0.02 * np.abs(drawn), leaf.dtype)  # not negative: second moments are among them
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
        out = jax.block_until_ready(compiled(*arguments))
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


def main(argv: list[str] | None = None) -> None:
    parser = harness.command_parser("jax_grpo.bench.scaling", __doc__)
    parser.add_argument("--json", metavar="FILE", help="where to write the raw data")
    parser.add_argument("--over", default=",".join(SIZES), help="sizes to vary")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no size that would not be done by then")
    parser.add_argument("--resume", action="store_true", help="keep the sizes that --json FILE already has")
    arguments = parser.parse_args(argv)
    wanted = [(over, size) for over in harness.selected("--over", arguments.over, SIZES) for size in SIZES[over]]
    started = time.monotonic()
    command = harness.command_of("jax_grpo.bench.scaling", argv)
    record = {"command": command, "machine": machine(), "base": BASE, **speeds()}
    # Points by sizes, of each program: the base's sizes are among those of every size that is varied, and are measured once.
    known: dict[tuple[int, ...], dict[str, dict[str, Any]]] = {}
    for point in harness.saved(arguments.json).get("points", []) if arguments.resume else []:
        known.setdefault(tuple(point["sizes"].values()), {})[point["program"]] = point
    points, longest_s = [], 0.0
    for number, (over, size) in enumerate(wanted):
        sizes, begun = BASE | {over: size}, time.monotonic()
        if (key := tuple(sizes.values())) not in known:
            if begun - started + longest_s > arguments.seconds:
                left = ", ".join(f"{over} {size}" for over, size in wanted[number:])
                raise SystemExit(f"{arguments.seconds:.0f} s were too few for {left}")
            problem = problem_of(sizes)
            # The task's stop rule is not met by random weights: completions have full length.
            settings = {"model": {"tokenizer": "chess"}, "task": {"prompt_style": "full"}}
            run = run_of(problems.config_of(problem, **settings))
            known[key] = {name: costs(run.program(name), problem, run) for name in PROGRAMS}
            longest_s = max(longest_s, time.monotonic() - begun)
        for point in known[key].values():
            points.append(point | {"sizes": sizes, "over": over, "size": size})
            cost = f"{point['min_ms']:9.1f} ms {point['bytes'] / 1e6:8.1f} MB"
            print(f"{point['program']:8} {over:7} {size:4} {cost}", flush=True)
        record |= {"points": points, "exponents": exponents(points)}
        harness.save(arguments.json, record)
    print("\n".join(exponent_lines(record["exponents"])))


if __name__ == "__main__":
    main()
