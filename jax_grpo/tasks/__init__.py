"""Verifiable tasks by their config name: prompts from positions, stop rules, and rewards of texts. Knows no tokens or models.

A new task is one new file, one line here, its name in `TaskConfig.name` and, to be mixed with others, one line in
`config.sections.Mixture`.
"""

from jax_grpo.config.sections import TaskConfig
from jax_grpo.tasks.base import Task
from jax_grpo.tasks.environment import EnvironmentTask
from jax_grpo.tasks.guess import GuessTask
from jax_grpo.tasks.mixed import MixedTask
from jax_grpo.tasks.policy import PolicyTask
from jax_grpo.tasks.toy import LengthTask

TASKS = {"policy": PolicyTask, "environment": EnvironmentTask, "length": LengthTask, "guess": GuessTask}


def make_task(config: TaskConfig) -> Task:
    """The task that the config names, or the mixture of those it lists; see `with_overrides` for what it refuses."""
    if config.mixture is None:
        return TASKS[config.name](config)
    tasks = {
        name: TASKS[name](config.model_copy(update={"name": name, "rewards": part.rewards, "mixture": None}))
        for name, part in config.mixture.parts.items()
    }
    return MixedTask(tasks, config.mixture.parts)
