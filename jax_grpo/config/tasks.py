"""The section `task`: what is asked and how it is scored; several turns; several tasks in one batch.

Which settings the section has depends on the task that it names: `TaskConfig` has those of every task, and the task's own class of
`Settings` (`names.SETTINGS`, or what a class of the user's own declares) adds its own. So has each part of a mixture.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, NamedTuple

import pydantic
from pydantic import BeforeValidator, Field, SerializeAsAny

from jax_grpo import names
from jax_grpo.config.imported import ImportedError, imported
from jax_grpo.config.loading import checked, did_you_mean
from jax_grpo.config.sections import Count, Home, Positive, Section, Text

MIXED = "mixed"
PartName = Annotated[str, Field(pattern=r"^[\w-]+$")]  # a component is called part/component


class Windows(NamedTuple):
    """Columns of what follows a prompt, `[c1 | o1 | c2 | o2 | ... | cK]`: a completion in each turn, an observation between two.

    A completion's window is padded on the right. An observation's is padded on the left: its last column is its last token,
    which predicts the next completion's first. Without episodes there is one completion.
    """

    turns: int
    completion: int  # columns of each, as many as `rollout.max_new_tokens`
    observation: int

    @property
    def columns(self) -> int:
        """Of all windows."""
        return self.begin(self.turns - 1) + self.completion

    @property
    def generated(self) -> int:
        """Most tokens that the model writes in an episode."""
        return self.turns * self.completion

    def begin(self, turn: int) -> int:
        """First column of a turn's completion; turns count from 0."""
        return turn * (self.completion + self.observation)


class EpisodeConfig(Section):
    """A task that answers completions: prompt, completion, observation, completion, and so on."""

    turns: Count
    """Most completions of an episode."""
    max_observation_tokens: Count = 16
    """A longer observation is an error, never cut."""


class Settings(Section):
    """What a task is made with; a task that has settings of its own has a class `Settings` derived from this, which adds them."""

    rewards: dict[str, float] | None = None
    """Weights by component, over the task's defaults (TRL: reward_weights)."""

    @property
    def needs_reference(self) -> str | None:
        """The setting by which the task plays against the run's frozen start, as errors show it; None: it does not."""
        return None


class EpisodicSettings(Settings):
    """Those of a task that may answer completions."""

    episode: EpisodeConfig | None = None
    """Several turns, for a task that answers completions (`guess`, `game`), such as {turns: 3}; null: one completion a prompt.
    A game has so many moves of the model's."""


class MixturePart(Settings):
    """One task of a mixture; it takes the settings of its task too, as `task` does where it names that one."""

    task: Text
    """As task.name; may be left out where the part is called as its task."""
    share: Positive = 1.0
    """Of the prompts, relative to the other parts' shares; met on average."""
    max_new_tokens: Count | None = None
    """Its own cap; null: rollout.max_new_tokens."""
    source: Annotated[Text, Home] | None = None
    """What it reads; null: prompts.source, which has positions."""


def is_own(task: str) -> bool:
    """Whether a task is the user's own."""
    return ":" in task


def settings_class(task: str, key: str = "task.name") -> type[Settings]:
    """The class of a task's settings; a task of the user's own, which `key` names, is imported.

    Raises:
        ImportedError: it cannot be imported, or what it declares as `Settings` cannot be used.
    """
    if not is_own(task):
        return names.by_name(names.SETTINGS[task]) if task in names.SETTINGS else Settings
    own = getattr(imported(task, key), "Settings", Settings)
    if not (isinstance(own, type) and issubclass(own, Settings)):
        raise ImportedError(
            f"{key} is {task!r}: its Settings is {own!r:.80}; expected a class derived from jax_grpo.Settings"
        )
    common = {*TaskConfig.model_fields, *MixturePart.model_fields} - {*EpisodicSettings.model_fields}
    if taken := sorted(common & {*own.model_fields}):
        raise ImportedError(
            f"{key} is {task!r}: its Settings have {taken[0]!r}, which is a setting of every task; rename it"
        )
    return own


_JOINED: dict[tuple[type[Settings], type[Settings]], Any] = {}


def _joined(own: type[Settings], common: type[Settings]) -> Any:
    """The class of a section that has a task's own settings and the common ones; the same for the same two."""
    if own is Settings:
        return common
    if (own, common) not in _JOINED:
        _JOINED[own, common] = pydantic.create_model(own.__name__, __base__=(own, common), __doc__=own.__doc__)
    return _JOINED[own, common]


def with_own_settings(settings: Settings, own: type[Settings]) -> Settings:
    """The section of a task of the user's own, with the defaults of its own settings where none of them was set.

    Raises:
        ConfigError: one of them has no default.
    """
    if isinstance(settings, own):
        return settings
    common = TaskConfig if isinstance(settings, TaskConfig) else MixturePart
    return checked(_joined(own, common), settings.model_dump(), {}, "task")


def _tasks_with(setting: str) -> list[str]:
    """The built-in tasks that have a setting of this name."""
    return [task for task in names.SETTINGS if setting in settings_class(task).model_fields]


