"""A model of chess judged on held-out positions, games, endings and puzzles: `python -m jax_grpo.evaluate`."""

from collections.abc import Iterable


def by_side(fens: Iterable[str]) -> dict[str, list[bool]]:
    """Which positions have White to move, and which Black."""
    white = [" w " in fen for fen in fens]
    return {"white": white, "black": [not each for each in white]}
