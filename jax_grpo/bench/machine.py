"""What every benchmark's record says: the command, and the machine, its cores and what it was measured to do; and the stopwatch.

    python -m jax_grpo.bench.machine

Two machines are compared by their matmul rate and bandwidth sooner than by their names: a virtual machine's name says little.
Knows nothing of what is measured.
"""

import json
import math
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from jax_grpo.system import devices

# Variables that change how memory is allocated.
ALLOCATOR = re.compile(r"MALLOC_|GLIBC_TUNABLES$|LD_PRELOAD$|TCMALLOC_")
LEAST_STEPS = 3  # timed, of every variant: a median of fewer is one measurement
SPEED_STEPS = 5  # the fastest of which is a speed of the machine
PASS_BYTES = 1 << 29  # read and written back to measure the bandwidth, too many for a cache
Step = Callable[[], Any]  # does the work; its result is waited for


def machine() -> dict[str, Any]:
    """What the numbers were made on; `allocator`: the environment's settings of it, alike for every variant."""
    return {
        "processor": devices.processor(),
        "platform": platform.platform(),
        "cores": devices.cores(),
        "python": platform.python_version(),
        "load_average": os.getloadavg(),
        "allocator": {name: value for name, value in sorted(os.environ.items()) if ALLOCATOR.match(name)},
    }


def speeds() -> dict[str, Any]:
    """JAX's device here, its float32 matmul rate in FLOPs a second and its bandwidth in bytes a second."""
    import jax

    device = jax.devices()[0]
    rows = 2048 if device.platform == "cpu" else 8192  # a GPU needs more of them to be busy
    rates = {"peak_flops": matmul_rate(rows), "bandwidth": bandwidth()}
    return {"on": device.platform, "device": device.device_kind, **rates}


def matmul_rate(size: int) -> float:
    """Float32 FLOPs a second of the fastest of some matmuls of `size` rows: what benchmarks print beside a maker's peak.

    Not what training divides by on a CPU: under another load than at the measurement, it would be passed.
    """
    import jax

    ones, multiply = jax.numpy.ones((size, size)), jax.jit(jax.numpy.matmul)
    return 2e3 * size**3 / best_ms(lambda: multiply(ones, ones), SPEED_STEPS)


def bandwidth() -> float:
    """Bytes a second of the fastest of some passes over `PASS_BYTES`."""
    import jax

    add, passes = jax.jit(lambda x: x + 1, donate_argnums=0), [jax.numpy.zeros(PASS_BYTES // 4, "float32")]

    def step() -> Any:
        passes.append(add(passes.pop()))
        return passes[-1]

    return 2e3 * PASS_BYTES / best_ms(step, SPEED_STEPS)


def line_of(about: dict[str, Any]) -> str:
    """A machine in one line, its speeds with it where they were measured."""
    facts = [about.get("processor") or about["platform"], f"{about['cores']} cores"]  # older records have no processor
    if about.get("on", "cpu") != "cpu":
        facts.insert(0, about["device"])
    if "peak_flops" in about:
        rates = f"{1e-9 * about['peak_flops']:.0f} GFLOP/s, {1e-9 * about['bandwidth']:.1f} GB/s"
        facts.append(f"{rates} (float32, measured)")
    return ", ".join([*facts, *(f"{name}={value}" for name, value in about.get("allocator", {}).items())])


def selected(option: str, text: str | None, known: Collection[str]) -> list[str]:
    """The names that an option lists, or all where it is not given. Raises SystemExit: one is unknown; says which there are."""
    names = text.split(",") if text else list(known)
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"{option} {unknown[0]!r}: expected some of {', '.join(known)}")
    return names


def new_record(module: str, argv: Sequence[str] | None, **facts: Any) -> dict[str, Any]:
    """The command as it was typed (`argv`: None in a shell), the facts, and the machine; command and machine are printed."""
    command = " ".join(["python -m", module, *(sys.argv[1:] if argv is None else argv)])
    record = {"command": command, **facts, "machine": machine()}
    print(f"# {command}\n# {line_of(record['machine'])}", flush=True)
    return record


def saved(file: str | Path | None) -> dict[str, Any]:
    """What an earlier run saved; empty where there is none, or it was ended while it wrote."""
    try:
        return json.loads(Path(file).read_text()) if file else {}
    except (FileNotFoundError, json.JSONDecodeError):
        return {}


def same_settings(earlier: Mapping[str, Any], record: Mapping[str, Any], *names: str) -> bool:
    """Whether an earlier record, which may be empty, has these settings as this one, and the same processor."""
    same = all(earlier.get(name) == record[name] for name in names)
    return same and earlier["machine"].get("processor") == record["machine"]["processor"]


def finished(result: Any) -> Any:
    """The result, when the devices of JAX and of PyTorch, as far as they are loaded, are done with it."""
    if jax := sys.modules.get("jax"):
        jax.block_until_ready(result)
    if (torch := sys.modules.get("torch")) and torch.cuda.is_available():
        torch.cuda.synchronize()
    return result


def milliseconds(step: Step, steps: int, until: float = math.inf) -> list[float]:
    """Of each of so many steps, `LEAST_STEPS` at least; no step beyond those is begun after `until` of `time.monotonic()`."""
    times: list[float] = []
    while len(times) < LEAST_STEPS or (len(times) < steps and time.monotonic() < until):
        started = time.perf_counter()
        finished(step())
        times.append(1e3 * (time.perf_counter() - started))
    return times


def best_ms(step: Step, steps: int = LEAST_STEPS) -> float:
    """Least milliseconds of some steps, after one that compiles."""
    finished(step())
    return min(milliseconds(step, steps))


if __name__ == "__main__":
    print(json.dumps(machine() | speeds()))
