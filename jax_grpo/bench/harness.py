"""What the benchmarks share: each variant in a process of its own, medians of several steps, a table, and the raw data as JSON.

A benchmark is a dict of variants; a variant is a function that prepares one and returns its step. One that fails is
recorded with its reason, and the others go on. Knows nothing of what is measured.
"""

import argparse
import json
import math
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax_grpo import resident_memory
from jax_grpo.process_failure import failure

Step = Callable[[], Any]  # does the work and waits for it
WARM_UP = 2  # steps, the first of which compiles
STEPS_SHARE = (
    0.4  # of a variant's seconds: no step is begun later, so that what it borrowed is for compiling, not for more steps
)
BORROWED = (
    2.5  # equal shares of the seconds left that a variant may take: most need less than one, and leave it to the others
)


@dataclass(frozen=True)
class Prepared:
    """A variant ready to run: `step`, and facts about it (FLOPs, a loss to compare) that go into its record."""

    step: Step
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class Bench:
    """A benchmark.

    Attributes:
        module: that `python -m` runs.
        about: one line.
        variants: by name; a variant takes the problem's name. The first is what the others' times are divided by.
        problems: by name, one line each.
        reads_configs: a problem may also be a run's config file, given as `--config`.
    """

    module: str
    about: str
    variants: Mapping[str, Callable[[str], Prepared]]
    problems: Mapping[str, str]
    reads_configs: bool = False


def measure(prepared: Prepared, steps: int, until: float = math.inf) -> dict[str, Any]:
    """Milliseconds of the steps, each waited for, and the most memory that the process and the device held.

    Args:
        prepared: the variant.
        steps: timed, after the warm-up.
        until: of `time.monotonic()`; no step but the first timed one is begun after it.
    """
    resident_memory.trim()
    resident_memory.forget_peak()  # reading weights is not the work
    started = time.perf_counter()
    prepared.step()
    first_s = time.perf_counter() - started
    for _ in range(WARM_UP - 1):
        if time.monotonic() < until:
            prepared.step()
    milliseconds = []
    while not milliseconds or (len(milliseconds) < steps and time.monotonic() < until):
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
        "process_peak_bytes": _process_peak(),
        "device_peak_bytes": _device_peak(),
        **prepared.facts,
    }
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


def run_child(bench: Bench, variant: str, problem: str, steps: int, limit_s: float) -> dict[str, Any]:
    """A variant's record from a fresh process; `error` when it has none."""
    if limit_s <= 0:
        return {"error": "left out: the seconds were over"}
    command = [sys.executable, "-m", bench.module, "--child", variant, "--problem", problem, "--steps", str(steps)]
    command += ["--limit", str(STEPS_SHARE * limit_s)]
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {limit_s:.0f} s"}
    if done.returncode:
        return {"error": failure(done.stderr, done.returncode)}
    return json.loads(done.stdout.splitlines()[-1])


def row(name: str, record: Mapping[str, Any], first: Mapping[str, Any]) -> str:
    """A line of the table; the ratio is this variant's time over the first one's."""
    if "error" in record:
        return f"| {name} | {record['error']} | | | | |"
    ratio = f"{record['median_ms'] / first['median_ms']:.2f}" if "median_ms" in first else "-"
    peak = record["device_peak_bytes"] or record["process_peak_bytes"]
    rates = [f"{scale * record[name]:.1f} {unit}" for name, scale, unit in RATES if name in record]
    span = f"{record['min_ms']:.1f} to {record['max_ms']:.1f}"
    return f"| {name} | {record['median_ms']:.1f} | {span} | {ratio} | {peak / 1e6:.0f} | {', '.join(rates) or '-'} |"


RATES = (
    ("teraflops_per_second", 1e3, "GFLOP/s"),
    ("tokens_per_second", 1, "tokens/s"),
    ("times_floor", 1, "times the floor"),
)
HEADER = "| variant | median ms | min to max | times the first | peak MB | rate |\n|---|---|---|---|---|---|"


def machine() -> dict[str, Any]:
    """What the numbers were made on."""
    return {
        "platform": platform.platform(),
        "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "python": platform.python_version(),
        "load_average": os.getloadavg(),
    }


def main(bench: Bench, argv: list[str] | None = None) -> None:
    """The benchmark's command line."""
    parser = argparse.ArgumentParser(prog=f"python -m {bench.module}", description=bench.about)
    parser.add_argument("--problem", default=next(iter(bench.problems)), help=", ".join(bench.problems))
    if bench.reads_configs:
        parser.add_argument(
            "--config", dest="problem", metavar="FILE", help="a run's config: its sizes are the problem"
        )
    parser.add_argument("--variants", default=",".join(bench.variants))
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--limit", type=float, default=600, help="seconds a variant may take")
    parser.add_argument("--seconds", type=float, default=math.inf, help="that all variants may take, shared fairly")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--resume", action="store_true", help="keep the variants that --json FILE already has")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.problem not in bench.problems and not (bench.reads_configs and arguments.problem.endswith(".yaml")):
        parser.error(f"--problem {arguments.problem!r}: expected one of {', '.join(bench.problems)}")
    started = time.monotonic()
    if arguments.child:
        prepared = bench.variants[arguments.child](arguments.problem)
        print(json.dumps(measure(prepared, arguments.steps, started + arguments.limit)))
        return
    chosen = arguments.variants.split(",")
    if unknown := [name for name in chosen if name not in bench.variants]:
        raise SystemExit(f"--variants {unknown[0]!r}: expected some of {', '.join(bench.variants)}")
    command = f"python -m {bench.module} {' '.join(sys.argv[1:] if argv is None else argv)}".strip()
    print(f"# {command}\n# {bench.problems.get(arguments.problem, 'the sizes of that config')}\n{HEADER}")
    kept = _kept(arguments.json, arguments.problem) if arguments.resume and arguments.json else {}
    record: dict[str, Any] = {"command": command, "problem": arguments.problem, "machine": machine(), "variants": {}}
    found = record["variants"]
    for number, name in enumerate(chosen):
        left_s = arguments.seconds - (time.monotonic() - started)
        limit_s = min(arguments.limit, left_s, BORROWED * left_s / (len(chosen) - number))
        found[name] = kept.get(name) or run_child(bench, name, arguments.problem, arguments.steps, limit_s)
        print(row(name, found[name], found[chosen[0]]), flush=True)
        if arguments.json:
            Path(arguments.json).write_text(json.dumps(record, indent=1) + "\n")


def _kept(file: str, problem: str) -> dict[str, dict[str, Any]]:
    """Variants without an error in an earlier run's data of the same problem."""
    earlier = json.loads(Path(file).read_text()) if Path(file).exists() else {}
    if earlier.get("problem") != problem:
        return {}
    return {name: record for name, record in earlier["variants"].items() if "error" not in record}
