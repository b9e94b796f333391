"""The instructions task: a drawn prompt with one to three instructions, rewarded by those that the completion follows.

A position is only a number here: with the seed it says which prompt is drawn. A completion ends at end-of-text or at its cap.
"""

import json
from collections.abc import Sequence

import numpy as np

from jax_grpo.config.tasks import TaskConfig
from jax_grpo.positions.position import Position
from jax_grpo.tasks.base import Prompt, Task, with_overrides
from jax_grpo.tasks.instructions.catalogue import CATALOGUE
from jax_grpo.tasks.instructions.generate import draw, prompt_text
from jax_grpo.tasks.instructions.rewards import score
from jax_grpo.tasks.stop import StopRule

WEIGHTS = {"strict": 1.0, "loose": 0.0, "share": 0.5}


class InstructionsTask(Task):
    """See the module; components are those of `instructions.score`, masked where a row has no instruction of the type.

    Strict accuracy and the share of instructions that are followed are rewarded: the share alone has a slope where no
    completion of a group follows everything. The loose accuracy and the types are diagnostics.
    """

    name = "instructions"

    def __init__(self, config: TaskConfig):
        self.component_weights = with_overrides(self.name, WEIGHTS | dict.fromkeys(CATALOGUE, 0.0), config.rewards)
        transitions_SB = np.repeat(np.arange(2, dtype=np.int32)[:, None], 256, axis=1)
        self.stop_rule = StopRule(transitions_SB, 1, np.zeros_like(transitions_SB, bool))

    def prompt(self, position: Position, seed: int) -> Prompt:
        row = draw(f"{position.fen} {seed}")
        return Prompt(prompt_text(row), 0, position, answer=json.dumps(row))

    def score(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> dict[str, np.ndarray]:
        components = score([json.loads(prompt.answer or "{}") for prompt in prompts], completions)
        return {name: _about(components[name]) for name in self.component_weights}


def _about(values_B: np.ndarray) -> np.ndarray:
    """The values; where some rows have none, those are masked and 0."""
    absent_B = np.isnan(values_B)
    values_B = np.nan_to_num(values_B).astype(np.float32)
    return np.ma.MaskedArray(values_B, absent_B) if absent_B.any() else values_B
