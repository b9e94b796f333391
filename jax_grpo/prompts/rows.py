"""Rows of a user's file: a `prompt` each, and other columns that reach the reward as they are.

Sources: JSONL, CSV, Parquet, or a folder that Hugging Face's `datasets` saved (`Dataset.save_to_disk`). A tenth of the prompts
is held out by a hash of the prompt's text, so that no text is in both splits. Every bad row is one clear error.
"""

import csv
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np
import pyarrow as pa

from jax_grpo.config.sections import PromptsConfig
from jax_grpo.positions.position import FILE_SHARE, SHARES, digest
from jax_grpo.positions.table import read_parquet
from jax_grpo.system.whole_files import file_hash

PROMPT = "prompt"
FORMATS = {".jsonl": "jsonl", ".csv": "csv", ".parquet": "parquet"}
STATE = "state.json"  # of a folder that `datasets` saved: it names the Arrow files


class PromptFileError(ValueError):
    """A file of prompts cannot be used; names the file, the line or row, what is there and what was expected."""


class Row(NamedTuple):
    """One row of a file: its prompt, and every other column of the file (None where the row has none)."""

    prompt: str
    columns: Mapping[str, Any]


class PromptTable(Sequence[Row]):
    """Rows in the order of their source; an index gives one, a slice a list.

    `identity` is of the source's bytes; `apart` is how many rows the source has in the other split, None where that is not known.
    """

    def __init__(
        self,
        prompts: Sequence[str],
        columns_of: Callable[[int], Mapping[str, Any]],
        identity: str,
        apart: int | None = None,
    ):
        self.identity, self.apart = identity, apart
        self._prompts, self._columns_of = prompts, columns_of

    def __len__(self) -> int:
        return len(self._prompts)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return Row(self._prompts[index], self._columns_of(index % len(self)))

    def keys(self) -> np.ndarray:
        """64 bits of each prompt's text, which its split is taken from."""
        return np.array([digest(text) for text in self._prompts], np.uint64)

    def where(self, mask: np.ndarray, identity: str) -> "PromptTable":
        """The rows where the mask [len] is true; the others are the source's other split."""
        numbers = np.flatnonzero(mask)
        prompts = [self._prompts[number] for number in numbers]
        return PromptTable(prompts, lambda i: self._columns_of(int(numbers[i])), identity, int((~mask).sum()))

    def identity_as_in(self, old: str) -> str:
        """The identity in the form of one that a checkpoint holds, of which there is one."""
        return self.identity


def load_prompts(config: PromptsConfig, seed: int = 0, cache: str | None = None) -> PromptTable:
    """Rows of the config's source and split, or a PromptFileError; `seed` and `cache` are for sources of positions."""
    path = Path(config.source)
    table = _read(path, config.format)
    if not len(table):
        raise PromptFileError(f"{path}: no rows in it")
    if config.split == "all":
        return table
    heldout = table.keys() % SHARES < round(FILE_SHARE * SHARES)
    part = table.where(heldout == (config.split == "heldout"), f"{config.split} of {table.identity}")
    if len(part):
        return part
    what, how_many, remedy = {
        "heldout": ("held-out prompts", "none", "Give others as evaluation.source, or set evaluation.positions to 0"),
        "train": ("prompts to train on", "all", "Set prompts.split to all, which trains on all of them"),
    }[config.split]
    raise PromptFileError(
        f"{path} has no {what}: a hash of a prompt holds out about one in ten, and {how_many} of its {len(table)}. {remedy}"
    )


