"""What programs should cost by formula over their sizes, and the exponents of what they did cost beside those of the formulas.

Knows no benchmark: points are dicts of a program's name, the size that was varied, its value, and costs.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jax_grpo.flops import Work
from jax_grpo.model import GPT2Config

FLOAT32 = 4  # bytes
# What is compared: a cost's name, the point's key, and the key of what it should grow like.
COSTS = (("time", "min_ms", "flops"), ("memory", "bytes", "expected_bytes"))


def update_bytes(sizes: GPT2Config, work: Work, parameters: int, scores: int) -> float:
    """Bytes of an optimiser step in float32 that recomputes nothing: weights, gradients, two moments, and what is kept.

        4 (4 N + tokens * 16 L H + 2 L heads * scores + 2 V * predicted)

    Activations a block keeps are those of Korthikanti et al. 2022 (Reducing Activation Recomputation), section 4.1,
    without dropout. `scores` are of one head: its (query, key) pairs, masked ones included, since they take memory too.
    """
    block = 16 * sizes.hidden_size * work.tokens + 2 * sizes.num_heads * scores
    return FLOAT32 * (4 * parameters + sizes.num_layers * block + 2 * sizes.vocab_size * work.predicted)


def rollout_bytes(sizes: GPT2Config, work: Work, parameters: int, rows: int) -> float:
    """Bytes of generation in float32: 4 (N + 2 L H * tokens + 2 V * rows), weights, keys and values, one step's logits."""
    cache = 2 * sizes.num_layers * sizes.hidden_size * work.tokens
    return FLOAT32 * (parameters + cache + 2 * sizes.vocab_size * rows)


def slope(points: Sequence[Mapping[str, Any]], key: str) -> float:
    """The exponent of a cost: least squares of log(cost) over log(size)."""
    return float(np.polyfit(np.log([p["size"] for p in points]), np.log([p[key] for p in points]), 1)[0])


def exponents(points: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Exponents found and expected, of each program's time and memory over each size that has two points or more.

    Those expected are local ones: the formula's own slope over the same sizes. Terms that do not grow with the size
    (the LM head over depth, weights over the batch) make both smaller than the highest power in the formula.
    """
    found = []
    for program, over in dict.fromkeys((p["program"], p["over"]) for p in points):
        chosen = [p for p in points if (p["program"], p["over"]) == (program, over)]
        if len(chosen) > 1:
            found += [
                {
                    "program": program,
                    "over": over,
                    "sizes": [p["size"] for p in chosen],
                    "what": what,
                    "found": slope(chosen, key),
                    "expected": slope(chosen, formula),
                }
                for what, key, formula in COSTS
            ]
    return found


def exponent_lines(fits: Sequence[Mapping[str, Any]]) -> list[str]:
    """A Markdown table; empty where there are none."""
    if not fits:
        return []
    lines = ["| program | over | cost | exponent found | by the formula |", "|---|---|---|---|---|"]
    for fit in fits:
        span = f"{fit['over']} {fit['sizes'][0]} to {fit['sizes'][-1]}"
        lines.append(f"| {fit['program']} | {span} | {fit['what']} | {fit['found']:.2f} | {fit['expected']:.2f} |")
    return [*lines, ""]
