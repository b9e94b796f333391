"""From a match's games to an Elo difference with its interval. Pure numbers; knows no chess."""

import math
from typing import NamedTuple

Z = 1.959964  # two-sided 95 %
CONFIDENCE = 0.95


class Estimate(NamedTuple):
    """Score in [0, 1] and Elo difference, each with its 95 % interval; None: without bound.

    A score of 0 or 1 has no Elo difference: only a one-sided bound, which is exact for decided games.
    """

    score: float
    score_interval: tuple[float, float]
    elo: float | None
    elo_interval: tuple[float | None, float | None]


def elo_difference(score: float) -> float | None:
    """-400 log10(1 / score - 1), the logistic model (Elo 1978); None for 0 and 1."""
    return -400 * math.log10(1 / score - 1) if 0 < score < 1 else None


def estimate(wins: int, draws: int, losses: int) -> Estimate:
    """Wilson's score interval (Wilson 1927), taking every game as decided: draws only make the truth narrower.

    With a score of 0 or 1 the bound is the share p at which such a match still has a chance of 5 %: p^n = 0.05.

    Raises:
        ValueError: no games.
    """
    games = wins + draws + losses
    if games == 0:
        raise ValueError("no games to estimate from")
    score = (wins + draws / 2) / games
    if wins + draws == 0 or losses + draws == 0:
        bound = (1 - CONFIDENCE) ** (1 / games)
        interval = (0.0, 1 - bound) if score == 0 else (bound, 1.0)
    else:
        centre = (score + Z**2 / (2 * games)) / (1 + Z**2 / games)
        half = Z * math.sqrt(score * (1 - score) / games + Z**2 / (4 * games**2)) / (1 + Z**2 / games)
        interval = (centre - half, centre + half)
    bounds = (elo_difference(interval[0]), elo_difference(interval[1]))
    return Estimate(score, interval, elo_difference(score), bounds)


def describe(found: Estimate) -> str:
    """`Elo difference -120 (95 % interval -310 to +40)`, or the one-sided bound."""
    low, high = found.elo_interval
    if found.elo is not None and low is not None and high is not None:
        return f"Elo difference {found.elo:+.0f} (95 % interval {low:+.0f} to {high:+.0f})"
    if high is not None:
        return f"Elo difference below {high:+.0f} (no point scored; one-sided 95 % bound)"
    return f"Elo difference above {low:+.0f} (every point scored; one-sided 95 % bound)"
