"""A program's memory measured while it runs on this machine, beside the report's figure: the check of the report.

Each program runs in a process of its own. On a GPU the allocator's own peak is read; a CPU's keeps none, so that the process's
resident pages are: before the arguments are made, and at their most while the program runs. Linux only.
"""

import gc
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jax_grpo.config import Config, load_config
from jax_grpo.memory.compile import memory_of
from jax_grpo.memory.programs import run_of
from jax_grpo.system.markdown import table
from jax_grpo.system.memory import forget_peak, peak, resident, trim
from jax_grpo.system.process import child_record

SETTLES_S = 0.5  # seconds in which memory that is about to be freed is
# Every block of 64 KiB and more is mapped by itself and unmapped when freed. As glibc comes, it moves that bound up to 32 MiB after
# a large block is freed, and freed blocks then stay in its heap, where they hide or pose as memory of the program.
ALLOCATOR = {
    "MALLOC_ARENA_MAX": "1",  # arenas of other threads cannot be given back
    "MALLOC_MMAP_THRESHOLD_": str(64 << 10),
    "MALLOC_TRIM_THRESHOLD_": "0",
    "MALLOC_TOP_PAD_": "0",
}


def compare(
    config: str, overrides: list[str], target: str, programs: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, Any], str]:
    """Measured bytes by program, and lines that put them beside those of the report."""
    measured, rows = {}, []
    for program in programs:
        name, compiled = program["name"], program["peak"]
        record = measured[name] = fresh(config, overrides, target, name)
        if "error" in record:
            columns = record["error"][:120], "-"
        else:
            columns = f"{record['peak'] / 1e6:.1f}", f"{compiled / record['peak'] - 1:+.1%}"
        rows.append((name, f"{compiled / 1e6:.1f}", *columns))
    return measured, "\n".join(["", *table(("program", "compiled MB", "measured MB", "difference"), rows)]) + "\n"


def fresh(config: str, overrides: list[str], target: str, program: str) -> dict[str, Any]:
    """`measure` in a process of its own, under the allocator's settings above; `error` when it fails."""
    command = [sys.executable, "-m", "jax_grpo.memory.measured", program, config, *overrides]
    platform = {"JAX_PLATFORMS": "cpu"} if target == "cpu" else {}
    return child_record(command, os.environ | platform | ALLOCATOR)


def measure(config: Config, name: str) -> dict[str, Any]:
    """Peak bytes of the named program on the first device here, from its arguments to its results, and XLA's count of them."""
    program, device = run_of(config).program(name), jax.devices()[0]
    executable = program.function.lower(*program.arguments).compile()

    def filled(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        """Ones, so that every page is there: the system lends pages of zeros without memory behind them."""
        return jax.device_put(np.ones(leaf.shape, leaf.dtype), leaf.sharding or device)

    before = 0
    for _ in range(2):  # the first starts threads and reads the runtime's code in, which is not the program's memory
        _give_back()
        before = resident()
        arguments = jax.block_until_ready(jax.tree.map(filled, program.arguments))
        _give_back()  # what made the arguments
        forget_peak()
        results = jax.block_until_ready(executable(*arguments))
        del results, arguments
    held = (device.memory_stats() or {}).get("peak_bytes_in_use", peak() - before)
    return {"peak": held, "compiled": memory_of(executable).total, "device": device.device_kind}


def _give_back() -> None:
    """Returns freed memory to the system until nothing more is freed: JAX's own threads free what a program left in their time."""
    gc.collect()
    before, now = None, resident()
    while now != before:
        time.sleep(SETTLES_S)
        trim()
        before, now = now, resident()


if __name__ == "__main__":  # the process that `fresh` starts
    of_program, file, *options = sys.argv[1:]
    print(json.dumps(measure(load_config(file, options), of_program)))
