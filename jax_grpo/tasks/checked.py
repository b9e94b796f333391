"""Scores a batch and refuses what is not a score: a reward that raises, or returns None, NaN or the wrong length, stops the run
with the sample named. Nothing is replaced by 0: a silent 0 is a wrong reward that nobody finds. Knows no particular task.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from jax_grpo.tasks.base import Prompt, Task
from jax_grpo.tasks.engine import EngineError


class RewardError(RuntimeError):
    """A task's score cannot be used; the message names the task, the component and the first sample at fault."""


def checked_score(task: Task, prompts: Sequence[Prompt], completions: Sequence[str]) -> dict[str, np.ndarray]:
    """`task.score`, each component float32 [B] and finite.

    Raises:
        RewardError: see the class.
        EngineError: the engine's own failure, as it is.
    """
    try:
        components = task.score(prompts, completions)
    except EngineError:
        raise
    except Exception as error:  # a task is anybody's code
        raise RewardError(_blame(task, prompts, completions, error)) from error
    if not isinstance(components, Mapping) or set(components) != set(task.component_weights):
        found = ", ".join(map(str, components)) if isinstance(components, Mapping) else repr(components)[:80]
        raise RewardError(
            f"task {task.name!r}: score returned {found}; expected an array for each of {', '.join(task.component_weights)}"
        )
    return {name: _checked(task, name, values, prompts, completions) for name, values in components.items()}


def _checked(
    task: Task, name: str, values: object, prompts: Sequence[Prompt], completions: Sequence[str]
) -> np.ndarray:
    where, count = f"task {task.name!r}: reward component {name!r}", len(completions)
    if values is None:
        raise RewardError(f"{where} is None; expected {count} numbers. {_sample(prompts, completions, 0)}")
    listed = np.asarray(values)
    if listed.shape != (count,):
        raise RewardError(f"{where} has shape {listed.shape}; expected one number for each of the {count} samples")
    if listed.dtype.kind in "fiub" and np.isfinite(listed).all():
        return listed.astype(np.float32)
    for row, value in enumerate(listed):
        if not _is_number(value):
            raise RewardError(f"{where} is {value!r}; expected a finite number. {_sample(prompts, completions, row)}")
    return listed.astype(np.float32)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | np.number | np.bool_) and bool(np.isfinite(value))


def _blame(task: Task, prompts: Sequence[Prompt], completions: Sequence[str], error: Exception) -> str:
    """Scores one by one, to find the sample that raises."""
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        try:
            task.score([prompt], [completion])
        except Exception as single:
            return f"task {task.name!r} raised {type(single).__name__}: {single}. {_sample(prompts, completions, row)}"
    return (
        f"task {task.name!r} raised {type(error).__name__}: {error}; it does so on the batch of {len(completions)}, on none "
        f"of its samples alone"
    )


def _sample(prompts: Sequence[Prompt], completions: Sequence[str], row: int) -> str:
    return f"Sample {row}: prompt {prompts[row].text[:120]!r}, completion {completions[row][:120]!r}"
