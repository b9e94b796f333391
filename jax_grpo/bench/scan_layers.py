"""Blocks in a loop (scan over layers) beside blocks one after another: the update's memory, compile time and speed.

    python -m jax_grpo.bench.scan_layers --problem 124m --target cpu --steps 5
    JAX_PLATFORMS=cpu python -m jax_grpo.bench.scan_layers --problem 124m-64x192-bf16 --target rtx4090

It is why there is no such setting: a loop keeps every array that a block's backward pass reads, where the compiler recomputes most
elementwise ones of unrolled blocks. Steps are timed on targets that are here (`cpu`, `local`).
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
from flax import nnx

from jax_grpo.bench.machine import machine
from jax_grpo.bench.update import jax_parts
from jax_grpo.bench.update_problem import ABOUT, RESOLVE, Problem, problem_of
from jax_grpo.memory.compiled import HERE, program_bytes
from jax_grpo.memory.shapes import Program
from jax_grpo.model import GPT2, Block, GPT2Config, differentiated
from jax_grpo.update import init_state, make_update


class Scanned(GPT2):
    """GPT-2 with a single block, whose parameters have a first axis over the layers."""

    def _through_blocks(self, x_RH: jax.Array, *masks: jax.Array) -> jax.Array:
        run = differentiated(Block.grouped, self.remat)
        graphdef, layers = nnx.split(self.h[0])
        return jax.lax.scan(lambda x, layer: (run(nnx.merge(graphdef, layer), x, *masks), None), x_RH, layers)[0]


def stacked(params: nnx.State) -> nnx.State:
    """Parameters of `GPT2` as `Scanned` wants them."""
    layers = [params["h"][layer] for layer in sorted(params["h"])]
    return nnx.State({**params, "h": {0: jax.tree.map(lambda *x: jnp.stack(x), *layers)}})


def parts(problem: Problem, scanned: bool, remat: bool) -> tuple[Any, Any, Any, Any]:
    """(graphdef, parameters, batch, config) of the update."""
    graphdef, params, batch, config = jax_parts(problem, "all" if remat else False)
    if scanned:
        sizes = GPT2Config(problem.vocabulary, 1, problem.heads, problem.width, problem.positions)
        dtype = jnp.dtype(problem.dtype)
        model = nnx.eval_shape(
            lambda: Scanned(sizes, rngs=nnx.Rngs(0), compute_dtype=dtype, remat="all" if remat else False)
        )
        graphdef, params = nnx.split(model, nnx.Param)[0], stacked(params)
    return graphdef, params, batch, config


def measured(problem: Problem, scanned: bool, remat: bool, target: str, steps: int) -> dict[str, Any]:
    """Bytes and seconds of the compiled update, and where it can run its median milliseconds and its first loss."""
    graphdef, params, batch, config = parts(problem, scanned, remat)
    update, state = make_update(graphdef, config, config.optimizer_steps()), init_state(params, config)
    del params
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (state, batch))
    started = time.perf_counter()
    record: dict[str, Any] = {"bytes": program_bytes(target, Program("update", update, shapes, ()))}
    record["compile_s"] = time.perf_counter() - started
    milliseconds = []
    for number in range(steps + 1 if target in HERE else 0):
        started = time.perf_counter()
        state, metrics = jax.block_until_ready(update(state, batch))
        if number:
            milliseconds.append(1e3 * (time.perf_counter() - started))
        else:
            record["loss"] = float(metrics["loss"])
    return record | ({"median_ms": statistics.median(milliseconds)} if milliseconds else {})


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m jax_grpo.bench.scan_layers", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--problem", default="quickstart", choices=ABOUT, help="; ".join(ABOUT.values()))
    parser.add_argument("--target", default="local", help="see jax_grpo.memory")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args(argv)
    command = f"python -m jax_grpo.bench.scan_layers {' '.join(sys.argv[1:] if argv is None else argv)}".strip()
    record: dict[str, Any] = {"command": command, "jax": jax.__version__, "machine": machine(), "variants": {}}
    problem = problem_of(RESOLVE(arguments.problem))
    print(f"# {command}\n| blocks | recomputed | MB | compiled in s | step, ms |\n|---|---|---|---|---|")
    for remat in (False, True):
        for scanned in (False, True):
            found = measured(problem, scanned, remat, arguments.target, arguments.steps)
            words = "scanned" if scanned else "unrolled"
            record["variants"][f"{words}, remat" if remat else words] = found
            step = f"{found['median_ms']:.1f}" if "median_ms" in found else "-"
            cells = (words, "yes" if remat else "no", f"{found['bytes'] / 1e6:.1f}", f"{found['compile_s']:.1f}", step)
            print(f"| {' | '.join(cells)} |", flush=True)
            if arguments.json:
                Path(arguments.json).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
