"""Facts of devices: this machine's processor, GPUs to compile for that need not be there, makers' peaks, and speeds measured here.

A GPU to compile for is one file in `assets/targets`: an XLA GpuTargetConfigProto in text form under a comment that names the card.
Adding a card is adding a file. Needs no JAX but to measure.
"""

import dataclasses
import os
import platform
import re
import sys
import time
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

SUFFIX = ".txtpb"
_FOLDER = resources.files("jax_grpo") / "assets" / "targets"


class UnknownTarget(ValueError):
    """No file of device facts has that name; the message lists those there are."""


@dataclasses.dataclass(frozen=True)
class Target:
    """A GPU by the name of its file."""

    name: str  # of the file, without its suffix
    device_kind: str  # as JAX names the device
    memory: int  # bytes a program may use
    bandwidth: int  # bytes a second
    architecture: str  # as the assembler is told, `sm_89`
    text: str  # the GpuTargetConfigProto


def known() -> tuple[str, ...]:
    """Names of the files, in alphabetical order."""
    return tuple(sorted(file.name.removesuffix(SUFFIX) for file in _FOLDER.iterdir() if file.name.endswith(SUFFIX)))


def read(name: str, others: tuple[str, ...] = ()) -> Target:
    """The target's facts; an error also lists `others`, names that the caller takes besides.

    Raises:
        UnknownTarget: no such file; names those there are.
        ValueError: a fact is missing; names the file and the fact.
    """
    if name not in known():
        raise UnknownTarget(f"target {name!r}: expected one of {', '.join((*known(), *others))}")
    lines = (_FOLDER / f"{name}{SUFFIX}").read_text(encoding="utf-8").splitlines()
    text = "\n".join(line for line in lines if not line.startswith("#"))

    def fact(pattern: str) -> str:
        match = re.search(pattern, text)
        if match is None:
            raise ValueError(f"assets/targets/{name}{SUFFIX} has no {pattern.split(':', maxsplit=1)[0]}")
        return match.group(1)

    capability = fact(r"cuda_compute_capability \{([^}]*)\}")
    major, minor = (re.search(rf"{part}: (\d+)", capability) for part in ("major", "minor"))
    accelerated = "a" if "ACCELERATED_FEATURES" in capability else ""  # instructions of that generation alone
    return Target(
        name,
        fact(r'device_description_str: "([^"]*)"'),
        int(fact(r"device_memory_size: (\d+)")),
        int(fact(r"memory_bandwidth: (\d+)")),
        f"sm_{major.group(1) if major else 0}{minor.group(1) if minor else 0}{accelerated}",
        text,
    )


class Peak(NamedTuple):
    """Dense matmul FLOPs a second of a device, float32 accumulation, with operands of a dtype, and who says so."""

    bfloat16: float
    float32: float
    source: str


# float32 is TF32's figure: what JAX multiplies float32 with on these GPUs unless `jax_default_matmul_precision` says otherwise.
PEAKS: dict[str, Peak] = {
    "NVIDIA GeForce RTX 4090": Peak(165.2e12, 82.6e12, "NVIDIA Ada GPU architecture whitepaper, appendix A"),
    "NVIDIA H200": Peak(989.4e12, 494.7e12, "NVIDIA H200 datasheet, halved: its figures are with sparsity"),
    "NVIDIA H100 80GB HBM3": Peak(989.4e12, 494.7e12, "NVIDIA H100 datasheet, halved: its figures are with sparsity"),
    "NVIDIA A100-SXM4-80GB": Peak(312e12, 156e12, "NVIDIA A100 datasheet"),
    "NVIDIA A100-SXM4-40GB": Peak(312e12, 156e12, "NVIDIA A100 datasheet"),
}


def device_peak(device_kind: str, dtype: str) -> float | None:
    """Peak of a named device for matmuls of that dtype; None where the table has none (every CPU)."""
    return getattr(PEAKS.get(device_kind), dtype, None)


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
    import jax.numpy as jnp

    square, multiply = jnp.ones((size, size), jnp.dtype(dtype)), jax.jit(jnp.matmul)
    return 2 * size**3 / _fastest_s(lambda _: multiply(square, square), square)


def measured_bandwidth(size: int = 1 << 29) -> float:
    """Bytes a second of the fastest of some passes that read `size` bytes, too many for a cache, and write them back."""
    import jax
    import jax.numpy as jnp

    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    return 2 * size / _fastest_s(add, jnp.zeros(size // 4, jnp.float32))


def _fastest_s(step: Callable[[Any], Any], result: Any, repeats: int = 5) -> float:
    """Seconds of the fastest of some steps, each given the result of the one before it, after one that compiles."""
    import jax

    seconds = []
    for _ in range(1 + repeats):
        started = time.perf_counter()
        result = jax.block_until_ready(step(result))
        seconds.append(time.perf_counter() - started)
    return min(seconds[1:])
