"""The least time a compiled program needs on a GPU: by the bytes its kernels move, by their FLOPs, and by launching them.

Bandwidth and peaks are the target's (`system.devices`), the costs of a launch assumptions. A program is slower than each of its
floors; which of them is the highest says what to change.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_grpo.config import Config
from jax_grpo.memory.compile import Compiled
from jax_grpo.memory.launches import Stretch, stretches
from jax_grpo.memory.programs import LATER_TURNS, Program, Run, generated
from jax_grpo.model import flops
from jax_grpo.rollout.decoding import chunk_lengths
from jax_grpo.system import devices

# Assumptions in seconds; none of them was measured here. A launch of a kernel, a copy or a whole graph by the host, from a good
# case to a common one; and what lies between two dependent kernels of a graph.
LAUNCH_S = (2e-6, 5e-6)
GRAPH_KERNEL_S = 1e-6
_PEAK_OF = {"bf16": "bfloat16", "f16": "bfloat16"}  # all others multiply as float32 does


def of_stretch(stretch: Stretch, target: str) -> dict[str, float]:
    """Least seconds of one pass through it, by what bounds it.

    `launches` takes what the host launches at the lower `LAUNCH_S`, and a graph's kernels at `GRAPH_KERNEL_S`;
    `launches_without_graphs` takes each kernel at the upper one. `arithmetic` leaves out opaque kernels.
    """
    facts = devices.read(target)
    peaks = {dtype: devices.device_peak(facts.device_kind, _PEAK_OF.get(dtype, "float32")) for dtype in stretch.flops}
    return {
        "bandwidth": stretch.moved / facts.bandwidth,
        "arithmetic": sum(count / (peaks[dtype] or float("nan")) for dtype, count in stretch.flops.items()),
        "launches": stretch.captured * GRAPH_KERNEL_S + stretch.launches * LAUNCH_S[0],
        "launches_without_graphs": stretch.kernels * LAUNCH_S[1],
    }


def record(target: str, config: Config, run: Run, program: Program, compiled: Compiled) -> dict[str, Any]:
    """What a program launches, as data: its straight parts with their floors, and the FLOPs that its task needs by formula.

    Of a loop that decodes, `least_moved` is what a step has to read however it is written: every weight in the compute dtype, and
    the cache of prompts and completions as long as this loop's is.
    """
    first_turn = program.generates and program.name != LATER_TURNS  # of a later one the data tell how long it is
    cap, whole = config.rollout.max_new_tokens, config.model.decode_attention == "pallas"
    lengths = chunk_lengths(cap, whole=whole) if first_turn else []
    parts = []
    for stretch in stretches(compiled, lengths):
        parts.append({**vars(stretch), "flops": dict(stretch.flops), "floors": of_stretch(stretch, target)})
    decoding = [part for part in parts if part["waits"] and part["trips"] and part["name"] != "entry"]
    for number, part in enumerate(decoding[: len(lengths)]):
        part["least_moved"] = _least_moved(config, run, program, sum(lengths[: number + 1]))
    return {"formula_flops": _formula(run, program), "parts": parts}


def _least_moved(config: Config, run: Run, program: Program, columns: int) -> int:
    """Bytes of the weights that a decode step reads, and of the keys and values of prompts and so many columns."""
    sizes, mask_PT = run.architecture, program.arguments[2]
    rows = generated(program)[0].stopped_PG.size
    weights = sizes.padded_vocab_size * sizes.hidden_size + 12 * sizes.num_layers * sizes.hidden_size**2
    cache = 2 * sizes.num_layers * sizes.hidden_size * (mask_PT.size + rows * columns)
    return (weights + cache) * jnp.dtype(config.model.compute_dtype).itemsize


def _formula(run: Run, program: Program) -> float | None:
    """FLOPs of the task, every column a real token (`model.flops`); None of an episode's later turns."""
    if program.name == LATER_TURNS:
        return None
    if program.generates:
        prompt, completion = program.arguments[2].shape, generated(program)[0].completion_ids_PGC.shape
    else:
        tokens = program.arguments[1].tokens
        prompt, completion = tokens.prompt_mask_PT.shape, tokens.completion_mask_PGC.shape
    passes = 1 + flops.BACKWARD if program.name == "update" else 1
    return passes * flops.forward(run.architecture, flops.completions_work(np.ones(prompt), np.ones(completion)))


def total(parts: Sequence[Mapping[str, Any]], what: str) -> float:
    """Of the whole program, over the parts whose number of runs is known."""
    return sum(part["trips"] * part[what] for part in parts if part["trips"])


def lines(program: Mapping[str, Any]) -> list[str]:
    """A program's record as a Markdown table, a line a straight part of it, and a sentence on the whole."""
    parts, formula = program["launches"]["parts"], program["launches"]["formula_flops"]
    out = [f"Launches of `{program['name']}`:", ""]
    head = ("part", "runs", "kernels", "in CUDA graphs", "host launches", "host waits", "MB", "of the least", "GFLOP")
    head += ("floor, us: bytes", "FLOPs", "launches", "without graphs")
    out += [_row(*head), "|---|" + "---|" * (len(head) - 1)]
    for part in parts:
        least = part.get("least_moved")
        out.append(
            _row(
                part["name"] + (f" ({part['opaque']} opaque)" if part["opaque"] else ""),
                "-" if part["trips"] is None else str(part["trips"]),
                str(part["kernels"]),
                f"{part['captured']} in {part['graphs']}" if part["graphs"] else "-",
                str(part["kernels"] - part["captured"] + part["graphs"]),
                str(part["waits"]),
                f"{part['moved'] / 1e6:,.1f}",
                f"{part['moved'] / least:.2f}" if least else "-",
                f"{sum(part['flops'].values()) / 1e9:,.1f}",
                *(f"{seconds * 1e6:,.0f}" for seconds in part["floors"].values()),
            )
        )
    whole = f"{total(parts, 'kernels'):,.0f} kernels and {total(parts, 'moved') / 1e9:,.1f} GB in all"
    return [*out, "", whole + (f"; {formula / 1e9:,.0f} GFLOP by formula." if formula else ".")]


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
