"""Bytes that a compiled program of several devices moves between them, by the axis of the mesh and what it does: from its HLO.

A device's own share, as rings move it: of n devices it sends (n - 1) / n of what an all-gather returns, and twice that of what an
all-reduce does. Loops count as often as XLA knows that they run; one whose trips depend on the data counts once, and is marked.
"""

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from jax_grpo.memory.hlo import Instruction, Module

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
    module, moved = Module(hlo), dict[tuple[str, str], Moved]()
    trips = _trips(module)
    for instruction in module.instructions.values():
        kind = instruction.opcode.removesuffix("-start")
        if kind not in OPCODES or instruction.computation not in trips:
            continue
        groups = _groups(instruction.line) or [list(range(math.prod(mesh.values())))]
        axis, sent = _axes(groups, mesh), _sent(kind, instruction, len(groups[0]))
        times, is_open = trips[instruction.computation]
        before = moved.get((axis, kind), Moved(axis, kind, 0, 0, False))
        is_open = is_open or before.in_open_loop
        moved[axis, kind] = Moved(axis, kind, before.times + times, before.bytes + times * sent, is_open)
    return sorted(moved.values(), key=lambda each: -each.bytes)


def _sent(kind: str, instruction: Instruction, size: int) -> int:
    """Bytes that a device sends of one collective of so many devices."""
    result = instruction.bytes
    if instruction.opcode == "all-gather-start":  # operands stand before the results
        result = result * size // (size + 1)
    elif instruction.opcode == "collective-permute-start":  # operand, result and two numbers
        result = instruction.arrays[0].bytes
    share = {"all-reduce": 2 * (size - 1) / size, "reduce-scatter": size - 1, "collective-permute": 1.0}
    return round(result * share.get(kind, (size - 1) / size))


def _trips(module: Module) -> dict[str, tuple[int, bool]]:
    """How often each computation that is reached runs, and whether a loop of unknown length is around it."""
    trips, todo = {module.entry: (1, False)}, [module.entry]
    while todo:
        name = todo.pop()
        times, is_open = trips[name]
        for instruction in module.computations[name]:
            loops = instruction.trips if instruction.opcode == "while" else 1
            for called in instruction.called:
                trips[called] = times * (loops or 1), is_open or loops is None
                todo.append(called)
    return trips


def _groups(line: str) -> list[list[int]]:
    """Numbers of the devices that exchange with each other; of a permutation, pairs of them; none: all of them."""
    if listed := _LISTED.search(line):
        return [[int(n) for n in group.split(",")] for group in re.split(r"\},\{", listed.group(1)) if group]
    if counted := _COUNTED.search(line):
        shape, sizes, order = ([int(n) for n in part.split(",")] if part else [] for part in counted.groups())
        numbers = np.arange(math.prod(sizes)).reshape(sizes)
        return (numbers.transpose(order) if order else numbers).reshape(shape).tolist()
    return []


def _axes(groups: list[list[int]], mesh: Mapping[str, int]) -> str:
    """The axes along which a group's devices differ."""
    numbers = set()
    for group in groups:
        places = np.stack(np.unravel_index(group, tuple(mesh.values())))
        numbers |= set(np.flatnonzero((places != places[:, :1]).any(axis=1)).tolist())
    return " and ".join(axis for number, axis in enumerate(mesh) if number in numbers) or "none"
