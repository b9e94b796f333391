"""Chess moves whose judge takes a quarter of a second a batch, as one behind a network does: see docs/methods.md.

    python -m jax_grpo.bench.variants --config configs/mates.yaml --variants docs/experiments/ahead.yaml \\
        --metric refill/reward --last 10 --seeds 0,1,2 --out docs/results/ahead
"""

import time
from collections.abc import Sequence

import numpy as np

from jax_grpo.chess.tasks.policy import PolicyTask
from jax_grpo.config.tasks import task_of
from jax_grpo.tasks.base import Prompt

SECONDS = 0.25
NOTHING_ELSE = dict.fromkeys(("legal", "parseable", "top_five", "quality", "malformed"), 0.0)


class Slow(PolicyTask):
    """Mates in one, as configs/mates.yaml asks for them, judged late."""

    def __init__(self) -> None:
        rewards = NOTHING_ELSE | {"best_move": 1.0}
        super().__init__(task_of(**{"prompt_style": "own_side", "rewards": rewards}))

    def score(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> dict[str, np.ndarray]:
        time.sleep(SECONDS)
        return super().score(prompts, completions)