def _read(path: Path, file_format: str) -> PromptTable:
    if (path / STATE).is_file():
        return _of_arrow(path, *_saved_dataset(path))
    if path.is_dir():
        raise PromptFileError(f"{path} has no {STATE}: expected a file, or a folder of `datasets.Dataset.save_to_disk`")
    if not path.is_file():
        raise PromptFileError(f"{path}: no such file; expected one with a {PROMPT!r} column as prompts.source")
    kind = FORMATS.get(path.suffix.lower()) if file_format == "auto" else file_format
    if kind not in FORMATS.values():
        raise PromptFileError(f"{path}: prompts are read from {', '.join(FORMATS)}; not from {kind or path.suffix!r}")
    identity = f"sha256:{file_hash(path)}"
    if kind == "parquet":
        try:
            return _of_arrow(path, read_parquet(path), identity)
        except pa.ArrowException as error:
            raise PromptFileError(f"{path}: not a Parquet file ({str(error).splitlines()[0]})") from error
    return (_of_jsonl if kind == "jsonl" else _of_csv)(path, identity)


def _of_jsonl(path: Path, identity: str) -> PromptTable:
    """The lines are kept as text, and parsed again when they are drawn."""
    lines, prompts, names = [], [], {}
    for number, line in _text_lines(path):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise PromptFileError(f"{where}: {line.strip()[:60]!r} is not JSON ({error})") from error
        if not isinstance(row, dict):
            raise PromptFileError(f"{where}: {line.strip()[:60]!r}; expected an object")
        prompts.append(_prompt(row.get(PROMPT), where, row))
        lines.append(line)
        names |= dict.fromkeys(row)
    others = [name for name in names if name != PROMPT]

    def columns_of(index: int) -> dict[str, Any]:
        row = json.loads(lines[index])
        return {name: row.get(name) for name in others}

    return PromptTable(prompts, columns_of, identity)


def _of_csv(path: Path, identity: str) -> PromptTable:
    """The first line names the columns; values are texts."""
    reader = csv.reader(line for _, line in _text_lines(path))
    names, rows = next(reader, []), []
    if names and PROMPT not in names:
        raise PromptFileError(f"{path}:1: columns {', '.join(names)}; expected one called {PROMPT!r}")
    for values in reader:
        if len(values) != len(names):
            raise PromptFileError(
                f"{path}:{reader.line_num}: {len(values)} values; expected {len(names)}, as in line 1"
            )
        rows.append(dict(zip(names, values, strict=True)))
        _prompt(rows[-1][PROMPT], f"{path}:{reader.line_num}", rows[-1])
    columns = [{name: value for name, value in row.items() if name != PROMPT} for row in rows]
    return PromptTable([row[PROMPT] for row in rows], columns.__getitem__, identity)


def _of_arrow(path: Path, table: pa.Table, identity: str) -> PromptTable:
    if PROMPT not in table.column_names:
        raise PromptFileError(f"{path}: columns {', '.join(table.column_names)}; expected one called {PROMPT!r}")
    table = table.combine_chunks()  # one chunk a column: a row is found without a search
    prompts = [_prompt(text, f"{path}: row {i}", {PROMPT: text}) for i, text in enumerate(table[PROMPT].to_pylist())]
    others = table.drop_columns(PROMPT)
    return PromptTable(
        prompts, lambda index: others.slice(index, 1).to_pylist()[0] if others.num_columns else {}, identity
    )


def _saved_dataset(path: Path) -> tuple[pa.Table, str]:
    """The table of a folder that `datasets` saved, and its identity."""
    try:
        names = [file["filename"] for file in json.loads((path / STATE).read_text(encoding="utf-8"))["_data_files"]]
        tables = [pa.ipc.open_stream(pa.memory_map(str(path / name))).read_all() for name in names]
        return pa.concat_tables(tables), "sha256:" + "+".join(file_hash(path / name) for name in names)
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
        raise PromptFileError(
            f"{path}: not a folder that `datasets` saved ({type(error).__name__}: {error})"
        ) from error


def _text_lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            yield from enumerate(file, start=1)
    except UnicodeDecodeError as error:
        raise PromptFileError(f"{path}: not UTF-8 text ({error})") from error


def _prompt(value: object, where: str, row: Mapping[str, Any]) -> str:
    if isinstance(value, str) and value:
        return value
    have = f"it has {', '.join(row)}" if PROMPT not in row else f"{PROMPT} is {value!r}"
    raise PromptFileError(f"{where}: {have}; expected a text that is not empty as {PROMPT!r}")
