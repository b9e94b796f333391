"""Bytes of a compiled program by what they are for: parameters, moments, gradients, activations, logits, key-value cache.

Arguments are known exactly. A temporary is told by its shape: one that a parameter has is a gradient or a copy of a weight, one as
wide as the vocabulary is logits, one of the cache's size is the cache, and the rest are activations.
"""

import math
import re
from collections import Counter

import jax

from jax_grpo.memory.compile import Compiled
from jax_grpo.memory.dumps import Live
from jax_grpo.memory.programs import Program, Run
from jax_grpo.rollout.decoding import chunk_lengths

PARTS = (
    *("parameters", "moments", "reference"),  # resident from program to program
    *("gradients", "weights cast", "logits", "activations", "KV cache"),  # temporaries
    *("batch", "results", "gaps"),
)
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")
_DTYPES = {"float32": "f32", "bfloat16": "bf16", "float64": "f64"}


def bytes_by_part(run: Run, program: Program, compiled: Compiled) -> dict[str, int]:
    """Bytes of the whole device while the program runs; the run's resident arrays that it does not read included.

    `gaps` are places of the temporaries' block that hold nothing at its fullest moment: arrays of different moments share it.
    """
    out = Counter(run.resident)
    out["batch"] = compiled.arguments - sum(run.resident[name] for name in program.holds)
    out["results"] = compiled.outputs - compiled.aliased
    out["gaps"] = compiled.temporaries
    for live in compiled.live:
        if live.place == "temporary":
            out[part_of(live, run, program)] += live.size
            out["gaps"] -= live.size
    return {name: out[name] for name in PARTS if out[name] > 0}


def part_of(live: Live, run: Run, program: Program) -> str:
    """The part of a temporary, by its shape."""
    shape = _SHAPE.match(live.shape)
    if shape is None:
        return "activations"
    dims = sorted(int(n) for n in shape.group(2).split(",") if n)
    weights = [leaf for leaf in jax.tree.leaves(program.arguments[0]) if leaf.ndim >= 2 and sorted(leaf.shape) == dims]
    if weights:
        # A weight's gradient leaves its matmul in the compute dtype, so that only its maker tells it from a cast weight.
        stored = shape.group(1) == _DTYPES.get(str(weights[0].dtype))
        gradient = stored or "transpose(jvp" in live.operation
        return "gradients" if program.name == "update" and gradient else "weights cast"
    if {run.architecture.vocab_size, run.architecture.padded_vocab_size} & set(dims):
        return "logits"
    if program.generates and math.prod(dims) in _cache_sizes(run, program):
        return "KV cache"
    return "activations"


def _cache_sizes(run: Run, program: Program) -> set[int]:
    """Elements of one layer's keys: of the prompts, of each chunk of the completions, and of the half that goes on alone."""
    rollout = jax.eval_shape(program.function, *program.arguments)
    prompts, group, cap = rollout.completion_ids_PGC.shape
    width, half = program.arguments[1].shape[1], prompts // 2
    chunks = {group * length for length in chunk_lengths(cap)}
    tokens = {prompts * n for n in {width, *chunks}} | {half * n for n in {width, group * (cap - 1), *chunks}}
    return {run.architecture.hidden_size * n for n in tokens}
