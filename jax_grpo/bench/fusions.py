"""Where a program's time goes: its compiled operations by the source line that asked for them, beside the machine's limits.

    python -m jax_grpo.bench.fusions --config configs/bench_124m_cpu.yaml --program update --json fusions.json

JAX's profiler says how long each operation (fusion, matmul, copy) took, the compiled text what it multiplies and moves. Its floor
is the longer of FLOPs over the measured matmul rate and bytes over the measured bandwidth; only what is read whole counts as moved.
"""

import argparse
import gzip
import json
import math
import re
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jax_grpo import flops
from jax_grpo.bench.machine import machine
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


def _array_bytes(shape: str) -> int:
    """Bytes of an array or tuple such as `f32[8,4]{1,0}`."""
    bits = ((8 if kind == "pred" else int(width or 0), dims) for kind, width, dims in _ARRAY.findall(shape))
    return sum(width * math.prod(map(int, filter(None, dims.split(",")))) // 8 for width, dims in bits)


def _dimensions(shape: str) -> list[int]:
    found = _ARRAY.search(shape)
    return [int(n) for n in found.group(3).split(",") if n] if found else []


def operations(hlo: str) -> dict[str, Operation]:
    """Every operation of a compiled program by its name, those inside fusions left out."""
    origins = origins_of(hlo)
    shapes: dict[str, str] = {}
    matmuls: dict[str, float] = defaultdict(float)
    partial: set[str] = set()
    lines: list[tuple[str, str, str, str]] = []
    computation = ""
    for line in hlo.splitlines():
        if opened := COMPUTATION.match(line):
            computation = opened.group(1)
        if not (found := _INSTRUCTION.match(line)):
            continue
        name, shape, opcode, rest = found.groups()
        shapes[name] = shape
        lines.append((name, shape, opcode, rest))
        if contracted := _CONTRACTED.search(rest):
            left = _dimensions(shapes.get(_NAME.findall(rest)[0], ""))
            inner = math.prod(left[int(n)] for n in contracted.group(1).replace('"', "").split(",") if n)
            matmuls[name] = 2 * math.prod(_dimensions(shape)) * inner
            matmuls[computation] += matmuls[name]
        if opcode in PARTIAL:
            partial |= {name, computation}
    made = {}
    for name, shape, opcode, rest in lines:
        if opcode in CONTAINERS:
            continue
        called = called.group(1) if (called := _FUSED.search(rest)) else name
        operands = [other for other in _NAME.findall(rest.split("), ")[0]) if other in shapes]
        moved = _array_bytes(shape) + sum(_array_bytes(shapes[other]) for other in operands)
        made[name] = Operation(matmuls[called], 0 if called in partial else moved, origins.get(name, Origin("", "")))
    return made


def traced(run: Any) -> list[tuple[str, float]]:
    """(operation, seconds) of each execution while `run()` runs; see `shared_out`."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        file = next(Path(folder).rglob("*.trace.json.gz"))
        events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    found = [event for event in events if event.get("ph") == "X" and "hlo_op" in event.get("args", {})]
    spans = [(event["args"]["hlo_op"], 1e-6 * event["ts"], 1e-6 * (event["ts"] + event["dur"])) for event in found]
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
    groups: dict[tuple[str, str, str], Group] = {}
    for name, seconds in events:
        if (operation := known.get(name)) is None:
            continue
        asked = operation.origin
        key = (direction(asked.operation), asked.source, asked.operation.rpartition("/")[2])
        floor = max(operation.flops / peak, operation.bytes_ / bandwidth)
        group = Group(1, seconds, operation.flops, operation.bytes_, floor)
        groups[key] = _sum([groups[key], group]) if key in groups else group
    return dict(sorted(groups.items(), key=lambda item: -item[1].seconds))


def _sum(groups: Collection[Group]) -> Group:
    return Group(
        sum(group.number for group in groups),
        sum(group.seconds for group in groups),
        sum(group.flops for group in groups),
        sum(group.bytes_ for group in groups),
        sum(group.floor_s for group in groups),
    )


def measured(program: Program) -> tuple[float, list[tuple[str, float]], dict[str, Operation]]:
    """Seconds of the program without the profiler, its executions with it, and its operations."""
    compiled = program.function.lower(*program.arguments).compile()
    held = {"arguments": jax.tree.map(filled, program.arguments)}

    def run() -> None:
        out = jax.block_until_ready(compiled(*held["arguments"]))
        if program.name == "update":
            held["arguments"] = (out[0], *held["arguments"][1:])  # the state is donated

    seconds = []
    for _ in range(WARM_UP + 3):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return min(seconds[WARM_UP:]), traced(run), operations(compiled.as_text() or "")


def table(groups: dict[tuple[str, str, str], Group], whole_s: float) -> list[str]:
    """Markdown: the longest groups, the rest, and all."""
    lines = [
        "| pass | asked for by | as | times | ms | share | GFLOP/s | GB/s | times its floor |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    total = _sum(groups.values())
    listed = list(groups.items())
    if rest := [group for _, group in listed[TOP:]]:
        listed[TOP:] = [(("", "everything else", ""), _sum(rest))]
    for (way, source, kind), group in [*listed, (("", "**all operations**", ""), total)]:
        # What the profiler's clock is too coarse for took 0 seconds, and has no rate.
        rate, moved = (
            f"{1e-9 * n / group.seconds:.0f}" if n and group.seconds else "" for n in (group.flops, group.bytes_)
        )
        floor = f"{group.seconds / group.floor_s:.1f}" if group.floor_s else ""
        cells = (
            way,
            source,
            kind,
            f"{group.number}",
            f"{1e3 * group.seconds:.1f}",
            f"{group.seconds / total.seconds:.1%}",
        )
        lines.append(f"| {' | '.join(cells)} | {rate} | {moved} | {floor} |")
    return [*lines, "", f"Without the profiler {1e3 * whole_s:.1f} ms, {whole_s / total.floor_s:.2f} times the floor."]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m jax_grpo.bench.fusions", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--config", required=True, help="of a run; any --section.key value overrides it")
    parser.add_argument("--program", default="update", help="rollout, score, reference or update")
    parser.add_argument("--json", metavar="FILE")
    arguments, overrides = parser.parse_known_args(argv)
    config = load_config(arguments.config, overrides)
    programs = {program.name: program for program in run_of(config).programs}
    if arguments.program not in programs:
        raise SystemExit(f"--program {arguments.program!r}: this run has {', '.join(programs)}")
    peak = flops.measured_peak(config.model.compute_dtype, 2048 if jax.devices()[0].platform == "cpu" else 8192)
    bandwidth = flops.measured_bandwidth()
    whole_s, events, known = measured(programs[arguments.program])
    groups = grouped(events, known, peak, bandwidth)
    command = f"python -m jax_grpo.bench.fusions {' '.join(sys.argv[1:] if argv is None else argv)}"
    print(f"# {command}\n# measured here: {1e-9 * peak:.0f} GFLOP/s, {1e-9 * bandwidth:.1f} GB/s")
    print("\n".join(table(groups, whole_s)))
    if arguments.json:
        record = {
            "command": command,
            "machine": machine(),
            "peak_flops": peak,
            "bandwidth": bandwidth,
            "seconds": whole_s,
        }
        record["unknown"] = Counter(name for name, _ in events if name not in known)
        record["groups"] = [
            dict(zip(("pass", "source", "kind"), key, strict=True)) | group._asdict() for key, group in groups.items()
        ]
        Path(arguments.json).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
