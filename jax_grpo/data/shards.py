"""Numbered batches of rows to deduplicated Parquet shards, each whole or not there, resumable after any interruption.

Batch n is a function of n alone. A finished shard says in its metadata which batch comes next; a restart reads the shards'
keys back and goes on from there, so a killed run and an undisturbed one end with the same files. Knows no source of rows.
"""

import contextlib
import itertools
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import chess
import pyarrow as pa
import pyarrow.parquet as pq

from jax_grpo.positions.position import digest, position_key
from jax_grpo.positions.sets import DataError
from jax_grpo.positions.table import batched, read_parquet
from jax_grpo.system.whole_files import UNFINISHED, file_hash, written_whole

SPLITS = ("heldout", "train")  # written in this order: a shard counts once its train file is there
Item = TypeVar("Item")


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


def row_position(row: Mapping[str, Any]) -> str:
    """What makes two rows' positions the same; counters do not count."""
    return position_key(chess.Board(row["fen"]))


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
        for batch in batched(itertools.islice(items(), start * size, None), size):
            yield rows(batch)

    return Source(schema, {"source": path.name, "sha256": file_hash(path), **settings}, batches, key)


class Progress(NamedTuple):
    """Rows by split so far, duplicates dropped (by this start), and whether the set is finished."""

    rows: Mapping[str, int]
    duplicates: int
    finished: bool


def write_shards(
    out: Path, source: Source, split_of: Callable[[str], str], wanted: Mapping[str, int | None], shard_rows: int
) -> Generator[Progress]:
    """Reads the source until each split has what is wanted (None: without bound) or the source ends.

    Args:
        out: folder of the shards, new or to be continued.
        source: the rows.
        split_of: split of a key.
        wanted: rows by split.
        shard_rows: a shard is written after the batch that reaches so many rows, so shards do not depend on interruptions.

    Yields:
        Where it stands, before the first batch and after every one.

    Raises:
        DataError: a shard there is damaged or of other columns.
        OSError: the disk is full or cannot be written; no shard is half there then.
    """
    seen: set[int] = set()
    rows, number, batch, finished = _restore(out, source, seen)
    duplicates = 0
    yield Progress(rows, duplicates, finished)
    pending: dict[str, list[dict]] = {split: [] for split in SPLITS}
    with contextlib.closing(source.batches(batch)) as batches:
        while not finished:
            new = next(batches, None)
            batch += 1
            for row in new or ():
                key = source.key(row)
                mark, split = digest(key), split_of(key)
                if mark in seen:
                    duplicates += 1
                elif (bound := wanted[split]) is None or rows[split] < bound:
                    seen.add(mark)
                    pending[split].append(row)
                    rows[split] += 1
            finished = new is None or all(rows[split] == wanted[split] for split in SPLITS)
            if finished or sum(map(len, pending.values())) >= shard_rows:
                schema = source.schema.with_metadata({"next_batch": str(batch), "finished": str(int(finished))})
                for split in SPLITS:
                    if split == "train" or pending[split]:
                        with written_whole(shard_path(out, split, number), durable=True) as working:
                            table = pa.Table.from_pylist(pending[split], schema)
                            pq.write_table(table, working, compression="zstd", compression_level=19)
                pending = {split: [] for split in SPLITS}
                number += 1
            yield Progress(rows, duplicates, finished)


def shard_path(out: Path, split: str, number: int) -> Path:
    """`train-00000.parquet` in the folder."""
    return out / f"{split}-{number:05d}.parquet"


def _restore(out: Path, source: Source, seen: set[int]) -> tuple[dict[str, int], int, int, bool]:
    """What the finished shards in `out` say: rows by split, their number, the next batch, and whether it is the end.

    Digests of their keys are added to `seen`; what a killed writer left unfinished is removed.
    """
    rows: dict[str, int] = dict.fromkeys(SPLITS, 0)
    number, batch, finished = 0, 0, False
    for leftover in out.glob(f"*{UNFINISHED}"):
        leftover.unlink()
    while shard_path(out, "train", number).is_file():
        paths = {split: shard_path(out, split, number) for split in SPLITS}
        tables = {split: _read(path, source.schema) for split, path in paths.items() if path.is_file()}
        for split, table in tables.items():
            seen.update(digest(source.key(row)) for row in table.to_pylist())
            rows[split] += table.num_rows
        metadata = tables["train"].schema.metadata
        batch, finished = int(metadata[b"next_batch"]), metadata[b"finished"] == b"1"
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
