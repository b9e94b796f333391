"""What plain players would get from a run's own reward on its held-out prompts: what a model's curve is read beside.

Exact: a player that draws from several moves is judged by their mean. Knows nothing of generation.
"""

from collections.abc import Sequence

import chess
import numpy as np

from jax_grpo.report.records import YARDSTICK
from jax_grpo.tasks.base import Prompt, Task
from jax_grpo.tasks.policy import TECHNIQUE, VALUE, PolicyTask, in_style
from jax_grpo.tasks.reference_players import REFERENCE_PLAYERS


def yardsticks(task: Task, prompts: Sequence[Prompt]) -> dict[str, float]:
    """`yardstick/<player>/<component>` for `value` and `technique`, where the task is to write one move and is paid for them."""
    paid = [name for name in (VALUE, TECHNIQUE) if task.component_weights.get(name)]
    if not isinstance(task, PolicyTask) or task.style == "full" or not paid:
        return {}
    positions = [prompt.position for prompt in prompts if prompt.position is not None]
    found = {}
    for player, moves_of in REFERENCE_PLAYERS.items():
        drawn_from = [moves_of(chess.Board(position.fen)) for position in positions]
        counts_P = [len(moves) for moves in drawn_from]
        asked = [prompt for prompt, count in zip(prompts, counts_P, strict=True) for _ in range(count)]
        answers = [
            in_style(task.style, move, position.fen)
            for position, moves in zip(positions, drawn_from, strict=True)
            for move in moves
        ]
        scores = task.score(asked, answers)
        starts_P = np.cumsum([0, *counts_P[:-1]])
        for name in paid:
            means_P = np.add.reduceat(scores[name], starts_P) / counts_P
            found[f"{YARDSTICK}{player}/{name}"] = float(means_P.mean())
    return found
