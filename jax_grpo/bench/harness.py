"""What the benchmarks share: each variant in a process of its own, medians of several steps, a table, and the raw data as JSON.

A benchmark is a dict of variants; a variant is a function that prepares one and returns its step. All are measured alike: one
step that warms up (and compiles), then the check of what it computed, then at least three timed ones; the same allocator, the
same peak. One that fails is recorded with its reason, and the others go on. Knows nothing of what is measured.
"""

import argparse
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jax_grpo import resident_memory
from jax_grpo.bench.machine import line_of, machine
from jax_grpo.process_failure import failure

Step = Callable[[], Any]  # does the work and waits for it
LEAST_STEPS = 3  # timed, of every variant: a median of fewer is one measurement
# Largest difference between a variant's numbers and the first one's, relative to the larger: the parity contract's, by dtype.
AGREEMENT = {"loss": 1e-5, "grad_norm": 1e-4}
ROUNDED = {"loss": 2e-2, "grad_norm": 5e-2}  # where one of the two computes in bfloat16 or TF32
STEPS_SHARE = (
    0.4  # of a variant's seconds: no step is begun later, so that what it borrowed is for compiling, not for more steps
)
BORROWED = (
    2.5  # equal shares of the seconds left that a variant may take: most need less than one, and leave it to the others
)


class Disagreement(ValueError):
    """A variant computes something else than the first one, or no number at all: its time would compare nothing."""


def nothing(_: Any = None) -> Mapping[str, Any]:
    """No facts."""
    return {}


@dataclass(frozen=True)
class Prepared:
    """A variant ready to run; nothing of it has run yet.

    Attributes:
        step: does the work and waits for it.
        facts: known before it (FLOPs, dtype), for its record.
        check: is given the first step's result before anything is timed; what it returns goes into the record, and of it `loss`
            and `grad_norm` must be those of the first variant (`agree`).
        after: facts that are measured after the steps, so that no step's memory has them.
    """

    step: Step
    facts: Mapping[str, Any]
    check: Callable[[Any], Mapping[str, Any]] = nothing
    after: Callable[[], Mapping[str, Any]] = nothing


@dataclass(frozen=True)
class Bench:
    """A benchmark.

    Attributes:
        module: that `python -m` runs.
        about: one line.
        variants: by name; a variant takes the problem, resolved. The first is what the others' times are divided by.
        problems: by name, one line each.
        reads_configs: a problem may also be a run's config file, given as `--config`.
        resolve: makes of a problem's name what its variants are given; called once, in the process that measures nothing.
    """

    module: str
    about: str
    variants: Mapping[str, Callable[[str], Prepared]]
    problems: Mapping[str, str]
    reads_configs: bool = False
    resolve: Callable[[str], str] = field(default=str)


