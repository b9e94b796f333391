"""`provenance.json` of a data set: what decided its rows, what made it, and how it ended. A set is continued only as it began."""

import hashlib
import json
import os
import shlex
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import jax_grpo
from jax_grpo.data.shards import UNFINISHED, DataError

FILE = "provenance.json"
PACKAGES = ("chess", "pyarrow")


def _write_whole(path: Path, record: Mapping[str, Any]) -> None:
    """Not `run_folder`'s: that module imports JAX, which each of this command's worker processes would wait for."""
    working = path.with_name(path.name + UNFINISHED)
    working.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    os.replace(working, path)


def sha256(path: Path) -> str:
    """Of the file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        assert isinstance(record["settings"], dict) and isinstance(record["finished"], bool)
    except (ValueError, KeyError, TypeError, AssertionError) as error:
        raise DataError(f"{path} is not a data set's record; give another --out") from error
    return record


def begin(out: Path, settings: Mapping[str, Any], command: list[str]) -> dict[str, Any]:
    """The record of a new set, or that of the set in `out`, which must have been begun with the same settings.

    Raises:
        DataError: `out` holds a set of other settings, or shards without a record.
    """
    path = out / FILE
    settings = json.loads(json.dumps(dict(settings)))  # as it will be read back
    if path.is_file():
        record = _read(path)
        begun = record["settings"]
        if begun != settings:
            names = [name for name in {**begun, **settings} if begun.get(name) != settings.get(name)]
            told = "; ".join(f"{name} {begun.get(name)!r}, now {settings.get(name)!r}" for name in names)
            raise DataError(f"{out} holds a set begun with {told}: give the same options to go on, or another --out")
        return record
    if any(out.glob("*.parquet")):
        raise DataError(f"{out} holds Parquet files but no {FILE}, so it cannot be continued: give another --out")
    record = {
        "command": shlex.join(["python", "-m", "jax_grpo.data", *command]),
        "settings": settings,
        "versions": {"jax_grpo": jax_grpo.__version__, "python": sys.version.split()[0]}
        | {name: metadata.version(name) for name in PACKAGES},
        "finished": False,
    }
    _write_whole(path, record)
    return record


def finish(out: Path, record: Mapping[str, Any], result: Mapping[str, Any]) -> None:
    """Adds what came out."""
    _write_whole(out / FILE, {**record, "finished": True, **result})
