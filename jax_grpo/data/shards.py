"""Numbered batches of rows to deduplicated Parquet shards, each whole or not there, resumable after any interruption.

Batch n is a function of n alone. A finished shard says in its metadata which batch comes next; a restart reads the shards'
keys back and goes on from there, so a killed run and an undisturbed one end with the same files. Knows no source of rows.
"""

import contextlib
import hashlib
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

SPLITS = ("heldout", "train")  # written in this order: a shard counts once its train file is there
UNFINISHED = ".unfinished"


class DataError(ValueError):
    """A data set cannot be made or continued; names the file or option, what was found and what to do."""


class Source(NamedTuple):
    """Where rows come from.

    Attributes:
        schema: of the rows.
        settings: JSON values that decide the rows; a set is only continued with the same.
        batches: from the number of the first batch wanted to the batches from there on, in order.
        key: what makes two rows the same; the later one is dropped.
    """

    schema: pa.Schema
    settings: Mapping[str, object]
    batches: Callable[[int], Generator[list[dict]]]
    key: Callable[[dict], str]


class Progress(NamedTuple):
    """Rows by split so far, duplicates dropped (by this start), and whether the set is finished."""

    rows: Mapping[str, int]
    duplicates: int
    finished: bool


def shard_name(split: str, number: int) -> str:
    """`train-00000.parquet`."""
    return f"{split}-{number:05d}.parquet"


def write_shards(
    out: Path,
    source: Source,
    split_of: Callable[[str], str],
    wanted: Mapping[str, int | None],
    shard_rows: int,
    report: Callable[[Progress], None],
) -> Progress:
    """Reads the source until each split has what is wanted (None: without bound) or the source ends.

    Args:
        out: folder of the shards, new or to be continued.
        source: the rows.
        split_of: split of a key.
        wanted: rows by split.
        shard_rows: a shard is written after the batch that reaches so many rows, so shards do not depend on interruptions.
        report: called before the first batch and after every one.

    Raises:
        DataError: a shard there is damaged or of other columns.
        OSError: the disk is full or cannot be written; no shard is half there then.
    """
    seen, rows, number, batch, finished = _restore(out, source)
    duplicates = 0
    if finished:
        return Progress(rows, duplicates, True)

    report(Progress(rows, duplicates, False))
    pending: dict[str, list[dict]] = {split: [] for split in SPLITS}
    with contextlib.closing(source.batches(batch)) as batches:
        while not finished:
            found = next(batches, None)
            batch += 1
            for row in found or ():
                key = source.key(row)
                digest, split = _digest(key), split_of(key)
                if digest in seen:
                    duplicates += 1
                elif (bound := wanted[split]) is None or rows[split] < bound:
                    seen.add(digest)
                    pending[split].append(row)
                    rows[split] += 1
            finished = found is None or all(rows[split] == wanted[split] for split in SPLITS)
            if finished or sum(map(len, pending.values())) >= shard_rows:
                for split in SPLITS:
                    if split == "train" or pending[split]:
                        progress = {"next_batch": batch, "finished": int(finished)}
                        _write(out / shard_name(split, number), pending[split], source.schema, progress)
                pending = {split: [] for split in SPLITS}
                number += 1
            report(Progress(rows, duplicates, finished))
    return Progress(rows, duplicates, True)


class _State(NamedTuple):
    """What the finished shards say: digests of keys, rows by split, their number, the next batch, whether it is the end."""

    seen: set[bytes]
    rows: dict[str, int]
    number: int
    batch: int
    finished: bool


def _restore(out: Path, source: Source) -> _State:
    """State after the shards in `out`; what a killed writer left unfinished is removed."""
    state = _State(set(), dict.fromkeys(SPLITS, 0), 0, 0, False)
    for leftover in out.glob(f"*{UNFINISHED}"):
        leftover.unlink()
    while (path := out / shard_name("train", state.number)).is_file():
        for split in SPLITS:
            if split == "train" or (out / shard_name(split, state.number)).is_file():
                table = _read(out / shard_name(split, state.number), source.schema)
                state.seen.update(_digest(source.key(row)) for row in table.to_pylist())
                state.rows[split] += table.num_rows
        metadata = pq.read_schema(path).metadata or {}
        if b"next_batch" not in metadata:
            raise DataError(f"{path} was not written by this program; give another --out")
        finished = metadata[b"finished"] == b"1"
        state = state._replace(number=state.number + 1, batch=int(metadata[b"next_batch"]), finished=finished)
    return state


def _digest(key: str) -> bytes:
    """16 bytes a row instead of a text: a million positions fit in memory."""
    return hashlib.blake2b(key.encode(), digest_size=16).digest()


def _read(path: Path, schema: pa.Schema) -> pa.Table:
    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} is damaged ({error}); delete its folder and make the set again") from error
    if table.schema.names != schema.names:
        raise DataError(
            f"{path} has the columns {', '.join(table.schema.names)}; expected {', '.join(schema.names)}: give another --out"
        )
    return table


def _write(path: Path, rows: Sequence[dict], schema: pa.Schema, metadata: Mapping[str, int]) -> None:
    """Puts the file in place whole: written under another name, forced to the disk, renamed."""
    working = path.with_name(path.name + UNFINISHED)
    with_progress = schema.with_metadata({name: str(value) for name, value in metadata.items()})
    with working.open("wb") as file:
        pq.write_table(pa.Table.from_pylist(list(rows), with_progress), file, compression="zstd", compression_level=19)
        file.flush()
        os.fsync(file.fileno())
    os.replace(working, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