def _section(given: Mapping[str, Any], common: type[Settings], key: str) -> Settings:
    """The section of the task that the setting `key` of it names, with the settings of that task.

    Raises:
        ValueError: there is no such task, or a setting is another's.
    """
    place, _, own_key = key.rpartition(".")
    task = given.get(own_key, TaskConfig.model_fields["name"].default)
    known = [*names.TASKS, MIXED] if common is TaskConfig else [*names.TASKS]
    if not isinstance(task, str):
        return common.model_validate(given)
    if task not in known and not is_own(task):
        expected = f"expected {', '.join(known)}, or my_module:MyTask.{did_you_mean(task, known)}"
        raise ValueError(f"{key} is {task!r}; {expected}")
    special = [setting for setting in given if setting not in common.model_fields]
    # A task of the user's own is imported here only where it must be known what its settings are.
    kind = _joined(settings_class(task, key), common) if special or not is_own(task) else common
    for setting in special:
        if setting not in kind.model_fields and (tasks := _tasks_with(setting)):
            part = f": give it to a part, as {place}.mixture.NAME.{setting}" if task == MIXED else ""
            raise ValueError(
                f"{place}.{setting} is {given[setting]!r}, which does nothing unless {key} is {' or '.join(tasks)}; it is "
                f"{task}{part}"
            )
    return kind.model_validate(given)


def _part(given: Any) -> Any:
    """A part of a mixture, which `_task` gives with its name."""
    name, part = given if isinstance(given, tuple) else ("", given)
    return _section(part, MixturePart, f"task.mixture.{name}.task") if isinstance(part, Mapping) else part


def _task(given: Any) -> Any:
    """The section of the task that it names.

    What stands beside a mixture is of each part whose task has such a setting and that does not give it. Null parts are left out;
    the others stand in the order of `names.TASKS`, whatever the file's, behind them the user's own.
    """
    if not isinstance(given, Mapping):
        return given
    name, mixture = given.get("name", "policy"), given.get("mixture")
    if (name == MIXED) != (mixture is not None):
        raise ValueError(
            f"task.name is {name} and task.mixture is {'null' if mixture is None else 'given'}: mixed needs a mixture, and a "
            "mixture task.name: mixed"
        )
    if isinstance(mixture, Mapping):
        beside = {setting: value for setting, value in given.items() if setting not in TaskConfig.model_fields}
        parts = {name: part for name, part in mixture.items() if part is not None}
        tasks = {name: part.get("task", name) if isinstance(part, Mapping) else part for name, part in parts.items()}
        passed: set[str] = set()
        for name, task in tasks.items():
            if isinstance(part := parts[name], Mapping):
                fields = settings_class(task).model_fields if task in [*names.SETTINGS] else ()
                own = {setting: value for setting, value in beside.items() if setting in fields and setting not in part}
                parts[name], passed = {"task": name, **own, **part}, passed | own.keys()
        order = [*names.TASKS, *tasks.values()]
        ordered = sorted(parts, key=lambda name: order.index(tasks[name]))
        given = {setting: value for setting, value in given.items() if setting not in passed}
        given["mixture"] = {name: (name, parts[name]) for name in ordered}
    return _section(given, TaskConfig, "task.name")


class TaskConfig(EpisodicSettings):
    """What is asked and how it is scored: the settings of every task, beside which each has those of its own."""

    name: str = "policy"
    """`policy` chooses moves, `environment` predicts the next state, `game` plays one side of a game of chess, `length` is the toy,
    `guess` the toy of several turns, `instructions` has some to follow, `reasoning_gym` asks that library's questions, `mixed` asks
    several in one batch; `prompts` asks those of a file of yours and has functions of yours reward them; `my_module:MyTask` or
    `my_file.py:MyTask` is a task of your own."""
    mixture: dict[PartName, Annotated[SerializeAsAny[MixturePart], BeforeValidator(_part)]] | None = None
    """`mixed`: its parts by names of your choice, such as {policy: {share: 3}, sums: {task: prompts, source: sums.jsonl}}; a null
    part is left out. What is set beside it in `task` is of each part whose task has such a setting."""

    @classmethod
    def variants(cls) -> list[type["TaskConfig"]]:
        """The classes that the section may be of: one for each task with settings of its own."""
        own = dict.fromkeys(_joined(settings_class(task), TaskConfig) for task in names.SETTINGS)
        return [*own, *(kind for kind in _JOINED.values() if issubclass(kind, TaskConfig) and kind not in own)]

    @property
    def tasks(self) -> dict[str, tuple[str, Settings]]:
        """The tasks, each with its settings, by the names of a mixture's parts; without a mixture, by the empty name."""
        if self.mixture is None:
            return {"": (self.name, self)}
        return {name: (part.task, part) for name, part in self.mixture.items()}

    @property
    def sources(self) -> dict[str, str]:
        """Files of the parts that have one of their own, by the part's name."""
        return {name: part.source for name, part in (self.mixture or {}).items() if part.source is not None}

    def share(self, part: str) -> float:
        """Mean share of the prompts that are a part's; without a mixture, all."""
        parts = self.mixture
        return 1.0 if parts is None else parts[part].share / sum(other.share for other in parts.values())

    def _refusals(self) -> Iterator[str]:
        for name, (task, settings) in self.tasks.items():
            place = f"task.mixture.{name}" if name else "task"
            if settings.rewards is not None and (is_own(task) or task == "prompts"):
                has = "task.reward_weights" if task == "prompts" else "its component_weights"
                yield f"{place}.rewards is of built-in tasks; the weights of {task} are {has}"
            if name and task == "prompts" and name not in self.sources:
                yield f"{place}.source is missing: the file of its prompts"
        if self.mixture is not None and len(self.mixture) < 2:
            yield f"task.mixture has {len(self.mixture)} task; expected at least 2, or set task.name to it"
        if self.mixture is not None and self.rewards is not None:
            yield "task.rewards is of one task; in a mixture set task.mixture.<task>.rewards"


Task = Annotated[SerializeAsAny[TaskConfig], BeforeValidator(_task)]
_CHECKED = pydantic.TypeAdapter(Task)


def task_of(**settings: Any) -> Any:
    """The section with these settings, of the class of the task that `name` says; `policy` where it is not given."""
    return _CHECKED.validate_python(settings)
