"""Bytes that each instruction of an optimised HLO module moves, the FLOPs of its matmuls, and bytes sent between devices.

A kernel's bytes are those of its operands and results, each once, as if nothing stayed in a cache from one kernel to the next. Of a
slice or a gather they are what it takes, of an update in place what it writes: a decode step touches a column of its cache there,
not the cache. A matmul's tiles that read an operand again find it in the L2 cache, and are not counted. Knows no config.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from jax_grpo.memory.hlo import Instruction, Module

_CONTRACTED = re.compile(r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d,"]*)')
_ALIASED = re.compile(r"\{(\d*)\}: \(\d+, \{")  # a result's number, of those that are an operand's memory
_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{\{([\d,{}]*)\}\}")
_COUNTED = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
OPCODES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")
_SAME_MEMORY = ("bitcast", "get-tuple-element", "reshape")
_WORKSPACE = "s8"  # of cuBLAS, its last result: memory to work in


class Cost(NamedTuple):
    """What one kernel does at the least."""

    moved: int  # bytes read and written
    flops: Counter[str]  # of matmuls, by their operands' dtype
    opaque: bool = False  # a kernel of its own whose FLOPs the HLO does not say (Pallas)


def cost(module: Module, name: str) -> Cost:
    """Cost of the kernel that an instruction became; of an unknown name, nothing."""
    instruction = module.instructions.get(name)
    if instruction is None:
        return Cost(0, Counter())
    if fused := instruction.fused:
        (root,) = (inner for inner in module.computations[fused] if inner.is_root)
        moved = sum(_read(module, parameter) for parameter in _parameters(module, fused))
        return Cost(moved + _written(module, root), _flops(module, instruction))
    operands = [module.instructions[operand] for operand in instruction.operands if operand in module.instructions]
    if instruction.opcode == "dynamic-update-slice":
        return Cost(2 * operands[1].bytes, Counter())
    if instruction.opcode in ("slice", "dynamic-slice", "gather"):
        return Cost(2 * instruction.bytes, Counter())
    moved, is_call = sum(operand.bytes for operand in operands) + instruction.bytes, instruction.opcode == "custom-call"
    opaque = is_call and 'custom_call_target="__cublas' not in instruction.line
    flops = Counter() if opaque else _flops(module, instruction)
    return Cost(moved - (_not_written(instruction) if is_call else 0), flops, opaque)


def _parameters(module: Module, computation: str) -> list[Instruction]:
    """In the order of their numbers."""
    parameters = (inner for inner in module.computations[computation] if inner.opcode == "parameter")
    return sorted(parameters, key=lambda inner: int(inner.arguments))


def _read(module: Module, array: Instruction, updated: bool = False) -> int:
    """Bytes that a fused computation reads of an array; of one `updated` in place its own result is no reading."""
    read = 0
    for user in module.users[array.name]:
        first = user.operands[0] == array.name
        if user.opcode in _SAME_MEMORY:
            read += _read(module, user, updated)
        elif user.opcode in ("slice", "dynamic-slice") or (user.opcode == "gather" and first):
            read += user.bytes
        elif user.opcode == "dynamic-update-slice" and first:
            read += _read(module, user, updated=True)
        elif user.opcode == "scatter" and first:
            read += module.instructions[user.operands[-1]].bytes
        elif user.opcode == "tuple" and updated:
            continue
        elif fused := user.fused:
            given = zip(user.operands, _parameters(module, fused), strict=True)
            read += sum(_read(module, parameter) for operand, parameter in given if operand == array.name)
        else:
            return array.bytes
    return array.bytes if array.is_root and not updated else min(read, array.bytes)


def _written(module: Module, result: Instruction) -> int:
    """Bytes of a fused computation's result that are written: of an update in place, the update."""
    operands = [module.instructions[name] for name in result.operands]
    if result.opcode == "tuple":
        return sum(_written(module, part) for part in operands)
    if result.opcode in _SAME_MEMORY:
        return min(_written(module, operands[0]), result.bytes)
    if result.opcode in ("dynamic-update-slice", "scatter"):
        updated = operands[0]
        while updated.opcode in _SAME_MEMORY:
            updated = module.instructions[updated.operands[0]]
        if updated.opcode == "parameter":
            return operands[1 if result.opcode == "dynamic-update-slice" else -1].bytes
    return result.bytes


