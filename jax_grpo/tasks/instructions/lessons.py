"""Drawn prompts with answers that follow some of their instructions: text to teach a small model from, which leaves GRPO something
to raise. All by seed. Knows no tasks and no models."""

import random
from collections.abc import Iterable
from typing import NamedTuple

from jax_grpo.tasks.instructions.answers import answer
from jax_grpo.tasks.instructions.generate import draw, prompt_text

# What sentences that are written for no instruction follow.
PLAIN = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
FOLLOWED = 0.6  # share of a prompt's instructions that its answer was written for


class Lesson(NamedTuple):
    """What the task asks, and an answer."""

    prompt: str
    answer: str


def lesson(seed: int | str, followed: float = FOLLOWED) -> Lesson:
    """A prompt as the instructions task asks it, and an answer written for each of its instructions with this probability.

    Those it was not written for it may follow by chance. The same for the same arguments.
    """
    row, rng = draw(f"lesson {seed}"), random.Random(f"followed {seed}")
    numbers = [number for number in range(len(row["kwargs"])) if rng.random() < followed]
    part = {key: [row[key][number] for number in numbers] for key in ("instruction_id_list", "kwargs")}
    return Lesson(prompt_text(row), answer(row | (part if numbers else PLAIN), seed))


def texts(count: int) -> Iterable[str]:
    """Prompts with answers that follow everything, for a vocabulary to be made of."""
    return (one.prompt + one.answer for one in (lesson(f"vocabulary/{number}", 1.0) for number in range(count)))
