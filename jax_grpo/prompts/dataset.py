"""The order of a run's rows, a pure function of (seed, step), so that a run can resume anywhere, and its held-out ones.

Knows nothing of prompts' texts or models.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jax_grpo.config import Config
from jax_grpo.config.sections import is_built_in
from jax_grpo.prompts.table import SourceError


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
    """Rows in a seeded order, epoch after epoch, each epoch its own permutation; none is a SourceError."""

    def __init__(self, rows: Sequence[Any], seed: int):
        if not len(rows):
            raise SourceError("prompts.source gave no rows")
        self.rows = rows
        self._seed = seed
        self._epoch, self._order = -1, np.empty(0, np.int64)

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, step: int, size: int) -> list[tuple[int, Any]]:
        """(number, row) of prompts `step * size` to `(step + 1) * size` of the endless order."""
        return [self.at(i) for i in range(step * size, (step + 1) * size)]

    def at(self, index: int) -> tuple[int, Any]:
        """(number, row) of one place of that order."""
        epoch, within = divmod(index, len(self.rows))
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = np.random.default_rng((self._seed, epoch)).permutation(len(self.rows))
        number = int(self._order[within])
        return number, self.rows[number]


class Heldout(NamedTuple):
    """`rows` are evaluated, of `available`; `left_out` others of evaluation.source are among those the run trains on."""

    rows: list[Any]
    available: int
    left_out: int = 0


def heldout_rows(config: Config, training: Any, read: Callable[..., Any]) -> Heldout | None:
    """The first `evaluation.positions` that the run does not train on, or the training rows' own error; None when that is 0.

    `read` is `Task.read`.
    """
    count, source = config.evaluation.positions, config.evaluation.source
    if count == 0:
        return None
    settings: dict[str, object] = {"split": "heldout"}
    if source is not None:
        file = not is_built_in(source) and not Path(source).is_dir()
        settings = {"source": source, "split": "all" if file else "heldout"}
    table = read(config.prompts.model_copy(update=settings), config.seed + 1, config.compilation_cache)
    if source is None:
        return Heldout(table[:count], len(table))
    new = np.flatnonzero(~np.isin(table.keys(), training.keys()))
    if not len(new):
        raise training.error(
            f"evaluation.source {source!r}: the run trains on all of its {len(table)} {training.noun}, so none is held out; give "
            "others, or set evaluation.positions to 0"
        )
    return Heldout([table[int(row)] for row in new[:count]], len(new), len(table) - len(new))


def describe_rows(training: Any, heldout: Heldout | None, noun: str | None = None) -> str:
    """One line for people: how many rows of the training's table are trained on, held out and evaluated.

    `noun` is what the task makes of a row; None: as the table has it.
    """
    line = f"{len(training)} {noun or training.noun} to train on"
    if heldout is None:
        unused = f", {training.apart} held out and not asked" if training.apart else ""
        return f"{line}{unused} (evaluation.positions is 0)"
    left_out = f"; left out {heldout.left_out} of evaluation.source that the run trains on" if heldout.left_out else ""
    return f"{line}, {heldout.available} held out, of which {len(heldout.rows)} are asked{left_out}"
