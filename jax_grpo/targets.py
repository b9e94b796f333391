"""Devices that programs can be compiled for without being there: one file of device facts each, in `assets/targets`.

A file is an XLA GpuTargetConfigProto in text form under a comment that names the card; adding a card is adding a file. Knows
nothing of JAX.
"""

import dataclasses
import re
from importlib import resources

SUFFIX = ".txtpb"
_FOLDER = resources.files("jax_grpo") / "assets" / "targets"


class UnknownTarget(ValueError):
    """No file of device facts has that name; the message lists those there are."""


@dataclasses.dataclass(frozen=True)
class Target:
    """A GPU by the name of its file.

    Attributes:
        name: of the file, without its suffix.
        device_kind: as JAX names the device.
        memory: bytes a program may use.
        bandwidth: bytes per second.
        architecture: as the assembler is told, `sm_89`.
        text: the GpuTargetConfigProto.
    """

    name: str
    device_kind: str
    memory: int
    bandwidth: int
    architecture: str
    text: str


def known() -> tuple[str, ...]:
    """Names of the files, in alphabetical order."""
    return tuple(sorted(file.name.removesuffix(SUFFIX) for file in _FOLDER.iterdir() if file.name.endswith(SUFFIX)))


def read(name: str) -> Target:
    """The target's facts.

    Raises:
        UnknownTarget: no such file; names those there are.
        ValueError: a fact is missing; names the file and the fact.
    """
    if name not in known():
        raise UnknownTarget(f"target {name!r}: expected one of {', '.join(known())}")
    lines = (_FOLDER / f"{name}{SUFFIX}").read_text(encoding="utf-8").splitlines()
    text = "\n".join(line for line in lines if not line.startswith("#"))

    def fact(pattern: str) -> str:
        found = re.search(pattern, text)
        if found is None:
            raise ValueError(f"assets/targets/{name}{SUFFIX} has no {pattern.split(':', maxsplit=1)[0]}")
        return found.group(1)

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
