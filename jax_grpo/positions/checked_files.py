"""A position file is checked once: its checked positions are stored by the hash of its bytes, and taken from there the next time.

Every row of a file is checked by the rules of chess (`positions.files`), a fifth of a millisecond each: a million take minutes. The
store is in the cache folder, never beside the file; a folder that cannot be written or a damaged file in it costs the check,
nothing else. The shipped positions are vouched for by the hashes in their `provenance.json`.
"""

import contextlib
import functools
import json
import os
from pathlib import Path

import chess
import pyarrow as pa
import pyarrow.parquet as pq

from jax_grpo.positions.files import PositionFileError, open_positions
from jax_grpo.positions.table import KEY, SCHEMA, PositionTable, read_parquet, to_columns
from jax_grpo.system.whole_files import file_hash, written_whole

PACKAGED = Path(__file__).parents[1] / "assets" / "positions"
CHECKER = 1  # raised when `positions.files` accepts other rows than before, or reads them otherwise
LARGEST = 2 * 10**9  # bytes stored; beyond them what was used longest ago goes


def packaged_table(split: str) -> PositionTable:
    """The repository's labelled positions, `train` or `heldout`; checked only if the file is not the one that was shipped."""
    path = PACKAGED / f"{split}.parquet"
    content = file_hash(path)
    if content != shipped()[split]:
        return checked_table(path, "parquet", None)
    stored = read_parquet(path)
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
        file_format: a key of `positions.files.READERS`, or `auto`.
        cache: folder of what was checked before; None: the file is checked, and nothing stored.
        allow_empty: a file without positions is no error.

    Raises:
        PositionFileError: see `positions.files.read_positions`.
    """
    kind, positions = open_positions(path, file_format)
    content = file_hash(path)
    # python-chess decides what is legal, so another version may decide otherwise
    stored = cache and cache / f"{content}-{kind}-{CHECKER}-{chess.__version__}.parquet"
    table = _load(stored) if stored else None
    if table is None:
        table = to_columns(positions)
        if stored:
            _store(table, stored)
    if not table.num_rows and not allow_empty:
        raise PositionFileError(f"{path}: no positions in it")
    return PositionTable(table, f"sha256:{content}")


def _load(path: Path) -> pa.Table | None:
    """What was stored, if it is there and whole."""
    try:
        table = read_parquet(path)
        os.utime(path)  # used now
    except (OSError, pa.ArrowException):
        return None
    return table if table.column_names == [*SCHEMA.names, KEY] else None


def _store(table: pa.Table, path: Path) -> None:
    """Without room, or rights, nothing is stored."""
    with contextlib.suppress(OSError, pa.ArrowException):
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(path) as working:
            pq.write_table(table, working, compression="zstd")
        files = {file: file.stat() for file in path.parent.glob("*.parquet")}
        total = sum(stat.st_size for stat in files.values())
        for file in sorted(files, key=lambda file: files[file].st_mtime):
            if total > LARGEST and file != path:
                total -= files[file].st_size
                file.unlink(missing_ok=True)
