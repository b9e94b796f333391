"""How far two optimiser steps are apart, and how far they may be: the parity contract as numbers.

A step is a dict of arrays as both `replay` commands write it. Every comparison refuses a side that is not finite: NaN is on neither
side of a tolerance, and `max` over errors may pass it by. No array of either command is NaN by definition. Knows no model.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

Arrays = Mapping[str, np.ndarray]
TESTED, REFERENCE = "side under test", "reference"


class Tolerances(NamedTuple):
    """Largest allowed errors at one precision."""

    logits: float
    """Absolute, for logits up to 8; in proportion for larger ones."""
    logp: float
    """Absolute, nats."""
    scalars: float
    """Loss and metrics, relative to the value or to its floor (`floor_of`), whichever is larger."""
    gradients: float
    """Relative L2 of each tensor."""
    change: float | None
    """Relative L2 of each parameter's change over 20 AdamW steps; None: reported only."""
    floor: float
    """Of scalars: a smaller value counts as this."""
    floor_in_advantages: float
    """Of `loss` and `policy_loss`, where larger: in units of the batch's mean |A|."""


TOLERANCES = {
    # No formula loses a digit: both sum at most some thousand float64 terms of size 1e-16. AdamW divides by sqrt(v), which
    # magnifies what rounding leaves of the smallest gradients. A KL of a policy that is still its reference, or a ratio
    # minus 1, is what is left of numbers of size 1 that carry 1e-15: a value below 1e-4 counts as 1e-4.
    "float64": Tolerances(1e-10, 1e-10, 1e-10, 1e-9, 1e-7, 1e-4, 0.0),
    # logp: logits of size 10 to 100 rounded to 24 bits, their products summed in another order. Scalars are means of such,
    # whose own absolute error of 1e-6 leaves five digits only of values above 0.1.
    # Gradients: sums over tokens that cancel. AdamW again divides what is left.
    "float32": Tolerances(1e-4, 2e-5, 1e-5, 1e-4, 1e-2, 0.1, 0.0),
    # 8 bits of mantissa in every activation, and the two frameworks round at other places (one keeps the residual stream in
    # float32, one in bfloat16). Log-probabilities are then up to 3e-2 apart and their means some 1e-3, which leaves two digits
    # only of values above 0.1, and of these it leaves them (errors found: below 1e-2). The two losses
    # are sums of ratio times advantage, and a group's advantages sum to 0: where they cancel, what remains has the rounding of its
    # terms, of size mean |A| (largest found: 6e-3 of that). It is below 1 where advantages are divided by their deviation.
    # Between 8 and 16 neighbouring bfloat16 numbers lie 0.0625 apart: hence the logits' tolerance, and its growth.
    "bfloat16": Tolerances(6e-2, 3e-2, 2e-2, 5e-2, None, 0.1, 1.0),
}


class NotFinite(ValueError):
    """A side of a comparison holds NaN or an infinity; the message names the quantity and the side."""


def finite(name: str, side: str, values: ArrayLike) -> np.ndarray:
    """The values in float64.

    Raises:
        NotFinite: one of them is not finite.
    """
    wide = np.asarray(values, np.float64)
    bad = ~np.isfinite(wide)
    if bad.any():
        raise NotFinite(
            f"{name}: {bad.sum()} of {wide.size} values of the {side} are not finite, such as {wide[bad][0]}"
        )
    return wide


def difference(name: str, tested: ArrayLike, reference: ArrayLike) -> float:
    """Largest absolute difference.

    Raises:
        NotFinite: of either side.
    """
    return float(np.abs(finite(name, TESTED, tested) - finite(name, REFERENCE, reference)).max())


def relative_l2(name: str, tested: ArrayLike, reference: ArrayLike) -> float:
    """|tested - reference| / |reference|; 0 where both are 0, infinity where only the reference is.

    Raises:
        NotFinite: of either side.
    """
    x, y = finite(name, TESTED, tested), finite(name, REFERENCE, reference)
    apart, norm = float(np.linalg.norm(x - y)), float(np.linalg.norm(y))
    return apart / norm if norm > 0 else math.inf if apart > 0 else 0.0


def largest(errors: Mapping[str, float]) -> tuple[str, float]:
    """Name and size of the largest error.

    Raises:
        NotFinite: an error is NaN: whoever computed it did not look at both sides.
    """
    for name, error in errors.items():
        if math.isnan(error):
            raise NotFinite(f"{name}: the error is NaN")
    name = max(errors, key=errors.__getitem__)
    return name, errors[name]


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


def tensor_errors(tested: Arrays, reference: Arrays, prefix: str = "grad/") -> dict[str, float]:
    """Relative L2 error of each tensor whose name starts with `prefix`.

    Raises:
        NotFinite: of either side.
        ValueError: the reference's tensor is 0, so that nothing would be compared, or there is none.
    """
    errors = {}
    for name in (name for name in reference if name.startswith(prefix)):
        if not np.any(reference[name]):
            raise ValueError(f"{name} of the reference is 0: nothing is compared")
        errors[name] = relative_l2(name, tested[name], reference[name])
    if not errors:
        raise ValueError(f"no array {prefix}* to compare")
    return errors


CANCELLING = ("loss", "policy_loss")  # sums of terms that advantages give both signs


def floor_of(name: str, reference: Arrays, dtype: str) -> float:
    """The size below which the reference's scalar of that name counts as this size."""
    allowed = TOLERANCES[dtype]
    if name not in CANCELLING or allowed.floor_in_advantages == 0:
        return allowed.floor
    advantages = finite("advantages", REFERENCE, reference["advantages"])
    return max(allowed.floor, allowed.floor_in_advantages * float(np.abs(advantages).mean()))


def scalar_errors(tested: Arrays, reference: Arrays, dtype: str) -> dict[str, float]:
    """Error of the loss and of each metric that both report, relative to its size or to its floor if that is larger.

    Raises:
        NotFinite: of either side.
    """
    names = [name for name, x in reference.items() if np.ndim(x) == 0 and name in tested]
    assert {"loss", "policy_loss", "grad_norm", "entropy", "ratio/mean"} <= set(names)
    return {
        name: difference(name, tested[name], reference[name])
        / max(abs(float(reference[name])), floor_of(name, reference, dtype))
        for name in names
    }


def logp_error(tested: np.ndarray, reference: np.ndarray, completion_mask: np.ndarray) -> float:
    """Largest absolute difference on completion tokens, nats.

    Raises:
        NotFinite: of either side, on those tokens; nobody reads the others.
    """
    there = np.asarray(completion_mask) == 1
    return difference("logp", np.asarray(tested)[there], np.asarray(reference)[there])
