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

    There is one of `prompts` for each of `completions`, whose texts end at the stop, groups of `rollout.group_size` together;
    `rewards_B` are weighted sums with penalties, `components` the raw rewards [B] by name. A record has `prompt`, `completion`,
    `reward` and `components`, and where the prompt has a position also `fen`, `engine_move` (the labels' first, or null) and
    `model_move` (the last move written, or null). A number that is not finite is null.
    """
    rows = []
    for i in range(0, len(prompts), config.rollout.group_size)[: config.logging.samples]:
        own = applicable({name: values[i : i + 1] for name, values in components.items()}, prompts[i : i + 1])
        row = {
            "prompt": prompts[i].text,
            "completion": completions[i],
            "reward": _finite(rewards_B[i]),
            "components": {name: _finite(values[0]) for name, values in own.items()},
        }
        if (position := prompts[i].position) is not None:
            # A completion of a task that rewards no legal moves is not moves.
            moves = _MOVE.findall(completions[i]) if any(name.endswith("legal") for name in own) else []
            engine, model = (position.moves[0] if position.moves else None), (moves[-1] if moves else None)
            row |= {"fen": position.fen, "engine_move": engine, "model_move": model}
        rows.append(row)
    return rows


def distinct_share(completions: Sequence[str], group_size: int) -> float:
    """Distinct texts in a group over its size, mean over groups: 1 where all differ, 1 / group_size where all are one."""
    groups = [completions[i : i + group_size] for i in range(0, len(completions), group_size)]
    return float(np.mean([len(set(group)) / len(group) for group in groups]))


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