def agree(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Holds a variant's numbers to the first one's.

    Args:
        found, expected: records; `dtype` says how exact they are, `loss` and `grad_norm` are compared where `found` has them.

    Raises:
        Disagreement: one is not finite, the first variant has none, or they are too far apart.
    """
    exact = all(record.get("dtype", "float32") == "float32" for record in (found, expected))
    for name, tolerance in (AGREEMENT if exact else ROUNDED).items():
        if name not in found:
            continue  # a matmul beside an update
        ours, theirs = expected.get(name, math.nan), found[name]
        if not (math.isfinite(ours) and math.isfinite(theirs) and math.isclose(ours, theirs, rel_tol=tolerance)):
            raise Disagreement(
                f"{name} {theirs} here, {ours} in the first variant: expected finite, and {tolerance:g} apart"
            )


def measure(
    prepared: Prepared, steps: int, until: float = math.inf, expected: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Milliseconds of the steps, each waited for, and the most memory that the process and the device held.

    The first step, which compiles, has a peak of its own (`first_step_peak_bytes`); the peak of the record is that of the steps
    after it, with what was freed given back before them.

    Args:
        prepared: the variant.
        steps: timed, after the first; at least `LEAST_STEPS`.
        until: of `time.monotonic()`; no step beyond the least number is begun after it.
        expected: the first variant's record; None for the first variant itself.

    Raises:
        Disagreement: see `agree`.
    """
    resident_memory.trim()
    resident_memory.forget_peak()  # reading weights is not the work
    started = time.perf_counter()
    result = prepared.step()
    first_s, first_peak = time.perf_counter() - started, _process_peak()
    facts = {**prepared.facts, **prepared.check(result)}
    agree(facts, facts if expected is None else expected)
    del result
    resident_memory.trim()
    resident_memory.forget_peak()
    milliseconds = []
    while len(milliseconds) < LEAST_STEPS or (len(milliseconds) < steps and time.monotonic() < until):
        started = time.perf_counter()
        prepared.step()
        milliseconds.append(1e3 * (time.perf_counter() - started))
    median = statistics.median(milliseconds)
    record = {
        "steps": len(milliseconds),
        "median_ms": median,
        "min_ms": min(milliseconds),
        "max_ms": max(milliseconds),
        "first_step_s": first_s,
        "first_step_peak_bytes": first_peak,
        "process_peak_bytes": _process_peak(),
        "device_peak_bytes": _device_peak(),
        **facts,
    }
    record |= prepared.after()
    if "flops" in record:
        record["teraflops_per_second"] = record["flops"] / median * 1e-9
    if "tokens" in record:
        record["tokens_per_second"] = 1e3 * record["tokens"] / median
    if "floor_ms" in record:
        record["times_floor"] = median / record["floor_ms"]
    return record


def _process_peak() -> int:
    if resident_memory.counted():
        return resident_memory.resident("VmHWM")
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _device_peak() -> int | None:
    """Of the libraries that the variant has loaded; None on a CPU, whose allocators keep no count."""
    if torch := sys.modules.get("torch"):
        return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
    if jax := sys.modules.get("jax"):
        return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return None


def run_child(
    bench: Bench,
    variant: str,
    problem: str,
    steps: int,
    limit_s: float,
    expected: Mapping[str, Any] | None = None,
    gives_back: bool = False,
) -> dict[str, Any]:
    """A variant's record from a fresh process; `error` when it has none.

    Args:
        bench, variant: what is run.
        problem: resolved.
        steps, expected: see `measure`.
        limit_s: seconds after which it is ended.
        gives_back: see `--allocator`.
    """
    if limit_s <= 0:
        return {"error": "left out: the seconds were over"}
    command = [sys.executable, "-m", bench.module, "--child", variant, "--problem", problem, "--steps", str(steps)]
    command += ["--limit", str(STEPS_SHARE * limit_s), "--allocator", ALLOCATORS[gives_back]]
    if expected is not None:
        command += ["--expect", json.dumps(expected)]
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {limit_s:.0f} s"}
    if done.returncode:
        return {"error": failure(done.stderr, done.returncode)}
    return json.loads(done.stdout.splitlines()[-1])


def compared(record: Mapping[str, Any]) -> dict[str, Any]:
    """What `agree` needs of a record; nothing where the variant has no record."""
    return {name: record[name] for name in (*AGREEMENT, "dtype") if name in record}


def row(name: str, record: Mapping[str, Any], first: Mapping[str, Any]) -> str:
    """A line of the table; the ratio is this variant's time over the first one's."""
    if "error" in record:
        return f"| {name} | {record['error']} | | | | | |"
    ratio = f"{record['median_ms'] / first['median_ms']:.2f}" if "median_ms" in first else "-"
    peak = record["device_peak_bytes"] or record["process_peak_bytes"]
    rates = [f"{scale * record[name]:.1f} {unit}" for name, scale, unit in RATES if name in record]
    span = f"{record['min_ms']:.1f} to {record['max_ms']:.1f}"
    cells = (
        f"{record['median_ms']:.1f}",
        f"{record['steps']}",
        span,
        ratio,
        f"{peak / 1e6:.0f}",
        ", ".join(rates) or "-",
    )
    return f"| {name} | {' | '.join(cells)} |"


RATES = (
    ("teraflops_per_second", 1e3, "GFLOP/s"),
    ("tokens_per_second", 1, "tokens/s"),
    ("times_floor", 1, "times the floor"),
)
HEADER = (
    "| variant | median ms | of steps | min to max | times the first | peak MB | rate |\n|---|---|---|---|---|---|---|"
)
ALLOCATORS = ("system", "gives-back")  # names of `--allocator`, by whether it gives back


def main(bench: Bench, argv: list[str] | None = None) -> None:
    """The benchmark's command line."""
    parser = argparse.ArgumentParser(prog=f"python -m {bench.module}", description=bench.about)
    parser.add_argument("--problem", default=next(iter(bench.problems)), help=", ".join(bench.problems))
    if bench.reads_configs:
        parser.add_argument(
            "--config", dest="problem", metavar="FILE", help="a run's config: its sizes are the problem"
        )
    parser.add_argument("--variants", default=",".join(bench.variants))
    parser.add_argument("--steps", type=int, default=10, help=f"timed; at least {LEAST_STEPS}")
    parser.add_argument("--limit", type=float, default=600, help="seconds a variant may take")
    parser.add_argument("--seconds", type=float, default=math.inf, help="that all variants may take, shared fairly")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--resume", action="store_true", help="keep the variants that --json FILE already has")
    parser.add_argument(
        "--allocator",
        choices=ALLOCATORS,
        default=ALLOCATORS[0],
        help="of every variant, peers too: the system's as it comes, or made to give freed memory back, as jax_grpo.train does",
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--expect", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.steps < LEAST_STEPS:
        parser.error(f"--steps {arguments.steps}: expected at least {LEAST_STEPS}")
    known = arguments.child or arguments.problem in bench.problems
    if not known and not (bench.reads_configs and arguments.problem.endswith(".yaml")):
        parser.error(f"--problem {arguments.problem!r}: expected one of {', '.join(bench.problems)}")
    started = time.monotonic()
    if arguments.child:
        if arguments.allocator == ALLOCATORS[True]:
            resident_memory.give_back_early()
        prepared = bench.variants[arguments.child](arguments.problem)
        expected = json.loads(arguments.expect) if arguments.expect else None
        print(json.dumps(measure(prepared, arguments.steps, started + arguments.limit, expected)))
        return
    chosen = arguments.variants.split(",")
    if unknown := [name for name in chosen if name not in bench.variants]:
        raise SystemExit(f"--variants {unknown[0]!r}: expected some of {', '.join(bench.variants)}")
    command = f"python -m {bench.module} {' '.join(sys.argv[1:] if argv is None else argv)}".strip()
    here, resolved = machine(), bench.resolve(arguments.problem)
    print(
        f"# {command}\n# {bench.problems.get(arguments.problem, 'the sizes of that config')}\n# {line_of(here)}\n{HEADER}"
    )
    record: dict[str, Any] = {
        "command": command,
        "problem": arguments.problem,
        "resolved": resolved,
        "allocator": arguments.allocator,
        "machine": here,
        "variants": {},
    }
    kept = _kept(arguments.json, record) if arguments.resume and arguments.json else {}
    found = record["variants"]
    for number, name in enumerate(chosen):
        left_s = arguments.seconds - (time.monotonic() - started)
        limit_s = min(arguments.limit, left_s, BORROWED * left_s / (len(chosen) - number))
        expected = compared(found[chosen[0]]) if number else None
        gives_back = arguments.allocator == ALLOCATORS[True]
        found[name] = kept.get(name) or run_child(bench, name, resolved, arguments.steps, limit_s, expected, gives_back)
        print(row(name, found[name], found[chosen[0]]), flush=True)
        if arguments.json:
            Path(arguments.json).write_text(json.dumps(record, indent=1) + "\n")


def _kept(file: str, record: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Variants without an error in an earlier run's data of the same problem, on the same machine, with the same allocator."""
    earlier = json.loads(Path(file).read_text()) if Path(file).exists() else {}
    if any(earlier.get(name) != record[name] for name in ("problem", "resolved", "allocator")):
        return {}
    if earlier["machine"].get("processor") != record["machine"]["processor"]:
        return {}
    return {name: record for name, record in earlier["variants"].items() if "error" not in record}
