"""A position file is checked once: its checked positions are kept by the hash of its bytes, and taken from there the next time.

Every row of a file is checked by the rules of chess (`position_files`), a fifth of a millisecond each: a million take minutes. What
is kept lies in the cache folder, never beside the file; a folder that cannot be written or a damaged file in it costs the check,
nothing else. The shipped positions are vouched for by the hashes in their `provenance.json`.
"""

import contextlib
import functools
import hashlib
import json
import os
from pathlib import Path

import chess
import pyarrow as pa
import pyarrow.parquet as pq

from jax_grpo.position_files import PositionFileError, open_positions
from jax_grpo.position_table import KEY, SCHEMA, PositionTable, to_columns

PACKAGED = Path(__file__).parent / "assets" / "positions"
CHECKER = 1  # raised when `position_files` accepts other rows than before, or reads them otherwise
LARGEST = 2 * 10**9  # bytes that are kept; beyond them what was used longest ago goes


def packaged_table(split: str) -> PositionTable:
    """The repository's labelled positions, `train` or `heldout`; checked only if the file is not the one that was shipped."""
    path = PACKAGED / f"{split}.parquet"
    content = file_hash(path)
    if content != shipped()[split]:
        return checked_table(path, "parquet", None)
    stored = _read(path)
    columns = {  # evaluations stay float32: a cast would import `pyarrow.compute`
        field.name: stored[field.name] if field.name in stored.column_names else pa.nulls(len(stored), field.type)
        for field in SCHEMA
    }
    return PositionTable(pa.table(columns), f"sha256:{content}")


@functools.cache
def shipped() -> dict[str, str]:
    """SHA-256 of the packaged files by split; a test checks every row of the files with these hashes."""
    return json.loads((PACKAGED / "provenance.json").read_text(encoding="utf-8"))["sha256"]


def checked_table(path: Path, file_format: str, cache: Path | None, *, allow_empty: bool = False) -> PositionTable:
    """Positions of a file, in its order.

    Args:
        path: the file.
        file_format: a key of `position_files.READERS`, or `auto`.
        cache: folder of what was checked before; None: the file is checked, and nothing kept.
        allow_empty: a file without positions is no error.

    Raises:
        PositionFileError: see `position_files.read_positions`.
    """
    kind, positions = open_positions(path, file_format)
    content = file_hash(path)
    # python-chess decides what is legal, so another version may decide otherwise
    kept = cache and cache / f"{content}-{kind}-{CHECKER}-{chess.__version__}.parquet"
    table = _kept(kept) if kept else None
    if table is None:
        table = to_columns(positions)
        if kept:
            _keep(table, kept)
    if not table.num_rows and not allow_empty:
        raise PositionFileError(f"{path}: no positions in it")
    return PositionTable(table, f"sha256:{content}")


def file_hash(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read(path: Path) -> pa.Table:
    with pq.ParquetFile(path) as file:  # `pq.read_table` would import `pyarrow.dataset`
        return file.read(use_threads=False)


def _kept(path: Path) -> pa.Table | None:
    """What was kept, if it is there and whole."""
    try:
        table = _read(path)
        os.utime(path)  # used now
    except (OSError, pa.ArrowException):
        return None
    return table if table.column_names == [*SCHEMA.names, KEY] else None


def _keep(table: pa.Table, path: Path) -> None:
    """Puts the file in place whole; without room, or rights, nothing is kept."""
    working = path.with_name(f"{path.name}.{os.getpid()}")
    with contextlib.suppress(OSError, pa.ArrowException):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            pq.write_table(table, working, compression="zstd")
            os.replace(working, path)
        finally:
            working.unlink(missing_ok=True)
        _make_room(path)


def _make_room(newest: Path) -> None:
    files = {path: path.stat() for path in newest.parent.glob("*.parquet")}
    total = sum(stat.st_size for stat in files.values())
    for path in sorted(files, key=lambda path: files[path].st_mtime):
        if total > LARGEST and path != newest:
            total -= files[path].st_size
            path.unlink(missing_ok=True)
