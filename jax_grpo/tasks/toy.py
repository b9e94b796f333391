"""The length toy: reward = min(characters of the first word, cap) / cap. If GRPO cannot climb this, its plumbing is broken."""

from collections.abc import Sequence

import numpy as np

from jax_grpo.config.tasks import TaskConfig
from jax_grpo.positions.position import Position
from jax_grpo.tasks.base import Prompt, Task, stack, with_overrides
from jax_grpo.tasks.stop import word_stop


class LengthTask(Task):
    """The completion ends at its first space, so a policy must learn to leave spaces out. Prompts are positions' FENs.

    A word, because a random policy almost never draws end-of-text: without another stop it would start at the cap.
    """

    name = "length"

    def __init__(self, config: TaskConfig):
        self._cap = config.length_cap
        self.component_weights = with_overrides(self.name, {"length": 1.0}, config.rewards)
        self.stop_rule = word_stop()

    def prompt(self, position: Position, seed: int) -> Prompt:
        return Prompt(f"{position.fen}\n", 0, position)

    def score(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> dict[str, np.ndarray]:
        rows = [{"length": min(len(text), self._cap) / self._cap} for text in completions]
        return stack(rows, self.component_weights)
