"""The positions that a run is asked about and does not train on, and what the run says about both. Knows no prompts or models."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from jax_grpo.config import Config
from jax_grpo.positions.dataset import load_positions
from jax_grpo.positions.files import PositionFileError
from jax_grpo.positions.position import Position
from jax_grpo.positions.table import PositionTable


class Heldout(NamedTuple):
    """`positions` are asked, of `available`; `left_out` others of evaluation.source are among those the run trains on."""

    positions: list[Position]
    available: int
    left_out: int = 0


def heldout_positions(config: Config, training: PositionTable) -> Heldout | None:
    """The first `evaluation.positions` that are not trained on; None when that is 0.

    Args:
        config: of the run.
        training: the positions it trains on.

    Raises:
        PositionFileError: there are none; or a file is bad, which is named with the row.
    """
    count, source = config.evaluation.positions, config.evaluation.source
    if count == 0:
        return None
    asked: dict[str, object] = {"split": "heldout"}
    if source is not None:
        file = source not in ("packaged", "selfplay") and not Path(source).is_dir()
        asked = {"source": source, "format": "auto", "split": "all" if file else "heldout"}
    table = load_positions(config.prompts.model_copy(update=asked), config.seed + 1, config.compilation_cache)
    if source is None:
        return Heldout(table[:count], len(table))
    new = np.flatnonzero(~np.isin(table.keys(), training.keys()))
    if not len(new):
        raise PositionFileError(
            f"evaluation.source {source!r}: the run trains on all of its {len(table)} positions, so none is held out; give "
            "others, or set evaluation.positions to 0"
        )
    return Heldout([table[int(row)] for row in new[:count]], len(new), len(table) - len(new))


def told(training: PositionTable, heldout: Heldout | None) -> str:
    """One line for people: how many positions are trained on, held out and asked."""
    line = f"{len(training)} positions to train on"
    if heldout is None:
        unused = f", {training.apart} held out and not asked" if training.apart else ""
        return f"{line}{unused} (evaluation.positions is 0)"
    line += f", {heldout.available} held out, of which {len(heldout.positions)} are asked"
    if heldout.left_out:
        line += f"; left out {heldout.left_out} of evaluation.source that the run trains on"
    return line
