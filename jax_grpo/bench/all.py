"""Every benchmark that this machine can run, within the minutes given: raw data and one Markdown table.

    python -m jax_grpo.bench.all --out docs/results/cpu --minutes 8

Each benchmark gets its share of the minutes, and shares that among its variants; what one leaves over goes to the next. One that
fails or takes too long is recorded with its reason. Results already in the folder are kept, so that the same command again goes on
where the machine was taken away; `--fresh` begins anew. `--dry-run` runs every benchmark and variant on tiny sizes, those for other
machines too: whether all of it completes, before a machine is kept quiet for it, or one is at hand for half an hour.
"""

import argparse
import importlib
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jax_grpo.bench import runner
from jax_grpo.bench.machine import line_of, machine, saved, selected
from jax_grpo.bench.runner import HEAD, row
from jax_grpo.system.markdown import table
from jax_grpo.system.process import child_record
from jax_grpo.system.whole_files import write_record

CPU, ACCELERATOR = ("cpu",), ("accelerator",)


class Entry(NamedTuple):
    """A benchmark of the suite: its module and options, its weight (about its seconds), and the machines it is for."""

    command: str
    weight: float
    machines: tuple[str, ...] = CPU + ACCELERATOR


# Shapes and variants of the suite on a CPU are those that two idle cores do in seconds; there TF32 and cuDNN do not exist. The
# first variant is ours as its config or the defaults have it, in every entry. Weights are about the seconds of two AMD EPYC cores.
ENTRIES: dict[str, Entry] = {
    name: Entry(f"jax_grpo.bench.{command}", *rest)
    for name, (command, *rest) in {
        "update_legality": ("update --problem legality --steps 5 --variants jax_grpo,torch_ref,TRL", 100),
        "update_124m": (
            "update --problem 124m --steps 3 --variants jax_grpo,jax_grpo-chunked,torch_ref,TRL,TRL-plain-head", 100, CPU
        ),
        "update_124m_64x192": (
            "update --problem 124m-64x192-bf16 --variants jax_grpo,jax_grpo-chunked,jax_grpo-micro-batches,"
            "torch_ref,torch_ref-compiled,torch_ref-flash,TRL,TRL-plain-head,TRL-liger", 105, ACCELERATOR
        ),
        "iteration_width_128": (
            "iteration --problem width-128 --steps 3 --variants jax_grpo,jax_grpo-chunked,TRL", 100, CPU
        ),
        "iteration_124m": ("iteration --problem 124m --steps 3 --variants jax_grpo,TRL,TRL-plain-head", 110, CPU),
        "iteration_124m_8x8x144": ("iteration --problem 124m-8x8x144-bf16", 70, ACCELERATOR),
        "rollout_legality": ("rollout --problem legality --steps 3 --variants jax_grpo,transformers", 25),
        "rollout_rook_small": ("rollout --problem rook-small-8x8x64 --steps 3 --variants jax_grpo,transformers", 20, CPU),
        "rollout_gpt2_small": ("rollout --problem gpt2-small-32 --steps 3 --variants jax_grpo,transformers", 60, CPU),
        "rollout_gpt2_small_64x144": ("rollout --problem gpt2-small-64x144-bf16", 80, ACCELERATOR),
        "attention": ("attention --steps 5 --variants model,torch-sdpa", 6, CPU),
        "attention_1024": ("attention --problem 1024", 30, ACCELERATOR),
        "optimiser": ("optimiser --steps 10 --variants optax,torch-fused", 8, CPU),
        "optimiser_124m": ("optimiser --problem 124m", 20, ACCELERATOR),
        "precision_124m": ("update --problem 124m-64x192-bf16 --variants jax_grpo,float32,tf32", 40, ACCELERATOR),
        "remat_124m": (
            "update --problem 124m-64x192-bf16 --variants jax_grpo,remat-matmuls,remat-full,remat-full-chunked-head",
            40, ACCELERATOR,
        ),
        "lm_head": ("lm_head --problem s2 --steps 20", 60, ACCELERATOR),
    }.items()
}  # fmt: skip
FINISHED = "finished"  # of a benchmark's record: it came to its end
PEERS = ("torch", "TRL", "transformers", "liger", "vllm")  # how variants of other projects begin
TINY = "--problem tiny --steps 3"  # what a dry run puts in the place of these options


