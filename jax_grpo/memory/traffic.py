"""Bytes that each instruction of an optimised HLO module moves, and the FLOPs of its matmuls. Knows no thunks and no configs.

A kernel's bytes are those of its operands and results, each once, as if nothing stayed in a cache from one kernel to the next. Of a
slice or a gather they are what it takes, of an update in place what it writes: a decode step touches a column of its cache there,
not the cache. A matmul's tiles that read an operand again find it in the L2 cache, and are not counted.
"""

import dataclasses
import functools
import math
import re
from collections import Counter, defaultdict
from typing import NamedTuple

from jax_grpo.memory.dumps import instructions

_ARRAY = re.compile(r"\b(pred|[subf]+\d+\w*|c64|c128)\[([\d,]*)\]")
_OPERAND = re.compile(r"%([\w.-]+)")
_CALLS = re.compile(r"\bcalls=%?([\w.-]+)")
_CONTRACTED = re.compile(r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d,"]*)')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_ALIASED = re.compile(r"\{(\d*)\}: \(\d+, \{")  # a result's number, of those that are an operand's memory
_SAME_MEMORY = ("bitcast", "get-tuple-element", "reshape")
_WORKSPACE = "s8"  # of cuBLAS, its last result: memory to work in


class Instruction(NamedTuple):
    """One line of a computation."""

    name: str
    shape: str  # `f32[8,4]{1,0}`, or a tuple of such
    opcode: str
    operands: tuple[str, ...]
    attributes: str  # what follows the operands

    @property
    def bytes(self) -> int:
        """Of its result."""
        return sum(array_bytes(dtype, dims) for dtype, dims in _ARRAY.findall(self.shape))


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one kernel does at the least."""

    moved: int = 0  # bytes read and written
    flops: Counter[str] = dataclasses.field(default_factory=Counter)  # of matmuls, by their operands' dtype
    opaque: bool = False  # a kernel of its own whose FLOPs the HLO does not say (Pallas)


def array_bytes(dtype: str, dims: str) -> int:
    """Bytes of `dtype[dims]`; a predicate takes one."""
    width = re.search(r"\d+", dtype)
    bits = 8 if dtype == "pred" or width is None else int(width.group())
    return math.ceil(math.prod(int(n) for n in dims.split(",") if n) * bits / 8)


class Module:
    """An HLO module's text, read."""

    def __init__(self, hlo: str):
        self.computations: dict[str, dict[str, Instruction]] = defaultdict(dict)
        self.roots: dict[str, str] = {}
        self.home: dict[str, str] = {}  # computation of each instruction
        for computation, found in instructions(hlo):
            name, shape, opcode, rest = found.groups()
            operands, attributes = _split_operands(rest)
            if opcode == "parameter":
                operands, attributes = "", operands + attributes  # its number stands there
            names = tuple(_OPERAND.findall(operands))
            self.computations[computation][name] = Instruction(name, shape, opcode, names, attributes)
            self.home[name] = computation
            if found.string.lstrip().startswith("ROOT"):
                self.roots[computation] = name

    def instruction(self, name: str) -> Instruction | None:
        """The instruction of that name, which is unique in a module."""
        return self.computations[self.home[name]][name] if name in self.home else None

    def cost(self, name: str) -> Cost:
        """Cost of the kernel that an instruction became; of an unknown name, nothing."""
        instruction = self.instruction(name)
        if instruction is None:
            return Cost()
        if called := self._called(instruction):
            moved = self._written(called, self.roots[called])
            moved += sum(self._read(called, parameter) for parameter in self._parameters(called))
            return Cost(moved, self._flops(called))
        arrays = [self.instruction(operand) for operand in instruction.operands]
        if instruction.opcode == "dynamic-update-slice":
            return Cost(2 * arrays[1].bytes if arrays[1] else 0)
        if instruction.opcode in ("slice", "dynamic-slice", "gather"):
            return Cost(2 * instruction.bytes)
        read = sum(array.bytes for array in arrays if array)
        written = instruction.bytes
        if instruction.opcode != "custom-call":
            return Cost(read + written, self._dot(instruction))
        written -= self._not_written(instruction)
        target = _TARGET.search(instruction.attributes)
        matmul = target is not None and target.group(1).startswith("__cublas")
        return Cost(read + written, self._dot(instruction) if matmul else Counter(), opaque=not matmul)

    def _called(self, instruction: Instruction) -> str:
        found = _CALLS.search(instruction.attributes) if instruction.opcode in ("fusion", "call") else None
        return found.group(1) if found else ""

    def _parameters(self, computation: str) -> list[str]:
        """In the order of their numbers."""
        found = [i for i in self.computations[computation].values() if i.opcode == "parameter"]
        return [i.name for i in sorted(found, key=lambda i: int(re.match(r"\d+", i.attributes).group()))]  # pyright: ignore

    @functools.cache  # noqa: B019 (a module lives as long as its report is made)
    def _users(self, computation: str) -> dict[str, list[Instruction]]:
        users = defaultdict(list)
        for instruction in self.computations[computation].values():
            for operand in dict.fromkeys(instruction.operands):
                users[operand].append(instruction)
        return users

    def _read(self, computation: str, name: str, updated: bool = False) -> int:
        """Bytes that a fused computation reads of an array; of one `updated` in place its own result is no reading."""
        whole, read = self.computations[computation][name].bytes, 0
        for user in self._users(computation)[name]:
            first = user.operands[0] == name
            if user.opcode in _SAME_MEMORY:
                read += self._read(computation, user.name, updated)
            elif user.opcode in ("slice", "dynamic-slice") or (user.opcode == "gather" and first):
                read += user.bytes
            elif user.opcode == "dynamic-update-slice" and first:
                read += self._read(computation, user.name, updated=True)
            elif user.opcode == "scatter" and first:
                read += self.computations[computation][user.operands[-1]].bytes
            elif user.opcode == "tuple" and updated:
                continue
            elif called := self._called(user):
                inner = self._parameters(called)
                read += sum(self._read(called, inner[i]) for i, given in enumerate(user.operands) if given == name)
            else:
                return whole
        if self.roots[computation] == name and not updated:
            return whole
        return min(read, whole)

    def _written(self, computation: str, name: str) -> int:
        """Bytes of a fused computation's result that are written: of an update in place, the update."""
        instruction = self.computations[computation][name]
        if instruction.opcode == "tuple":
            return sum(self._written(computation, part) for part in instruction.operands)
        if instruction.opcode in _SAME_MEMORY:
            inner = self._written(computation, instruction.operands[0])
            return min(inner, instruction.bytes)
        in_place = self._behind(computation, instruction.operands[0]) if instruction.operands else None
        if in_place is not None and in_place.opcode == "parameter":
            if instruction.opcode == "dynamic-update-slice":
                return self.computations[computation][instruction.operands[1]].bytes
            if instruction.opcode == "scatter":
                return self.computations[computation][instruction.operands[-1]].bytes
        return instruction.bytes

    def _behind(self, computation: str, name: str) -> Instruction:
        """The instruction whose memory a name stands for."""
        instruction = self.computations[computation][name]
        while instruction.opcode in _SAME_MEMORY:
            instruction = self.computations[computation][instruction.operands[0]]
        return instruction

    def _flops(self, computation: str) -> Counter[str]:
        total = Counter()
        for instruction in self.computations[computation].values():
            called = self._called(instruction)
            total += self._flops(called) if called else self._dot(instruction)
        return total

    def _dot(self, instruction: Instruction) -> Counter[str]:
        """2 x elements of the result x elements contracted, by the wider operand's dtype; nothing of other instructions."""
        contracted = _CONTRACTED.search(instruction.attributes)
        if contracted is None:
            return Counter()
        arrays = [_ARRAY.findall(self.instruction(name).shape)[0] for name in instruction.operands[:2]]  # pyright: ignore
        dims = [int(n) for n in arrays[0][1].split(",") if n]
        length = math.prod(dims[int(n)] for n in contracted.group(1).replace('"', "").split(",") if n)
        elements = math.prod(int(n) for n in _ARRAY.findall(instruction.shape)[0][1].split(",") if n)
        return Counter(
            {max((dtype for dtype, _ in arrays), key=lambda dtype: array_bytes(dtype, "")): 2 * elements * length}
        )

    def _not_written(self, call: Instruction) -> int:
        """Bytes of a library call's results that are a workspace, or an operand's own memory (written where it changes)."""
        results = _ARRAY.findall(call.shape)
        of_operands = {
            int(n or 0) for n in _ALIASED.findall(call.attributes.partition("output_to_operand_aliasing=")[2])
        }
        return sum(
            array_bytes(*result)
            for number, result in enumerate(results)
            if number in of_operands or (result[0] == _WORKSPACE and number == len(results) - 1 > 0)
        )


def _split_operands(rest: str) -> tuple[str, str]:
    """What stands in the parentheses that are open at the start, and what follows them."""
    depth = 1
    for place, letter in enumerate(rest):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return rest[:place], rest[place + 1 :]
    return rest, ""
