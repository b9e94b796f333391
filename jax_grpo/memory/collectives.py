"""Bytes that a compiled program of several devices moves between them, by the axis of the mesh and what it does: from its HLO.

A device's own share, as rings move it: of n devices it sends (n - 1) / n of what an all-gather returns, and twice that of what an
all-reduce does. Loops count as often as XLA knows that they run; one whose trips only the data tell counts once, and is said to.
"""

import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from jax_grpo.memory.dumps import instructions
from jax_grpo.memory.traffic import array_bytes

_ARRAY = re.compile(r"\b(pred|[subf]+\d+\w*|c64|c128)\[([\d,]*)\]")
_CALLED = re.compile(r"\b(?:calls|to_apply|body|condition|\w+_computation)=(%?[\w.-]+)|branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{\{([\d,{}]*)\}\}")
_COUNTED = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
OPCODES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")


class Moved(NamedTuple):
    """What the collectives of one kind over one axis do in a run of the program."""

    axis: str  # `fsdp`, or several: `data and fsdp`
    opcode: str
    times: int  # arrays moved
    bytes: int  # that a device sends
    in_open_loop: bool  # some stand in a loop whose trips are not known: `times` and `bytes` are of one of them


def collectives(hlo: str, mesh: Mapping[str, int]) -> list[Moved]:
    """Of a program of the devices of `mesh`, sizes by axis in the order that devices are counted in; the most bytes first."""
    trips, found = _trips(hlo), dict[tuple[str, str], list[tuple[int, int, bool]]]()
    for computation, instruction in instructions(hlo):
        _, shape, opcode, rest = instruction.groups()
        kind = opcode.removesuffix("-start")
        if kind not in OPCODES or computation not in trips:
            continue
        groups, (times, open_) = _groups(rest), trips[computation]
        size = len(groups[0]) if groups else math.prod(mesh.values())
        sent = _sent(kind, shape, size, started=opcode.endswith("-start"))
        found.setdefault((_axes(groups, mesh), kind), []).append((times, times * sent, open_))
    moved = [
        Moved(axis, kind, sum(times for times, _, _ in all_), sum(sent for _, sent, _ in all_), any(x[2] for x in all_))
        for (axis, kind), all_ in found.items()
    ]
    return sorted(moved, key=lambda each: -each.bytes)


def _sent(kind: str, shape: str, size: int, *, started: bool) -> int:
    """Bytes that a device sends of one collective of so many devices, whose result has this shape."""
    arrays = [array_bytes(*array) for array in _ARRAY.findall(shape)]
    if started and kind == "all-gather":  # operands stand before the results
        result = sum(arrays) * size // (size + 1)
    elif started and kind == "collective-permute":  # operand, result and two numbers
        result = arrays[0]
    else:
        result = sum(arrays)
    share = {"all-reduce": 2 * (size - 1) / size, "reduce-scatter": size - 1, "collective-permute": 1.0}
    return round(result * share.get(kind, (size - 1) / size))


def _trips(hlo: str) -> dict[str, tuple[int, bool]]:
    """How often each computation that is reached runs, and whether a loop of unknown length is around it."""
    calls: dict[str, list[tuple[str, int, bool]]] = {}
    for computation, instruction in instructions(hlo):
        opcode, rest = instruction.group(3), instruction.group(4)
        known = _TRIPS.search(rest)
        loops = int(known.group(1)) if known and opcode == "while" else 1
        for one, several in _CALLED.findall(rest):
            for name in re.findall(r"[\w.-]+", f"{one} {several}"):
                calls.setdefault(computation, []).append((name, loops, opcode == "while" and known is None))
    entry = re.search(r"^ENTRY %?([\w.-]+)", hlo, re.MULTILINE)
    assert entry is not None, "a module has an entry"
    found, todo = {entry.group(1): (1, False)}, [entry.group(1)]
    while todo:
        name = todo.pop()
        times, open_ = found[name]
        for called, loops, unknown in calls.get(name, ()):
            found[called] = times * loops, open_ or unknown
            todo.append(called)
    return found


def _groups(rest: str) -> list[list[int]]:
    """Numbers of the devices that exchange with each other; of a permutation, pairs of them; none: all of them."""
    if listed := _LISTED.search(rest):
        return [[int(n) for n in group.split(",")] for group in re.split(r"\},\{", listed.group(1)) if group]
    if counted := _COUNTED.search(rest):
        shape, sizes, order = ([int(n) for n in part.split(",")] if part else [] for part in counted.groups())
        numbers = np.arange(math.prod(sizes)).reshape(sizes)
        return (numbers.transpose(order) if order else numbers).reshape(shape).tolist()
    return []


def _axes(groups: list[list[int]], mesh: Mapping[str, int]) -> str:
    """The axes along which a group's devices differ."""
    sizes = tuple(mesh.values())

    def differing() -> Iterator[int]:
        for group in groups or [list(range(math.prod(sizes)))]:
            places = np.stack(np.unravel_index(group, sizes))
            yield from np.flatnonzero((places != places[:, :1]).any(axis=1)).tolist()

    numbers = set(differing())
    return " and ".join(axis for number, axis in enumerate(mesh) if number in numbers) or "none"
