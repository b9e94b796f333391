"""What a benchmark's numbers were made on: the processor, its cores, and what it was measured to do.

    python -m jax_grpo.bench.machine

Two machines are compared by their matmul rate and bandwidth sooner than by their names: a virtual machine's name says little.
"""

import json
import os
import platform
import re
from typing import Any

from jax_grpo.system import devices

# Variables that change how memory is allocated.
ALLOCATOR = re.compile(r"MALLOC_|GLIBC_TUNABLES$|LD_PRELOAD$|TCMALLOC_")


def machine() -> dict[str, Any]:
    """What the numbers were made on; `allocator`: what the environment says of it, for every variant alike."""
    return {
        "processor": devices.processor(),
        "platform": platform.platform(),
        "cores": devices.cores(),
        "python": platform.python_version(),
        "load_average": os.getloadavg(),
        "allocator": {name: value for name, value in sorted(os.environ.items()) if ALLOCATOR.match(name)},
    }


def square() -> int:
    """Rows of the square matmul whose rate is measured: a GPU needs more of them to be busy."""
    import jax

    return 2048 if jax.devices()[0].platform == "cpu" else 8192


def speeds() -> dict[str, Any]:
    """JAX's device here, its float32 matmul rate in FLOPs a second and its bandwidth in bytes a second."""
    import jax

    device = jax.devices()[0]
    peak, bandwidth = devices.measured_peak("float32", square()), devices.measured_bandwidth()
    return {"on": device.platform, "device": device.device_kind, "peak_flops": peak, "bandwidth": bandwidth}


def line_of(about: dict[str, Any]) -> str:
    """A machine in one line, its speeds with it where they were measured."""
    facts = [about.get("processor") or about["platform"], f"{about['cores']} cores"]  # older records have no processor
    if about.get("on", "cpu") != "cpu":
        facts.insert(0, about["device"])
    if "peak_flops" in about:
        rates = f"{1e-9 * about['peak_flops']:.0f} GFLOP/s, {1e-9 * about['bandwidth']:.1f} GB/s"
        facts.append(f"{rates} (float32, measured)")
    return ", ".join([*facts, *(f"{name}={value}" for name, value in about.get("allocator", {}).items())])


if __name__ == "__main__":
    print(json.dumps(machine() | speeds()))
