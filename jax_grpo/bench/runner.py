"""The runner of every benchmark: each variant in a process of its own, medians of several steps, a table, the raw data as JSON.

A benchmark is a dict of variants; a variant is a function that prepares one and returns its step. All are measured alike: one
step that warms up (and compiles), then the check of what it computed, then at least three timed ones; the same allocator, the
same peak. One that fails is recorded with its reason, as is one whose package or device is not here, and the others go on. Knows
nothing of what is measured.
"""

import argparse
import dataclasses
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jax_grpo.bench.machine import LEAST_STEPS, Step, finished, milliseconds, new_record, same_settings, saved, selected
from jax_grpo.system import memory
from jax_grpo.system.markdown import line, table
from jax_grpo.system.process import child_record
from jax_grpo.system.whole_files import write_record

# Largest difference between a variant's numbers and the first one's, relative to the larger: the parity contract's, by dtype.
AGREEMENT = {"loss": 1e-5, "grad_norm": 1e-4}
ROUNDED = {"loss": 2e-2, "grad_norm": 5e-2}  # where one of the two computes in bfloat16 or TF32
# Of a variant's seconds: no step is begun later, so that what it borrowed is for compiling, not for more steps.
STEPS_SHARE = 0.4
# Equal shares of the seconds left that a variant may take: most need less than one, and leave it to the others.
BORROWED = 2.5
Record = Mapping[str, Any]  # of a variant: what was measured and what is known of it
PACKAGE = __name__.partition(".")[0]
CHILD = "--child"  # first argument of a process that measures one variant; the second says which, as JSON
# What a child's process has beside this one's environment.
QUIET = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "MPLBACKEND": "Agg"}
SYSTEM, GIVES_BACK = ALLOCATORS = ("system", "gives-back")  # names of `--allocator`


class Disagreement(ValueError):
    """A variant computes something else than the first one, or no number at all: its time would compare nothing."""


class NotHere(RuntimeError):
    """A variant needs a device that is not here, and the message says which. As where its package is missing, it is skipped."""


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A variant ready to run; nothing of it has run yet. `facts`, and what `check` and `after` return, go into its record."""

    step: Step
    facts: Mapping[str, Any]  # known before it runs: FLOPs, dtype
    # Given the first step's result before anything is timed: its `loss` and `grad_norm` must be the first variant's (`agree`).
    check: Callable[[Any], Mapping[str, Any]] = lambda _: {}
    after: Callable[[], Mapping[str, Any]] = dict  # measured after the steps, so that no step's memory has it


@dataclasses.dataclass(frozen=True)
class Bench:
    """A benchmark; the first variant is what the others' times are divided by."""

    module: str  # that `python -m` runs
    about: str | None  # its first line is shown
    # By name; a variant is given the problem. One that is not timed by steps returns its record, with `notes` for the table.
    variants: Mapping[str, Callable[[Any], Prepared | dict[str, Any]]]
    problems: Mapping[str, Any]  # by name: sizes, or the file that `read` takes them from
    read: Callable[[str], Any] | None = None  # sizes of a file, or of another text; raises ValueError
    of_json: Callable[[Any], Any] = str  # the problem from what it is in JSON, as a variant's process gets it
    # Fields of the problem that the option of that name sets, and the values that it may have.
    options: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)

    def problem(self, name: str) -> Any:
        """The problem of that name, or of what `read` takes for one. Raises ValueError: there is none."""
        sizes = self.problems.get(name, Path(name))
        if not isinstance(sizes, Path):
            return sizes
        if self.read is None:
            raise ValueError(f"--problem {name!r}: expected one of {', '.join(self.problems)}")
        return self.read(str(sizes))


def agree(ours: Record, first: Record) -> None:
    """Holds a variant's `loss` and `grad_norm`, where its record has them, to those of the first one's record.

    Raises Disagreement: one is not finite, the first variant has none, or they are too far apart for their `dtype`.
    """
    exact = all(record.get("dtype", "float32") == "float32" for record in (ours, first))
    for name, tolerance in (AGREEMENT if exact else ROUNDED).items():
        if name not in ours:
            continue  # a matmul beside an update
        value, expected = ours[name], first.get(name, math.nan)
        if not (math.isfinite(expected) and math.isclose(value, expected, rel_tol=tolerance)):
            raise Disagreement(
                f"{name} {value} here, {expected} in the first variant: expected finite, and {tolerance:g} apart"
            )


