"""A data set is a folder of shards and `provenance.json`: what decided its rows, what made it, and how it ended.

A set is continued only as it began, and read for training only when it is finished. Knows no source of rows.
"""

import json
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import jax_grpo
from jax_grpo.positions.checked_files import checked_table
from jax_grpo.positions.files import PositionFileError
from jax_grpo.positions.table import PositionTable, joined
from jax_grpo.system.whole_files import written_whole

FILE = "provenance.json"


class DataError(ValueError):
    """A data set cannot be made or continued; names the file or option, what was found and what to do."""


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Puts a set's record, or another file's, in place whole."""
    with written_whole(path) as working:
        working.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _record(folder: Path, advice: str) -> dict[str, Any]:
    path = folder / FILE
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        assert isinstance(record["settings"], dict) and isinstance(record["finished"], bool)
    except (OSError, ValueError, KeyError, TypeError, AssertionError) as error:
        raise PositionFileError(f"{path} is not a data set's record; {advice} ({error!r})") from error
    return record


def begin(out: Path, settings: Mapping[str, Any], command: str) -> dict[str, Any]:
    """The record of a new set, or that of the set in `out`, which must have been begun with the same settings.

    Raises:
        DataError: `out` holds a set of other settings, or shards without a record.
        PositionFileError: the record there cannot be read.
    """
    settings = json.loads(json.dumps(dict(settings)))  # as it will be read back
    if (out / FILE).is_file():
        record = _record(out, "give another --out")
        begun = record["settings"]
        differ = [name for name in {**begun, **settings} if begun.get(name) != settings.get(name)]
        if differ:
            told = "; ".join(f"{name} {begun.get(name)!r}, now {settings.get(name)!r}" for name in differ)
            raise DataError(f"{out} holds a set begun with {told}: give the same options to go on, or another --out")
        return record
    if any(out.glob("*.parquet")):
        raise DataError(f"{out} holds Parquet files but no {FILE}, so it cannot be continued: give another --out")
    versions = {"jax_grpo": jax_grpo.__version__, "python": sys.version.split()[0]}
    versions |= {name: metadata.version(name) for name in ("chess", "pyarrow")}
    record = {"command": command, "settings": settings, "versions": versions, "finished": False}
    write_record(out / FILE, record)
    return record


def read_set(folder: Path, split: str, cache: Path | None = None) -> PositionTable:
    """Positions of `train`, `heldout`, or `all`: of both, training first; the shards in order, each by `checked_table`.

    Raises:
        PositionFileError: the set is unfinished (its rows would change under a run that resumes), has no such split, or a
            row is bad, which is named with its file.
    """
    record = _record(folder, "make the set again")
    if not record["finished"]:
        raise PositionFileError(f"{folder} is not finished; finish it first: {record['command']}")
    names = ("train", "heldout") if split == "all" else (split,)
    paths = [path for name in names for path in sorted(folder.glob(f"{name}-*.parquet"))]
    tables = [checked_table(path, "parquet", cache) for path in paths]
    if not any(map(len, tables)):
        advice = "again with more rows"
        if split == "heldout":
            advice = "with held-out positions, give others as evaluation.source, or set evaluation.positions to 0"
        raise PositionFileError(f"{folder} has no {split} positions; make the set {advice}")
    return joined(tables)
