"""A config's memory report for a device: a record that is written as JSON, its Markdown, and its picture.

What the bytes are for is known exactly of arguments. A temporary is known by its shape: one that a parameter has is a gradient or a
copy of a weight, one as wide as the vocabulary is logits, one of the cache's size is the cache, and the rest are activations.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jax_grpo.config import Config
from jax_grpo.memory.compile import POOL, Compiled, compile_program, device
from jax_grpo.memory.fit import largest_completions, run_on
from jax_grpo.memory.launches import launches_of
from jax_grpo.memory.programs import Program, Run, generated, on_a_device
from jax_grpo.memory.traffic import collectives
from jax_grpo.mesh import gathered_shape
from jax_grpo.report.pictures import saved_figure
from jax_grpo.rollout.decoding import chunk_lengths
from jax_grpo.system.markdown import table
from jax_grpo.system.memory import GB

TOP = 8  # kinds of buffer listed for a program
COUNTS = ("arguments", "outputs", "aliased", "temporaries")  # of XLA, see `compile.Compiled`
PARTS = (
    *("base", "parameters", "moments", "reference"),  # resident from program to program
    *("gradients", "weights gathered", "weights cast", "logits", "activations", "KV cache"),  # temporaries
    *("batch", "results", "gaps"),
)
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")
_DTYPES = {"float32": "f32", "bfloat16": "bf16", "float64": "f64"}

Record = Mapping[str, Any]


def report(config: Config, target: str, *, search: bool = False, launches: bool = False) -> dict[str, Any]:
    """Compiles every program of the config's run for the target; with `search`, some ten more for the largest batches.

    With `launches`, each program's record also has that of `launches_of`. Sizes are bytes. A program's `total` is that of the
    device while it runs, and its `parts` sum to it; the run's is the largest of them. `spare` is negative when the run does not
    fit. The `largest` are completions and bytes; None without `search`.
    Raises as `compile.jax_devices` does.
    """
    where, run = device(target), run_on(target, config)
    programs = [_of_program(target, run, program, config if launches else None) for program in run.programs]
    total = max(program["total"] for program in programs)
    return {
        "device": where._asdict(),
        "mesh": run.mesh,
        "jax": jax.__version__,
        "assumed": run.assumed,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(run.programs[0].arguments[0])),
        "resident": run.resident,
        "in_host": run.in_host,
        "programs": programs,
        "largest_micro_batch": largest_completions(config, "update", where) if search else None,
        "largest_batch": largest_completions(config, "rollout", where) if search else None,
        "total": total,
        "spare": where.memory - total,
        "fits": total <= where.memory,
    }


def _of_program(target: str, run: Run, program: Program, counted: Config | None) -> dict[str, Any]:
    compiled = compile_program(target, program)
    parts, moved = bytes_by_part(run, program, compiled), collectives(compiled.hlo, run.mesh)
    return {
        "name": program.name,
        **{name: getattr(compiled, name) for name in COUNTS},
        "peak": compiled.total,
        "total": sum(parts.values()),
        "parts": parts,
        "buffers": _buffers(run, program, compiled)[:TOP],
        **({"moved": [each._asdict() for each in moved]} if moved else {}),
        **({"launches": launches_of(target, counted, run, program, compiled)} if counted else {}),
    }


def _buffers(run: Run, program: Program, compiled: Compiled) -> list[dict[str, Any]]:
    """Temporaries, largest first. Twelve layers make twelve arrays of each kind: one entry with their number and sum."""
    groups: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for live in compiled.live:
        if live.place == "temporary":
            groups[live.shape, live.operation, live.source].append(live.size)
    buffers = []
    for (shape, operation, source), alike in groups.items():
        sizes = {"count": len(alike), "size": sum(alike), "shape": shape}
        part = _part_of(shape, operation, run, program)
        buffers.append({**sizes, "part": part, "operation": operation, "source": source})
    return sorted(buffers, key=lambda buffer: -buffer["size"])


def bytes_by_part(run: Run, program: Program, compiled: Compiled) -> dict[str, int]:
    """Bytes of the whole device while the program runs; the run's resident arrays that it does not read included.

    `gaps` are places of the temporaries' block that hold nothing at its fullest moment: arrays of different moments share it.
    """
    out = Counter(run.resident)
    if "reference" in program.holds and "reference" not in out:
        # Compiled ahead of time, the argument counts as the copy that is made of it on the device.
        out["reference"] = run.in_host["reference"]
    out["batch"] = compiled.arguments - sum(out[name] for name in program.holds)
    out["results"] = compiled.outputs - compiled.aliased
    out["gaps"] = compiled.temporaries
    for buffer in _buffers(run, program, compiled):
        out[buffer["part"]] += buffer["size"]
        out["gaps"] -= buffer["size"]
    return {name: out[name] for name in PARTS if out[name] > 0}


def _part_of(shape: str, operation: str, run: Run, program: Program) -> str:
    """The part of a temporary, by its shape (`f32[8,4]`) and what made it."""
    array, sizes = _SHAPE.match(shape), run.architecture
    if array is None:
        return "activations"
    dims = sorted(int(n) for n in array.group(2).split(",") if n)
    weights = [leaf for leaf in program.weights if dims in (sorted(on_a_device(leaf)), sorted(gathered_shape(leaf)))]
    if weights:
        # A weight's gradient leaves its matmul in the compute dtype, so that only its maker tells it from a cast weight.
        stored = array.group(1) == _DTYPES.get(str(weights[0].dtype))
        if program.name == "update" and (stored or "transpose(jvp" in operation):
            return "gradients"
        return "weights cast" if any(dims == sorted(on_a_device(leaf)) for leaf in weights) else "weights gathered"
    rows = {on_a_device(leaf)[0] for leaf in program.weights if leaf.shape[0] == sizes.padded_vocab_size}
    if {sizes.vocab_size, sizes.padded_vocab_size, *rows} & set(dims):
        return "logits"
    cached = program.generates and math.prod(dims) in _cache_sizes(run, program)
    return "KV cache" if cached else "activations"


def _cache_sizes(run: Run, program: Program) -> set[int]:
    """Elements of one layer's keys: of the prompts, of each chunk of the completions, and of the half that goes on alone."""
    rollout, caches = generated(program)
    prompts, group, cap = rollout.completion_ids_PGC.shape
    prompts, *_ = on_a_device(jax.tree.leaves(program.arguments[1])[0])  # of prompts, or of what a later turn is given
    width, half = caches.prompts[0].k.shape[2] if caches else program.arguments[1].shape[1], prompts // 2
    lengths = {cap - 1, *chunk_lengths(cap), *([caches.earlier.mask_PGS.shape[-1]] if caches else [])}
    tokens = {some * n for some in (prompts, half) for n in (width, *(group * length for length in lengths))}
    sizes = run.architecture
    return {sizes.kv_heads * sizes.head_dim // run.mesh["tensor"] * n for n in tokens}


def text(record: Record) -> str:
    """The report as Markdown."""
    device, programs = record["device"], record["programs"]
    lines = [f"Note: {record['assumed']}.", ""] if record["assumed"] else []
    verdict, remainder = ("fits", "to spare") if record["fits"] else ("DOES NOT FIT", "missing")
    if axes := " x ".join(f"{axis} {size}" for axis, size in record["mesh"].items() if size > 1):
        lines += [f"On {math.prod(record['mesh'].values())} devices, {axes}: every figure is of each of them.", ""]
    lines += [
        f"**{verdict} on {device['kind']} ({device['memory'] / GB:.2f} GB) with {abs(record['spare']) / GB:.2f} GB {remainder}**: "
        f"the run needs {record['total'] / GB:.2f} GB at its fullest. {record['parameters']:,} parameters, JAX {record['jax']}.",
        "",
    ]
    if device["target"] != "cpu":
        pool = POOL * device["memory"]
        advice = "enough." if record["total"] <= pool else "too little; set XLA_PYTHON_CLIENT_MEM_FRACTION=0.95."
        lines += [f"JAX takes {POOL:.0%} of a GPU unless told otherwise, {pool / GB:.2f} GB: {advice}", ""]
    lines += [f"In the host's memory: {name}, {size / GB:.2f} GB.\n" for name, size in record["in_host"].items()]
    rows = {f"program: {name}": [program[name] for program in programs] for name in (*COUNTS, "peak")}
    for part in dict.fromkeys(part for program in programs for part in program["parts"]):
        rows[part] = [program["parts"].get(part, 0) for program in programs]
    rows["**device, total**"] = [program["total"] for program in programs]
    cells = ((name, *(f"{size / 1e6:,.1f}" for size in sizes)) for name, sizes in rows.items())
    lines += table(("MB", *(program["name"] for program in programs)), cells)
    sent = []
    for program in programs:
        buffers = []
        for alike in program["buffers"]:
            names = (alike[key] or "-" for key in ("part", "operation", "source"))
            buffers.append((f"{alike['size'] / 1e6:.1f}", f"{alike['count']} x `{alike['shape']}`", *names))
        lines += ["", f"Largest temporaries of `{program['name']}`:", ""]
        lines += table(("MB", "arrays", "what", "made by", "at"), buffers)
        for each in program.get("moved", ()):
            what = each["opcode"] + (", one trip of a loop" if each["in_open_loop"] else "")
            sent.append((program["name"], each["axis"], what, each["times"], f"{each['bytes'] / 1e6:,.2f}"))
    if sent:
        lines += ["", "Sent by each device to others, in one run of a program:", ""]
        lines += table(("program", "over", "what", "arrays", "MB"), sent)
    for key, label in (("largest_micro_batch", "micro-batch"), ("largest_batch", "batch")):
        if record[key]:
            completions, size = record[key]
            lines += ["", f"Largest {label} that fits: {completions} completions ({size / GB:.2f} GB)."]
    lines += [line for program in programs if "launches" in program for line in ("", *_launches(program))]
    return "\n".join(lines) + "\n"


def _launches(program: Record) -> list[str]:
    """The record of `launches_of` as text: a line for each straight part of the program, and a sentence on the whole."""
    parts, formula = program["launches"]["parts"], program["launches"]["formula_flops"]
    head = ("part", "runs", "kernels", "in CUDA graphs", "host launches", "host waits", "MB", "of the least", "GFLOP")
    head += ("floor, us: bytes", "FLOPs", "launches", "without graphs")
    rows = (
        (
            part["name"] + (f" ({part['opaque']} opaque)" if part["opaque"] else ""),
            "-" if part["trips"] is None else part["trips"],
            part["kernels"],
            f"{part['captured']} in {part['graphs']}" if part["graphs"] else "-",
            part["kernels"] - part["captured"] + part["graphs"],
            part["waits"],
            f"{part['moved'] / 1e6:,.1f}",
            f"{part['moved'] / part['least_moved']:.2f}" if part.get("least_moved") else "-",
            f"{sum(part['flops'].values()) / 1e9:,.1f}",
            *(f"{seconds * 1e6:,.0f}" for seconds in part["floors"].values()),
        )
        for part in parts
    )
    kernels, moved = (sum((part["trips"] or 0) * part[what] for part in parts) for what in ("kernels", "moved"))
    whole = f"{kernels:,.0f} kernels and {moved / 1e9:,.1f} GB in all"
    whole += f"; {formula / 1e9:,.0f} GFLOP by formula." if formula else "."
    return [f"Launches of `{program['name']}`:", "", *table(head, rows), "", whole]


def save_picture(record: Record, path: Path, title: str) -> None:
    """Writes a PNG: a bar for each program, stacked by the parts that fill the device while it runs, under a line at its memory."""
    import matplotlib  # slow

    device, programs = record["device"], record["programs"]
    names, bottom = [program["name"] for program in programs], np.zeros(len(programs))
    with saved_figure(path, 1, 1, (8, 4.5), dpi=120) as (_, ((axes,),)):
        for colour, part in zip(matplotlib.color_sequences["tab20"], PARTS, strict=False):
            heights = np.array([program["parts"].get(part, 0) / GB for program in programs])
            if heights.any():
                axes.bar(names, heights, bottom=bottom, label=part, color=colour, width=0.6)
                bottom = bottom + heights
        for place, top in enumerate(bottom):
            axes.annotate(f"{top:.2f} GB", (place, top), ha="center", va="bottom")
        if device["memory"] < 2 * max(bottom) * GB:
            axes.axhline(device["memory"] / GB, color="black", linestyle="--", linewidth=1)
            axes.annotate(device["kind"], (0, device["memory"] / GB), va="bottom")
        axes.set(ylabel="GB on the device", ylim=(0, 1.15 * max(bottom)))
        axes.set_title(f"{title}: {device['kind']}, {record['spare'] / GB:.2f} GB to spare", fontsize=10)
        axes.legend(reverse=True, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
