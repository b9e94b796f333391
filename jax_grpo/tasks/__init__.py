"""Verifiable tasks by their config name: prompts of rows, stop rules, and rewards of texts. Knows no tokens or models.

A new task is one new file and one line in `names.TASKS`, and another in `names.SETTINGS` if it has settings of its own. A task of
the user's own needs neither: the config names its module.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jax_grpo.config import ConfigError
from jax_grpo.config.imported import ImportedError, imported, source_file, where
from jax_grpo.config.tasks import Settings, TaskConfig, is_own, settings_class, with_own_settings
from jax_grpo.names import TASKS, by_name
from jax_grpo.prompts.chat import ChatTemplate
from jax_grpo.tasks.base import Task
from jax_grpo.tasks.episodes import EpisodicTask
from jax_grpo.tasks.mixed import MixedTask
from jax_grpo.tasks.rewards import RewardsTask

NEEDED = ("name", "stop_rule", "component_weights", "prompt", "score")


def make_task(
    config: TaskConfig, rewards: Sequence[Callable[..., Any]] | None = None, tokenizer: str | None = None
) -> Task:
    """The task that the config names, or the mixture of those it lists; `rewards` are functions for `prompts`.

    `tokenizer` is `model.tokenizer`, whose chat template messages are rendered by.

    See `with_overrides` and `RewardsTask` for what is refused.

    Raises:
        ImportedError: a task of the user's own cannot be made.
        ConfigError: functions are given where nothing asks for any, a setting is missing, or a task of a mixture answers
            completions.
    """
    names = [task for task, _ in config.tasks.values()]
    if rewards is not None and "prompts" not in names:
        raise ConfigError(f"rewards: functions reward the prompts of task.name prompts; here it is {', '.join(names)}")
    chat = None if tokenizer is None else ChatTemplate(tokenizer)
    tasks: dict[str, Task] = {}
    for name, (task, settings) in config.tasks.items():
        key = f"task.mixture.{name}.task" if name else "task.name"
        tasks[name] = _own(task, settings, key) if is_own(task) else _built_in(task, settings, rewards)
        tasks[name].chat = chat
        if name and isinstance(tasks[name], EpisodicTask):
            kind = type(tasks[name]).__qualname__
            raise ConfigError(
                f"task.mixture.{name}: {kind} answers completions (EpisodicTask), and a mixture has one turn"
            )
    return tasks[""] if config.mixture is None else MixedTask(tasks, config.mixture)


def task_class(name: str) -> Any:
    """The class of a built-in task."""
    return by_name(TASKS[name])


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


def _built_in(name: str, settings: Any, rewards: Sequence[Callable[..., Any]] | None) -> Task:
    return task_class(name)(settings) if rewards is None or name != "prompts" else RewardsTask(settings, rewards)


def _own(spec: str, settings: Settings, key: str) -> Task:
    """The user's task, made with its settings where it has a class of them, and else without arguments."""
    make = imported(spec, key)
    kind = settings_class(spec, key)
    given = () if kind is Settings else (with_own_settings(settings, kind),)
    try:
        task = make(*given)
    except (Exception, SystemExit) as error:
        message = f"{where(error, source_file(make))}: {type(error).__name__}: {error}"
        raise ImportedError(f"{key} is {spec!r}; calling it failed: {message}") from error
    return require_task(task, f"{key} is {spec!r}")
