"""Positions to train on, their order, a pure function of (seed, step), so that a run can resume anywhere, and held-out ones.

Sources: the packaged positions and tables, seeded self-play, won endings, a file (`positions.files`), or a data set's folder
(`data`), each with a training and a held-out split. Knows nothing of prompts' texts or models.
"""

import hashlib
import random
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jax_grpo.config import Config
from jax_grpo.config.sections import BUILT_IN_SOURCES, ENDINGS, PromptsConfig
from jax_grpo.positions.checked_files import checked_table, packaged_table
from jax_grpo.positions.files import PositionFileError
from jax_grpo.positions.position import FILE_SHARE, SHARES, Position
from jax_grpo.positions.random_play import random_game
from jax_grpo.positions.sets import read_set
from jax_grpo.positions.table import PositionTable, joined, to_columns
from jax_grpo.positions.won_endings import endings_table

# What `prompts.source` calls the repository's positions, and where they lie.
PACKAGED_SOURCES = {"packaged": "positions", "packaged:tables": "tables"}


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


def load_positions(config: PromptsConfig, seed: int, cache: str | None = None) -> PositionTable:
    """Positions of the config's source and split, or a PositionFileError; `seed` is of self-play.

    What was checked once is found again in the folder `cache` (`compilation_cache`); with None all is checked.
    """
    if name := PACKAGED_SOURCES.get(config.source):
        tables = [packaged_table(split, name) for split in ("train", "heldout") if config.split in (split, "all")]
        return joined(tables) if len(tables) > 1 else tables[0]
    if config.source == "selfplay":
        offset = 1_000_000_007 if config.split == "heldout" else 0  # other games for the held-out split
        positions = selfplay_positions(config.selfplay_games, seed + offset, config.split)
        content = hashlib.sha256("\n".join(position.fen for position in positions).encode()).hexdigest()
        return PositionTable(to_columns(positions, keyed=False), f"fens:{content}")
    if config.source in ENDINGS:
        return endings_table(config.source, config.split)
    path = Path(config.source)
    folder = None if cache is None else Path(cache).expanduser() / "positions"
    if path.is_dir():
        return read_set(path, config.split, folder)
    return of_split(checked_table(path, config.format, folder), path, config.split, "position", PositionFileError)


def of_split(table: Any, path: Path, split: str, what: str, error: type[ValueError]) -> Any:
    """The rows of a file's split, by the hash that data sets are split by, or the error; `what` is one row's name."""
    if not len(table):
        raise error(f"{path}: no {what}s in it")
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
    raise error(
        f"{path} has no {lacks}: a hash of a {what} holds out about one in ten, and {how_many} of its {len(table)}. {remedy}"
    )


def sampling_numbers(numbers: Sequence[int], size: int) -> list[int]:
    """What each prompt of one batch is sampled under: its number, and for each further time in the batch `size` more.

    An epoch's end, or a batch larger than the data set of `size`, draws a position twice; under one number its completions
    would be the same ones, and count twice.
    """
    before: Counter[int] = Counter()
    out = []
    for number in numbers:
        out.append(number + before[number] * size)
        before[number] += 1
    return out


class PromptDataset:
    """Positions in a seeded order, epoch after epoch, each epoch its own permutation; none is a PositionFileError."""

    def __init__(self, positions: Sequence[Position], seed: int):
        if not len(positions):
            raise PositionFileError("prompts.source gave no positions")
        self.positions = positions
        self._seed = seed
        self._epoch, self._order = -1, np.empty(0, np.int64)

    def __len__(self) -> int:
        return len(self.positions)

    def batch(self, step: int, size: int) -> list[tuple[int, Position]]:
        """(number, position) of prompts `step * size` to `(step + 1) * size` of the endless order."""
        return [self.at(i) for i in range(step * size, (step + 1) * size)]

    def at(self, index: int) -> tuple[int, Position]:
        """(number, position) of one place of that order."""
        epoch, within = divmod(index, len(self.positions))
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = np.random.default_rng((self._seed, epoch)).permutation(len(self.positions))
        number = int(self._order[within])
        return number, self.positions[number]


class Heldout(NamedTuple):
    """`positions` are asked, of `available`; `left_out` others of evaluation.source are among those the run trains on."""

    positions: list[Position]
    available: int
    left_out: int = 0


def heldout_positions(config: Config, training: Any, read: Callable[..., Any] = load_positions) -> Heldout | None:
    """The first `evaluation.positions` that the run does not train on, or a PositionFileError; None when that is 0.

    `read` gives a table of a source as that of the training was read: of positions, or of what else a task reads.
    """
    count, source = config.evaluation.positions, config.evaluation.source
    if count == 0:
        return None
    asked: dict[str, object] = {"split": "heldout"}
    if source is not None:
        file = source not in BUILT_IN_SOURCES and not Path(source).is_dir()
        asked = {"source": source, "format": "auto", "split": "all" if file else "heldout"}
    table = read(config.prompts.model_copy(update=asked), config.seed + 1, config.compilation_cache)
    if source is None:
        return Heldout(table[:count], len(table))
    new = np.flatnonzero(~np.isin(table.keys(), training.keys()))
    if not len(new):
        raise PositionFileError(
            f"evaluation.source {source!r}: the run trains on all of its {len(table)} {training.noun}, so none is held out; give "
            "others, or set evaluation.positions to 0"
        )
    return Heldout([table[int(row)] for row in new[:count]], len(new), len(table) - len(new))


def told(training: Any, heldout: Heldout | None) -> str:
    """One line for people: how many rows of the training's table are trained on, held out and asked."""
    line = f"{len(training)} {training.noun} to train on"
    if heldout is None:
        unused = f", {training.apart} held out and not asked" if training.apart else ""
        return f"{line}{unused} (evaluation.positions is 0)"
    left_out = f"; left out {heldout.left_out} of evaluation.source that the run trains on" if heldout.left_out else ""
    return f"{line}, {heldout.available} held out, of which {len(heldout.positions)} are asked{left_out}"
