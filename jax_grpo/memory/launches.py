"""Kernels that a compiled program launches, by loop and branch, with the bytes they move, their FLOPs, and the least time of each.

Read from XLA's dump of its GPU runtime's steps ("thunks"): in order, under the loop, branch or CUDA graph that they belong to, with
the instruction of each (`traffic`). Least times are by the target's bandwidth and peaks (`system.devices`), and by assumed costs of
a launch. A program is slower than each of these floors; the highest of them is the one to lower.
"""

import itertools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jax_grpo.config import Config
from jax_grpo.memory.compile import Compiled
from jax_grpo.memory.hlo import Module
from jax_grpo.memory.programs import Program, Run, generated
from jax_grpo.memory.traffic import cost
from jax_grpo.model import flops
from jax_grpo.rollout.decoding import chunk_lengths
from jax_grpo.system import devices

# Assumptions in seconds; none of them was measured here. A launch of a kernel, a copy or a whole graph by the host, from a good
# case to a common one; and what lies between two dependent kernels of a graph.
LAUNCH_S = (2e-6, 5e-6)
GRAPH_KERNEL_S = 1e-6
_PEAK_OF = {"bf16": "bfloat16", "f16": "bfloat16"}  # all others multiply as float32 does

_THUNK = re.compile(r"^ *(\d+): (k\w+)")
_LABEL = re.compile(r"^ *(\w+):$")
_JITTED = re.compile(r"^jit\(\w+\)/")
_METADATA = re.compile(r'profile_annotation: "([^"]*)"\s+(?:thunk_id: (\d+))?')
_GRAPH, _LOOP, _CHOICE = "kCommandBuffer", "kWhile", "kConditional"
_NO_LAUNCH = ("kSequential", "kWaitForStreams", "kCopyDone")


class Thunk(NamedTuple):
    """A step of the runtime."""

    number: int  # XLA's; of a CUDA graph 0
    kind: str  # `kCustomKernel`, `kWhile`, ...
    # Steps of a loop's `condition` and `body`, or of a choice's branches; of a graph under "".
    parts: dict[str, list["Thunk"]]


@dataclass(kw_only=True)
class Segment:
    """Steps that run one after another each time their loop or branch is entered: counts of one such time."""

    name: str  # `entry`, or XLA's name of the loop, and of a branch its label
    operation: str  # JAX's name of the loop or branch
    trips: int | None = 1  # how often it runs in a run of the program; None where that depends on the data
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
        """Launches by the host: kernels outside graphs, and graphs."""
        return self.kernels - self.captured + self.graphs

    def floors(self, target: str) -> dict[str, float]:
        """Least seconds of one pass through it, by what bounds it.

        `launches` takes a launch by the host at the lower `LAUNCH_S`, and a graph's kernels at `GRAPH_KERNEL_S`;
        `launches_without_graphs` takes each kernel at the upper one. `arithmetic` leaves out opaque kernels.
        """
        facts = devices.read(target)
        peaks = {dtype: devices.device_peak(facts.device_kind, _PEAK_OF.get(dtype, "float32")) for dtype in self.flops}
        return {
            "bandwidth": self.moved / facts.bandwidth,
            "arithmetic": sum(count / (peaks[dtype] or float("nan")) for dtype, count in self.flops.items()),
            "launches": self.captured * GRAPH_KERNEL_S + self.launches * LAUNCH_S[0],
            "launches_without_graphs": self.kernels * LAUNCH_S[1],
        }


