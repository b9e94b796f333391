"""Scores by several processes: each scores its own share of the completions, and all have all scores.

In one process it is `checked_score`. What a task logs, and the texts, are everybody's too. Knows no devices.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jax_grpo.mesh import processes
from jax_grpo.tasks.base import Logged, Prompt, Task, TrainerState, checked_score


class Scores(NamedTuple):
    """Of all processes' completions: texts, raw components [B] by name, and what was logged beside them."""

    texts: list[str]
    components: dict[str, np.ndarray]
    logged: Logged


def shared_score(
    task: Task,
    prompts: Sequence[Prompt],
    completions: Sequence[Any],
    completion_ids: Sequence[Sequence[int]],
    state: TrainerState,
) -> Scores:
    """Scores of everybody's completions, in the order of the processes, of which this one gives its own; none is no error.

    Raises as `checked_score` does, in the process whose completion it is.
    """
    texts = [str(completion) for completion in completions]
    if processes.count() == 1:
        return Scores(texts, checked_score(task, prompts, completions, completion_ids, state), task.logged())
    components = checked_score(task, prompts, completions, completion_ids, state) if texts else {}
    metrics, extras = task.logged() if texts else Logged({}, {})
    listed = {name: values_B.tolist() for name, values_B in components.items()}  # what is masked is None
    return _joined(processes.exchanged([texts, listed, metrics, extras]))


def _joined(parts: Sequence[Sequence[Any]]) -> Scores:
    """What the processes found, end to end."""
    texts, components, metrics, extras = zip(*(part for part in parts if part[0]), strict=True)

    def column(name: str) -> list[Any]:
        """A text's extra is None where its process logged none of this name."""
        return [value for own, said in zip(texts, extras, strict=True) for value in said.get(name, [None] * len(own))]

    return Scores(
        texts=[text for own in texts for text in own],
        components={name: _array([value for own in components for value in own[name]]) for name in components[0]},
        logged=Logged(
            {name: [x for own in metrics for x in own.get(name, [])] for name in _names(metrics)},
            {name: column(name) for name in _names(extras)},
        ),
    )


def _names(parts: Sequence[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for part in parts for name in part))


def _array(values: Sequence[float | None]) -> np.ndarray:
    """A component, masked where it is about nothing."""
    filled = np.array([0.0 if value is None else value for value in values], np.float32)
    masked = [value is None for value in values]
    return np.ma.masked_array(filled, masked) if any(masked) else filled
