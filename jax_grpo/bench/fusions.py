"""Where a program's time goes: its compiled operations by the source line that asked for them, beside the machine's limits.

    python -m jax_grpo.bench.fusions --config configs/bench_124m_cpu.yaml --program update --json fusions.json

JAX's profiler says how long each operation (fusion, matmul, copy) took, the compiled text what it multiplies and moves. Its floor
is the longer of FLOPs over the measured matmul rate and bytes over the measured bandwidth; only what is read whole counts as moved.
"""

import gzip
import json
import math
import re
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jax_grpo.bench.harness import command_of, command_parser, header, line, milliseconds, save, selected
from jax_grpo.bench.machine import machine, speeds
from jax_grpo.bench.scaling import filled
from jax_grpo.config import load_config
from jax_grpo.memory.buffers import COMPUTATION, Origin, origins_of
from jax_grpo.memory.shapes import Program, run_of

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\((.*)$")
_ARRAY = re.compile(r"\b([a-z]+)(\d*)\w*\[([\d,]*)\]")
_NAME = re.compile(r"%([\w.-]+)")
_FUSED = re.compile(r"calls=%?([\w.-]+)")  # not `to_apply`, which a scatter has too
_CONTRACTED = re.compile(r'lhs_contracting_dim\w*"?[=:][{\[]([\d,"]*)')
CONTAINERS = ("while", "call", "conditional")  # their time is that of what they run
PARTIAL = ("gather", "scatter", "dynamic-slice", "dynamic-update-slice")  # read or write less than their operands
WARM_UP = 2  # steps, the first of which compiles nothing here
TOP = 14  # lines of the table


class Operation(NamedTuple):
    """A compiled operation: its multiplications and additions in matmuls, the bytes it must move, and who asked for it."""

    flops: float
    bytes_: float
    origin: Origin


class Group(NamedTuple):
    """Operations that one line of the source asked for, in one direction: number, seconds, FLOPs, bytes, seconds at the limits."""

    number: int
    seconds: float
    flops: float
    bytes_: float
    floor_s: float


def summed(groups: Iterable[Group]) -> Group:
    """All of them as one."""
    return Group(*map(sum, zip(*groups, strict=True)))


def _arrays(shape: str) -> list[tuple[int, list[int]]]:
    """Bits of an element and sizes, of each array of a type such as `(f32[8,4]{1,0}, pred[])`."""
    return [
        (8 if kind == "pred" else int(width or 0), [int(size) for size in sizes.split(",") if size])
        for kind, width, sizes in _ARRAY.findall(shape)
    ]


def _bytes(shape: str) -> int:
    return sum(bits * math.prod(sizes) // 8 for bits, sizes in _arrays(shape))


def operations(hlo: str) -> dict[str, Operation]:
    """Every operation of a compiled program by its name, those inside fusions left out."""
    origins, shapes, partial = origins_of(hlo), {}, set()
    matmuls: dict[str, float] = defaultdict(float)
    instructions: list[tuple[str, str, str, str]] = []
    computation = ""
    for text in hlo.splitlines():
        if opened := COMPUTATION.match(text):
            computation = opened.group(1)
        if not (instruction := _INSTRUCTION.match(text)):
            continue
        name, shape, opcode, rest = instruction.groups()
        shapes[name] = shape
        instructions.append((name, shape, opcode, rest))
        if contracted := _CONTRACTED.search(rest):
            (_, left), *_ = _arrays(shapes.get(_NAME.findall(rest)[0], "")) or [(0, [])]
            inner = math.prod(left[int(n)] for n in contracted.group(1).replace('"', "").split(",") if n)
            matmuls[name] = 2 * math.prod(_arrays(shape)[0][1]) * inner
            matmuls[computation] += matmuls[name]
        if opcode in PARTIAL:
            partial |= {name, computation}
    results = {}
    for name, shape, opcode, rest in instructions:
        if opcode in CONTAINERS:
            continue
        called = fused.group(1) if (fused := _FUSED.search(rest)) else name
        operands = [other for other in _NAME.findall(rest.split("), ")[0]) if other in shapes]
        moved = _bytes(shape) + sum(_bytes(shapes[other]) for other in operands)
        results[name] = Operation(matmuls[called], 0 if called in partial else moved, origins.get(name, Origin("", "")))
    return results


def traced(run: Any) -> list[tuple[str, float]]:
    """(operation, seconds) of each execution while `run()` runs; see `shared_out`."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        file = next(Path(folder).rglob("*.trace.json.gz"))
        events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    executions = [event for event in events if event.get("ph") == "X" and "hlo_op" in event.get("args", {})]
    spans = [(event["args"]["hlo_op"], 1e-6 * event["ts"], 1e-6 * (event["ts"] + event["dur"])) for event in executions]
    return shared_out([span for span in spans if not span[0].startswith(CONTAINERS)])


def shared_out(spans: list[tuple[str, float, float]]) -> list[tuple[str, float]]:
    """Each execution's part of the time from the first beginning to the last end, given (operation, beginning, end).

    What runs side by side shares its time. A moment in which nothing is recorded belongs to what ended last: XLA:CPU records of a
    plain matmul only that it was begun; on a GPU it is the wait for the next launch.
    """
    seconds = [0.0] * len(spans)
    edges = [(moment, end, i) for i, span in enumerate(spans) for end, moment in enumerate(span[1:])]
    running: set[int] = set()
    before, last = 0.0, None
    for moment, end, i in sorted(edges):
        for j in running or ([] if last is None else [last]):
            seconds[j] += (moment - before) / max(1, len(running))
        before = moment
        if end:
            running.discard(i)
            last = i
        else:
            running.add(i)
    return [(name, part) for (name, _, _), part in zip(spans, seconds, strict=True)]


def direction(operation: str) -> str:
    """Whether JAX made the operation for the forward or the backward pass; empty where the program has no such halves."""
    if "transpose(" in operation:
        return "backward"
    return "forward" if "jvp(" in operation else ""


def grouped(
    events: list[tuple[str, float]], known: dict[str, Operation], peak: float, bandwidth: float
) -> dict[tuple[str, str, str], Group]:
    """Executions by (direction, source line, kind of operation), the longest first."""
    groups: dict[tuple[str, str, str], list[Group]] = defaultdict(list)
    for name, seconds in events:
        if (operation := known.get(name)) is None:
            continue
        asked = operation.origin
        key = (direction(asked.operation), asked.source, asked.operation.rpartition("/")[2])
        floor = max(operation.flops / peak, operation.bytes_ / bandwidth)
        groups[key].append(Group(1, seconds, operation.flops, operation.bytes_, floor))
    sums = {key: summed(executions) for key, executions in groups.items()}
    return dict(sorted(sums.items(), key=lambda item: -item[1].seconds))


def measured(program: Program) -> tuple[float, list[tuple[str, float]], dict[str, Operation]]:
    """Seconds of the program without the profiler, its executions with it, and its operations."""
    compiled = program.function.lower(*program.arguments).compile()
    held = {"arguments": jax.tree.map(filled, program.arguments)}

    def run() -> None:
        out = jax.block_until_ready(compiled(*held["arguments"]))
        if program.name == "update":
            held["arguments"] = (out[0], *held["arguments"][1:])  # the state is donated

    for _ in range(WARM_UP):
        run()
    return 1e-3 * min(milliseconds(run, 3)), traced(run), operations(compiled.as_text() or "")


def table(groups: dict[tuple[str, str, str], Group], whole_s: float) -> list[str]:
    """Markdown: the longest groups, the rest, and all."""
    total, listed = summed(groups.values()), list(groups.items())
    if rest := [group for _, group in listed[TOP:]]:
        listed[TOP:] = [(("", "everything else", ""), summed(rest))]
    names = ("pass", "asked for by", "as", "times", "ms", "share", "GFLOP/s", "GB/s", "times its floor")
    lines = [header(*names)]
    for key, group in [*listed, (("", "**all operations**", ""), total)]:
        # What the profiler's clock is too coarse for took 0 seconds, and has no rate.
        rates = [
            f"{1e-9 * count / group.seconds:.0f}" if count and group.seconds else ""
            for count in (group.flops, group.bytes_)
        ]
        floor = f"{group.seconds / group.floor_s:.1f}" if group.floor_s else ""
        share = f"{group.seconds / total.seconds:.1%}"
        lines.append(line(*key, group.number, f"{1e3 * group.seconds:.1f}", share, *rates, floor))
    return [*lines, "", f"Without the profiler {1e3 * whole_s:.1f} ms, {whole_s / total.floor_s:.2f} times the floor."]


def main(argv: list[str] | None = None) -> None:
    module = "jax_grpo.bench.fusions"
    parser = command_parser(module, __doc__)
    parser.add_argument("--config", required=True, help="of a run; any --section.key value overrides it")
    parser.add_argument("--program", default="update", help="rollout, score, reference or update")
    parser.add_argument("--json", metavar="FILE", help="where to write the raw data")
    arguments, overrides = parser.parse_known_args(argv)
    config = load_config(arguments.config, overrides)
    programs = {program.name: program for program in run_of(config).programs}
    (name,) = selected("--program", arguments.program, programs)
    limits = speeds(config.model.compute_dtype)
    peak, bandwidth = limits["peak_flops"], limits["bandwidth"]
    whole_s, events, known = measured(programs[name])
    groups = grouped(events, known, peak, bandwidth)
    record = {"command": command_of(module, argv), "machine": machine(), "peak_flops": peak, "bandwidth": bandwidth}
    print(f"# {record['command']}\n# measured here: {1e-9 * peak:.0f} GFLOP/s, {1e-9 * bandwidth:.1f} GB/s")
    print("\n".join(table(groups, whole_s)))
    unknown = Counter(name for name, _ in events if name not in known)
    lines = [dict(zip(("pass", "source", "kind"), key, strict=True)) | group._asdict() for key, group in groups.items()]
    save(arguments.json, record | {"seconds": whole_s, "unknown": unknown, "groups": lines})


if __name__ == "__main__":
    main()
