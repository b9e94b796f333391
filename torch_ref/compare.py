"""How far two optimiser steps are apart, and how far they may be: the parity contract as numbers.

A step is a dict of arrays as both `replay` commands write it. Knows no model.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

Arrays = Mapping[str, np.ndarray]


class Tolerances(NamedTuple):
    """Largest allowed errors at one precision."""

    logits: float
    """Absolute, for logits up to 8; in proportion for larger ones."""
    logp: float
    """Absolute, nats."""
    scalars: float
    """Loss and metrics, relative to the value or to `floor`, whichever is larger."""
    gradients: float
    """Relative L2 of each tensor."""
    change: float | None
    """Relative L2 of each parameter's change over 20 AdamW steps; None: reported only."""
    floor: float


TOLERANCES = {
    # No formula loses a digit: both sum at most some thousand float64 terms of size 1e-16. AdamW divides by sqrt(v), which
    # magnifies what rounding leaves of the smallest gradients. A KL of a policy that is still its reference, or a ratio
    # minus 1, is what is left of numbers of size 1 that carry 1e-15: a value below 1e-4 counts as 1e-4.
    "float64": Tolerances(1e-10, 1e-10, 1e-10, 1e-9, 1e-7, 1e-4),
    # logp: logits of size 10 to 100 rounded to 24 bits, their products summed in another order. Scalars are means of such,
    # whose own absolute error of 1e-6 leaves five digits only of values above 0.1.
    # Gradients: sums over tokens that cancel. AdamW again divides what is left.
    "float32": Tolerances(1e-4, 2e-5, 1e-5, 1e-4, 1e-2, 0.1),
    # 8 bits of mantissa in every activation, and the two frameworks round at other places (one keeps the residual stream in
    # float32, one in bfloat16). A loss that cancels (advantages sum to 0) has no relative accuracy: below 1 it counts as 1.
    # Between 8 and 16 neighbouring bfloat16 numbers lie 0.0625 apart: hence the logits' tolerance, and its growth.
    "bfloat16": Tolerances(6e-2, 3e-2, 2e-2, 5e-2, None, 1.0),
}


LARGE_LOGIT = 8.0


def logits_tolerance(dtype: str, largest: float) -> float:
    """Allowed absolute error of logits whose largest size is given."""
    return TOLERANCES[dtype].logits * max(1.0, largest / LARGE_LOGIT)


def observable(changes: Arrays) -> dict[str, np.ndarray]:
    """The changes without those of the attention keys' biases.

    Adding one vector to every key moves all scores of a query alike, and softmax does not see it: the true gradient of a
    key's bias is 0. What rounding leaves of it AdamW scales up to steps like any other's, in a random direction.
    """

    def seen(name: str, x: np.ndarray) -> np.ndarray:
        if not name.endswith("attn.c_attn.bias"):
            return x
        query, _, value = np.split(np.asarray(x), 3)
        return np.concatenate([query, value])

    return {name: seen(name, x) for name, x in changes.items()}


def tensor_errors(found: Arrays, reference: Arrays, prefix: str = "grad/") -> dict[str, float]:
    """Relative L2 error of each tensor whose name starts with `prefix`.

    Raises:
        ValueError: the reference's tensor is 0, so that nothing would be compared, or there is none.
    """
    errors = {}
    for name in (name for name in reference if name.startswith(prefix)):
        x, y = np.asarray(found[name], np.float64), np.asarray(reference[name], np.float64)
        norm = np.linalg.norm(y)
        if not norm > 0:
            raise ValueError(f"{name} of the reference is 0: nothing is compared")
        errors[name] = float(np.linalg.norm(x - y) / norm)
    if not errors:
        raise ValueError(f"no array {prefix}* to compare")
    return errors


def scalar_errors(found: Arrays, reference: Arrays, floor: float = 1e-30) -> dict[str, float]:
    """Error of the loss and of each metric that both report, relative to its size or to `floor` if that is larger."""
    names = [name for name, x in reference.items() if np.ndim(x) == 0 and name in found]
    assert {"loss", "policy_loss", "grad_norm", "entropy", "ratio/mean"} <= set(names)
    return {
        name: abs(float(found[name]) - float(reference[name])) / max(abs(float(reference[name])), floor)
        for name in names
    }


def logp_error(found: np.ndarray, reference: np.ndarray, completion_mask: np.ndarray) -> float:
    """Largest absolute difference on completion tokens, nats."""
    there = np.asarray(completion_mask) == 1
    return float(np.abs(np.asarray(found, np.float64) - np.asarray(reference, np.float64))[there].max())
