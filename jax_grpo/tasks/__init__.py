"""Verifiable tasks by their config name: prompts from positions, stop rules, and rewards of texts. Knows no tokens or models.

A new task is one new file, one line here, its name in `TASK_NAMES` and, to be mixed with others, one line in
`config.tasks.Mixture`. One of the user's own needs none of it: the config names its module.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jax_grpo.config import ConfigError
from jax_grpo.config.tasks import OwnPart, TaskConfig
from jax_grpo.prompts.chat import ChatTemplate
from jax_grpo.tasks.base import Task
from jax_grpo.tasks.environment import EnvironmentTask
from jax_grpo.tasks.episodes import EpisodicTask
from jax_grpo.tasks.game import GameTask
from jax_grpo.tasks.guess import GuessTask
from jax_grpo.tasks.imported import ImportedError, imported, source_file, where
from jax_grpo.tasks.instructions.task import InstructionsTask
from jax_grpo.tasks.mixed import MixedTask
from jax_grpo.tasks.policy import PolicyTask
from jax_grpo.tasks.rewards import RewardsTask
from jax_grpo.tasks.toy import LengthTask

TASKS = {
    "policy": PolicyTask,
    "environment": EnvironmentTask,
    "length": LengthTask,
    "guess": GuessTask,
    "game": GameTask,
    "instructions": InstructionsTask,
    "prompts": RewardsTask,
}
NEEDED = ("name", "stop_rule", "component_weights", "prompt", "score")


def make_task(
    config: TaskConfig, rewards: Sequence[Callable[..., Any]] | None = None, tokenizer: str | None = None
) -> Task:
    """The task that the config names, or the mixture of those it lists; `rewards` are functions for `prompts`.

    `tokenizer` is `model.tokenizer`, whose chat template messages are rendered by.

    See `with_overrides` and `RewardsTask` for what is refused.

    Raises:
        ImportedError: a task of the user's own cannot be made.
        ConfigError: functions are given where nothing asks for any, or a task of a mixture answers completions.
    """
    if rewards is not None and not config.asks_prompts():
        raise ConfigError("rewards: functions reward the prompts of task.name prompts, and no other task's")
    chat = None if tokenizer is None else ChatTemplate(tokenizer)
    if config.mixture is None:
        return _with(chat, _own(config.name, "task.name") if ":" in config.name else _built_in(config, rewards))
    tasks: dict[str, Task] = {}
    for name, part in config.mixture.parts.items():
        alone = config.model_copy(update={"name": name, "rewards": part.rewards, "mixture": None})
        own = isinstance(part, OwnPart)
        tasks[name] = _with(chat, _own(part.task, f"task.mixture.{name}.task") if own else _built_in(alone, rewards))
        if isinstance(tasks[name], EpisodicTask):
            kind = type(tasks[name]).__qualname__
            raise ConfigError(
                f"task.mixture.{name}: {kind} answers completions (EpisodicTask), and a mixture has one turn"
            )
    return MixedTask(tasks, config.mixture.parts)


def require_task(task: Any, place: str) -> Task:
    """The task, or an ImportedError that says what it lacks."""
    if Task not in type(task).__mro__:
        raise ImportedError(f"{place}: {task!r:.80} is no task; expected a class derived from jax_grpo.Task")
    base, needed = (EpisodicTask, (*NEEDED, "reset")) if isinstance(task, EpisodicTask) else (Task, NEEDED)
    if missing := [
        name
        for name in needed
        if getattr(type(task), name, None) is getattr(base, name, None) and name not in vars(task)
    ]:
        raise ImportedError(f"{place}: {type(task).__qualname__} has no {', '.join(missing)}")
    return task


def _with(chat: ChatTemplate | None, task: Task) -> Task:
    task.chat = chat
    return task


def _built_in(config: TaskConfig, rewards: Sequence[Callable[..., Any]] | None) -> Task:
    return RewardsTask(config, rewards) if config.name == "prompts" else TASKS[config.name](config)


def _own(spec: str, key: str) -> Task:
    """The user's task, made without arguments."""
    make = imported(spec, key)
    try:
        task = make()
    except Exception as error:
        said = f"{where(error, source_file(make))}: {type(error).__name__}: {error}"
        raise ImportedError(f"{key} is {spec!r}; calling it failed: {said}") from error
    return require_task(task, f"{key} is {spec!r}")
