"""The text of an optimised HLO module, read: its instructions, what each is of, what it calls, and who uses it.

Knows nothing of configs, of devices, or of what a kernel costs.
"""

import math
import re
from collections import defaultdict
from typing import NamedTuple

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) (?:\(.*)?\{$")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\((.*?)\)(?:, [\w-]+=.*)?$")
_ARRAY = re.compile(r"\b(pred|[subf]+\d+\w*|c64|c128)\[([\d,]*)\]")
_OPERAND = re.compile(r"%([\w.-]+)")
_CALLED = re.compile(r"\b(?:calls|to_apply|body|condition|\w+_computation)=(%?[\w.-]+)|branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_OPERATION = re.compile(r'op_name="([^"]*)"')


class Array(NamedTuple):
    """A dtype and sizes: `f32[8,4]`."""

    dtype: str
    sizes: tuple[int, ...]

    @property
    def width(self) -> int:
        """Bits of an element; a predicate takes a byte."""
        width = re.search(r"\d+", self.dtype)
        return 8 if width is None else int(width.group())

    @property
    def bytes(self) -> int:
        return math.ceil(math.prod(self.sizes) * self.width / 8)


class Instruction(NamedTuple):
    """One line of a computation."""

    name: str  # unique in its module
    computation: str
    shape: str  # `f32[8,4]{1,0}`, or a tuple of such
    opcode: str
    arguments: str  # the text in its parentheses: operands, or a parameter's number
    operands: tuple[str, ...]
    line: str

    @property
    def arrays(self) -> list[Array]:
        """Of its result, one or the parts of a tuple."""
        arrays = _ARRAY.findall(self.shape)
        return [Array(dtype, tuple(int(n) for n in sizes.split(",") if n)) for dtype, sizes in arrays]

    @property
    def bytes(self) -> int:
        """Of its result."""
        return sum(array.bytes for array in self.arrays)

    @property
    def is_root(self) -> bool:
        """Whether it is its computation's result."""
        return self.line.startswith("ROOT")

    @property
    def called(self) -> list[str]:
        """Computations that it runs: of a fusion, a loop, a branch or a reduction."""
        return [name for names in _CALLED.findall(self.line) for name in re.findall(r"[\w.-]+", " ".join(names))]

    @property
    def fused(self) -> str:
        """The computation of a fusion; empty of any other instruction."""
        return self.called[0] if self.opcode in ("fusion", "call") else ""

    @property
    def trips(self) -> int | None:
        """How often a loop runs; None where XLA does not know, and of what is no loop."""
        return int(known.group(1)) if (known := _TRIPS.search(self.line)) else None

    @property
    def operation(self) -> str | None:
        """JAX's name of what it computes."""
        return name.group(1) if (name := _OPERATION.search(self.line)) else None


class Module:
    """A module's instructions in their order: by name, by the computation they stand in, and by the operand they use."""

    def __init__(self, hlo: str):
        self.instructions: dict[str, Instruction] = {}
        self.computations: dict[str, list[Instruction]] = defaultdict(list)
        self.users: dict[str, list[Instruction]] = defaultdict(list)
        self.entry = computation = ""
        for line in hlo.splitlines():
            if opened := _COMPUTATION.match(line):
                computation = opened.group(2)
                self.entry = computation if opened.group(1) else self.entry
            elif parts := _INSTRUCTION.match(line):
                name, shape, opcode, arguments = parts.groups()
                operands = tuple(_OPERAND.findall(arguments))
                instruction = Instruction(name, computation, shape, opcode, arguments, operands, line.strip())
                self.instructions[name] = instruction
                self.computations[computation].append(instruction)
                for operand in dict.fromkeys(operands):
                    self.users[operand].append(instruction)
