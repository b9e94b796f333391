"""A finished data set as positions for training: the shards of one split, in order, each row checked."""

import json
from pathlib import Path

from jax_grpo.data.provenance import FILE
from jax_grpo.position_files import PositionFileError, read_positions
from jax_grpo.tasks.base import Position


def read_set(folder: Path, split: str) -> list[Position]:
    """Positions of `train` or `heldout`.

    Raises:
        PositionFileError: the set is unfinished (its rows would change under a run that resumes), has no such split, or a
            row is bad, which is named with its file.
    """
    try:
        record = json.loads((folder / FILE).read_text(encoding="utf-8"))
        finished, command = record["finished"], record["command"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PositionFileError(f"{folder / FILE}: not a data set's record ({error}); make the set again") from error
    if not finished:
        raise PositionFileError(f"{folder} is not finished; finish it first: {command}")
    positions = []
    for path in sorted(folder.glob(f"{split}-*.parquet")):
        positions += read_positions(path, allow_empty=True)
    if not positions:
        raise PositionFileError(
            f"{folder} has no {split} positions; make the set with held-out positions, or with evaluation.positions 0 none "
            "are needed"
            if split == "heldout"
            else f"{folder} has no {split} positions; make the set again with more rows"
        )
    return positions
