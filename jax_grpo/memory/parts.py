"""Bytes of a compiled program by what they are for: parameters, moments, gradients, activations, logits, key-value cache.

Arguments are known exactly. A temporary is told by its shape: one that a parameter has is a gradient or a copy of a weight, one as
wide as the vocabulary is logits, one of the cache's size is the cache, and the rest are activations.
"""

import math
import re
from collections import Counter

import jax

from jax_grpo.decoding import chunk_lengths
from jax_grpo.memory.buffers import Live
from jax_grpo.memory.compiled import Compiled
from jax_grpo.memory.shapes import EVALUATION, Program, Run

PARTS = (
    "parameters",
    "moments",
    "reference",
    "gradients",
    "weights cast",
    "logits",
    "activations",
    "KV cache",
    "batch",
    "results",
    "gaps",
)
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")
_DTYPES = {"float32": "f32", "bfloat16": "bf16", "float64": "f64"}


def parts(run: Run, program: Program, compiled: Compiled) -> dict[str, int]:
    """Bytes of the whole device while the program runs, by part; the run's resident arrays that it does not read included.

    `gaps` are places of the temporaries' block that hold nothing at its fullest moment: XLA lays arrays of different
    moments into one block, and it does not always find a use for every hole.
    """
    out = Counter({name: run.resident[name] for name in run.resident if name not in program.holds})
    held = {name: run.resident[name] for name in program.holds}
    out.update(held)
    out["batch"] += compiled.arguments - sum(held.values())
    out["results"] += compiled.outputs - compiled.aliased
    temporaries = [live for live in compiled.live if live.place == "temporary"]
    for live in temporaries:
        out[part_of(live, run, program)] += live.size
    out["gaps"] += compiled.temporaries - sum(live.size for live in temporaries)
    return {name: out[name] for name in PARTS if out[name] > 0}


def part_of(live: Live, run: Run, program: Program) -> str:
    """The part of a temporary, by its shape."""
    found = _SHAPE.match(live.shape)
    if found is None:
        return "activations"
    dims = tuple(sorted(int(n) for n in found.group(2).split(",") if n))
    weights = jax.tree.leaves(program.arguments[0])
    alike = [leaf for leaf in weights if tuple(sorted(leaf.shape)) == dims and leaf.ndim >= 2]
    if alike:
        stored = _DTYPES.get(str(alike[0].dtype), "")
        # A weight's gradient leaves its matmul in the compute dtype, so that only its maker tells it from a cast weight.
        gradient = found.group(1) == stored or "transpose(jvp" in live.operation
        return "gradients" if program.name == "update" and gradient else "weights cast"
    if {run.architecture.vocab_size, run.architecture.padded_vocab_size} & set(dims):
        return "logits"
    if generates(program.name) and math.prod(dims) in _cache_sizes(run, program):
        return "KV cache"
    return "activations"


def generates(name: str) -> bool:
    """Whether the program of that name makes completions, and so has a cache; micro-batches do not change those."""
    return name == "rollout" or name.startswith(EVALUATION)


def _cache_sizes(run: Run, program: Program) -> set[int]:
    """Elements of one layer's keys: of the prompts, of each chunk of the completions, and of the half that goes on alone."""
    rollout = jax.eval_shape(program.function, *program.arguments)
    prompts, group, cap = rollout.completion_ids_PGC.shape
    width, few = program.arguments[1].shape[1], prompts // 2
    chunks = {group * length for length in chunk_lengths(cap)}
    tokens = {prompts * n for n in {width, *chunks}} | {few * n for n in {width, group * (cap - 1), *chunks}}
    return {run.architecture.hidden_size * n for n in tokens}


def outside(run: Run, program: Program) -> int:
    """Bytes of resident arrays that are in memory while the program runs and are not among its arguments."""
    return sum(bytes_ for name, bytes_ in run.resident.items() if name not in program.holds)
