"""Facts of devices: this machine's processor, GPUs to compile for that need not be there, makers' peaks, and how near to a peak a
phase of training came (MFU).

A GPU to compile for is one file in `assets/targets`: an XLA GpuTargetConfigProto in text form under a comment that names the card.
Adding a card is adding a file. Needs no JAX.
"""

import os
import platform
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

_FOLDER = Path(__file__).parents[1] / "assets" / "targets"


class UnknownTarget(ValueError):
    """No file of device facts has that name; the message lists those there are."""


class Target(NamedTuple):
    """A GPU by the name of its file."""

    name: str  # of the file, without its suffix
    device_kind: str  # as JAX names the device
    memory: int  # bytes a program may use
    bandwidth: int  # bytes a second
    architecture: str  # the assembler's name of it, `sm_89`
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
_HOPPER = {"bfloat16": 989.4e12, "float32": 494.7e12}  # NVIDIA H100 and H200 datasheets, halved: with sparsity there
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


class ImpossibleRate(RuntimeError):
    """More FLOPs a second than the device has: a time or a count is wrong."""


def utilisation(flops: float, seconds: float, peak: float, what: str) -> float:
    """MFU: FLOPs over what the device could have done in that time. Raises ImpossibleRate above 1."""
    share = flops / (seconds * peak)
    if share > 1:
        raise ImpossibleRate(
            f"{what}: {flops:.3e} FLOPs in {seconds:.6f} s are {share:.1%} of the device's peak of {peak:.3e} a second: the "
            f"time was not taken around finished work, or the peak in jax_grpo/system/devices.py is not this device's"
        )
    return share


def rates(work: Mapping[str, float], seconds: Mapping[str, float], peak: float | None) -> dict[str, float]:
    """`flops_per_second/<phase>` of an iteration's phases, and `mfu/<phase>` where the device's peak is known (not None).

    `work` is the FLOPs of each phase, `seconds` its time, taken around finished work.
    """
    out: dict[str, float] = {}
    for phase, flops in work.items():
        if flops and phase in seconds:
            out[f"flops_per_second/{phase}"] = flops / seconds[phase]
            if peak is not None:
                out[f"mfu/{phase}"] = utilisation(flops, seconds[phase], peak, phase)
    return out
