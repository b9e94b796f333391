"""XLA's dumps of a compiled program: the arrays that are alive when it needs the most memory, their source, its wide matmuls.

The text file `live-range` names the values at the peak, `buffer-assignment` those that share a place, and the optimised HLO the
operations that made them. Works alike for the GPU's compiler and the CPU's. Knows nothing of configs.
"""

import re
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from jax_grpo.memory.hlo import Module

_FRAME = re.compile(r"stack_frame_id=(\d+)")
# Of the tables at the head of a module, in which frames refer to locations, and these to files.
_FILE = re.compile(r'^(\d+) "(.*)"', re.MULTILINE)
_LOCATION = re.compile(r"^(\d+) \{file_name_id=(\d+).*? line=(\d+)", re.MULTILINE)
_STACK_FRAME = re.compile(r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?", re.MULTILINE)
# Of the assignment and the live ranges: an allocation's number and what it is; a value's name, index, size, offset and shape.
_ALLOCATION = re.compile(r"allocation (\d+): size \d+, (.*?):?$")
_VALUE = re.compile(r" value: <\d+ (\S+?)(\{[\d,]*\})?(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (\S+)")
_LIVE = re.compile(r"^\s+(\S+?)(\{[\d,]*\}): \d+ bytes", re.MULTILINE)
_NESTING = ("while", "body", "closed_call", "jit(<lambda>)")
_OWNERS = {"parameter": "argument", "maybe-live-out": "output", "constant": "constant"}  # by XLA's word for them
PACKAGE = "jax_grpo"
OPTIMISED = "after_optimizations.txt"  # ending of the file that has the program as XLA compiled it


class Live(NamedTuple):
    """An array that is alive at the peak; `operation` and `source` are empty where the compiler does not know them."""

    size: int  # bytes
    place: str  # `argument`, `output`, `constant` or `temporary`: who owns its memory
    shape: str  # `f32[50304,768]`
    operation: str  # JAX's name of what made it
    source: str  # `file.py:line` of the project that the operation stands in


_UNKNOWN = ("", "")  # an instruction's `operation` and `source`, see `Live`


def at_peak(folder: Path) -> tuple[Live, ...]:
    """Arrays alive at the peak, largest first; those that share a place count once.

    Raises:
        ValueError: a file is missing: the compiler wrote other dumps than expected.
    """
    places = _places(text(folder, "after_optimizations-buffer-assignment.txt"))
    origins = _origins(text(folder, OPTIMISED))
    _, _, peak = text(folder, "after_optimizations-live-range.txt").partition("(peak):")
    sharing: dict[tuple[int, int], list[tuple[str, str]]] = defaultdict(list)
    for value in _LIVE.findall(peak):
        if value in places:
            sharing[places[value][0]].append(value)
    live = []
    for values in sharing.values():
        known = [origins.get(name, _UNKNOWN) for name, _ in values]
        best = max(known, key=lambda origin: (origin[1] != "", origin[0] != ""))  # the first of those
        live.append(Live(*max(places[value][1] for value in values), *best))
    return tuple(sorted(live, key=lambda array: (-array.size, array.place, array.shape)))


def thunks(folder: Path) -> tuple[str, str]:
    """The steps of the GPU's runtime, by loop and CUDA graph, and the instruction of each step; empty for a CPU's program."""
    if not any(folder.glob("*thunk_metadata.txt")):
        return "", ""
    passed = "thunk_sequence_after_thunk_passes.txt"  # written only where these passes changed something, as graphs do
    sequence = passed if any(folder.glob(f"*{passed}")) else "thunk_sequence.txt"
    return text(folder, sequence), text(folder, "thunk_metadata.txt")


def text(folder: Path, ending: str) -> str:
    """A dump of the main module: the largest such file, since small helper programs may be dumped too."""
    files = sorted(folder.glob(f"*{ending}"), key=lambda path: path.stat().st_size)
    if not files:
        raise ValueError(f"XLA wrote no *{ending} into {folder}; this JAX dumps other files than 0.10 to 0.12 do")
    return files[-1].read_text()


def _places(assignment: str) -> dict[tuple[str, str], tuple[tuple[int, int], tuple[int, str, str]]]:
    """Of each value, by its name and index, its allocation and the offset in it; its bytes, whose memory they are, and its shape.

    Tuples, which are tables of addresses, are left out.
    """
    places, allocation, owner = {}, 0, "temporary"
    for line in assignment.splitlines():
        if header := _ALLOCATION.match(line):
            allocation = int(header.group(1))
            owner = next((owner for word, owner in _OWNERS.items() if word in header.group(2)), "temporary")
        elif (value := _VALUE.match(line)) and not value.group(5).startswith("("):
            name, index, size, offset, shape = value.groups()
            places[name, index or "{}"] = (allocation, int(offset)), (int(size), owner, shape.split("{")[0])
    return places


def _origins(hlo: str) -> dict[str, tuple[str, str]]:
    """Operation and source line of each instruction; a fusion without its own has those of what it computes last."""
    frames = _frames(hlo)
    origins: dict[str, tuple[str, str]] = {}
    last_of: dict[str, tuple[str, str]] = {}  # by computation; those that an instruction calls stand above it
    for name, instruction in Module(hlo).instructions.items():
        if (operation := instruction.operation) is not None:
            frame = _FRAME.search(instruction.line)
            source = frames.get(int(frame.group(1)), "") if frame else ""
            # The last names of JAX's path of transformations say what is computed, the first ones only where it is nested.
            path = [part for part in operation.split("/") if part not in _NESTING]
            origins[name] = last_of[instruction.computation] = ("/".join(path[-3:]), source)
        elif called := instruction.called:
            origins[name] = last_of.get(called[0], _UNKNOWN)
    return origins


def _frames(hlo: str) -> dict[int, str]:
    """The innermost line of the project of each stack frame in the tables at the head of the module."""
    files = dict(_FILE.findall(hlo.partition("FunctionNames")[0]))  # names of functions look alike
    locations, frames = {}, {}
    for number, file, line in _LOCATION.findall(hlo):
        _, package, path = files.get(file, "").rpartition(f"/{PACKAGE}/")
        locations[number] = f"{PACKAGE}/{path}:{line}" if package else ""
    for number, location, parent in _STACK_FRAME.findall(hlo):
        # Parents are counted from 1 where frames are too, and a frame that names itself has none above it.
        frames[int(number)] = locations.get(location) or frames.get(int(parent or 0) - 1, "")
    return frames


def wide_dots(hlo: str) -> tuple[str, ...]:
    """Lines of matmuls whose two operands are float32 or wider (on a GPU: half the speed of bfloat16, or less)."""
    module = Module(hlo)

    def is_wide(name: str) -> bool:
        return name in module.instructions and module.instructions[name].shape.startswith(("f32", "f64"))

    matmuls = (each for each in module.instructions.values() if each.opcode == "dot" or "__cublas" in each.line)
    return tuple(each.line.split(", metadata")[0] for each in matmuls if all(map(is_wide, each.operands[:2])))
