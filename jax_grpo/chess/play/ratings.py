"""How much stronger one side is than another: the Elo of a match's games, and one rating for each of many who played each other.

Games of a pair share an opening, so they are counted as one observation. Knows nothing of chess.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jax_grpo.evaluate.statistics import Estimate, Z, wilson

LOG_ODDS_OF_ELO = math.log(10) / 400
MOST_ELO = 1200.0  # ratings are held within this of their mean: a side that always loses has no finite one
RESAMPLES = 400


class Elo(NamedTuple):
    """Score in [0, 1] and Elo difference, each with its 95 % interval; None: without bound, as of a score of 0 or 1."""

    score: float
    score_interval: tuple[float, float]
    elo: float | None
    elo_interval: tuple[float | None, float | None]

    @classmethod
    def of_score(cls, score: float, low: float, high: float) -> "Elo":
        return cls(score, (low, high), elo_difference(score), (elo_difference(low), elo_difference(high)))

    def __str__(self) -> str:
        """`Elo difference -120 (95 % interval -310 to +40)`, or the one-sided bound."""
        if self.elo is None:
            why = "every point scored" if self.score else "no point scored"
            return f"Elo difference {elo_range(self.elo_interval)} ({why}; one-sided 95 % bound)"
        return f"Elo difference {signed(self.elo)} (95 % interval {elo_range(self.elo_interval)})"


def signed(elo: float | None) -> str:
    """Whole Elo with its sign, and 0 without one; `-` for none."""
    return "-" if elo is None else f"{round(elo):+d}" if round(elo) else "0"


def elo_range(interval: tuple[float | None, float | None]) -> str:
    """`-310 to +40`; without a bound on one side `above +40` or `below -310`, without any `any`."""
    low, high = interval
    if low is None and high is None:
        return "any"
    if low is None or high is None:
        return f"below {signed(high)}" if low is None else f"above {signed(low)}"
    return f"{signed(low)} to {signed(high)}"


def elo_difference(score: float) -> float | None:
    """-400 log10(1 / score - 1), the logistic model (Elo 1978); None for 0 and 1."""
    return 0.0 - 400 * math.log10(1 / score - 1) if 0 < score < 1 else None


def elo_of_games(wins: int, draws: int, losses: int) -> Elo:
    """Wilson's interval, taking every game as decided: draws only make the truth narrower.

    With a score of 0 or 1 the bound is the share p at which such a match still has a chance of 5 %: p^n = 0.05.
    Raises ValueError: no games.
    """
    games = wins + draws + losses
    if games == 0:
        raise ValueError("no games to estimate from")
    score = (wins + draws / 2) / games
    one_sided = (1 - 0.95) ** (1 / games)
    bounds = {0.0: (0.0, 1 - one_sided), 1.0: (one_sided, 1.0)}.get(score) or wilson(score, games)
    return Elo.of_score(score, *bounds)


def elo_of_pairs(scores: Sequence[float]) -> Elo:
    """From the scores of games 0, 1, 2, ...: pairs are (0, 1), (2, 3), ...

    The interval is normal over the pairs' means, so that what the two games of an opening share widens nothing (as in engine
    testing by pentanomial counts). Where every pair has one and the same mean, the variance is that of one differing pair.
    Raises ValueError: an odd number of games, or none.
    """
    if not scores or len(scores) % 2:
        raise ValueError(f"{len(scores)} games; expected pairs")
    pair_N = np.asarray(scores, np.float64).reshape(-1, 2).mean(-1)
    n, score = len(pair_N), float(pair_N.mean())
    variance = max(float(pair_N.var(ddof=1)) if n > 1 else 0.25, 0.25**2 / n)
    half = Z * math.sqrt(variance / n)
    return Elo.of_score(score, max(0.0, score - half), min(1.0, score + half))


def fit_ratings(matches: Mapping[tuple[str, str], Sequence[float]], anchor: str, seed: int = 0) -> dict[str, Estimate]:
    """One Elo for each player, from the scores of the first of each pair of names; the anchor's is 0.

    Maximum likelihood of the logistic model, P(first scores) = 1 / (1 + 10^((second - first) / 400)), with a draw as half of
    each (Bradley and Terry 1952; Elo 1978). A weak normal prior (deviation `MOST_ELO`) keeps the ratings of sides that never
    score finite. Intervals: percentile bootstrap over the pairs of games.
    Raises ValueError: the anchor played nobody, or someone cannot be compared with it.
    """
    names = sorted({name for pair in matches for name in pair})
    _require_connected(names, matches, anchor)
    # By match: 1 for the first player, -1 for the second, 0 for the others.
    sides_MN = np.array([[(name == a) - (name == b) for name in names] for a, b in matches], np.float64)
    pairs = [np.asarray(scores, np.float64).reshape(-1, 2).mean(-1) for scores in matches.values()]

    def elos(samples: Sequence[np.ndarray]) -> np.ndarray:
        won_M = np.array([2 * sample.sum() for sample in samples])
        games_M = np.array([2.0 * len(sample) for sample in samples])
        elo_N = _newton(sides_MN, won_M, games_M)
        return elo_N - elo_N[names.index(anchor)]

    fitted_N, rng = elos(pairs), np.random.default_rng(seed)
    resampled_RN = np.array([elos([rng.choice(pair, len(pair)) for pair in pairs]) for _ in range(RESAMPLES)])
    low_N, high_N = np.quantile(resampled_RN, [0.025, 0.975], axis=0)
    games = {name: sum(len(scores) for pair, scores in matches.items() if name in pair) for name in names}
    return {
        name: Estimate(float(fitted_N[i]), float(low_N[i]), float(high_N[i]), games[name], "bootstrap of pairs")
        for i, name in enumerate(names)
    }


def _newton(sides_MN: np.ndarray, won_M: np.ndarray, games_M: np.ndarray) -> np.ndarray:
    """Elo [players] of largest likelihood times the prior; the negative logarithm is convex, so Newton's steps reach it."""
    players = sides_MN.shape[1]
    prior = 1 / (MOST_ELO * LOG_ODDS_OF_ELO) ** 2
    x_N = np.zeros(players)  # log-odds
    for _ in range(100):
        p_M = 1 / (1 + np.exp(-sides_MN @ x_N))
        gradient_N = prior * x_N + sides_MN.T @ (games_M * p_M - won_M)
        weight_M = games_M * p_M * (1 - p_M)
        hessian_NN = prior * np.eye(players) + sides_MN.T @ (weight_M[:, None] * sides_MN)
        step_N = np.linalg.solve(hessian_NN, gradient_N)
        x_N -= step_N * min(1.0, 2 / max(np.abs(step_N).max(), 1e-12))  # at most two log-odds at once
        if np.abs(step_N).max() < 1e-10:
            break
    return x_N / LOG_ODDS_OF_ELO


def _require_connected(names: Sequence[str], matches: Mapping[tuple[str, str], Sequence[float]], anchor: str) -> None:
    reached, new = {anchor} & set(names), True
    while new:
        new = {name for pair in matches if reached & set(pair) for name in pair} - reached
        reached |= new
    if left := sorted(set(names) - reached):
        raise ValueError(f"{left[0]!r} cannot be compared with {anchor!r}: no chain of matches joins them")
