"""Verifiable tasks by their config name: prompts from positions, stop rules, and rewards of texts. Knows no tokens or models.

A new task is one new file, one line here, its name in `TASK_NAMES` and, to be mixed with others, one line in
`config.sections.Mixture`. One of the user's own needs none of it: the config names its module.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jax_grpo.config.sections import TaskConfig
from jax_grpo.tasks.base import Task
from jax_grpo.tasks.environment import EnvironmentTask
from jax_grpo.tasks.imported import ImportedError, imported
from jax_grpo.tasks.mixed import MixedTask
from jax_grpo.tasks.policy import PolicyTask
from jax_grpo.tasks.rewards import RewardsTask
from jax_grpo.tasks.toy import LengthTask

TASKS = {"policy": PolicyTask, "environment": EnvironmentTask, "length": LengthTask, "prompts": RewardsTask}
NEEDED = ("name", "stop_rule", "component_weights", "prompt", "score", "prepare", "close")


def make_task(config: TaskConfig, rewards: Sequence[Callable[..., Any]] | None = None) -> Task:
    """The task that the config names, or the mixture of those it lists; `rewards` are functions for `prompts`.

    See `with_overrides` and `RewardsTask` for what is refused. Raises ImportedError: a task of the user's own cannot be made.
    """
    if rewards is not None:
        return RewardsTask(config, rewards)
    if ":" in config.name:
        return _own(config.name)
    if config.mixture is None:
        return TASKS[config.name](config)
    tasks = {
        name: TASKS[name](config.model_copy(update={"name": name, "rewards": part.rewards, "mixture": None}))
        for name, part in config.mixture.parts.items()
    }
    return MixedTask(tasks, config.mixture.parts)


def _own(spec: str) -> Task:
    """The user's task, made without arguments."""
    make = imported(spec, "task.name")
    try:
        task = make()
    except Exception as error:
        raise ImportedError(f"task.name is {spec!r}: calling it raised {type(error).__name__}: {error}") from error
    if missing := [name for name in NEEDED if not hasattr(task, name)]:
        raise ImportedError(f"task.name is {spec!r}: it has no {', '.join(missing)}; derive it from jax_grpo.Task")
    return task
