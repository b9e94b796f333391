"""What the benchmarks share: each variant in a process of its own, medians of several steps, a table, and the raw data as JSON.

A benchmark is a dict of variants; a variant is a function that prepares one and returns its step. All are measured alike: one
step that warms up (and compiles), then the check of what it computed, then at least three timed ones; the same allocator, the
same peak. One that fails is recorded with its reason, as is one whose package or device is not here, and the others go on. Knows
nothing of what is measured.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax_grpo.bench.machine import LEAST_STEPS, Step, finished, line_of, machine, milliseconds
from jax_grpo.system import memory
from jax_grpo.system.process import child_record
from jax_grpo.system.whole_files import written_whole

# Largest difference between a variant's numbers and the first one's, relative to the larger: the parity contract's, by dtype.
AGREEMENT = {"loss": 1e-5, "grad_norm": 1e-4}
ROUNDED = {"loss": 2e-2, "grad_norm": 5e-2}  # where one of the two computes in bfloat16 or TF32
# Of a variant's seconds: no step is begun later, so that what it borrowed is for compiling, not for more steps.
STEPS_SHARE = 0.4
# Equal shares of the seconds left that a variant may take: most need less than one, and leave it to the others.
BORROWED = 2.5
PACKAGE = __name__.partition(".")[0]
CHILD = "--child"  # first argument of a process that measures one variant; the second says which, as JSON
SYSTEM, GIVES_BACK = ALLOCATORS = ("system", "gives-back")  # names of `--allocator`


class Disagreement(ValueError):
    """A variant computes something else than the first one, or no number at all: its time would compare nothing."""


class NotHere(RuntimeError):
    """A variant needs a device that is not here, and the message says which. As where its package is missing, it is skipped."""


@dataclass(frozen=True)
class Prepared:
    """A variant ready to run; nothing of it has run yet. `facts`, and what `check` and `after` return, go into its record."""

    step: Step
    facts: Mapping[str, Any]  # known before it runs: FLOPs, dtype
    # Given the first step's result before anything is timed: its `loss` and `grad_norm` must be the first variant's (`agree`).
    check: Callable[[Any], Mapping[str, Any]] = lambda _: {}
    after: Callable[[], Mapping[str, Any]] = dict  # measured after the steps, so that no step's memory has it


@dataclass(frozen=True)
class Bench:
    """A benchmark; the first variant is what the others' times are divided by."""

    module: str  # that `python -m` runs
    about: str | None  # its first line is shown
    variants: Mapping[str, Callable[[str], Prepared]]  # by name; a variant takes the problem, resolved
    problems: Mapping[str, str]  # by name, one line each
    reads_configs: bool = False  # a problem may also be a run's config file, given as `--config`
    # Makes of a problem's name what its variants are given, or raises ValueError; called in the process that measures nothing.
    resolve: Callable[[str], str] = str


def agree(ours: Mapping[str, Any], first: Mapping[str, Any]) -> None:
    """Holds a variant's `loss` and `grad_norm`, where its record has them, to those of the first one's record.

    Raises:
        Disagreement: one is not finite, the first variant has none, or they are too far apart for their `dtype`.
    """
    exact = all(record.get("dtype", "float32") == "float32" for record in (ours, first))
    for name, tolerance in (AGREEMENT if exact else ROUNDED).items():
        if name not in ours:
            continue  # a matmul beside an update
        value, expected = ours[name], first.get(name, math.nan)
        finite = math.isfinite(value) and math.isfinite(expected)
        if not finite or not math.isclose(value, expected, rel_tol=tolerance):
            raise Disagreement(
                f"{name} {value} here, {expected} in the first variant: expected finite, and {tolerance:g} apart"
            )


