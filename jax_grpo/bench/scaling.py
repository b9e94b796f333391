"""Time and memory of the update and the rollout over batch, length, width and depth, with the exponents of the fitted powers.

    python -m jax_grpo.bench.scaling --json scaling.json

One size varies while the others stay. Memory is that of the compiled program's buffers, which is exact; the time is that of
the fastest step. `fits` says what both should grow like.
"""

import argparse
import json
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_grpo import flops
from jax_grpo.bench import fits
from jax_grpo.bench.machine import machine
from jax_grpo.config import Config
from jax_grpo.memory.shapes import Program, Run, run_of

BASE = {"batch": 32, "length": 32, "width": 128, "depth": 2}
SIZES = {"batch": (8, 32, 128), "length": (8, 32, 128), "width": (32, 128, 512), "depth": (1, 2, 8)}
VOCABULARY, PROMPT, GROUP, HEAD_WIDTH = 1024, 16, 4, 32
STEPS = 3
PROGRAMS = ("update", "rollout")


def config_of(sizes: dict[str, int]) -> Config:
    """A run of these sizes; `batch` counts completions, `length` their tokens."""
    model = {
        "vocab_size": VOCABULARY,
        "tokenizer": "chess",
        "num_layers": sizes["depth"],
        "num_heads": max(1, sizes["width"] // HEAD_WIDTH),
        "hidden_size": sizes["width"],
        "max_position_embeddings": PROMPT + max(SIZES["length"]),
    }
    return Config.model_validate(
        {
            "iterations": 10,
            "run_dir": "none",
            "model": model,
            "task": {
                "prompt_style": "full"
            },  # its stop rule is not met by random weights: completions have full length
            "prompts": {"per_iteration": sizes["batch"] // GROUP, "max_prompt_tokens": PROMPT},
            "rollout": {"group_size": GROUP, "max_new_tokens": sizes["length"]},
        }
    )


def filled(leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """Small random weights; ones for ids, masks and seeds."""
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        drawn = np.random.default_rng(0).standard_normal(leaf.shape, np.float32)
        return jnp.asarray(0.02 * np.abs(drawn), leaf.dtype)  # not negative: second moments are among them
    return jnp.ones(leaf.shape, leaf.dtype)


def costs(program: Program, sizes: dict[str, int], run: Run) -> dict[str, Any]:
    """Milliseconds of the program, its compiled bytes, what both should be like, and the least bytes it must move."""
    compiled = program.function.lower(*program.arguments).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    arguments = jax.tree.map(filled, program.arguments)
    if program.name == "rollout":
        *others, caps_P = arguments
        arguments = (*others, jnp.full_like(caps_P, sizes["length"]))
    milliseconds = []
    for number in range(STEPS + 1):
        started = time.perf_counter()
        out = jax.block_until_ready(compiled(*arguments))
        if number:  # the first one warms up
            milliseconds.append(1e3 * (time.perf_counter() - started))
        if program.name == "rollout":
            assert int(out.completion_mask_PGC.sum(-1).max()) == sizes["length"], "the loop goes to the cap"
        if program.name == "update":
            arguments = (out[0], *arguments[1:])  # the state is donated
    parameters, prompts = run.resident["parameters"] // fits.FLOAT32, sizes["batch"] // GROUP
    work = flops.completions_work(np.ones((prompts, PROMPT), int), np.ones((prompts, GROUP, sizes["length"]), int))
    scores = prompts * PROMPT**2 + sizes["batch"] * sizes["length"] * (PROMPT + sizes["length"])
    expected = {
        "update": fits.update_bytes(run.architecture, work, parameters, scores),
        "rollout": fits.rollout_bytes(run.architecture, work, parameters, sizes["batch"]),
    }
    passes = {"rollout": 1, "update": 1 + flops.BACKWARD}[program.name]
    # A rollout reads the weights once a token; an update reads and writes them, their moments and gradients once.
    moved = {"rollout": sizes["length"] * memory.argument_size_in_bytes, "update": 2 * memory.argument_size_in_bytes}
    return {
        "program": program.name,
        "median_ms": statistics.median(milliseconds),
        "min_ms": min(milliseconds),
        "bytes": memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes,
        "expected_bytes": expected[program.name],
        "flops": passes * flops.forward(run.architecture, work),
        "traffic_bytes": moved[program.name],
        "tokens": sizes["batch"] * sizes["length"],
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m jax_grpo.bench.scaling", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--over", default=",".join(SIZES), help="sizes to vary")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no size that would not be done by then")
    parser.add_argument("--resume", action="store_true", help="keep the sizes that --json FILE already has")
    arguments = parser.parse_args(argv)
    if unknown := [name for name in arguments.over.split(",") if name not in SIZES]:
        raise SystemExit(f"--over {unknown[0]!r}: expected some of {', '.join(SIZES)}")
    started, command = time.monotonic(), " ".join(sys.argv[1:] if argv is None else argv)
    file = Path(arguments.json) if arguments.json else None
    earlier = json.loads(file.read_text()) if file and arguments.resume and file.exists() else {"points": []}
    cpu = jax.devices()[0].platform == "cpu"
    record: dict[str, Any] = {
        "command": f"python -m jax_grpo.bench.scaling {command}".strip(),
        "machine": machine(),
        "device": jax.devices()[0].device_kind,
        "base": BASE,
        "peak_flops": flops.measured_peak("float32", 1024 if cpu else 8192),
        "bandwidth": flops.measured_bandwidth(),
    }
    known = {tuple(p["sizes"].values()): [] for p in earlier["points"]}
    for p in earlier["points"]:
        if all(q["program"] != p["program"] for q in known[tuple(p["sizes"].values())]):
            known[tuple(p["sizes"].values())].append(p)
    wanted = [(over, size) for over in arguments.over.split(",") for size in SIZES[over]]
    points, longest_s = [], 0.0
    for number, (over, size) in enumerate(wanted):
        sizes, begun = BASE | {over: size}, time.monotonic()
        if (key := tuple(sizes.values())) not in known:
            if begun - started + longest_s > arguments.seconds:
                left = ", ".join(f"{over} {size}" for over, size in wanted[number:])
                raise SystemExit(f"{arguments.seconds:.0f} s were too few for {left}")
            run = run_of(config_of(sizes))
            known[key] = [costs(program, sizes, run) for program in run.programs if program.name in PROGRAMS]
            longest_s = max(longest_s, time.monotonic() - begun)
        points += [p | {"sizes": sizes, "over": over, "size": size} for p in known[key]]
        for p in points[-len(PROGRAMS) :]:
            print(f"{p['program']:8} {over:7} {size:4} {p['min_ms']:9.1f} ms {p['bytes'] / 1e6:8.1f} MB", flush=True)
        record |= {"points": points, "exponents": fits.exponents(points)}
        if file:  # after each size: a run that is stopped leaves what it has
            file.write_text(json.dumps(record, indent=1) + "\n")
    print("\n".join(fits.exponent_lines(record["exponents"])))


if __name__ == "__main__":
    main()
