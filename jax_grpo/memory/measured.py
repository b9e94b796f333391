"""A program's memory as it is when it runs here, beside what its report says: the check of the report.

Each program runs in a process of its own. On a GPU the allocator's own peak is read; a CPU's keeps none, so that the process's
resident pages are: before the arguments are made, and at their most while the program runs. Linux only.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from typing import Any

from jax_grpo.memory.report import Report
from jax_grpo.process_failure import failure
from jax_grpo.resident_memory import forget_peak, resident, trim

SETTLES_S = 0.5  # seconds in which memory that is about to be freed is
# Every block of 64 KiB and more is mapped by itself and unmapped when freed. As glibc comes, it moves that bound up to 32 MiB after
# a large block is freed, and freed blocks then stay in its heap, where they hide or pose as memory of the program.
ALLOCATOR = {
    "MALLOC_ARENA_MAX": "1",  # arenas of other threads cannot be given back
    "MALLOC_MMAP_THRESHOLD_": str(64 << 10),
    "MALLOC_TRIM_THRESHOLD_": "0",
    "MALLOC_TOP_PAD_": "0",
}


def compare(config: str, overrides: list[str], target: str, found: Report) -> tuple[dict[str, Any], str]:
    """Measured bytes by program, and lines that put them beside the report's."""
    measured = {program.name: fresh(config, overrides, target, program.name) for program in found.programs}
    lines = ["", "| program | compiled MB | measured MB | difference |", "|---|---|---|---|"]
    for program in found.programs:
        peak = measured[program.name].get("peak")
        if peak is None:
            lines.append(f"| {program.name} | {program.peak / 1e6:.1f} | {measured[program.name]['error'][:120]} | - |")
        else:
            lines.append(
                f"| {program.name} | {program.peak / 1e6:.1f} | {peak / 1e6:.1f} | {program.peak / peak - 1:+.1%} |"
            )
    return measured, "\n".join(lines) + "\n"


def fresh(config: str, overrides: list[str], target: str, program: str) -> dict[str, Any]:
    """`measure` in a process of its own, under the allocator's settings above; `error` when it fails."""
    command = [sys.executable, "-m", "jax_grpo.memory.measured", "--config", config, "--program", program]
    environment = dict(os.environ)
    if target == "cpu":
        environment["JAX_PLATFORMS"] = "cpu"
    environment |= ALLOCATOR
    done = subprocess.run([*command, *overrides], capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        return {"error": failure(done.stderr, done.returncode)}
    return json.loads(done.stdout.splitlines()[-1])


def _give_back() -> None:
    """Returns freed memory to the system; glibc keeps it, which would count as used before and hide what is used next.

    JAX frees what an earlier program left when its own threads come to it: waits until nothing more is freed.
    """
    gc.collect()
    before, now = None, resident("VmRSS")
    while now != before:
        time.sleep(SETTLES_S)
        trim()
        before, now = now, resident("VmRSS")


def measure(config: Any, name: str) -> dict[str, Any]:
    """Peak bytes of the named program on the first device here, from its arguments to its results, and XLA's count of them."""
    import jax
    import numpy as np

    from jax_grpo.memory.shapes import run_of

    program = next(program for program in run_of(config).programs if program.name == name)
    compiled = program.function.lower(*program.arguments).compile()
    counted = compiled.memory_analysis()
    assert counted is not None, "XLA reports its memory for CPUs and GPUs"
    kept = counted.argument_size_in_bytes + counted.output_size_in_bytes - counted.alias_size_in_bytes
    compiled_bytes = kept + counted.temp_size_in_bytes
    device = jax.devices()[0]

    def filled(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        """Ones, so that every page is there: the system lends pages of zeros without memory behind them."""
        return jax.device_put(np.ones(leaf.shape, leaf.dtype), leaf.sharding or device)

    before = 0
    for _ in range(
        2
    ):  # the first run starts threads and reads the runtime's code in, which is not the program's memory
        _give_back()
        before = resident("VmRSS")
        arguments = jax.block_until_ready(jax.tree.map(filled, program.arguments))
        _give_back()  # what made the arguments
        forget_peak()
        results = jax.block_until_ready(compiled(*arguments))
        del results, arguments
    statistics = device.memory_stats() or {}
    if "peak_bytes_in_use" in statistics:
        peak = statistics["peak_bytes_in_use"]
        reserved = statistics.get("bytes_reserved", statistics.get("pool_bytes", peak))
        return {"peak": peak, "compiled": compiled_bytes, "device": device.device_kind, "reserved": reserved}
    return {"peak": resident("VmHWM") - before, "compiled": compiled_bytes, "device": device.device_kind}


def main(argv: list[str] | None = None) -> None:
    from jax_grpo.config import load_config

    parser = argparse.ArgumentParser(prog="python -m jax_grpo.memory.measured")
    parser.add_argument("--config", required=True)
    parser.add_argument("--program", required=True)
    parser.add_argument("--profile", help="also write a device memory profile for pprof here")
    arguments, overrides = parser.parse_known_args(argv)
    print(json.dumps(measure(load_config(arguments.config, overrides), arguments.program)))
    if arguments.profile:
        import jax

        jax.profiler.save_device_memory_profile(arguments.profile)


if __name__ == "__main__":
    main()