def measure(
    prepared: Prepared, steps: int, until: float = math.inf, expected: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Milliseconds of the steps (see `milliseconds`), and the most memory that the process and the device held.

    The first step, which compiles, has a peak of its own (`first_step_peak_bytes`); the peak of the record is that of the steps
    after it, with what was freed given back before them. `expected` is the first variant's record; None for the first itself.

    Raises:
        Disagreement: see `agree`.
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
    record |= {"process_peak_bytes": memory.peak(), "device_peak_bytes": _device_peak(), **facts}
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


def _device_peak() -> int | None:
    """Of the libraries that the variant has loaded; None on a CPU, whose allocators keep no count."""
    if torch := sys.modules.get("torch"):
        return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
    if jax := sys.modules.get("jax"):
        return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return None


def torch_device() -> str:
    """Where PyTorch's variants run."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def run_child(
    bench: Bench,
    variant: str,
    problem: str,
    steps: int,
    limit_s: float,
    expected: Mapping[str, Any] | None = None,
    allocator: str = SYSTEM,
) -> dict[str, Any]:
    """A variant's record (`measure`) from a fresh process, which is ended after `limit_s` seconds.

    `error` says why it has none, `skipped` what of it is not on this machine.
    """
    if limit_s <= 0:
        return {"error": "left out: the seconds were over"}
    given = {"variant": variant, "problem": problem, "steps": steps, "limit_s": STEPS_SHARE * limit_s}
    given |= {"allocator": allocator, "expected": expected}
    command = [sys.executable, "-m", bench.module, CHILD, json.dumps(given)]
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    try:
        return child_record(command, environment, limit_s)
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {limit_s:.0f} s"}


def _child(bench: Bench, given: Mapping[str, Any]) -> dict[str, Any]:
    """The record of the variant that this process was started for; `given`: by `run_child`."""
    until = time.monotonic() + given["limit_s"]
    if given["allocator"] == GIVES_BACK:
        memory.give_back_early()
    try:
        prepared = bench.variants[given["variant"]](given["problem"])
    except NotHere as error:
        return {"skipped": str(error)}
    except ModuleNotFoundError as error:
        if (error.name or PACKAGE).partition(".")[0] == PACKAGE:
            raise
        return {"skipped": f"the package {error.name} is not installed"}
    return measure(prepared, given["steps"], until, given["expected"])


def line(*cells: Any) -> str:
    """A line of a Markdown table."""
    return f"| {' | '.join(map(str, cells))} |"


def header(*names: str) -> str:
    """The first two lines of a Markdown table."""
    return f"{line(*names)}\n|{'---|' * len(names)}"


HEADER = header("variant", "median ms", "of steps", "min to max", "times the first", "peak MB", "rate")
RATES = (
    ("teraflops_per_second", 1e3, "GFLOP/s"),
    ("tokens_per_second", 1, "tokens/s"),
    ("times_floor", 1, "times the floor"),
    ("half_masked_ms", 1, "ms with half of the tokens masked"),
)


def row(name: str, record: Mapping[str, Any], first: Mapping[str, Any]) -> str:
    """A line of `HEADER`'s table; the ratio is this variant's time over the first one's."""
    if "median_ms" not in record:
        return f"| {name} | {record.get('error') or 'skipped: ' + record['skipped']} | | | | | |"
    ratio = f"{record['median_ms'] / first['median_ms']:.2f}" if "median_ms" in first else "-"
    peak = record["device_peak_bytes"] or record["process_peak_bytes"]
    rates = [f"{scale * record[key]:.1f} {unit}" for key, scale, unit in RATES if key in record]
    span = f"{record['min_ms']:.1f} to {record['max_ms']:.1f}"
    median = f"{record['median_ms']:.1f}"
    return line(name, median, record["steps"], span, ratio, f"{peak / 1e6:.0f}", ", ".join(rates) or "-")


def command_parser(
    module: str, about: str | None, parents: Sequence[argparse.ArgumentParser] = ()
) -> argparse.ArgumentParser:
    """A parser that calls itself by its module, and shows the first line of what it is `about`."""
    first_line = (about or "").partition("\n")[0]
    return argparse.ArgumentParser(prog=f"python -m {module}", description=first_line, parents=parents)


def command_of(module: str, argv: Sequence[str] | None) -> str:
    """The command as it was typed; `argv`: None where it was typed in a shell."""
    return " ".join(["python -m", module, *(sys.argv[1:] if argv is None else argv)])


def selected(option: str, text: str | None, known: Collection[str]) -> list[str]:
    """The names that an option lists, or all where it is not given.

    Raises:
        SystemExit: one is unknown; says which there are.
    """
    names = text.split(",") if text else list(known)
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"{option} {unknown[0]!r}: expected some of {', '.join(known)}")
    return names


