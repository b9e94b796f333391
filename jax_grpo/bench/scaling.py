"""Time and memory of the update and the rollout over batch, length, width and depth, with the exponents of the fitted powers.

    python -m jax_grpo.bench.scaling --json scaling.json

One size is doubled while the others stay. An exponent is the slope of log(cost) over log(size) by least squares; a fixed cost
(dispatch, the LM head over depth) makes it smaller than that of the work.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_grpo import flops
from jax_grpo.bench.harness import machine
from jax_grpo.config import Config
from jax_grpo.memory.shapes import Program, run_of

BASE = {"batch": 16, "length": 32, "width": 128, "depth": 2}
SIZES = {"batch": (8, 16, 32, 64), "length": (16, 32, 64, 128), "width": (64, 128, 256, 512), "depth": (1, 2, 4, 8)}
EXPECTED = {
    "batch": "1",
    "length": "1 while matrices dominate, 2 where attention does",
    "width": "1 where activations and attention dominate, 2 where matrices do",
    "depth": "1, less the head's share",
}
VOCABULARY, PROMPT, GROUP, HEAD_WIDTH = 1024, 16, 4, 32
STEPS = 5


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


def point(program: Program, sizes: dict[str, int], over: str) -> dict[str, Any]:
    """Median milliseconds of the program, its compiled bytes, model FLOPs, and the least bytes it must move."""
    compiled = program.function.lower(*program.arguments).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    arguments = jax.tree.map(filled, program.arguments)
    milliseconds = []
    for number in range(STEPS + 1):
        started = time.perf_counter()
        out = jax.block_until_ready(compiled(*arguments))
        if number:  # the first one warms up
            milliseconds.append(1e3 * (time.perf_counter() - started))
        if program.name == "update":
            arguments = (out[0], *arguments[1:])  # the state is donated
    architecture = run_of(config_of(sizes)).architecture
    prompts = sizes["batch"] // GROUP
    work = flops.completions_work(np.ones((prompts, PROMPT), int), np.ones((prompts, GROUP, sizes["length"]), int))
    passes = {"rollout": 1, "update": 1 + flops.BACKWARD}[program.name]
    # A rollout reads the weights once a token; an update reads and writes them, their moments and gradients once.
    moved = {"rollout": sizes["length"] * memory.argument_size_in_bytes, "update": 2 * memory.argument_size_in_bytes}
    return {
        "program": program.name,
        "over": over,
        "size": sizes[over],
        "median_ms": statistics.median(milliseconds),
        "min_ms": min(milliseconds),
        "bytes": memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes,
        "flops": passes * flops.forward(architecture, work),
        "traffic_bytes": moved[program.name],
        "tokens": sizes["batch"] * sizes["length"],
    }


def exponents(points: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The slope of each program's time, memory and FLOPs over each size."""
    found = []
    for program in ("update", "rollout"):
        for over, expected in EXPECTED.items():
            chosen = [p for p in points if p["program"] == program and p["over"] == over]
            if len(chosen) < 2:
                continue
            sizes = np.log([p["size"] for p in chosen])
            for what, key in (("time", "min_ms"), ("memory", "bytes"), ("model FLOPs", "flops")):
                slope = float(np.polyfit(sizes, np.log([p[key] for p in chosen]), 1)[0])
                found.append({"program": program, "over": over, "what": what, "found": slope, "expected": expected})
    return found


def measured_bandwidth(size: int = 1 << 26) -> float:
    """Bytes a second of the fastest of some passes that read and write an array of `size` bytes."""
    array = jnp.zeros(size // 4, jnp.float32)
    add = jax.jit(lambda x: x + 1)
    jax.block_until_ready(add(array))
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        jax.block_until_ready(add(array))
        seconds.append(time.perf_counter() - started)
    return 2 * size / min(seconds)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m jax_grpo.bench.scaling", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--over", default=",".join(SIZES), help="sizes to vary")
    arguments = parser.parse_args(argv)
    if unknown := [name for name in arguments.over.split(",") if name not in SIZES]:
        raise SystemExit(f"--over {unknown[0]!r}: expected some of {', '.join(SIZES)}")
    command = f"python -m jax_grpo.bench.scaling {' '.join(sys.argv[1:] if argv is None else argv)}"
    record: dict[str, Any] = {
        "command": command,
        "machine": machine(),
        "device": jax.devices()[0].device_kind,
        "peak_flops": flops.measured_peak("float32", 1024 if jax.devices()[0].platform == "cpu" else 8192),
        "bandwidth": measured_bandwidth(),
        "points": [],
    }
    for over in arguments.over.split(","):
        for size in SIZES[over]:
            sizes = BASE | {over: size}
            for program in run_of(config_of(sizes)).programs:
                if program.name in ("rollout", "update"):
                    record["points"].append(point(program, sizes, over))
                    last = record["points"][-1]
                    print(
                        f"{program.name:8} {over:7} {size:4} {last['median_ms']:9.1f} ms {last['bytes'] / 1e6:8.1f} MB",
                        flush=True,
                    )
            record["exponents"] = exponents(record["points"])
            if arguments.json:  # after each size: a run that is stopped leaves what it has
                Path(arguments.json).write_text(json.dumps(record, indent=1) + "\n")
    for fit in record["exponents"]:
        print(
            f"{fit['program']:8} {fit['what']:12} over {fit['over']:7} {fit['found']:5.2f}  expected {fit['expected']}"
        )


if __name__ == "__main__":
    main()
