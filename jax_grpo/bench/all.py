"""Every benchmark that this machine can run, within the minutes given: raw data, one Markdown table, and pictures.

    python -m jax_grpo.bench.all --out docs/results/cpu --minutes 8

Each benchmark gets its share of the minutes, and shares that among its variants; what one leaves over goes to the next. One that
fails or takes too long is recorded with its reason. Results already in the folder are kept; `--fresh` begins again. `--dry-run`
runs every benchmark and variant on tiny sizes: whether all of it completes, before a machine is kept quiet for it.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jax_grpo.bench import harness
from jax_grpo.bench.fits import exponent_lines
from jax_grpo.bench.machine import line_of, machine
from jax_grpo.bench.pictures import save_pictures
from jax_grpo.process_failure import failure


class Entry(NamedTuple):
    """A benchmark of the suite: its module, arguments, weight (about its seconds), and the machines it is for."""

    module: str
    weight: float
    arguments: tuple[str, ...] = ()
    machines: tuple[str, ...] = ("cpu", "accelerator")


CPU, ACCELERATOR = ("cpu",), ("accelerator",)
# Shapes and variants of the suite on a CPU are those that two idle cores do in seconds; there TF32 and cuDNN do not exist. The
# first variant is ours as its config or the defaults have it, in every entry. Weights are about the seconds of two AMD EPYC cores.
ENTRIES: dict[str, Entry] = {
    "update_quickstart": Entry(
        "jax_grpo.bench.update", 100,
        ("--problem", "quickstart", "--steps", "5", "--variants", "jax_grpo,torch_ref,TRL"),
    ),
    "update_124m": Entry(
        "jax_grpo.bench.update", 100,
        ("--problem", "124m", "--steps", "3", "--variants", "jax_grpo,jax_grpo-chunked,torch_ref,TRL,TRL-plain-head"), CPU,
    ),
    "update_124m_64x192": Entry("jax_grpo.bench.update", 85, ("--problem", "124m-64x192-bf16"), ACCELERATOR),
    "iteration_width_128": Entry(
        "jax_grpo.bench.iteration", 100,
        ("--problem", "width-128", "--steps", "3", "--variants", "jax_grpo,jax_grpo-chunked,TRL"), CPU,
    ),
    "iteration_124m": Entry(
        "jax_grpo.bench.iteration", 110,
        ("--problem", "124m", "--steps", "3", "--variants", "jax_grpo,TRL,TRL-plain-head"), CPU,
    ),
    "iteration_124m_8x8x144": Entry("jax_grpo.bench.iteration", 60, ("--problem", "124m-8x8x144-bf16"), ACCELERATOR),
    "rollout_quickstart": Entry(
        "jax_grpo.bench.rollout", 25, ("--problem", "quickstart", "--steps", "3", "--variants", "jax_grpo,transformers")
    ),
    "rollout_rook_small": Entry(
        "jax_grpo.bench.rollout", 20,
        ("--problem", "rook-small-8x8x64", "--steps", "3", "--variants", "jax_grpo,transformers"), CPU,
    ),
    "rollout_gpt2_small": Entry(
        "jax_grpo.bench.rollout", 60, ("--problem", "gpt2-small-32", "--steps", "3", "--variants", "jax_grpo,transformers"), CPU
    ),
    "rollout_gpt2_small_64x144": Entry(
        "jax_grpo.bench.rollout", 60, ("--problem", "gpt2-small-64x144-bf16"), ACCELERATOR
    ),
    "attention": Entry("jax_grpo.bench.attention", 6, ("--steps", "5", "--variants", "model,torch-sdpa"), CPU),
    "attention_1024": Entry("jax_grpo.bench.attention", 30, ("--problem", "1024"), ACCELERATOR),
    "optimiser": Entry("jax_grpo.bench.optimiser", 8, ("--steps", "10", "--variants", "optax,torch-fused"), CPU),
    "optimiser_124m": Entry("jax_grpo.bench.optimiser", 20, ("--problem", "124m"), ACCELERATOR),
    "precision_124m": Entry("jax_grpo.bench.precision", 40, ("--problem", "124m-64x192-bf16"), ACCELERATOR),
    "remat_124m": Entry("jax_grpo.bench.remat", 40, ("--problem", "124m-64x192-bf16"), ACCELERATOR),
    "lm_head": Entry("jax_grpo.bench.lm_head", 60, ("--target", "local"), ACCELERATOR),
    "scaling": Entry("jax_grpo.bench.scaling", 35, ("--over", "batch,length"), CPU),
    "scaling_all": Entry("jax_grpo.bench.scaling", 60, (), ACCELERATOR),
}  # fmt: skip
TINY_PROBLEMS = tuple(f"jax_grpo.bench.{name}" for name in ("update", "iteration", "rollout", "attention", "optimiser"))
UNBUDGETED = ("jax_grpo.bench.lm_head",)  # has neither --seconds nor --resume of its own
GRACE_S = 5.0  # beyond a benchmark's share before it is ended from outside
PEERS = ("torch", "TRL", "transformers")  # how variants of other projects begin
TINY = {
    "--problem": "tiny",
    "--steps": "3",
    "--over": "length",
}  # what a dry run puts in the place of these arguments' values


def dry(entry: Entry) -> Entry:
    """The entry on tiny sizes, with the same variants."""
    given = dict(zip(entry.arguments[::2], entry.arguments[1::2], strict=True))
    if entry.module in TINY_PROBLEMS:
        given.setdefault("--problem", "tiny")
    changed = {name: TINY.get(name, value) for name, value in given.items()}
    return entry._replace(arguments=tuple(part for pair in changed.items() for part in pair))


def accelerated() -> bool:
    """Whether JAX has a device here that is not a CPU; asked in a process of its own, which frees the device again."""
    command = [sys.executable, "-c", "import jax; print(jax.devices()[0].platform)"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode == 0 and done.stdout.split()[-1] != "cpu"


def here() -> dict[str, Any]:
    """This machine and what it was measured to do, in a process of its own."""
    command = [sys.executable, "-m", "jax_grpo.bench.machine"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else machine()


def run(entry: Entry, file: Path, seconds: float) -> str | None:
    """Runs a benchmark that adds to the data in `file`; returns why it has no, or not all, results."""
    command = [sys.executable, "-m", entry.module, *entry.arguments, "--json", str(file)]
    if entry.module not in UNBUDGETED:
        command += ["--seconds", f"{seconds:.0f}", "--resume"]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as child:
        try:
            _, said = child.communicate(timeout=seconds + GRACE_S)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)  # its variants too: they would go on beside the next benchmark
            return f"stopped after its share of {seconds:.0f} s"
    return None if child.returncode == 0 else failure(said, child.returncode)


def complete(record: Mapping[str, Any]) -> bool:
    """Whether a benchmark's data is there, with every variant of it."""
    return "error" not in record and not any("error" in variant for variant in record.get("variants", {}).values())