def _flops(module: Module, instruction: Instruction) -> Counter[str]:
    """2 x elements of the result x elements contracted, by the wider operand's dtype, of a matmul or of those in a fusion."""
    if fused := instruction.fused:
        return sum((_flops(module, inner) for inner in module.computations[fused]), Counter())
    contracted = _CONTRACTED.search(instruction.line)
    if contracted is None:
        return Counter()
    left, right = (module.instructions[name].arrays[0] for name in instruction.operands[:2])
    length = math.prod(left.sizes[int(n)] for n in contracted.group(1).replace('"', "").split(",") if n)
    wider = max(left, right, key=lambda array: array.width)
    return Counter({wider.dtype: 2 * math.prod(instruction.arrays[0].sizes) * length})


def _not_written(call: Instruction) -> int:
    """Bytes of a library call's results that are a workspace, or an operand's own memory (written where it changes)."""
    *others, last = call.arrays
    aliased = {int(n or 0) for n in _ALIASED.findall(call.line.partition("output_to_operand_aliasing=")[2])}
    if others and last.dtype == _WORKSPACE:
        aliased.add(len(others))
    return sum(array.bytes for number, array in enumerate(call.arrays) if number in aliased)


class Moved(NamedTuple):
    """What the collectives of one kind over one axis do in a run of the program."""

    axis: str  # `fsdp`, or several: `data and fsdp`
    opcode: str
    times: int  # arrays moved
    bytes: int  # that a device sends
    in_open_loop: bool  # some stand in a loop whose trips are not known: `times` and `bytes` are of one of them


def collectives(hlo: str, mesh: Mapping[str, int]) -> list[Moved]:
    """Of a program of the devices of `mesh`, sizes by axis in the order that devices are counted in; the most bytes first.

    A device's own share, as rings move it: of n devices it sends (n - 1) / n of what an all-gather returns, and twice that of what
    an all-reduce does. Loops count as often as XLA knows that they run; one whose trips depend on the data counts once, marked.
    """
    module, moved = Module(hlo), dict[tuple[str, str], Moved]()
    for instruction, times, is_open in _runs(module, module.entry):
        kind = instruction.opcode.removesuffix("-start")
        if kind in OPCODES:
            groups_GD = _groups(instruction.line, math.prod(mesh.values()))
            key, sent = (_axes(groups_GD, mesh), kind), _sent(kind, instruction, groups_GD.shape[1])
            before = moved.get(key, Moved(*key, 0, 0, False))
            moved[key] = Moved(*key, before.times + times, before.bytes + times * sent, is_open or before.in_open_loop)
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


def _runs(module: Module, name: str, times: int = 1, is_open: bool = False) -> Iterator[tuple[Instruction, int, bool]]:
    """Instructions that a computation reaches, how often each runs, and whether a loop of unknown length is around it."""
    for instruction in module.computations[name]:
        yield instruction, times, is_open
        loops = instruction.trips if instruction.opcode == "while" else 1
        for called in instruction.called:
            yield from _runs(module, called, times * (loops or 1), is_open or loops is None)


def _groups(line: str, devices: int) -> np.ndarray:
    """Numbers [G, D] of the devices that exchange with each other; of a permutation, pairs of them; where none are said, all."""
    if listed := _LISTED.search(line):
        groups = listed.group(1).split("},{")
        return np.array([[int(n) for n in group.split(",")] for group in groups if group] or [range(devices)])
    if counted := _COUNTED.search(line):
        shape, sizes, order = ([int(n) for n in part.split(",")] if part else [] for part in counted.groups())
        numbers = np.arange(math.prod(sizes)).reshape(sizes)
        return (numbers.transpose(order) if order else numbers).reshape(shape)
    return np.arange(devices)[None]


def _axes(groups_GD: np.ndarray, mesh: Mapping[str, int]) -> str:
    """The axes along which a group's devices differ."""
    places_AGD = np.stack(np.unravel_index(groups_GD, tuple(mesh.values())))
    differ_A = (places_AGD != places_AGD[..., :1]).any(axis=(1, 2))
    return " and ".join(axis for axis, differs in zip(mesh, differ_A, strict=True) if differs) or "none"
