"""How much stronger one side is than another: the Elo of paired games, and one rating for each of many who played each other.

Games of a pair share an opening, so they are counted as one observation. Knows nothing of chess.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jax_grpo.evaluate.statistics import Z, elo_difference

LOG_ODDS_OF_ELO = math.log(10) / 400
MOST_ELO = 1200.0  # ratings are held within this of their mean: a side that always loses has no finite one
RESAMPLES = 400


class PairedElo(NamedTuple):
    """Score in [0, 1] and Elo difference of a match of paired games, with 95 % intervals; None: without bound."""

    pairs: int
    score: float
    score_interval: tuple[float, float]
    elo: float | None
    elo_interval: tuple[float | None, float | None]


def paired_elo(scores: Sequence[float]) -> PairedElo:
    """From the scores of games 0, 1, 2, ...: pairs are (0, 1), (2, 3), ...

    The interval is normal over the pairs' means, so that what the two games of an opening share widens nothing (as in engine
    testing by pentanomial counts). Where every pair has one and the same mean, the variance is that of one differing pair.

    Raises:
        ValueError: an odd number of games, or none.
    """
    if not scores or len(scores) % 2:
        raise ValueError(f"{len(scores)} games; expected pairs")
    pair_N = np.asarray(scores, np.float64).reshape(-1, 2).mean(-1)
    n, score = len(pair_N), float(pair_N.mean())
    variance = max(float(pair_N.var(ddof=1)) if n > 1 else 0.25, 0.25**2 / n)
    half = Z * math.sqrt(variance / n)
    low, high = max(0.0, score - half), min(1.0, score + half)
    return PairedElo(n, score, (low, high), elo_difference(score), (elo_difference(low), elo_difference(high)))


class Rating(NamedTuple):
    """Elo above the anchor, with its 95 % interval."""

    elo: float
    low: float
    high: float
    games: int


def fit_ratings(matches: Mapping[tuple[str, str], Sequence[float]], anchor: str, seed: int = 0) -> dict[str, Rating]:
    """One Elo for each player, from the scores of the first of each pair of names; the anchor's is 0.

    Maximum likelihood of the logistic model, P(first scores) = 1 / (1 + 10^((second - first) / 400)), with a draw as half of
    each (Bradley and Terry 1952; Elo 1978). A weak normal prior (deviation `MOST_ELO`) keeps the ratings of sides that never
    score finite. Intervals: percentile bootstrap over the pairs of games.

    Raises:
        ValueError: the anchor played nobody, or someone cannot be compared with it.
    """
    names = sorted({name for pair in matches for name in pair})
    _require_connected(names, matches, anchor)
    index = {name: i for i, name in enumerate(names)}
    sides_M2 = np.array([[index[a], index[b]] for a, b in matches])
    pairs = [np.asarray(scores, np.float64).reshape(-1, 2).mean(-1) for scores in matches.values()]

    def elos(samples: Sequence[np.ndarray]) -> np.ndarray:
        won_M = np.array([2 * sample.sum() for sample in samples])
        games_M = np.array([2.0 * len(sample) for sample in samples])
        elo_N = _newton(sides_M2, won_M, games_M, len(names))
        return elo_N - elo_N[index[anchor]]

    fitted_N, rng = elos(pairs), np.random.default_rng(seed)
    resampled_RN = np.array([elos([rng.choice(pair, len(pair)) for pair in pairs]) for _ in range(RESAMPLES)])
    low_N, high_N = np.quantile(resampled_RN, [0.025, 0.975], axis=0)
    games = {name: sum(len(scores) for pair, scores in matches.items() if name in pair) for name in names}
    return {
        name: Rating(float(fitted_N[i]), float(low_N[i]), float(high_N[i]), games[name]) for name, i in index.items()
    }


def _newton(sides_M2: np.ndarray, won_M: np.ndarray, games_M: np.ndarray, players: int) -> np.ndarray:
    """Elo [players] of largest likelihood times the prior; the negative logarithm is convex, so Newton's steps reach it."""
    first_M, second_M = sides_M2.T
    prior = 1 / (MOST_ELO * LOG_ODDS_OF_ELO) ** 2
    x_N = np.zeros(players)  # log-odds
    for _ in range(100):
        p_M = 1 / (1 + np.exp(x_N[second_M] - x_N[first_M]))
        gradient_N, hessian_NN = prior * x_N, prior * np.eye(players)
        np.add.at(gradient_N, first_M, games_M * p_M - won_M)
        np.add.at(gradient_N, second_M, won_M - games_M * p_M)
        weight_M = games_M * p_M * (1 - p_M)
        for i, j, sign in (
            (first_M, first_M, 1),
            (second_M, second_M, 1),
            (first_M, second_M, -1),
            (second_M, first_M, -1),
        ):
            np.add.at(hessian_NN, (i, j), sign * weight_M)
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
