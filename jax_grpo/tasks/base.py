"""What a task is: prompts made of the rows of a source, a stop rule, and reward components from decoded text.

A component is a pure function of (prompt, completion), vectorised over a batch; the reward is their weighted sum. A task
knows nothing of tokens, models or training.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from jax_grpo.config import ConfigError
from jax_grpo.config.loading import did_you_mean
from jax_grpo.config.sections import PromptsConfig, is_built_in
from jax_grpo.config.tasks import Settings as TaskSettings
from jax_grpo.names import READERS, by_name
from jax_grpo.prompts.chat import ChatTemplate
from jax_grpo.prompts.rows import load_prompts
from jax_grpo.prompts.table import Rows
from jax_grpo.tasks.stop import StopRule

RowT = TypeVar("RowT")


@dataclasses.dataclass(frozen=True)
class Prompt:
    """What a completion is written for, and what its task needs to score it."""

    text: str  # what the model reads
    start_state: int  # where its stop automaton begins
    row: Any = None  # of the source, that it is made of: a `Position`, or a `Row`
    answer: str | None = None  # task-private
    task: str = ""  # in a mixture, the name of the task that asks
    max_new_tokens: int | None = None  # its own cap, at most the run's
    columns: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of the row of a user's file that asks
    # Of an episode: (seed, iteration, prompt, sample), which tell it from all others of the run.
    draw: tuple[int, ...] = ()
    messages: Sequence[Mapping[str, Any]] | None = None  # that the text was made of; None: it was a text


class TrainerState(NamedTuple):
    """How far the run is; one optimiser step an iteration makes these TRL's (TRL: trainer_state)."""

    global_step: int  # iterations that are done
    max_steps: int  # iterations of the whole run


class Logged(NamedTuple):
    """What a task's rewards logged beside their values."""

    metrics: dict[str, list[float]]  # by name, every value that was logged
    extras: dict[str, list[Any]]  # by name, one value a completion


class Component(NamedTuple):
    """A reward component of B completions."""

    values_B: np.ndarray  # float32; 0 where it is not about the completion
    about_B: np.ndarray  # bool

    def at(self, rows: slice | np.ndarray) -> "Component":
        """The same of some of the completions."""
        return Component(self.values_B[rows], self.about_B[rows])

    def tolist(self) -> list[float | None]:
        """Its values; None where it is not about the completion."""
        return [value if about else None for value, about in zip(self.values_B.tolist(), self.about_B, strict=True)]


def component(values: Sequence[float | None]) -> Component:
    """The component with these values, which is not about the completions that have None."""
    about_B = np.array([value is not None for value in values], bool)
    return Component(np.array([0.0 if value is None else value for value in values], np.float32), about_B)


def as_component(values: Any) -> Component:
    """What `Task.score` returned as a component: one, a NumPy masked array, or numbers, which are about every completion."""
    if isinstance(values, Component):
        return values
    if hasattr(values, "filled"):
        return Component(values.filled(0), ~np.broadcast_to(values.mask, values.shape))
    values_B = np.asarray(values)
    return Component(values_B, np.ones(values_B.shape, bool))


class Headline(NamedTuple):
    """A component that people watch while a run trains: its mean is a metric, a column of the console and a panel of the curves."""

    component: str
    metric: str
    heading: str  # of the column, at most five characters
    title: str
    unit: str


