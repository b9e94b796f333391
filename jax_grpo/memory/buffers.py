"""What is alive when a program needs the most memory: each array's bytes, shape, and the line of code that made it.

Read from the text files that XLA dumps: `live-range` names the values at the peak, `buffer-assignment` says which of them share a
place, and the optimised HLO who made them. Works alike for the GPU's compiler and the CPU's. Knows nothing of configs.
"""

import dataclasses
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

_HEADER = re.compile(r"allocation (\d+): size (\d+), (.*?):?$")
_VALUE = re.compile(r" value: <\d+ (\S+?)(\{[\d,]*\})?(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (\S+)")
_LIVE = re.compile(r"^\s+(\S+?)(\{[\d,]*\}): (\d+) bytes")
_DEFINED = re.compile(r"^\s*(ROOT )?%?([\w.-]+) = ")
COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) (?:\(.*)?\{$")
_CALLS = re.compile(r"(?:calls|to_apply)=%?([\w.-]+)")
_OP = re.compile(r'op_name="([^"]*)"')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_INLINE = re.compile(r'source_file="([^"]*)" source_line=(\d+)')
PACKAGE = "jax_grpo"


@dataclasses.dataclass(frozen=True)
class Live:
    """An array that is alive at the peak.

    Attributes:
        size: bytes.
        place: `argument`, `output`, `constant` or `temporary`: who owns its memory.
        shape: `f32[50304,768]`.
        operation: JAX's name of what made it; empty where the compiler does not say.
        source: `file.py:line` of the project that asked for it; empty where the compiler does not say.
    """

    size: int
    place: str
    shape: str
    operation: str
    source: str


class Origin(NamedTuple):
    """Who asked for an instruction; see `Live` for both."""

    operation: str
    source: str


_UNKNOWN = Origin("", "")
_PLACES = {"parameter": "argument", "maybe-live-out": "output", "constant": "constant"}


def at_peak(dump: Path) -> tuple[Live, ...]:
    """Arrays alive at the peak, largest first; those that share a place count once.

    Raises:
        ValueError: a file is missing: the compiler wrote other dumps than expected.
    """
    places = _places(_text(dump, "after_optimizations-buffer-assignment.txt").splitlines())
    origins = origins_of(_text(dump, "after_optimizations.txt"))
    alive: dict[tuple[int, int], list[tuple[str, str]]] = {}
    for name, index in _live(_text(dump, "after_optimizations-live-range.txt").splitlines()):
        if (name, index) in places:
            number, offset, *_ = places[name, index]
            alive.setdefault((number, offset), []).append((name, index))
    found = []
    for sharing in alive.values():
        size, place, shape = max(places[value][2:] for value in sharing)
        known = [origins.get(name, _UNKNOWN) for name, _ in sharing]
        origin = next((origin for origin in known if origin.source), next((o for o in known if o.operation), _UNKNOWN))
        found.append(Live(size, place, shape, *origin))
    return tuple(sorted(found, key=lambda live: (-live.size, live.place, live.shape)))


def _text(dump: Path, ending: str) -> str:
    """Of the main module: the largest such file, since small helper programs may be dumped too."""
    found = sorted(dump.glob(f"*{ending}"), key=lambda path: path.stat().st_size)
    if not found:
        raise ValueError(f"XLA wrote no *{ending} into {dump}; this JAX dumps other files than 0.10 to 0.12 do")
    return found[-1].read_text()


def _places(lines: Iterable[str]) -> dict[tuple[str, str], tuple[int, int, int, str, str]]:
    """(allocation, offset, bytes, place, shape) of each value; tuples, which are tables of addresses, are left out."""
    found, number, place = {}, 0, "temporary"
    for line in lines:
        if header := _HEADER.match(line):
            number = int(header.group(1))
            place = next((ours for word, ours in _PLACES.items() if word in header.group(3)), "temporary")
        elif (value := _VALUE.match(line)) and not value.group(5).startswith("("):
            name, index, size, offset, shape = value.groups()
            found[name, index or "{}"] = (number, int(offset), int(size), place, shape.split("{")[0])
    return found


def _live(lines: Iterable[str]) -> list[tuple[str, str]]:
    found, inside = [], False
    for line in lines:
        inside = inside or "(peak):" in line
        if inside and (value := _LIVE.match(line)):
            found.append((value.group(1), value.group(2)))
    return found


def origins_of(hlo: str) -> dict[str, Origin]:
    """Operation and source line of each instruction; a fusion without its own has those of what it computes last."""
    lines, frames = hlo.splitlines(), _frames(hlo)
    found: dict[str, Origin] = {}
    last: dict[str, Origin] = {}
    waiting: dict[str, str] = {}
    computation = ""
    for line in lines:
        if opened := COMPUTATION.match(line):
            computation = opened.group(1)
        if not (defined := _DEFINED.match(line)):
            continue
        operation = _OP.search(line)
        if operation:
            found[defined.group(2)] = last[computation] = Origin(_short(operation.group(1)), _source(line, frames))
        elif called := _CALLS.search(line):
            waiting[defined.group(2)] = called.group(1)
    return {name: last.get(called, _UNKNOWN) for name, called in waiting.items()} | found


def _short(operation: str) -> str:
    """The last parts of JAX's path of transformations: they say what is computed, the first ones only where it is nested."""
    parts = [part for part in operation.split("/") if part not in ("while", "body", "closed_call", "jit(<lambda>)")]
    return "/".join(parts[-3:])


def _source(line: str, frames: dict[int, str]) -> str:
    if frame := _FRAME.search(line):
        return frames.get(int(frame.group(1)), "")
    if inline := _INLINE.search(line):
        return _relative(inline.group(1), inline.group(2))
    return ""


def _relative(file: str, line: str) -> str:
    _, package, rest = file.rpartition(f"/{PACKAGE}/")
    return f"{PACKAGE}/{rest}:{line}" if package else ""


def _frames(hlo: str) -> dict[int, str]:
    """The innermost line of the project of each stack frame in the tables at the head of the module."""
    section, files, places, stack = "", {}, {}, {}
    for line in hlo.splitlines():
        if line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
            section = line
        elif section == "FileNames" and (named := re.match(r'(\d+) "(.*)"', line)):
            files[int(named.group(1))] = named.group(2)
        elif section == "FileLocations" and (where := re.match(r"(\d+) \{file_name_id=(\d+).*? line=(\d+)", line)):
            places[int(where.group(1))] = _relative(files.get(int(where.group(2)), ""), where.group(3))
        elif section == "StackFrames" and (
            frame := re.match(r"(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?", line)
        ):
            number, place, parent = frame.groups()
            # Parents are counted from 1 where frames are too, and a frame that names itself has none above it.
            above = int(parent or 0) - 1
            stack[int(number)] = places.get(int(place), "") or stack.get(above, "")
        elif stack and not line.strip():
            break
    return stack
