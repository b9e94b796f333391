"""Every benchmark that this machine can run, within the minutes given: raw data, one Markdown table, and pictures.

    python -m jax_grpo.bench.all --out docs/results/cpu --minutes 8

A variant that fails or takes too long is recorded with its reason. Results already in the folder are kept, so that a run that
was stopped goes on where it was; `--fresh` begins again.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from jax_grpo.bench import harness
from jax_grpo.bench.pictures import save_pictures


class Entry(NamedTuple):
    """A benchmark of the suite: its module, arguments, and whether it needs an accelerator."""

    module: str
    arguments: tuple[str, ...] = ()
    accelerator: bool = False


# In order of worth: what does not fit into the minutes is at the end.
ENTRIES: dict[str, Entry] = {
    "update_quickstart": Entry("update", ("--problem", "quickstart", "--steps", "3")),
    "precision": Entry("precision", ("--steps", "3")),
    "attention": Entry("attention", ("--steps", "3")),
    "remat": Entry("remat", ("--steps", "3")),
    "optimiser": Entry("optimiser", ("--steps", "3")),
    "scaling": Entry("scaling"),
    "update_124m": Entry("update", ("--problem", "124m", "--steps", "2")),
    "update_124m_64x192": Entry("update", ("--problem", "124m-64x192-bf16"), accelerator=True),
    "lm_head": Entry("lm_head", ("--target", "local"), accelerator=True),
}


def accelerated() -> bool:
    """Whether JAX has a device here that is not a CPU; asked in a process of its own, which frees the device again."""
    command = [sys.executable, "-c", "import jax; print(jax.devices()[0].platform)"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode == 0 and done.stdout.split()[-1] != "cpu"


def run(entry: Entry, file: Path, seconds: float) -> str | None:
    """Runs a benchmark that writes its data to `file`; returns why it has no, or not all, results."""
    command = [sys.executable, "-m", f"jax_grpo.bench.{entry.module}", *entry.arguments, "--json", str(file)]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as child:
        try:
            _, said = child.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(
                child.pid, signal.SIGKILL
            )  # its variant's process too, which would go on beside the next benchmark
            return f"stopped: the suite's minutes were over after {seconds:.0f} s of it"
    return None if child.returncode == 0 else harness.failure(said, child.returncode)


def table(results: dict[str, dict[str, Any]]) -> str:
    """Markdown of every benchmark's variants."""
    lines = []
    for name, record in results.items():
        lines += [f"## {name}", ""]
        if "error" in record:
            lines += [f"{record['error']}", ""]
        found = record.get("variants")
        if found:
            first = next(iter(found.values()))
            lines += [f"`{record['command']}`", "", harness.HEADER]
            known = (harness.row(variant, values, first) for variant, values in found.items())
            lines += [*known, ""]
        for fit in record.get("exponents", []):
            lines.append(
                f"- {fit['program']}, {fit['what']} over {fit['over']}: exponent {fit['found']:.2f} (expected {fit['expected']})"
            )
        lines += [""] if record.get("exponents") else []
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m jax_grpo.bench.all", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", required=True, help="folder of the results")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--only", help=f"comma-separated: {', '.join(ENTRIES)}")
    parser.add_argument("--fresh", action="store_true", help="do not keep the results of an earlier run")
    arguments = parser.parse_args(argv)
    names = arguments.only.split(",") if arguments.only else list(ENTRIES)
    if unknown := [name for name in names if name not in ENTRIES]:
        raise SystemExit(f"--only {unknown[0]!r}: expected some of {', '.join(ENTRIES)}")
    folder, started = Path(arguments.out), time.monotonic()
    (folder / "raw").mkdir(parents=True, exist_ok=True)
    gpu = accelerated()
    results: dict[str, dict[str, Any]] = {}
    for name in names:
        entry, file = ENTRIES[name], folder / "raw" / f"{name}.json"
        if file.exists() and not arguments.fresh and "error" not in (kept := json.loads(file.read_text())):
            results[name] = kept
            print(f"{name}: kept", flush=True)
            continue
        left = 60 * arguments.minutes - (time.monotonic() - started)
        reason = "needs an accelerator" if entry.accelerator and not gpu else None
        reason = reason or ("left out: the minutes were over" if left < 5 else run(entry, file, left))
        record = json.loads(file.read_text()) if file.exists() else {}
        results[name] = record | ({"error": reason} if reason else {})
        file.write_text(json.dumps(results[name], indent=1) + "\n")
        print(f"{name}: {reason or 'done'}", flush=True)
    minutes = (time.monotonic() - started) / 60
    about = {"minutes": minutes, "accelerator": gpu, "machine": harness.machine()}
    (folder / "suite.json").write_text(json.dumps(about, indent=1) + "\n")
    head = f"`python -m jax_grpo.bench.all`, {minutes:.1f} minutes, {about['machine']['cores']} cores\n\n"
    pictures = "".join(f"![{path.stem}]({path.name})\n" for path in save_pictures(results, folder))
    (folder / "README.md").write_text(head + table(results) + "\n" + pictures)
    print(f"saved: {folder / 'README.md'}")


if __name__ == "__main__":
    main()
