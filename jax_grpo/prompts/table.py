"""Rows that prompts are made of, in a fixed order and decoded when they are asked for, and the splits that they are in.

A split is a hash of the row's own text, so that no text is in both, whatever file it stands in. Knows no files' formats.
"""

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, overload

import pyarrow as pa
import pyarrow.parquet as pq

SHARES = 10_000  # a share is rounded to so many parts
FILE_SHARE = 0.1  # of a file's rows, held out; the default share of a data set
Item = TypeVar("Item")


class SourceError(ValueError):
    """A source of prompts cannot be used; names the file or key, what is there and what was expected."""


class UnsuitableRow(ValueError):
    """A task cannot make a prompt of a row; names the row and what it lacks."""


def digest(key: str) -> int:
    """64 bits of a row's text, which its split is taken from."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")


def is_heldout(key: str, heldout: int, count: int) -> bool:
    """Whether a text belongs to the held-out split, which is `heldout` parts beside `count` parts of training."""
    return digest(key) % (count + heldout) < heldout


class Rows(Sequence[Item]):
    """Rows in a fixed order that are made when they are asked for: an index gives one, a slice a list.

    `identity` is of the contents: the same rows in the same order, or another text. `apart` is how many rows the source has in
    other splits; None: not known. `error` is what is raised where the source has too few of them.
    """

    noun: str  # what its rows are, in messages
    identity: str
    apart: int | None
    error: type[ValueError] = SourceError

    def row(self, index: int) -> Item:
        """Row `index`, 0 to the length less 1."""
        raise NotImplementedError

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> list[Item]: ...
    def __getitem__(self, index: int | slice) -> Item | list[Item]:
        if isinstance(index, slice):
            return [self.row(i) for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return self.row(index % len(self))

    def identity_as_in(self, old: str) -> str:
        """The identity in the form of one that a checkpoint holds, where there is more than one form."""
        return self.identity


def of_split(table: Any, path: Path, split: str, what: str) -> Any:
    """The rows of a file's split; `table.error` says why there are none, and calls a row `what`."""
    if not len(table):
        raise table.error(f"{path}: no {what}s in it")
    if split == "all":
        return table
    heldout = table.keys() % SHARES < round(FILE_SHARE * SHARES)
    part = table.where(heldout == (split == "heldout"), f"{split} of {table.identity}")
    if len(part):
        return part
    lacks, how_many, remedy = {
        "heldout": (f"held-out {what}s", "none", "Give others as evaluation.source, or set evaluation.positions to 0"),
        "train": (f"{what}s to train on", "all", "Set prompts.split to all, which trains on all of them"),
    }[split]
    raise table.error(
        f"{path} has no {lacks}: a hash of a {what} holds out about one in ten, and {how_many} of its {len(table)}. {remedy}"
    )


def read_parquet(path: Path) -> pa.Table:
    """A whole file's table; `pq.read_table` would import `pyarrow.dataset`."""
    with pq.ParquetFile(path) as file:
        return file.read(use_threads=False)


def batched(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """Lists of `size` items, the last one shorter (`itertools.batched` of Python 3.12)."""
    rest = iter(items)
    while batch := list(itertools.islice(rest, size)):
        yield batch
