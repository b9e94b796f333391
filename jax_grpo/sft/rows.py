"""Rows of text that a model is taught: prompt and completion, of several kinds, and batches of them. Knows nothing of models."""

import random
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Literal, NamedTuple, Self

import numpy as np
import pydantic

from jax_grpo.model.tokenizer import Tokenizer
from jax_grpo.names import LESSONS, by_name

INSTRUCTIONS = "instructions"  # the kind of rows that is not of chess
LENGTH_MULTIPLE = 32  # batches are padded to a multiple, so that only a few shapes are compiled
CHUNK_BATCHES = 16  # rows are sorted by length within this many batches


class Row(NamedTuple):
    """`completion` is what the loss is taken on; end-of-text follows it."""

    prompt: str
    completion: str


class Stage(pydantic.BaseModel, extra="forbid", frozen=True):
    """One part of the training: `rows` examples at a peak learning rate, cosine to a tenth of it.

    They are texts of a `mixture`, or positions of `tables`, a source as `prompts.source` with every legal move's value, and then
    all moves are taught at once by softmax(win probability / tau), of which a share `uniform` is even (`chess.lessons`), in
    prompts of `prompt_style`.
    """

    mixture: dict[str, float] | None = None
    tables: str | None = None
    tau: float = pydantic.Field(default=0.02, gt=0)
    uniform: float = pydantic.Field(default=0.08, ge=0, le=1)
    prompt_style: Literal["best_move", "own_side"] = "best_move"
    rows: int = pydantic.Field(gt=0)
    learning_rate: float = pydantic.Field(gt=0)

    @pydantic.field_validator("mixture")
    @classmethod
    def _known_kinds(cls, mixture: dict[str, float] | None) -> dict[str, float] | None:
        if mixture is not None and (not mixture or mixture.keys() - kinds(mixture) or min(mixture.values()) <= 0):
            raise ValueError(f"expected positive weights for some of {', '.join(kinds(()))}; found {mixture}")
        return mixture

    @pydantic.model_validator(mode="after")
    def _one_kind(self) -> Self:
        if (self.mixture is None) == (self.tables is None):
            raise ValueError("expected one of mixture and tables in a stage")
        if self.tables is None and (aimless := sorted({"tau", "uniform", "prompt_style"} & self.model_fields_set)):
            raise ValueError(f"{aimless[0]} is of a stage of tables; this one has a mixture")
        return self

    def data(self) -> list[str]:
        """What its examples are made of, for people."""
        if self.mixture is None:
            return [f"every legal move's value from {self.tables}"]
        return [kinds(self.mixture)[kind] for kind in self.mixture]


def kinds(mixture: Collection[str]) -> dict[str, str]:
    """What the rows of each kind of a mixture are made of; of kinds that are not of chess without looking there."""
    own = {INSTRUCTIONS: "prompts and answers drawn by jax_grpo.tasks.instructions"}
    return own if mixture and own.keys() >= set(mixture) else by_name(LESSONS).DATA | own


def rows(mixture: dict[str, float], makers: Mapping[str, Callable[[], Row]], rng: random.Random) -> Iterator[Row]:
    """Endless rows, each kind drawn with its weight."""
    while True:
        yield makers[rng.choices(list(mixture), list(mixture.values()))[0]]()


def batches(
    source: Iterator[Row], tokenizer: Tokenizer, batch_size: int, max_length: int, rng: random.Random
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Right-padded (input_ids, attention_mask, loss_mask), each [B, T], of similar length; longer rows are left out."""
    while True:
        chunk = [next(source) for _ in range(batch_size * CHUNK_BATCHES)]
        prompts = tokenizer.encode_prompts([row.prompt for row in chunk])
        completions = tokenizer.encode_batch([row.completion for row in chunk])
        tokens = [(len(p), [*p, *c, tokenizer.eos_id]) for p, c in zip(prompts, completions, strict=True)]
        tokens = sorted((row for row in tokens if len(row[1]) <= max_length), key=lambda row: len(row[1]))
        groups = [tokens[i : i + batch_size] for i in range(0, len(tokens) - batch_size + 1, batch_size)]
        rng.shuffle(groups)
        for group in groups:
            length = min(-(-len(group[-1][1]) // LENGTH_MULTIPLE) * LENGTH_MULTIPLE, max_length)
            input_ids_BT = np.full((batch_size, length), tokenizer.pad_id, np.int32)
            attention_BT, loss_BT = np.zeros((2, batch_size, length), np.int32)
            for i, (prompt_length, ids) in enumerate(group):
                input_ids_BT[i, : len(ids)] = ids
                attention_BT[i, : len(ids)] = 1
                loss_BT[i, prompt_length : len(ids)] = 1
            yield input_ids_BT, attention_BT, loss_BT
