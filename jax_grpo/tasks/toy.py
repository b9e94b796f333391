"""The length toy: reward = min(characters of the first word, cap) / cap. If GRPO cannot climb this, its plumbing is broken."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jax_grpo.config.sections import Count
from jax_grpo.config.tasks import Settings
from jax_grpo.tasks.base import Prompt, Task, stack, with_overrides
from jax_grpo.tasks.stop import word_stop


class LengthSettings(Settings):
    """`length`: the toy."""

    length_cap: Count = 20
    """Length task: reward = min(characters of the first word, cap) / cap."""


class LengthTask(Task):
    """The completion ends at its first space, so a policy must learn to leave spaces out. Prompts are the texts of its rows.

    A word, because a random policy almost never draws end-of-text: without another stop it would start at the cap.
    """

    name, noun, reads, Settings = "length", "prompts", "positions", LengthSettings

    def __init__(self, settings: LengthSettings):
        self._cap = settings.length_cap
        self.component_weights = with_overrides(self.name, {"length": 1.0}, settings.rewards)
        self.stop_rule = word_stop()

    def prompt(self, row: Any, seed: int) -> Prompt:
        return Prompt(f"{row.prompt}\n", 0, row)

    def score(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> dict[str, np.ndarray]:
        rows = [{"length": min(len(text), self._cap) / self._cap} for text in completions]
        return stack(rows, self.component_weights)