def peers(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Lines of a table: ours, which is each benchmark's first variant and no other, beside the fastest of another project."""
    lines = []
    for name, record in results.items():
        variants = record.get("variants", {})
        timed = {key: values["median_ms"] for key, values in variants.items() if "median_ms" in values}
        others = [key for key in timed if key.startswith(PEERS)]
        ours = next(iter(variants), None)
        if ours in timed and others:
            best = min(others, key=lambda key: timed[key])
            lines.append(
                f"| {name} | {ours} {timed[ours]:.1f} ms | {best} {timed[best]:.1f} ms | {timed[best] / timed[ours]:.2f} |"
            )
    head = ["| benchmark | ours | fastest peer | peer / ours |", "|---|---|---|---|"]
    return [*head, *lines, ""] if lines else []


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
            lines += [f"`{record['command']}`", "", f"{line_of(record['machine'])}", "", harness.HEADER]
            known = (harness.row(variant, values, first) for variant, values in found.items())
            lines += [*known, ""]
        if record.get("exponents"):
            lines += [f"`{record['command']}`", "", line_of(record["machine"] | record), ""]
        lines += exponent_lines(record.get("exponents", []))
    return "\n".join(lines)


def main(argv: list[str] | None = None, entries: Mapping[str, Entry] = ENTRIES) -> None:
    parser = argparse.ArgumentParser(prog="python -m jax_grpo.bench.all", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", required=True, help="folder of the results")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--only", help=f"comma-separated: {', '.join(entries)}")
    parser.add_argument("--dry-run", action="store_true", help="every benchmark and variant on tiny sizes")
    parser.add_argument("--fresh", action="store_true", help="do not keep the results of an earlier run")
    arguments = parser.parse_args(argv)
    names = arguments.only.split(",") if arguments.only else list(entries)
    if unknown := [name for name in names if name not in entries]:
        raise SystemExit(f"--only {unknown[0]!r}: expected some of {', '.join(entries)}")
    folder = Path(arguments.out)
    (folder / "raw").mkdir(parents=True, exist_ok=True)
    kind = "accelerator" if accelerated() else "cpu"
    started = time.monotonic()  # importing JAX to ask is no benchmark's time
    chosen = {name: entries[name] for name in names if kind in entries[name].machines}
    if arguments.dry_run:
        chosen = {name: dry(entry) for name, entry in chosen.items()}
    results = {name: {} if arguments.fresh else _read(folder, name) for name in chosen}
    waiting = [name for name, record in results.items() if not record or not complete(record)]
    for number, name in enumerate(waiting):
        file, left_s = _file(folder, name), 60 * arguments.minutes - (time.monotonic() - started)
        share_s = left_s * chosen[name].weight / sum(chosen[other].weight for other in waiting[number:])
        if arguments.fresh:
            file.unlink(missing_ok=True)
        reason = run(chosen[name], file, share_s)
        results[name] = {key: value for key, value in _read(folder, name).items() if key != "error"}
        results[name] |= {"error": reason} if reason else {}
        file.write_text(json.dumps(results[name], indent=1) + "\n")
        print(f"{name}: {reason or 'done'} ({60 * arguments.minutes - left_s:.0f} s gone at its start)", flush=True)
    minutes, machine_here = (time.monotonic() - started) / 60, here()
    about = {"minutes": minutes, "device": kind, "machine": machine_here}
    (folder / "suite.json").write_text(json.dumps(about, indent=1) + "\n")
    head = f"`python -m jax_grpo.bench.all`, {minutes:.1f} minutes, {line_of(machine_here)}\n\n"
    if arguments.dry_run:
        head = f"A dry run on tiny sizes: no figure here means anything.\n\n{head}"
    pictures = "".join(f"![{path.stem}]({path.name})\n" for path in save_pictures(results, folder))
    text = "\n".join(peers(results)) + "\n" + table(results) + "\n" + pictures
    (folder / "README.md").write_text(head + text)
    print(f"saved: {folder / 'README.md'}")


def _file(folder: Path, name: str) -> Path:
    return folder / "raw" / f"{name}.json"


def _read(folder: Path, name: str) -> dict[str, Any]:
    """What the folder has of a benchmark; empty where a run was ended while it wrote."""
    try:
        return json.loads(_file(folder, name).read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return {}


if __name__ == "__main__":
    main()
