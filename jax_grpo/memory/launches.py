"""Kernels that a compiled program launches, by loop and branch, with the bytes they move and their FLOPs.

Read from what XLA says its GPU runtime will do: the steps ("thunks") in order, under the loop, branch or CUDA graph they belong to,
and the instruction each came from (`traffic`). Knows nothing of time: see `floors`.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from jax_grpo.memory.compile import Compiled
from jax_grpo.memory.traffic import Module

_THUNK = re.compile(r"^ *(\d+): (k\w+)")
_LABEL = re.compile(r"^ *(\w+):$")
_METADATA = re.compile(r'profile_annotation: "([^"]*)"\s+(?:thunk_id: (\d+))?')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_OPERATION = re.compile(r'op_name="(?:jit\(\w+\)/)?([^"]*)"')
_GRAPH, _LOOP, _CHOICE = "kCommandBuffer", "kWhile", "kConditional"
_NO_LAUNCH = ("kSequential", "kWaitForStreams", "kCopyDone")


class Thunk(NamedTuple):
    """A step of the runtime."""

    number: int  # XLA's; of a CUDA graph 0
    kind: str  # `kCustomKernel`, `kWhile`, ...
    parts: dict[
        str, list["Thunk"]
    ]  # steps of a loop's `condition` and `body`, a choice's branches; of a graph under ""


@dataclass(kw_only=True)
class Stretch:
    """Steps that run one after another each time their loop or branch is entered: counts of one such time."""

    name: str  # `entry`, or XLA's name of the loop, and of a branch its label
    operation: str  # JAX's name of what the loop or choice was
    trips: int | None = 1  # how often it runs in a run of the program; None where only the data tell
    kernels: int = 0  # copies within the device included
    copies: int = 0  # of them
    graphs: int = 0  # CUDA graphs, each launched once
    captured: int = 0  # kernels in them
    waits: int = 0  # times the host waits for the device to know how to go on
    moved: int = 0  # bytes, see `traffic`
    flops: Counter[str] = field(default_factory=Counter)  # of matmuls, by dtype
    opaque: int = 0  # kernels whose FLOPs are not known
    unknown: int = 0  # kernels whose instruction is not known, nor their bytes

    @property
    def launches(self) -> int:
        """What the host launches: kernels outside graphs, and graphs."""
        return self.kernels - self.captured + self.graphs


def stretches(compiled: Compiled, dynamic_trips: Sequence[int] = ()) -> list[Stretch]:
    """The program's straight parts, the entry first, then loops and branches in the order they run.

    `dynamic_trips` are those of loops outside branches whose number XLA does not know, in order; a loop inside a branch, and a loop
    for which none is given, has None.

    Raises:
        ValueError: the program has no thunks: it was not compiled for a GPU.
    """
    sequence, metadata = compiled.thunks
    if not sequence:
        raise ValueError("no thunks: launches are counted in programs that are compiled for a GPU")
    instructions = {int(number or 0): name for name, number in _METADATA.findall(metadata)}
    return list(_Reader(Module(compiled.hlo), instructions, iter(dynamic_trips)).read(tree(sequence)))


def tree(sequence: str) -> list[Thunk]:
    """The dump's steps; a step's own are those indented below it."""
    root = Thunk(0, "", {})
    open_ = [(-4, root)]  # indentation and step
    labels: dict[int, str] = {}  # by indentation of the loop or choice: which of its parts is being read
    for line in sequence.splitlines():
        indent = len(line) - len(line.lstrip())
        if found := _LABEL.match(line):
            if found.group(1) == "condition":  # which XLA does not indent, right under its loop
                labels[open_[-1][0]] = "condition"
            else:
                labels[indent - 2] = found.group(1)
        elif found := _THUNK.match(line):
            while open_[-1][0] >= indent:
                open_.pop()
            outer, above = open_[-1]
            thunk = Thunk(int(found.group(1)), found.group(2), {})
            label = labels[outer] if above.kind in (_LOOP, _CHOICE) else ""
            above.parts.setdefault(label, []).append(thunk)
            open_.append((indent, thunk))
    return root.parts.get("", [])


class _Reader:
    """Walks the tree and adds up; the module says what each kernel costs."""

    def __init__(self, module: Module, instructions: Mapping[int, str], dynamic_trips: Iterator[int]):
        self.module, self.instructions, self.dynamic_trips = module, instructions, dynamic_trips

    def read(self, thunks: list[Thunk]) -> Iterator[Stretch]:
        entry = Stretch(name="entry", operation="")
        yield from self._filled(entry, thunks, in_branch=False)

    def _filled(self, stretch: Stretch, thunks: list[Thunk], in_branch: bool) -> list[Stretch]:
        """The stretch with the steps added, and what is nested in it after it."""
        nested: list[Stretch] = []
        self._add(stretch, thunks, False, in_branch, nested)
        return [stretch, *nested]

    def _add(
        self, stretch: Stretch, thunks: list[Thunk], captured: bool, in_branch: bool, nested: list[Stretch]
    ) -> None:
        for thunk in thunks:
            if thunk.kind == _LOOP:
                nested += self._loop(stretch, thunk, captured, in_branch)
            elif thunk.kind == _CHOICE:
                stretch.waits += not captured
                for label, steps in thunk.parts.items():
                    branch = self._named(thunk, label)
                    branch.trips = None
                    nested += self._filled(branch, steps, in_branch=True)
            elif thunk.kind == _GRAPH:
                stretch.graphs += not captured
                self._add(stretch, thunk.parts.get("", []), True, in_branch, nested)
            elif thunk.parts:
                self._add(
                    stretch, [step for steps in thunk.parts.values() for step in steps], captured, in_branch, nested
                )
            elif thunk.kind not in _NO_LAUNCH:
                self._launch(stretch, thunk, captured)

    def _loop(self, outer: Stretch, thunk: Thunk, captured: bool, in_branch: bool) -> list[Stretch]:
        loop = self._named(thunk)
        instruction = self.module.instruction(loop.name)
        known = _TRIPS.search(instruction.attributes) if instruction else None
        steps = thunk.parts.get("body", [])
        if known:  # the runtime counts by itself and evaluates no condition
            loop.trips = int(known.group(1))
        else:
            steps = [*thunk.parts.get("condition", []), *steps]
            loop.trips = None if in_branch else next(self.dynamic_trips, None)
            loop.waits += not captured
        loop.trips = None if loop.trips is None or outer.trips is None else loop.trips * outer.trips
        return self._filled(loop, steps, in_branch)

    def _named(self, thunk: Thunk, label: str = "") -> Stretch:
        name = self.instructions.get(thunk.number, "")
        instruction = self.module.instruction(name)
        operation = _OPERATION.search(instruction.attributes) if instruction else None
        return Stretch(name=f"{name}/{label}" if label else name, operation=operation.group(1) if operation else "")

    def _launch(self, stretch: Stretch, thunk: Thunk, captured: bool) -> None:
        name = self.instructions.get(thunk.number, "")
        cost = self.module.cost(name)
        stretch.kernels += 1
        stretch.copies += thunk.kind == "kCopy"
        stretch.captured += captured
        stretch.moved += cost.moved
        stretch.flops += cost.flops
        stretch.opaque += cost.opaque
        stretch.unknown += self.module.instruction(name) is None
