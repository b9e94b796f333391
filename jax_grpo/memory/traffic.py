"""Bytes that each instruction of an optimised HLO module moves, and the FLOPs of its matmuls. Knows no thunks and no configs.

A kernel's bytes are those of its operands and results, each once, as if nothing stayed in a cache from one kernel to the next. Of a
slice or a gather they are what it takes, of an update in place what it writes: a decode step touches a column of its cache there,
not the cache. A matmul's tiles that read an operand again find it in the L2 cache, and are not counted.
"""

import dataclasses
import math
import re
from collections import Counter

from jax_grpo.memory.hlo import Instruction, Module

_CONTRACTED = re.compile(r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d,"]*)')
_ALIASED = re.compile(r"\{(\d*)\}: \(\d+, \{")  # a result's number, of those that are an operand's memory
_SAME_MEMORY = ("bitcast", "get-tuple-element", "reshape")
_WORKSPACE = "s8"  # of cuBLAS, its last result: memory to work in


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one kernel does at the least."""

    moved: int = 0  # bytes read and written
    flops: Counter[str] = dataclasses.field(default_factory=Counter)  # of matmuls, by their operands' dtype
    opaque: bool = False  # a kernel of its own whose FLOPs the HLO does not say (Pallas)


def cost(module: Module, name: str) -> Cost:
    """Cost of the kernel that an instruction became; of an unknown name, nothing."""
    instruction = module.instructions.get(name)
    if instruction is None:
        return Cost()
    if fused := instruction.fused:
        (root,) = (inner for inner in module.computations[fused] if inner.is_root)
        moved = sum(_read(module, parameter) for parameter in _parameters(module, fused))
        return Cost(moved + _written(module, root), _flops(module, instruction))
    operands = [module.instructions[operand] for operand in instruction.operands if operand in module.instructions]
    if instruction.opcode == "dynamic-update-slice":
        return Cost(2 * operands[1].bytes)
    if instruction.opcode in ("slice", "dynamic-slice", "gather"):
        return Cost(2 * instruction.bytes)
    moved = sum(operand.bytes for operand in operands) + instruction.bytes
    if instruction.opcode != "custom-call":
        return Cost(moved, _flops(module, instruction))
    matmul = 'custom_call_target="__cublas' in instruction.line
    flops = _flops(module, instruction) if matmul else Counter()
    return Cost(moved - _not_written(instruction), flops, opaque=not matmul)


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
    return Counter({wider.dtype: 2 * instruction.arrays[0].elements * length})


def _not_written(call: Instruction) -> int:
    """Bytes of a library call's results that are a workspace, or an operand's own memory (written where it changes)."""
    *others, last = call.arrays
    aliased = {int(n or 0) for n in _ALIASED.findall(call.line.partition("output_to_operand_aliasing=")[2])}
    if others and last.dtype == _WORKSPACE:
        aliased.add(len(others))
    return sum(array.bytes for number, array in enumerate(call.arrays) if number in aliased)
