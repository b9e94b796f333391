"""What is costly to find and a function of what is known is kept in the cache folder: files' checked positions, small values.

Every row of a file is checked by the rules of chess (`positions.files`), a fifth of a millisecond each: a million take minutes.
So a file's checked positions are stored by the hash of its bytes, never beside the file. A folder that cannot be written or a
damaged file in it costs the work, nothing else. The shipped positions are vouched for by the hashes in `provenance.json`.
"""

import contextlib
import functools
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import chess
import pyarrow as pa
import pyarrow.parquet as pq

from jax_grpo.positions.files import open_positions
from jax_grpo.positions.table import KEY, SCHEMA, PositionTable, read_parquet, to_columns
from jax_grpo.system.whole_files import file_hash, written_whole

ASSETS = Path(__file__).parents[1] / "assets"
PACKAGED = ASSETS / "positions"
CHECKER = 2  # raised when `positions.files` accepts other rows than before, or reads them otherwise
LARGEST = 2 * 10**9  # bytes of positions stored; beyond them what was used longest ago goes


def packaged_table(split: str, name: str = "positions") -> PositionTable:
    """A split of the repository's labelled `positions` or `tables`; checked only if the file is not the one that was shipped."""
    path = ASSETS / name / f"{split}.parquet"
    content = file_hash(path)
    if content != shipped(name)[split]:
        return checked_table(path, "parquet", None)
    return PositionTable(read_parquet(path), f"sha256:{content}")


@functools.cache
def shipped(name: str = "positions") -> dict[str, str]:
    """SHA-256 of the packaged files by split; a test checks every row of the files with these hashes."""
    return json.loads((ASSETS / name / "provenance.json").read_text(encoding="utf-8"))["sha256"]


def checked_table(path: Path, file_format: str, cache: Path | None) -> PositionTable:
    """Positions of `open_positions`, or as the folder `cache` has them; with None the file is checked, and nothing stored."""
    kind, positions = open_positions(path, file_format)
    content = file_hash(path)
    # python-chess decides what is legal, so another version may decide otherwise
    stored = cache and cache / f"{content}-{kind}-{CHECKER}-{chess.__version__}.parquet"
    table = None
    if stored:
        with contextlib.suppress(OSError, pa.ArrowException):  # not there, or damaged
            table = read_parquet(stored)
            os.utime(stored)  # used now
    if table is None or table.column_names != [*SCHEMA.names, KEY]:
        table = to_columns(positions)
        if stored:
            _store(stored, functools.partial(pq.write_table, table, compression="zstd"))
            _make_room(stored)
    return PositionTable(table, f"sha256:{content}")


def _store(path: Path, write: Callable[[Path], object]) -> None:
    """Without room, or rights, nothing is stored."""
    with contextlib.suppress(OSError, pa.ArrowException):
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(path) as working:
            write(working)


def _make_room(newest: Path) -> None:
    with contextlib.suppress(OSError):
        files = {file: file.stat() for file in newest.parent.glob("*.parquet")}
        total = sum(stat.st_size for stat in files.values())
        for file in sorted(files, key=lambda file: files[file].st_mtime):
            if total > LARGEST and file != newest:
                total -= files[file].st_size
                file.unlink(missing_ok=True)


class Remembered:
    """A small JSON `value` of a `kind` that the JSON values `what` decide; None: not known. Without a cache it never is."""

    def __init__(self, cache: str | None, kind: str, what: Sequence[Any]):
        self.value: Any = None
        name = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()
        self._path = None if cache is None else Path(cache).expanduser() / "remembered" / f"{kind}-{name}.json"
        if self._path is not None:
            with contextlib.suppress(OSError, ValueError):
                self.value = json.loads(self._path.read_text(encoding="utf-8"))

    def keep(self, value: Any) -> None:
        """Remembers it, if that can be written."""
        if self._path is not None:
            _store(self._path, lambda path: path.write_text(json.dumps(value), encoding="utf-8"))
