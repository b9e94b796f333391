"""Numbered batches of rows to deduplicated Parquet shards, each whole or not there, resumable after any interruption.

Batch n is a function of n alone. A finished shard says in its metadata which batch comes next; a restart reads the shards'
keys back and goes on from there, so a killed run and an undisturbed one end with the same files. Knows no source of rows.
"""

import contextlib
import itertools
import json
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

import jax_grpo
from jax_grpo.chess.positions.position import position_key
from jax_grpo.chess.positions.sources import PROVENANCE, read_provenance
from jax_grpo.prompts.table import batched, digest, read_parquet
from jax_grpo.system.whole_files import UNFINISHED, file_hash, write_record, written_whole

SPLITS = ("heldout", "train")  # of most sets; tables have `test` besides
Item = TypeVar("Item")
Split = Callable[[str, Mapping[str, Any]], str]  # of a row, by its key or by what it says


class DataError(ValueError):
    """A data set cannot be made or continued; names the file or option, what was found and what to do."""


class Source(NamedTuple):
    """Where rows come from."""

    schema: pa.Schema
    settings: Mapping[str, object]  # JSON values that decide the rows; a set is only continued with the same
    batches: Callable[[int], Generator[list[dict]]]  # from the number of the first one wanted to those from there on
    key: Callable[[dict], str]  # what makes two rows the same; the later one is dropped


def row_position(row: Mapping[str, Any]) -> str:
    """The `position_key` of a row."""
    return position_key(row["fen"])


def of_file(
    path: Path,
    schema: pa.Schema,
    settings: Mapping[str, object],
    items: Callable[[], Iterator[Item]],
    size: int,
    rows: Callable[[list[Item]], list[dict]],
    key: Callable[[dict], str] = row_position,
) -> Source:
    """The rows of a file's items, `size` items a batch; `items` reads the file from its beginning."""

    def batches(start: int) -> Generator[list[dict]]:
        yield from map(rows, batched(itertools.islice(items(), start * size, None), size))

    return Source(schema, {"source": path.name, "sha256": file_hash(path), **settings}, batches, key)


def begin_set(out: Path, settings: Mapping[str, Any], command: str) -> dict[str, Any]:
    """The record of a new set, or that of the set in `out`, which must have been begun with the same settings.

    Raises:
        DataError: `out` holds a set of other settings, or shards without a record.
        PositionFileError: the record there cannot be read.
    """
    settings = json.loads(json.dumps(dict(settings)))  # as it will be read back
    if (out / PROVENANCE).is_file():
        record = read_provenance(out, "give another --out")
        begun = record["settings"]
        differ = [name for name in {**begun, **settings} if begun.get(name) != settings.get(name)]
        if differ:
            changes = "; ".join(f"{name} {begun.get(name)!r}, now {settings.get(name)!r}" for name in differ)
            raise DataError(f"{out} holds a set begun with {changes}: give the same options to go on, or another --out")
        return record
    if any(out.glob("*.parquet")):
        raise DataError(f"{out} holds Parquet files but no {PROVENANCE}, so it cannot be continued: give another --out")
    versions = {"jax_grpo": jax_grpo.__version__, "python": sys.version.split()[0]}
    versions |= {name: metadata.version(name) for name in ("chess", "pyarrow")}
    record = {"command": command, "settings": settings, "versions": versions, "finished": False}
    write_record(out / PROVENANCE, record)
    return record


class Progress(NamedTuple):
    """How far a set is."""

    rows: Mapping[str, int]  # by split
    duplicates: int  # dropped by this start
    finished: bool


def write_shards(
    out: Path, source: Source, split_of: Split, wanted: Mapping[str, int | None], shard_rows: int
) -> Generator[Progress]:
    """Begins or continues the shards in `out`, until each split has the rows wanted (None: no bound) or the source ends.

    A shard is written after the batch that reaches `shard_rows`, so shards do not depend on interruptions. Yields where it
    stands, before the first batch and after every one.

    Raises:
        DataError: a shard there is damaged or of other columns.
        OSError: the disk is full or cannot be written; no shard is half there then.
    """
    seen: set[int] = set()
    splits = sorted(wanted, key="train".__eq__)  # train is written last: a shard counts once its train file is there
    rows, number, batch, finished = _restore(out, source, splits, seen)
    duplicates = 0
    yield Progress(rows, duplicates, finished)
    pending: dict[str, list[dict]] = {split: [] for split in splits}
    with contextlib.closing(source.batches(batch)) as batches:
        while not finished:
            new = next(batches, None)
            batch += 1
            for row in new or ():
                key = source.key(row)
                mark, split = digest(key), split_of(key, row)
                if mark in seen:
                    duplicates += 1
                elif (bound := wanted[split]) is None or rows[split] < bound:
                    seen.add(mark)
                    pending[split].append(row)
                    rows[split] += 1
            finished = new is None or all(rows[split] == wanted[split] for split in splits)
            if finished or sum(map(len, pending.values())) >= shard_rows:
                schema = source.schema.with_metadata({"next_batch": str(batch), "finished": str(int(finished))})
                for split in splits:
                    if split == "train" or pending[split]:
                        with written_whole(_shard(out, split, number), durable=True) as working:
                            table = pa.Table.from_pylist(pending[split], schema)
                            pq.write_table(table, working, compression="zstd", compression_level=19)
                pending = {split: [] for split in splits}
                number += 1
            yield Progress(rows, duplicates, finished)


def _shard(out: Path, split: str, number: int) -> Path:
    return out / f"{split}-{number:05d}.parquet"


def _restore(out: Path, source: Source, splits: Sequence[str], seen: set[int]) -> tuple[dict[str, int], int, int, bool]:
    """What the finished shards in `out` say: rows by split, their number, the next batch, and whether it is the end.

    Digests of their keys are added to `seen`; what a killed writer left unfinished is removed.
    """
    rows: dict[str, int] = dict.fromkeys(splits, 0)
    number, batch, finished = 0, 0, False
    for leftover in out.glob(f"*{UNFINISHED}"):
        leftover.unlink()
    while _shard(out, "train", number).is_file():
        for split in splits:
            if (path := _shard(out, split, number)).is_file():
                table = _read(path, source.schema)
                seen.update(digest(source.key(row)) for row in table.to_pylist())
                rows[split] += table.num_rows
                batch, finished = int(table.schema.metadata[b"next_batch"]), table.schema.metadata[b"finished"] == b"1"
        number += 1
    return rows, number, batch, finished


def _read(path: Path, schema: pa.Schema) -> pa.Table:
    try:
        table = read_parquet(path)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} is damaged ({error}); delete its folder and make the set again") from error
    if table.schema.names != schema.names:
        raise DataError(
            f"{path} has the columns {', '.join(table.schema.names)}; expected {', '.join(schema.names)}: give another --out"
        )
    if b"next_batch" not in (table.schema.metadata or {}):
        raise DataError(f"{path} was not written by this program; give another --out")
    return table
