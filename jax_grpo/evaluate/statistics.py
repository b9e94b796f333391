"""Estimates with 95 % intervals: of shares, means and their differences.

Sums are exact (`math.fsum`), so that no number depends on the order of the rows. Knows nothing of chess.
"""

import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

Z = 1.959963984540054  # 97.5 % quantile of the standard normal distribution: two-sided 95 %
RESAMPLES = 2000  # of the bootstrap


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A number, its 95 % interval, from how many observations, and the interval's method. Null where nothing was observed."""

    value: float | None
    low: float | None
    high: float | None
    count: int
    method: str


def wilson(share: float, n: int) -> tuple[float, float]:
    """Wilson's score interval (1927) of a share of n observations: within [0, 1], and not empty at a share of 0 or 1.

    (p + z^2/2n +- z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n).
    """
    centre = share + Z * Z / (2 * n)
    half = Z * math.sqrt(share * (1 - share) / n + Z * Z / (4 * n * n))
    scale = 1 + Z * Z / n
    # exact at both ends, where rounding would leave 1e-17
    return 0.0 if share == 0 else (centre - half) / scale, 1.0 if share == 1 else (centre + half) / scale


def proportion(outcomes: Sequence[bool]) -> Estimate:
    """Share of true outcomes, with Wilson's interval."""
    n = len(outcomes)
    if n == 0:
        return Estimate(None, None, None, 0, "wilson")
    share = sum(outcomes) / n
    return Estimate(share, *wilson(share, n), n, "wilson")


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
    rows_RN = np.random.default_rng(seed).integers(0, n, (RESAMPLES, n))
    low, high = np.quantile(ordered_N[rows_RN].mean(-1), [0.025, 0.975])
    return Estimate(math.fsum(values) / n, float(low), float(high), n, "bootstrap")


def cluster_bootstrap_mean(
    values: Sequence[float], clusters: Sequence[Hashable], seed: int, weights: Sequence[float] | None = None
) -> Estimate:
    """Weighted mean, with the percentile bootstrap over whole clusters (Field and Welsh 2007): what is in one shares luck.

    `clusters` says which cluster each value is in; no `weights`: each counts alike. The interval is null for a single cluster.
    Clusters are sorted by their sums first: neither their names nor the order of the values matters.
    """
    terms: dict[Hashable, list[tuple[float, float]]] = defaultdict(list)
    for value, cluster, weight in zip(values, clusters, weights or [1.0] * len(values), strict=True):
        if weight:
            terms[cluster].append((weight * value, weight))
    sums = sorted((math.fsum(wv for wv, _ in own), math.fsum(w for _, w in own)) for own in terms.values())
    count = sum(map(len, terms.values()))
    if not sums:
        return Estimate(None, None, None, 0, "cluster bootstrap")
    centre = math.fsum(wv for wv, _ in sums) / math.fsum(w for _, w in sums)
    if len(sums) == 1:
        return Estimate(centre, None, None, count, "cluster bootstrap")
    # Not `@`: the order in which BLAS adds depends on the machine and its threads.
    sums_R2 = np.einsum("rc,ck->rk", _resample_counts(len(sums), seed), np.array(sums))
    low, high = np.quantile(sums_R2[:, 0] / sums_R2[:, 1], [0.025, 0.975])
    return Estimate(centre, float(low), float(high), count, "cluster bootstrap")


@functools.lru_cache(maxsize=4)
def _resample_counts(clusters: int, seed: int) -> np.ndarray:
    """How often each cluster is in each resample, float64 [RESAMPLES, clusters]."""
    share = np.full(clusters, 1 / clusters)
    return np.random.default_rng(seed).multinomial(clusters, share, RESAMPLES).astype(np.float64)


def difference(before: Estimate, after: Estimate) -> Estimate | None:
    """after - before of two independent estimates, squaring and adding their half-widths; None where either lacks an interval.

    Newcombe 1998, method 10, for proportions; Zou and Donner 2008 (MOVER) for the others. On the same prompts the two are
    positively correlated, so the interval is wider than it need be.
    """
    if before.value is None or before.low is None or before.high is None:
        return None
    if after.value is None or after.low is None or after.high is None:
        return None
    change = after.value - before.value
    down = math.hypot(after.value - after.low, before.high - before.value)
    up = math.hypot(after.high - after.value, before.value - before.low)
    return Estimate(change, change - down, change + up, min(before.count, after.count), "square and add")


def summarise(rows: Sequence[Mapping[str, Any]], groups: Mapping[str, Sequence[bool]]) -> dict[str, Estimate]:
    """`group/name` estimates of the columns of `rows`: proportions of booleans, means of numbers; None is not counted.

    `groups` says which rows each group has; `all` is added. A group without rows gives estimates without a value.
    """
    names = list(rows[0]) if rows else []
    kinds = {name: mean if any(isinstance(row[name], float) for row in rows) else proportion for name in names}
    out = {}
    for group, members in {"all": [True] * len(rows), **groups}.items():
        inside = [row for row, member in zip(rows, members, strict=True) if member]
        for name in names:
            out[f"{group}/{name}"] = kinds[name]([row[name] for row in inside if row[name] is not None])
    return out