def segments(compiled: Compiled, dynamic_trips: Sequence[int] = ()) -> list[Segment]:
    """The program's straight parts, the entry first, then loops and branches in the order they run.

    `dynamic_trips` are those of loops outside branches whose number XLA does not know, in order; a loop inside a branch, and a loop
    for which none is given, has None.

    Raises:
        ValueError: the program has no thunks: it was not compiled for a GPU.
    """
    sequence, metadata = compiled.thunks
    if not sequence:
        raise ValueError("no thunks: launches are counted in programs that are compiled for a GPU")
    names = {int(number or 0): name for name, number in _METADATA.findall(metadata)}
    module, trips_left = Module(compiled.hlo), iter(dynamic_trips)
    parts = [Segment(name="entry", operation="")]

    def add(to: Segment, thunks: list[Thunk], captured: bool = False) -> None:
        """Adds steps to a segment; a loop or branch among them becomes a part of its own."""
        for thunk in thunks:
            name = names.get(thunk.number, "")
            instruction = module.instructions.get(name)
            operation = _JITTED.sub("", instruction.operation or "") if instruction else ""
            if thunk.kind == _LOOP:
                parts.append(loop := Segment(name=name, operation=operation))
                steps, trips = thunk.parts.get("body", []), instruction.trips if instruction else None
                if trips is None:  # the runtime, which counts known trips by itself, evaluates the condition
                    steps = [*thunk.parts.get("condition", []), *steps]
                    trips = None if to.trips is None else next(trips_left, None)
                    loop.waits += not captured
                loop.trips = None if trips is None or to.trips is None else trips * to.trips
                add(loop, steps)
            elif thunk.kind == _CHOICE:
                to.waits += not captured
                for label, steps in thunk.parts.items():
                    parts.append(branch := Segment(name=f"{name}/{label}", operation=operation, trips=None))
                    add(branch, steps)
            elif thunk.parts or thunk.kind == _GRAPH:
                to.graphs += thunk.kind == _GRAPH and not captured
                for steps in thunk.parts.values():
                    add(to, steps, captured or thunk.kind == _GRAPH)
            elif thunk.kind not in _NO_LAUNCH:
                kernel = cost(module, name)
                to.kernels += 1
                to.copies += thunk.kind == "kCopy"
                to.captured += captured
                to.moved += kernel.moved
                to.flops += kernel.flops
                to.opaque += kernel.opaque
                to.unknown += instruction is None

    add(parts[0], tree(sequence))
    return parts


def tree(sequence: str) -> list[Thunk]:
    """The dump's steps; a step's own are those indented below it."""
    root = Thunk(0, "", {})
    open_ = [(-4, root)]  # indentation and step
    labels: dict[int, str] = {}  # by indentation of the loop or choice: which of its parts is being read
    for line in sequence.splitlines():
        indent = len(line) - len(line.lstrip())
        if label := _LABEL.match(line):
            # XLA does not indent `condition:`, which stands right under its loop.
            labels[open_[-1][0] if label.group(1) == "condition" else indent - 2] = label.group(1)
        elif step := _THUNK.match(line):
            while open_[-1][0] >= indent:
                open_.pop()
            outer, above = open_[-1]
            thunk = Thunk(int(step.group(1)), step.group(2), {})
            part = labels[outer] if above.kind in (_LOOP, _CHOICE) else ""
            above.parts.setdefault(part, []).append(thunk)
            open_.append((indent, thunk))
    return root.parts.get("", [])


def launches_of(target: str, config: Config, run: Run, program: Program, compiled: Compiled) -> dict[str, Any]:
    """A program's segments with their floors, and the FLOPs that its task needs by formula, as JSON values.

    Of a loop that decodes, `least_moved` is the bytes that a step must read, however it is written: every weight in the compute
    dtype, and the cache of prompts and completions as long as this loop's is.
    """
    first_turn = program.generates and not program.goes_on  # the length of a later one depends on the data
    cap, whole = config.rollout.max_new_tokens, config.model.decode_attention == "pallas"
    lengths = chunk_lengths(cap, whole=whole) if first_turn else []
    parts = [
        {**vars(segment), "flops": dict(segment.flops), "floors": segment.floors(target)}
        for segment in segments(compiled, lengths)
    ]
    decoding = [part for part in parts if part["waits"] and part["trips"] and part["name"] != "entry"]
    sizes, itemsize = run.architecture, jnp.dtype(config.model.compute_dtype).itemsize
    weights = sizes.padded_vocab_size * sizes.hidden_size + sizes.num_layers * sizes.block_matrices
    of_token = 2 * sizes.num_layers * sizes.kv_heads * sizes.head_dim  # its keys and values
    for part, columns in zip(decoding, itertools.accumulate(lengths), strict=False):
        tokens = program.arguments[2].size + generated(program)[0].stopped_PG.size * columns
        part["least_moved"] = (weights + of_token * tokens) * itemsize
    return {"formula_flops": formula_flops(config, run, program), "parts": parts}


def formula_flops(config: Config, run: Run, program: Program) -> float | None:
    """FLOPs of the task, every column a real token (`model.flops`); None of an episode's later turns."""
    if program.goes_on:
        return None
    if program.generates:
        prompt, completion = program.arguments[2].shape, generated(program)[0].completion_ids_PGC.shape
    else:
        tokens = program.arguments[1].tokens
        prompt, completion = tokens.prompt_mask_PT.shape, tokens.completion_mask_PGC.shape
    work = flops.completions_work(np.ones(prompt), np.ones(completion), run.architecture.window)
    backward = flops.BACKWARD if config.model.adapter is None else flops.BACKWARD_UNDER_ADAPTERS
    passes = 1 + backward if program.name == "update" else 1
    return passes * flops.forward(run.architecture, work)
