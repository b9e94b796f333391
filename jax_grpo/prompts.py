"""Positions to ask about, and their order: a pure function of (seed, step), so that a run can resume anywhere.

Sources: the packaged positions, seeded self-play, a file (`position_files`), or a data set's folder (`data`). Knows nothing of
prompts' texts or models.
"""

import itertools
import random
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jax_grpo.config_sections import PromptsConfig
from jax_grpo.data.reading import read_set
from jax_grpo.position_files import PositionFileError, read_positions
from jax_grpo.sft_rows import random_positions
from jax_grpo.tasks.base import Position

PACKAGED = Path(__file__).parent / "assets" / "positions"


def read_packaged(split: str) -> list[Position]:
    """The repository's labelled positions, `train` or `heldout`."""
    return read_positions(PACKAGED / f"{split}.parquet")


def selfplay_positions(games: int, seed: int, split: str = "train") -> list[Position]:
    """Distinct unlabelled positions of random games, in game order; a function of its arguments.

    A tenth of all positions is `heldout` by a checksum of the position itself, so that no games of any seeds put one
    position in both splits: games apart are not enough, they all open alike.
    """
    found: dict[str, Position] = {}
    for game in range(games):
        for board in itertools.takewhile(_first_game(), random_positions(random.Random(f"{seed}/{game}"))):
            key = board.epd()
            if key not in found and (zlib.crc32(key.encode()) % 10 == 0) == (split == "heldout"):
                found[key] = Position(board.fen(), tuple(move.uci() for move in board.move_stack[-10:]))
    return list(found.values())


def _first_game():
    """Predicate that holds until the board returns to the start: `random_positions` goes on with another game."""
    last = -1

    def same_game(board) -> bool:
        nonlocal last
        grows = len(board.move_stack) > last
        last = len(board.move_stack)
        return grows

    return same_game


def load_positions(config: PromptsConfig, seed: int) -> list[Position]:
    """Positions of the config's source.

    Raises:
        PositionFileError: the file, its line, the value and what was expected.
    """
    if config.source == "packaged":
        return read_packaged(config.split)
    if config.source == "selfplay":
        offset = 0 if config.split == "train" else 1_000_000_007  # other games for the held-out split
        return selfplay_positions(config.selfplay_games, seed + offset, config.split)
    if Path(config.source).is_dir():
        return read_set(Path(config.source), config.split)
    return read_positions(config.source, config.format)


def sampling_numbers(numbers: Sequence[int], size: int) -> list[int]:
    """What each prompt of one batch is sampled under: its number, and for each further time in the batch `size` more.

    An epoch's end, or a batch larger than the data set, draws a position twice; under one number its completions would be the
    same ones, and count twice.

    Args:
        numbers: of the prompts in their data set.
        size: of the data set.
    """
    before: Counter[int] = Counter()
    out = []
    for number in numbers:
        out.append(number + before[number] * size)
        before[number] += 1
    return out


class PromptDataset:
    """Positions in a seeded order, epoch after epoch, each epoch its own permutation.

    Args:
        positions: at least one.
        seed: of the order.

    Raises:
        PositionFileError: there are no positions.
    """

    def __init__(self, positions: Sequence[Position], seed: int):
        if not positions:
            raise PositionFileError("prompts.source gave no positions")
        self._positions = positions
        self._seed = seed
        self._epoch, self._order = -1, np.empty(0, np.int64)

    def __len__(self) -> int:
        return len(self._positions)

    def batch(self, step: int, size: int) -> list[tuple[int, Position]]:
        """(number, position) of prompts `step * size` to `(step + 1) * size` of the endless order."""
        return [self._at(i) for i in range(step * size, (step + 1) * size)]

    def _at(self, index: int) -> tuple[int, Position]:
        epoch, within = divmod(index, len(self._positions))
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = np.random.default_rng((self._seed, epoch)).permutation(len(self._positions))
        number = int(self._order[within])
        return number, self._positions[number]
