"""The instructions task: a drawn prompt with one to three instructions, rewarded by those that the completion follows.

A row is only a number here: its text and the seed say which prompt is drawn. A tenth of all texts is held out by a hash of the
text, as the prompts of a file are, and only asked in evaluations. A completion ends at end-of-text or at its cap.
"""

import itertools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from jax_grpo.config.tasks import Settings
from jax_grpo.prompts.table import is_heldout
from jax_grpo.tasks.base import Component, Prompt, Task, with_overrides
from jax_grpo.tasks.instructions.catalogue import CATALOGUE
from jax_grpo.tasks.instructions.generate import draw, prompt_text
from jax_grpo.tasks.instructions.rewards import score
from jax_grpo.tasks.stop import text_stop

WEIGHTS = {"strict": 1.0, "loose": 0.0, "share": 0.5}


class InstructionsTask(Task):
    """See the module; components are those of `instructions.score`, about no row that has no instruction of the type.

    Strict accuracy and the share of instructions that are followed are rewarded: the share alone has a slope where no
    completion of a group follows everything. The loose accuracy and the types are diagnostics.
    """

    name, noun, reads = "instructions", "prompts", "positions"

    def __init__(self, settings: Settings):
        self.component_weights = with_overrides(self.name, WEIGHTS | dict.fromkeys(CATALOGUE, 0.0), settings.rewards)
        self.stop_rule = text_stop()

    def prompt(self, row: Any, seed: int) -> Prompt:
        return self._prompt(row, seed, heldout=False)

    def heldout_prompt(self, row: Any, seed: int) -> Prompt:
        return self._prompt(row, seed, heldout=True)

    def _prompt(self, row: Any, seed: int, *, heldout: bool) -> Prompt:
        """The first draw for the row whose text is in this split."""
        draws = (draw(f"{row.prompt} {seed}{' again' * number}") for number in itertools.count())
        made = next(each for each in draws if is_heldout(each["prompt"], 1, 9) == heldout)
        return Prompt(prompt_text(made), 0, row, answer=json.dumps(made))

    def score(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> dict[str, Component]:
        components = score([json.loads(prompt.answer or "{}") for prompt in prompts], completions)
        return {
            name: Component(np.nan_to_num(components[name]), ~np.isnan(components[name]))
            for name in self.component_weights
        }
