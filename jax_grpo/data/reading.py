"""A finished data set as positions for training: the shards of one split, in order, each row checked."""

import json
from pathlib import Path

from jax_grpo.checked_files import checked_table
from jax_grpo.data.provenance import FILE
from jax_grpo.position_files import PositionFileError
from jax_grpo.position_table import PositionTable, joined


def read_set(folder: Path, split: str, cache: Path | None = None) -> PositionTable:
    """Positions of `train`, `heldout`, or `all`: of both, training first.

    Args:
        folder: of the set.
        split: see above.
        cache: see `checked_files`.

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
    names = ("train", "heldout") if split == "all" else (split,)
    paths = [path for name in names for path in sorted(folder.glob(f"{name}-*.parquet"))]
    tables = [checked_table(path, "parquet", cache, allow_empty=True) for path in paths]
    if not any(map(len, tables)):
        raise PositionFileError(
            f"{folder} has no {split} positions; make the set with held-out positions, give others as evaluation.source, or "
            "set evaluation.positions to 0"
            if split == "heldout"
            else f"{folder} has no {split} positions; make the set again with more rows"
        )
    return joined(tables)