class Task(Generic[RowT]):
    """A verifiable task about rows of a kind. `component_weights` lists every component, diagnostics with weight 0 included."""

    Settings: type[TaskSettings] = (
        TaskSettings  # what can be set of it in `task`; one of its own is what it is made with
    )
    name: str
    stop_rule: StopRule
    component_weights: Mapping[str, float]
    reads: str = "prompts"  # what `prompts.source` has: rows of the user's file, or a kind that `names.READERS` reads
    noun: str | None = None  # what it makes of a row, in messages; None: what the source calls its rows
    chat: ChatTemplate | None = None  # what makes texts of messages; `make_task` gives it
    answers: Sequence[str] = ()  # texts that a right completion may be: a tokenizer that cannot write one is refused
    headlines: Sequence[Headline] = ()
    shown: Sequence[str] = ()  # components that the console shows of an evaluation, beside the reward; none: all
    has_suites = False  # whether `python -m jax_grpo.evaluate` judges models of it

    def read(self, prompts: PromptsConfig, seed: int, cache: str | None) -> Rows[RowT]:
        """The rows of the config's source and split; its errors are ValueErrors."""
        if self.reads == "prompts":
            if is_built_in(prompts.source):
                raise ConfigError(
                    f"prompts.source is {prompts.source!r}, which has chess positions, and task {self.name!r} reads prompts: "
                    'expected a .jsonl, .csv or .parquet file, or `reads = "positions"` in the task'
                )
            return load_prompts(prompts, self.chat)  # pyright: ignore[reportReturnType] (RowT is Row)
        if self.reads not in READERS:
            kinds = ", ".join(("prompts", *READERS))
            raise ConfigError(f"task {self.name!r} reads {self.reads!r}; expected one of {kinds}")
        for key in ("template", "chat_template_kwargs"):
            if given := getattr(prompts, key):
                raise ConfigError(
                    f"prompts.{key} {given!r} would do nothing: task {self.name!r} asks about {self.reads}"
                )
        return by_name(READERS[self.reads])(prompts, seed, cache)

    def prompt(self, row: RowT, seed: int) -> Prompt:
        """The prompt of a row; a function of its arguments alone."""
        raise NotImplementedError

    def heldout_prompt(self, row: RowT, seed: int) -> Prompt:
        """The same of a held-out row; a task that draws texts itself draws none here that `prompt` can give."""
        return self.prompt(row, seed)

    def claims(self, row: RowT) -> bool:
        """Whether, in a mixture, a row of the shared source can only be this task's."""
        return False

    def begin(self, state: TrainerState, completion_ids: Sequence[Sequence[int]]) -> None:
        """Called before each `score`: how far the run is, and the tokens of each completion, or that it wrote in each episode.

        May do nothing.
        """

    def logged(self) -> Logged:
        """What was logged since `begin` beside the components."""
        return Logged({}, {})

    def code(self) -> Sequence[Any]:
        """Classes and functions that the task is made of: a run that continues says which of the user's files changed."""
        return [type(self)]

    def score(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> Mapping[str, np.ndarray | Component]:
        """Raw components [B] float32 of stop-truncated completions, by name, in the order of `component_weights`.

        One that is not about every completion is a `Component`, or a NumPy masked array.
        """
        raise NotImplementedError

    def prepare(self, prompts: Sequence[Prompt]) -> None:
        """Called while completions of the prompts are generated: work for `score` that does not need them. May do nothing."""

    def close(self) -> None:
        """Ends whatever the task started (engine processes)."""

    def require_weights(self, weights: str | None) -> None:
        """Raises ConfigError: the model of this name was taught to answer other prompts than this task's."""

    def model_settings(self) -> dict[str, Any]:
        """What config.json says of a model that was trained on the task, beside its architecture."""
        return {}

    def yardsticks(self, prompts: Sequence[Prompt]) -> dict[str, float]:
        """`yardstick/<player>/<component>`: what plain players would get on the held-out prompts."""
        return {}

    def sample_fields(self, prompt: Prompt, completion: str) -> dict[str, Any]:
        """What a recorded sample has beside texts and rewards, ready for JSON."""
        return {}

    def save_pictures(self, folder: Path, prompts: Sequence[Prompt], completions: Sequence[str]) -> list[Path]:
        """Pictures of the greedy answers to the held-out prompts of a run that is complete; returns the files."""
        return []


def total_reward(components: Mapping[str, Component], weights: Mapping[str, float]) -> np.ndarray:
    """Weighted sum of the components, float32 [B]."""
    terms = [np.float32(weights[name]) * component.values_B for name, component in components.items()]
    return np.asarray(np.sum(terms, axis=0), np.float32)


def is_of(name: str, prompts: Sequence[Prompt]) -> np.ndarray:
    """Which of the prompts a component of this name can be about, bool [B]: those of its part; without a mixture, all."""
    return np.array([not prompt.task or name.startswith(f"{prompt.task}/") for prompt in prompts], bool)


def applicable(components: Mapping[str, Component], prompts: Sequence[Prompt]) -> dict[str, np.ndarray]:
    """Each component's values at the prompts it is about, without components that are about none of them.

    In a mixture `policy/legal` is about prompts of the part `policy` alone.
    """
    own = {name: x.values_B[x.about_B & is_of(name, prompts)] for name, x in components.items()}
    return {name: values for name, values in own.items() if len(values)}


def held_out_means(
    components: Mapping[str, Component], prompts: Sequence[Prompt], weights: Mapping[str, float]
) -> dict[str, float]:
    """Means by the names of an evaluation's metrics."""
    return {name: float(own.mean()) for name, (own, _) in held_out_values(components, prompts, weights).items()}


def held_out_values(
    components: Mapping[str, Component], prompts: Sequence[Prompt], weights: Mapping[str, float]
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Values, and the numbers of their prompts, by the names of an evaluation's metrics: `reward`, the weighted sum, and each
    component's own.

    A component that is itself called `reward` is `reward/reward`, and left out where it is the only one.
    """
    all_B = np.arange(len(prompts))
    values = {"reward": (total_reward(components, weights), all_B)}
    numbers = applicable({name: one._replace(values_B=all_B) for name, one in components.items()}, prompts)
    for name, own in applicable(components, prompts).items():
        if name not in values:
            values[name] = own, numbers[name]
        elif len(components) > 1:
            values[f"{name}/{name}"] = own, numbers[name]
    return values


class UnknownComponent(ValueError):
    """`task.rewards` names a component that the task does not have."""


def with_overrides(task: str, defaults: Mapping[str, float], overrides: Mapping[str, float] | None) -> dict[str, float]:
    """Default weights with the config's `task.rewards` on top; UnknownComponent names the nearest one and all that exist."""
    for name in overrides or {}:
        if name not in defaults:
            hint = did_you_mean(name, [*defaults])
            raise UnknownComponent(
                f"task.rewards.{name}: the {task} task has no such component.{hint} It has {', '.join(defaults)}"
            )
    return dict(defaults) | dict(overrides or {})


def stack(rows: Sequence[Mapping[str, float]], names: Iterable[str]) -> dict[str, np.ndarray]:
    """Per-row components to arrays; a component that a row lacks is 0."""
    return {name: np.array([row.get(name, 0.0) for row in rows], np.float32) for name in names}


class TaskError(RuntimeError):
    """A task's own failure, in words: it ends the run as it stands, and no sample is blamed for it."""


class RewardError(TaskError):
    """A task's score cannot be used; the message names the task, the component and the first sample at fault.

    Nothing is replaced by 0: a silent 0 is a wrong reward that nobody finds.
    """