def measure(prepared: Prepared, steps: int, until: float = math.inf, expected: Record | None = None) -> dict[str, Any]:
    """Milliseconds of the steps (see `milliseconds`), and the most memory that the process and the device held.

    The first step, which compiles, has a peak of its own (`first_step_peak_bytes`); the peak of the record is that of the steps
    after it, before which freed memory is given back. `expected` is the first variant's record; None for the first itself.
    Raises Disagreement: see `agree`.
    """
    _count_peak_anew()  # reading weights is not the work
    started = time.perf_counter()
    result = finished(prepared.step())
    first_s, first_peak = time.perf_counter() - started, memory.peak()
    facts = {**prepared.facts, **prepared.check(result)}
    agree(facts, facts if expected is None else expected)
    del result
    _count_peak_anew()
    times = milliseconds(prepared.step, steps, until)
    median = statistics.median(times)
    record = {"steps": len(times), "median_ms": median, "min_ms": min(times), "max_ms": max(times)}
    record |= {"first_step_s": first_s, "first_step_peak_bytes": first_peak}
    record |= {"process_peak_bytes": memory.peak(), **_device(), **facts}
    record |= prepared.after()
    if "flops" in record:
        record["teraflops_per_second"] = record["flops"] / median * 1e-9
    if "tokens" in record:
        record["tokens_per_second"] = 1e3 * record["tokens"] / median
    if "floor_ms" in record:
        record["times_floor"] = median / record["floor_ms"]
    return record


def _count_peak_anew() -> None:
    """Of the process, and of PyTorch's device; JAX has no such call."""
    memory.trim()
    memory.forget_peak()
    if (torch := sys.modules.get("torch")) and torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def _device() -> dict[str, Any]:
    """Name and peak of the device of the library that the variant has loaded; a CPU's allocators keep no count."""
    name, peak = "cpu", None
    if (torch := sys.modules.get("torch")) and torch.cuda.is_available():
        name, peak = torch.cuda.get_device_name(), torch.cuda.max_memory_allocated()
    elif (jax := sys.modules.get("jax")) and not torch:
        device = jax.devices()[0]
        name, peak = device.device_kind, (device.memory_stats() or {}).get("peak_bytes_in_use")
    return {"device": name, "device_peak_bytes": peak}


