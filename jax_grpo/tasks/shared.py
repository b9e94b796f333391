"""Scores by several processes: each scores its own share of the completions, and all have all scores.

In one process it is `checked_score`. What a task logs, and the texts, are everybody's too. Knows no devices.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax_grpo.mesh import processes
from jax_grpo.tasks.base import Component, Logged, Prompt, Task, TrainerState, component
from jax_grpo.tasks.checked import checked_score


class Scores(NamedTuple):
    """Of all processes' completions: texts, raw components [B] by name, and what was logged beside them."""

    texts: list[str]
    components: dict[str, Component]
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
    listed = {name: one.tolist() for name, one in components.items()}
    return _joined(processes.exchanged([texts, listed, task.logged() if texts else None]))


def _joined(parts: Sequence[Sequence[Any]]) -> Scores:
    """The scores of the processes' completions, end to end."""
    texts, components, logs = zip(*(part for part in parts if part[0]), strict=True)
    return Scores(
        texts=[text for own in texts for text in own],
        components={name: component([value for own in components for value in own[name]]) for name in components[0]},
        logged=joined_logs([(Logged(*logged), len(own)) for logged, own in zip(logs, texts, strict=True)]),
    )


def joined_logs(parts: Sequence[tuple[Logged, int]]) -> Logged:
    """End to end, what was logged of batches of so many completions: an extra that a batch did not log is None for each."""
    metrics = dict.fromkeys(name for logged, _ in parts for name in logged.metrics)
    extras = dict.fromkeys(name for logged, _ in parts for name in logged.extras)
    return Logged(
        {name: [value for logged, _ in parts for value in logged.metrics.get(name, [])] for name in metrics},
        {name: [x for logged, count in parts for x in logged.extras.get(name, [None] * count)] for name in extras},
    )
