"""Facts of devices: this machine's processor, GPUs to compile for that need not be there, makers' peaks, and speeds measured here.

A GPU to compile for is one file in `assets/targets`: an XLA GpuTargetConfigProto in text form under a comment that names the card.
Adding a card is adding a file. Needs no JAX but to measure.
"""

import os
import platform
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

_FOLDER = Path(__file__).parents[1] / "assets" / "targets"


class UnknownTarget(ValueError):
    """No file of device facts has that name; the message lists those there are."""


class Target(NamedTuple):
    """A GPU by the name of its file."""

    name: str  # of the file, without its suffix
    device_kind: str  # as JAX names the device
    memory: int  # bytes a program may use
    bandwidth: int  # bytes a second
    architecture: str  # as the assembler is told, `sm_89`
    text: str  # the GpuTargetConfigProto


def known() -> tuple[str, ...]:
    """Names of the files, in alphabetical order."""
    return tuple(sorted(file.stem for file in _FOLDER.glob("*.txtpb")))


def read(name: str, others: tuple[str, ...] = ()) -> Target:
    """The target's facts.

    Raises:
        UnknownTarget: no such file; names those there are, and `others` that the caller takes besides.
        ValueError: a fact is missing; names the file and the fact.
    """
    if name not in known():
        raise UnknownTarget(f"target {name!r}: expected one of {', '.join((*known(), *others))}")
    file = _FOLDER / f"{name}.txtpb"
    lines = file.read_text(encoding="utf-8").splitlines()
    text = "\n".join(line for line in lines if not line.startswith("#"))

    def fact(pattern: str) -> str:
        match = re.search(pattern, text)
        if match is None:
            raise ValueError(f"assets/targets/{file.name} has no {pattern.split(':', maxsplit=1)[0]}")
        return match.group(1)

    capability = fact(r"cuda_compute_capability \{([^}]*)\}")
    version = dict(re.findall(r"(major|minor): (\d+)", capability))  # a 0 is left out
    accelerated = "a" if "ACCELERATED_FEATURES" in capability else ""  # instructions of that generation alone
    return Target(
        name,
        fact(r'device_description_str: "([^"]*)"'),
        int(fact(r"device_memory_size: (\d+)")),
        int(fact(r"memory_bandwidth: (\d+)")),
        f"sm_{version.get('major', 0)}{version.get('minor', 0)}{accelerated}",
        text,
    )


# Dense matmul FLOPs a second by the operands' dtype, float32 accumulation; of float32, TF32's: what JAX multiplies float32 with on
# these GPUs unless `jax_default_matmul_precision` says otherwise.
_HOPPER = {
    "bfloat16": 989.4e12,
    "float32": 494.7e12,
}  # NVIDIA's H100 and H200 datasheets, halved: theirs are with sparsity
_AMPERE = {"bfloat16": 312e12, "float32": 156e12}  # NVIDIA A100 datasheet
_ADA = {"bfloat16": 165.2e12, "float32": 82.6e12}  # NVIDIA Ada GPU architecture whitepaper, appendix A
PEAKS = {
    "NVIDIA GeForce RTX 4090": _ADA,
    "NVIDIA H200": _HOPPER,
    "NVIDIA H100 80GB HBM3": _HOPPER,
    "NVIDIA A100-SXM4-80GB": _AMPERE,
    "NVIDIA A100-SXM4-40GB": _AMPERE,
}


def device_peak(device_kind: str, dtype: str) -> float | None:
    """Peak of a named device for matmuls of that dtype; None where the table has none (every CPU)."""
    return PEAKS.get(device_kind, {}).get(dtype)


def processor() -> str:
    """This machine's processor as the system names it, where it can with family and model: `AMD EPYC (family 25, model 17)`."""
    file = Path("/proc/cpuinfo")
    text = file.read_text() if file.exists() else ""
    facts = dict(re.findall(r"^(model name|cpu family|model)\s*: (.*)$", text, re.M))
    name = facts.get("model name") or platform.processor() or platform.machine()
    return f"{name} (family {facts['cpu family']}, model {facts['model']})" if "cpu family" in facts else name


def cores() -> int | None:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()


def measured_peak(dtype: str, size: int) -> float:
    """FLOPs a second of the fastest of some square matmuls on the first device here: what benchmarks print beside a peak.

    Not what training divides by on a CPU: under another load than at the measurement, it would be passed.
    """
    import jax

    square, multiply = jax.numpy.ones((size, size), dtype), jax.jit(jax.numpy.matmul)
    return 2 * size**3 / _fastest_s(lambda _: multiply(square, square), square)


def measured_bandwidth(size: int = 1 << 29) -> float:
    """Bytes a second of the fastest of some passes that read `size` bytes, too many for a cache, and write them back."""
    import jax

    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    return 2 * size / _fastest_s(add, jax.numpy.zeros(size // 4, "float32"))


def _fastest_s(step: Callable[[Any], Any], result: Any, repeats: int = 5) -> float:
    """Seconds of the fastest of some steps, each given the result of the one before it, after one that compiles."""
    import jax

    seconds = []
    for _ in range(1 + repeats):
        started = time.perf_counter()
        result = jax.block_until_ready(step(result))
        seconds.append(time.perf_counter() - started)
    return min(seconds[1:])