def run(entry: Entry, file: Path, seconds: float) -> str | None:
    """Runs a benchmark that adds to the data in `file`; returns why it could not be run."""
    module, *words = entry.command.split()
    try:
        bench = importlib.import_module(module).BENCH
        runner.main(bench, [*words, "--json", str(file), "--seconds", f"{seconds:.0f}", "--resume"])
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {error}"


def complete(record: Mapping[str, Any]) -> bool:
    """Whether a benchmark came to its end, with a figure of every variant that this machine can have.

    One that was interrupted has none of its later variants, and no error either: hence the mark that `main` makes.
    """
    parts = (record, *record.get("variants", {}).values())
    return record.get(FINISHED, False) and not any("error" in part for part in parts)


def peers(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Lines of a table: ours, which is each benchmark's first variant and no other, beside the fastest of another project."""
    rows = []
    for name, record in results.items():
        times = {key: values.get("median_ms") for key, values in record.get("variants", {}).items()}
        ours = next(iter(times), "")
        timed = [key for key in times if key.startswith(PEERS) and times[key]]
        if times.get(ours) and timed:
            best = min(timed, key=lambda key: times[key])
            ratio = f"{times[best] / times[ours]:.2f}"
            rows.append((name, f"{ours} {times[ours]:.1f} ms", f"{best} {times[best]:.1f} ms", ratio))
    return [*table(("benchmark", "ours", "fastest peer", "peer / ours"), rows), ""] if rows else []


def tables(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Markdown of every benchmark's variants."""
    lines = []
    for name, record in results.items():
        lines += [f"## {name}", "", *([record["error"], ""] if "error" in record else [])]
        if variants := record.get("variants"):
            first = next(iter(variants.values()))
            rows = [row(variant, values, first) for variant, values in variants.items()]
            lines += [f"`{record['command']}`", "", line_of(record["machine"]), "", *table(HEAD, rows), ""]
    return "\n".join(lines)


def main(argv: list[str] | None = None, entries: Mapping[str, Entry] = ENTRIES) -> None:
    about = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m jax_grpo.bench.all", description=about)
    parser.add_argument("--out", required=True, help="folder of the results")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--only", help=f"comma-separated: {', '.join(entries)}")
    parser.add_argument("--dry-run", action="store_true", help="every benchmark and variant on tiny sizes")
    parser.add_argument("--fresh", action="store_true", help="do not keep the results of an earlier run")
    arguments = parser.parse_args(argv)
    names = selected("--only", arguments.only, entries)
    folder = Path(arguments.out)
    (folder / "raw").mkdir(parents=True, exist_ok=True)
    # What the machine does is measured in a process of its own, which frees the device again, and is no benchmark's time.
    about = child_record([sys.executable, "-m", "jax_grpo.bench.machine"], os.environ)
    about, started = machine() if "error" in about else about, time.monotonic()
    kind = "cpu" if about.get("on", "cpu") == "cpu" else "accelerator"
    suite = {name: entry for name, entry in entries.items() if kind in entry.machines}
    if arguments.dry_run:
        suite = {name: entry._replace(command=f"{entry.command} {TINY}") for name, entry in entries.items()}
    files = {name: folder / "raw" / f"{name}.json" for name in suite}
    for name in suite.keys() & names if arguments.fresh else ():
        files[name].unlink(missing_ok=True)
    waiting = [name for name in suite if name in names and not complete(saved(files[name]))]
    for number, name in enumerate(waiting):
        left_s = 60 * arguments.minutes - (time.monotonic() - started)
        share_s = left_s * suite[name].weight / sum(suite[other].weight for other in waiting[number:])
        reason = run(suite[name], files[name], share_s)
        write_record(files[name], saved(files[name]) | ({"error": reason} if reason else {FINISHED: True}))
        print(f"{name}: {reason or 'done'} ({60 * arguments.minutes - left_s:.0f} s gone at its start)\n", flush=True)
    results = {name: record for name, file in files.items() if (record := saved(file))}
    minutes = (time.monotonic() - started) / 60
    write_record(folder / "suite.json", {"minutes": minutes, "device": kind, "machine": about})
    text = "A dry run on tiny sizes: no figure here means anything.\n\n" if arguments.dry_run else ""
    text += f"`python -m jax_grpo.bench.all`, {minutes:.1f} minutes, {line_of(about)}\n\n"
    text += "\n".join(peers(results)) + "\n" + tables(results) + "\n"
    (folder / "README.md").write_text(text)
    print(f"saved: {folder / 'README.md'}")


if __name__ == "__main__":
    main()