def save(file: str | Path | None, record: Mapping[str, Any]) -> None:
    """Writes the raw data, where a file is asked for; after each result, so that a run that is stopped leaves what it has."""
    if file:
        with written_whole(Path(file)) as working:  # the machine may be taken away at any moment
            working.write_text(json.dumps(record, indent=1) + "\n")


def saved(file: str | Path | None) -> dict[str, Any]:
    """What an earlier run saved; empty where there is none, or it was ended while it wrote."""
    try:
        return json.loads(Path(file).read_text()) if file else {}
    except (FileNotFoundError, json.JSONDecodeError):
        return {}


def parser_of(bench: Bench, parents: Sequence[argparse.ArgumentParser] = ()) -> argparse.ArgumentParser:
    """The benchmark's own arguments, and those of `parents`."""
    parser = command_parser(bench.module, bench.about, parents)
    option = parser.add_argument
    option("--problem", default=next(iter(bench.problems)), help=", ".join(bench.problems))
    if bench.reads_configs:
        option("--config", dest="problem", metavar="FILE", help="a run's config: its sizes are the problem")
    option("--variants", help=f"of {', '.join(bench.variants)}; all of them otherwise")
    option("--json", metavar="FILE", help="where to write the raw data")
    option("--steps", type=int, default=10, help=f"timed; at least {LEAST_STEPS}")
    option("--limit", type=float, default=600, help="seconds a variant may take")
    option("--seconds", type=float, default=math.inf, help="that all variants may take, shared fairly")
    option("--resume", action="store_true", help="keep the variants that --json FILE already has")
    allocator = "of every variant, peers too: the system's as it comes, or made to give freed memory back, as jax_grpo.train does"
    option("--allocator", choices=ALLOCATORS, default=SYSTEM, help=allocator)
    return parser


def main(bench: Bench, argv: list[str] | None = None, parents: Sequence[argparse.ArgumentParser] = ()) -> None:
    """The benchmark's command line."""
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == [CHILD]:
        print(json.dumps(_child(bench, json.loads(words[1]))))
        return
    started, parser = time.monotonic(), parser_of(bench, parents)
    arguments = parser.parse_args(words)
    if arguments.steps < LEAST_STEPS:
        parser.error(f"--steps {arguments.steps}: expected at least {LEAST_STEPS}")
    names = selected("--variants", arguments.variants, bench.variants)
    if bench.resolve is str and arguments.problem not in bench.problems:
        parser.error(f"--problem {arguments.problem!r}: expected one of {', '.join(bench.problems)}")
    try:
        resolved = bench.resolve(arguments.problem)
    except ValueError as error:
        parser.error(str(error))
    record: dict[str, Any] = {"command": command_of(bench.module, argv), "problem": arguments.problem}
    record |= {"resolved": resolved, "allocator": arguments.allocator, "machine": machine(), "variants": {}}
    about = bench.problems.get(arguments.problem, "the sizes of that problem")
    print(f"# {record['command']}\n# {about}\n# {line_of(record['machine'])}\n{HEADER}")
    earlier = _earlier(saved(arguments.json), record) if arguments.resume else {}
    results = record["variants"]
    for number, name in enumerate(names):
        left_s = arguments.seconds - (time.monotonic() - started)
        limit_s = min(arguments.limit, left_s, BORROWED * left_s / (len(names) - number))
        expected = results[names[0]] if number else None
        how = (arguments.steps, limit_s, expected, arguments.allocator)
        results[name] = earlier.get(name) or run_child(bench, name, resolved, *how)
        print(row(name, results[name], results[names[0]]), flush=True)
        save(arguments.json, record)


def _earlier(earlier: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Variants that have a figure in an earlier run's data of the same problem, on the same machine, with the same allocator."""
    same = all(earlier.get(name) == record[name] for name in ("problem", "resolved", "allocator"))
    if not same or earlier["machine"].get("processor") != record["machine"]["processor"]:
        return {}
    return {name: variant for name, variant in earlier["variants"].items() if "median_ms" in variant}
