"""Completions worth keeping as records: the first of some prompts, with their scores and, for moves, what a board shows; and how
many of a group differ.

Pure functions of an iteration's completions. Knows no files.
"""

import math
import re
from collections.abc import Mapping, Sequence

import numpy as np

from jax_grpo.config import Config
from jax_grpo.tasks.base import Prompt, applicable

_MOVE = re.compile(r"(?<![a-h0-9])[a-h][1-8][a-h][1-8][qrbn]?(?![a-z0-9])")


def sample_rows(
    prompts: Sequence[Prompt],
    completions: Sequence[str],
    rewards_B: np.ndarray,
    components: Mapping[str, np.ndarray],
    config: Config,
) -> list[dict]:
    """One JSON-ready record for the first completion of each of `logging.samples` prompts.

    Args:
        prompts: one a completion, groups of `rollout.group_size` together.
        completions: their texts up to the stop.
        rewards_B: weighted sums with penalties.
        components: raw reward components [B] by name.
        config: `logging.samples`, `rollout.group_size`.

    Returns:
        Records with `prompt`, `completion`, `reward`, `components`; where the prompt has a position also `fen`,
        `engine_move` (the labels' first, or null) and `model_move` (the last move written, or null). A number that is not
        finite is null.
    """
    rows = range(0, len(prompts), config.rollout.group_size)
    of_one = (
        (i, applicable({name: values[i : i + 1] for name, values in components.items()}, prompts[i : i + 1]))
        for i in rows
    )
    records = [_row(prompts[i], completions[i], rewards_B[i], {n: v[0] for n, v in own.items()}) for i, own in of_one]
    return records[: config.logging.samples]


def distinct_share(completions: Sequence[str], group_size: int) -> float:
    """Distinct texts in a group over its size, mean over groups: 1 where all differ, 1 / group_size where all are one."""
    groups = [completions[i : i + group_size] for i in range(0, len(completions), group_size)]
    return float(np.mean([len(set(group)) / len(group) for group in groups]))


def _row(prompt: Prompt, completion: str, reward: float, components: Mapping[str, float]) -> dict:
    row = {
        "prompt": prompt.text,
        "completion": completion,
        "reward": _finite(reward),
        "components": {name: _finite(value) for name, value in components.items()},
    }
    if prompt.position is not None:
        moves = (
            _MOVE.findall(completion) if any(name.endswith("legal") for name in components) else []
        )  # other tasks' completions are not moves
        row |= {
            "fen": prompt.position.fen,
            "engine_move": prompt.position.moves[0] if prompt.position.moves else None,
            "model_move": moves[-1] if moves else None,
        }
    return row


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
