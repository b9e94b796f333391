"""A model of chess judged on held-out positions, games, endings and puzzles: `python -m jax_grpo.evaluate`."""

from collections.abc import Sequence
from typing import Any


def by_side(rows: Sequence[Any]) -> dict[str, list[bool]]:
    """Which rows, each with a `fen`, have White to move, and which Black."""
    white = [" w " in row.fen for row in rows]
    return {"white": white, "black": [not each for each in white]}
