"""Positions by `prompts.source`: packaged ones and tables, self-play, won endings, a file, or the folder of a data set.

Each has a training and a held-out split. A data set's folder holds shards and `provenance.json`: what decided its rows, what made
it, and whether it is finished; it is read only when it is.

Every row of a file is checked by the rules of chess (`positions.files`), a fifth of a millisecond each: a million take minutes.
So a file's checked positions are stored by the hash of its bytes in the cache folder, never beside the file. A folder that cannot
be written or a damaged file in it costs the work, nothing else. The shipped positions are vouched for by the hashes in
`provenance.json`. Knows nothing of prompts' texts or models.
"""

import contextlib
import functools
import hashlib
import json
import os
import random
import zlib
from pathlib import Path
from typing import Any

import chess
import pyarrow as pa
import pyarrow.parquet as pq

from jax_grpo.chess.games import random_game
from jax_grpo.chess.positions.endings import endings_table
from jax_grpo.chess.positions.files import open_positions
from jax_grpo.chess.positions.position import Position, PositionFileError
from jax_grpo.chess.positions.table import KEY, SCHEMA, PositionTable, joined, to_columns
from jax_grpo.config.files import parsed_json
from jax_grpo.config.sections import ENDINGS, PromptsConfig, is_built_in
from jax_grpo.prompts.table import of_split, read_parquet
from jax_grpo.system.whole_files import file_hash, store

# What `prompts.source` calls the repository's positions, and where they lie.
PACKAGED_SOURCES = {"packaged": "positions", "packaged:tables": "tables"}
ASSETS = Path(__file__).parents[2] / "assets"
PACKAGED = ASSETS / "positions"
PROVENANCE = "provenance.json"
SELFPLAY_GAMES = 200  # of `selfplay` without a number
CHECKER = 3  # raised when `positions.files` accepts other rows than before, or reads them otherwise
LARGEST = 2 * 10**9  # bytes of positions stored; beyond them what was used longest ago goes


def load_positions(config: PromptsConfig, seed: int, cache: str | None = None) -> PositionTable:
    """Positions of the config's source and split, or a PositionFileError; `seed` is of self-play.

    What was checked once is found again in the folder `cache` (`compilation_cache`); with None all is checked.
    """
    if name := PACKAGED_SOURCES.get(config.source):
        tables = [packaged_table(split, name) for split in ("train", "heldout") if config.split in (split, "all")]
        return joined(tables) if len(tables) > 1 else tables[0]
    if config.source.startswith("selfplay") and is_built_in(config.source):
        games = int(config.source.partition(":")[2] or SELFPLAY_GAMES)
        offset = 1_000_000_007 if config.split == "heldout" else 0  # other games for the held-out split
        positions = selfplay_positions(games, seed + offset, config.split)
        content = hashlib.sha256("\n".join(position.fen for position in positions).encode()).hexdigest()
        return PositionTable(to_columns(positions, keyed=False), f"fens:{content}")
    if config.source in ENDINGS:
        return endings_table(config.source, config.split)
    path = Path(config.source)
    folder = None if cache is None else Path(cache).expanduser() / "positions"
    if path.is_dir():
        return read_set(path, config.split, folder)
    return of_split(checked_table(path, folder), path, config.split, "position")


def read_packaged(split: str, source: str = "packaged") -> list[Position]:
    """The repository's labelled positions: `train`, `heldout`, or the `test` split of `packaged:tables`."""
    return list(packaged_table(split, PACKAGED_SOURCES[source]))


def selfplay_positions(games: int, seed: int, split: str = "train") -> list[Position]:
    """Distinct unlabelled positions of random games, in game order; a function of its arguments. Split `all` is both.

    A tenth of all positions is `heldout` by a checksum of the position itself, so that no games of any seeds put one
    position in both splits: games apart are not enough, they all open alike.
    """
    positions: dict[str, Position] = {}
    for game in range(games):
        for board in random_game(random.Random(f"{seed}/{game}")):
            key = board.epd()
            side = "heldout" if zlib.crc32(key.encode()) % 10 == 0 else "train"
            if key not in positions and split in (side, "all"):
                positions[key] = Position.of_board(board)
    return list(positions.values())


def packaged_table(split: str, name: str = "positions") -> PositionTable:
    """A split of the repository's labelled `positions` or `tables`; checked only if the file is not the one that was shipped."""
    path = ASSETS / name / f"{split}.parquet"
    content = file_hash(path)
    if content != shipped(name)[split]:
        return checked_table(path, None)
    return PositionTable(read_parquet(path), f"sha256:{content}")


@functools.cache
def shipped(name: str = "positions") -> dict[str, str]:
    """SHA-256 of the packaged files by split; a test checks every row of the files with these hashes."""
    return json.loads((ASSETS / name / PROVENANCE).read_text(encoding="utf-8"))["sha256"]


def checked_table(path: Path, cache: Path | None) -> PositionTable:
    """Positions of `open_positions`, or as the folder `cache` has them; with None the file is checked, and nothing stored."""
    kind, positions = open_positions(path)
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
            with contextlib.suppress(pa.ArrowException):
                store(stored, functools.partial(pq.write_table, table, compression="zstd"))
            _make_room(stored)
    return PositionTable(table, f"sha256:{content}")


def _make_room(newest: Path) -> None:
    with contextlib.suppress(OSError):
        files = {file: file.stat() for file in newest.parent.glob("*.parquet")}
        total = sum(stat.st_size for stat in files.values())
        for file in sorted(files, key=lambda file: files[file].st_mtime):
            if total > LARGEST and file != newest:
                total -= files[file].st_size
                file.unlink(missing_ok=True)


def read_set(folder: Path, split: str, cache: Path | None = None) -> PositionTable:
    """Positions of `train`, `heldout`, or `all`: of both, training first; the shards in order, each by `checked_table`.

    Raises:
        PositionFileError: the set is unfinished (its rows would change under a run that resumes), has no such split, or a
            row is bad, which is named with its file.
    """
    record = read_provenance(folder, "make the set again")
    if not record["finished"]:
        raise PositionFileError(f"{folder} is not finished; finish it first: {record['command']}")
    names = ("train", "heldout") if split == "all" else (split,)
    paths = [path for name in names for path in sorted(folder.glob(f"{name}-*.parquet"))]
    tables = [checked_table(path, cache) for path in paths]
    if not any(map(len, tables)):
        advice = "again with more rows"
        if split == "heldout":
            advice = "with held-out positions, give others as evaluation.source, or set evaluation.positions to 0"
        raise PositionFileError(f"{folder} has no {split} positions; make the set {advice}")
    return joined(tables)


def read_provenance(folder: Path, advice: str) -> dict[str, Any]:
    """The record of a data set's folder, or a PositionFileError that ends with the `advice`."""
    path = folder / PROVENANCE
    try:
        record = parsed_json(path.read_text(encoding="utf-8"))
        assert isinstance(record["settings"], dict) and isinstance(record["finished"], bool)
    except (OSError, ValueError, KeyError, TypeError, AssertionError) as error:
        raise PositionFileError(f"{path} is not a data set's record; {advice} ({error!r})") from error
    return record
