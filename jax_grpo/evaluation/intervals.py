"""Estimates with 95 % intervals: Wilson for proportions, normal for means, bootstrap for skewed means, Newcombe for differences.

Sums are exact (`math.fsum`), so that no number depends on the order of the rows. Knows nothing of chess.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Z = 1.959963984540054  # 97.5 % quantile of the standard normal distribution
RESAMPLES = 2000  # of the bootstrap


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A number, its 95 % interval, from how many observations, and the interval's method. Null where nothing was observed."""

    value: float | None
    low: float | None
    high: float | None
    count: int
    method: str


def proportion(outcomes: Sequence[bool]) -> Estimate:
    """Share of true outcomes; Wilson's score interval (1927), which stays in [0, 1] and is not empty at 0 or n.

    (p + z^2/2n +- z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n).
    """
    n = len(outcomes)
    if n == 0:
        return Estimate(None, None, None, 0, "wilson")
    p = sum(outcomes) / n
    centre = p + Z * Z / (2 * n)
    half = Z * math.sqrt(p * (1 - p) / n + Z * Z / (4 * n * n))
    scale = 1 + Z * Z / n
    # exact at both ends, where rounding would leave 1e-17
    low = 0.0 if p == 0 else (centre - half) / scale
    high = 1.0 if p == 1 else (centre + half) / scale
    return Estimate(p, low, high, n, "wilson")


def mean(values: Sequence[float]) -> Estimate:
    """Mean +- z s / sqrt(n), s with ddof 1; the interval is null for a single value."""
    n = len(values)
    if n == 0:
        return Estimate(None, None, None, 0, "normal")
    centre = math.fsum(values) / n
    if n == 1:
        return Estimate(centre, None, None, 1, "normal")
    variance = math.fsum((value - centre) ** 2 for value in values) / (n - 1)
    half = Z * math.sqrt(variance / n)
    return Estimate(centre, centre - half, centre + half, n, "normal")


def bootstrap_mean(values: Sequence[float], seed: int) -> Estimate:
    """Mean with the percentile bootstrap (Efron 1979) of `RESAMPLES` resamples: for few, skewed values.

    Values are sorted first: the same values in any order give the same interval.
    """
    n = len(values)
    if n == 0:
        return Estimate(None, None, None, 0, "bootstrap")
    ordered_N = np.sort(np.asarray(values, np.float64))
    chosen_RN = np.random.default_rng(seed).integers(0, n, (RESAMPLES, n))
    low, high = np.quantile(ordered_N[chosen_RN].mean(-1), [0.025, 0.975])
    return Estimate(math.fsum(values) / n, float(low), float(high), n, "bootstrap")


def difference(before: Estimate, after: Estimate) -> Estimate | None:
    """after - before of two independent estimates, squaring and adding their half-widths; None where either lacks an interval.

    Newcombe 1998, method 10, for proportions; Zou and Donner 2008 (MOVER) for the others. On the same prompts the two are
    positively correlated, so the interval is wider than it need be.
    """
    if before.value is None or after.value is None:
        return None
    if None in (before.low, before.high, after.low, after.high):
        return None
    change = after.value - before.value
    down = math.hypot(after.value - _known(after.low), _known(before.high) - before.value)
    up = math.hypot(_known(after.high) - after.value, before.value - _known(before.low))
    return Estimate(change, change - down, change + up, min(before.count, after.count), "square and add")


def _known(bound: float | None) -> float:
    assert bound is not None
    return bound


def summarise(rows: Sequence[Mapping[str, Any]], groups: Mapping[str, Sequence[bool]]) -> dict[str, Estimate]:
    """`group/name` estimates of the columns of `rows`: proportions of booleans, means of numbers.

    Args:
        rows: one a prompt, all with the same names; None: not measured on this prompt, and not counted.
        groups: which rows each group has; `all` is added. A group without rows gives estimates without a value.
    """
    names = list(rows[0]) if rows else []
    kinds = {name: mean if any(isinstance(row[name], float) for row in rows) else proportion for name in names}
    out = {}
    for group, chosen in {"all": [True] * len(rows), **groups}.items():
        inside = [row for row, keep in zip(rows, chosen, strict=True) if keep]
        for name in names:
            out[f"{group}/{name}"] = kinds[name]([row[name] for row in inside if row[name] is not None])
    return out