def torch_device() -> str:
    """Where PyTorch's variants run."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def run_child(bench: Bench, job: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
    """A variant's record (`measure`) from a fresh process, which is ended after `limit_s` seconds.

    `job` names the variant, its `problem`, `steps` and `allocator`, and has the first variant's record as `expected`, or None.
    `error` says why there is no record, `skipped` what of the variant is not on this machine.
    """
    if limit_s <= 0:
        return {"error": "left out: the seconds were over"}
    command = [sys.executable, "-m", bench.module, CHILD, json.dumps({**job, "limit_s": STEPS_SHARE * limit_s})]
    try:
        return child_record(command, os.environ | QUIET, limit_s)
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {limit_s:.0f} s"}


def _child(bench: Bench, job: Mapping[str, Any]) -> dict[str, Any]:
    """The record of the variant that this process was started for."""
    until = time.monotonic() + job["limit_s"]
    if job["allocator"] == GIVES_BACK:
        memory.give_back_early()
    try:
        prepared = bench.variants[job["variant"]](bench.of_json(job["problem"]))
    except NotHere as error:
        return {"skipped": str(error)}
    except ModuleNotFoundError as error:
        if (error.name or PACKAGE).partition(".")[0] == PACKAGE:
            raise
        return {"skipped": f"the package {error.name} is not installed"}
    return prepared if isinstance(prepared, dict) else measure(prepared, job["steps"], until, job["expected"])


HEAD = ("variant", "median ms", "of steps", "min to max", "times the first", "peak MB", "rate")
RATES = (
    ("teraflops_per_second", 1e3, "GFLOP/s"),
    ("tokens_per_second", 1, "tokens/s"),
    ("times_floor", 1, "times the floor"),
    ("half_masked_ms", 1, "ms with half of the tokens masked"),
)


def row(name: str, record: Record, first: Record) -> tuple[object, ...]:
    """A row below `HEAD`; the ratio is this variant's time over the first one's."""
    if reason := record.get("error") or ("skipped" in record and f"skipped: {record['skipped']}"):
        return (name, reason, *[""] * 5)
    times = ["-"] * 4
    if "median_ms" in record:
        ratio = f"{record['median_ms'] / first['median_ms']:.2f}" if "median_ms" in first else "-"
        span = f"{record['min_ms']:.1f} to {record['max_ms']:.1f}"
        times = [f"{record['median_ms']:.1f}", record["steps"], span, ratio]
    peak = record.get("device_peak_bytes") or record.get("process_peak_bytes")
    rates = [f"{scale * record[key]:.1f} {unit}" for key, scale, unit in RATES if key in record]
    return (name, *times, f"{peak / 1e6:.0f}" if peak else "-", ", ".join(rates + record.get("notes", [])) or "-")


def _parser(bench: Bench) -> argparse.ArgumentParser:
    about = (bench.about or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog=f"python -m {bench.module}", description=about)
    option = parser.add_argument
    other = " or --config FILE, or the like" if bench.read else ""
    names = f"one of {', '.join(bench.problems)}{other}"
    option("--problem", "--config", "--shape", default=next(iter(bench.problems)), help=names)
    for name, choices in bench.options.items():
        option(f"--{name}", default=choices[0], choices=choices)
    option("--variants", "--implementation", help=f"of {', '.join(bench.variants)}; all of them otherwise")
    option("--json", metavar="FILE", help="where to write the raw data")
    option("--steps", type=int, default=10, help=f"timed; at least {LEAST_STEPS}")
    option("--limit", type=float, default=600, help="seconds a variant may take")
    option("--seconds", type=float, default=math.inf, help="that all variants may take, shared fairly")
    option("--resume", action="store_true", help="keep the variants that --json FILE already has")
    allocator = "of every variant, peers too: the system's as it comes, or made to give freed memory back, as jax_grpo.train does"
    option("--allocator", choices=ALLOCATORS, default=SYSTEM, help=allocator)
    return parser


def main(bench: Bench, argv: list[str] | None = None) -> None:
    """The benchmark's command line."""
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == [CHILD]:
        print(json.dumps(_child(bench, json.loads(words[1]))))
        return
    started, parser = time.monotonic(), _parser(bench)
    arguments = parser.parse_args(words)
    if arguments.steps < LEAST_STEPS:
        parser.error(f"--steps {arguments.steps}: expected at least {LEAST_STEPS}")
    names = selected("--variants", arguments.variants, bench.variants)
    try:
        problem = bench.problem(arguments.problem)
    except ValueError as error:
        parser.error(str(error))
    if bench.options:
        problem = problem._replace(**{name: getattr(arguments, name) for name in bench.options})
    facts = {"problem": arguments.problem, "resolved": json.dumps(problem), "allocator": arguments.allocator}
    record = new_record(bench.module, argv, **facts)
    print(f"# {problem}", *table(HEAD), sep="\n")
    earlier = saved(arguments.json) if arguments.resume else {}
    earlier = with_figures(earlier) if same_settings(earlier, record, *facts) else {}
    results = record["variants"] = {}
    for number, name in enumerate(names):
        left_s = arguments.seconds - (time.monotonic() - started)
        limit_s = min(arguments.limit, left_s, BORROWED * left_s / (len(names) - number))
        job = {"variant": name, "problem": problem, "steps": arguments.steps, "allocator": arguments.allocator}
        job["expected"] = results[names[0]] if number else None
        results[name] = earlier.get(name) or run_child(bench, job, limit_s)
        print(line(*row(name, results[name], results[names[0]])), flush=True)
        if arguments.json:
            write_record(Path(arguments.json), record)  # after each: the machine may be taken away at any moment


def with_figures(record: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Variants of a record that were measured; the others are tried again."""
    return {name: variant for name, variant in record["variants"].items() if not {"error", "skipped"} & variant.keys()}
