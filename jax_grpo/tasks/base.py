"""What a task is: prompts from positions or from rows of a user's file, a stop rule, and reward components from decoded text.

A component is a pure function of (prompt, completion), vectorised over a batch; the reward is their weighted sum. A task
knows nothing of tokens, models or training.
"""

import dataclasses
import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from jax_grpo.config.sections import PromptsConfig
from jax_grpo.positions.dataset import load_positions
from jax_grpo.positions.position import Position
from jax_grpo.prompts.chat import ChatTemplate
from jax_grpo.prompts.rows import load_prompts
from jax_grpo.tasks.engine import EngineError
from jax_grpo.tasks.imported import source_file, where
from jax_grpo.tasks.stop import StopRule


@dataclasses.dataclass(frozen=True)
class Prompt:
    """What is asked."""

    text: str  # what the model reads
    start_state: int  # where its stop automaton begins
    position: Position | None = None  # the one asked about
    answer: str | None = None  # task-private
    task: str = ""  # in a mixture, the name of the task that asks
    max_new_tokens: int | None = None  # its own cap, where it is below the run's
    columns: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of the row of a user's file that asks
    # Of an episode: (seed, iteration, prompt, sample), which tell it from all others of the run.
    draw: tuple[int, ...] = ()
    messages: Sequence[Mapping[str, Any]] | None = None  # that the text was made of; None: it was a text


class TrainerState(NamedTuple):
    """How far the run is; one optimiser step an iteration makes these TRL's (TRL: trainer_state)."""

    global_step: int  # iterations that are done
    max_steps: int  # iterations of the whole run


class Logged(NamedTuple):
    """What a task's rewards said beside their values."""

    metrics: dict[str, list[float]]  # by name, every value that was logged
    extras: dict[str, list[Any]]  # by name, one value a completion


class Task(Protocol):
    """A verifiable task. `component_weights` lists every component, diagnostics with weight 0 included."""

    name: str
    stop_rule: StopRule
    component_weights: Mapping[str, float]
    reads: Literal["positions", "prompts"] = "positions"  # what `prompts.source` has: `Position`s of chess, or `Row`s
    chat: ChatTemplate | None = None  # what makes texts of messages; `make_task` gives it
    answers: Sequence[str] = ()  # texts that a right completion may be: a tokenizer that cannot write one is refused

    def read(self, prompts: PromptsConfig, seed: int, cache: str | None) -> Any:
        """What the source and split of the config have, as a table of what `reads` says; its errors are ValueErrors."""
        if self.reads == "prompts":
            return load_prompts(prompts, self.chat)
        return load_positions(prompts, seed, cache)

    def prompt(self, position: Position, seed: int) -> Prompt:
        """The prompt for a position, or a row; a function of its arguments alone."""
        ...

    def begin(self, state: TrainerState, completion_ids: Sequence[Sequence[int]]) -> None:
        """Said before each `score`: how far the run is, and the tokens of each completion, or that it wrote in each episode.

        May do nothing.
        """

    def logged(self) -> Logged:
        """What was said since `begin` beside the components."""
        return Logged({}, {})

    def code(self) -> Sequence[Any]:
        """Classes and functions that the task is made of: a run that continues says which of the user's files changed."""
        return [type(self)]

    def score(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> dict[str, np.ndarray]:
        """Raw components [B] float32 of stop-truncated completions, by name, in the order of `component_weights`."""
        ...

    def prepare(self, prompts: Sequence[Prompt]) -> None:
        """Called while completions of the prompts are generated: work for `score` that does not need them. May do nothing."""

    def close(self) -> None:
        """Ends whatever the task started (engine processes)."""


def total_reward(components: Mapping[str, np.ndarray], weights: Mapping[str, float]) -> np.ndarray:
    """Weighted sum of the components, float32 [B]."""
    terms = [np.float32(weights[name]) * np.ma.filled(values, 0) for name, values in components.items()]
    return np.asarray(np.sum(terms, axis=0), np.float32)


def applicable(components: Mapping[str, np.ndarray], prompts: Sequence[Prompt]) -> dict[str, np.ndarray]:
    """Each component's values at the prompts it is about, without components that are about none of them.

    Outside mixtures that is all of [B], but for what is masked; in one, `policy/legal` is about the prompts of `policy`.
    """
    tasks_B = np.array([prompt.task for prompt in prompts])
    own = {name: np.ma.compressed(values[tasks_B == name.rpartition("/")[0]]) for name, values in components.items()}
    return {name: values for name, values in own.items() if len(values)}


def caps(prompts: Sequence[Prompt], cap: int) -> np.ndarray:
    """Most tokens of each prompt's completion, int32 [P]."""
    return np.array([prompt.max_new_tokens or cap for prompt in prompts], np.int32)


class UnknownComponent(ValueError):
    """`task.rewards` names a component that the task does not have."""


def with_overrides(task: str, defaults: Mapping[str, float], overrides: Mapping[str, float] | None) -> dict[str, float]:
    """Default weights with the config's `task.rewards` on top; UnknownComponent names the nearest one and all that exist."""
    for name in overrides or {}:
        if name not in defaults:
            close = difflib.get_close_matches(name, defaults, n=1)
            hint = f" Did you mean {close[0]}?" if close else ""
            raise UnknownComponent(
                f"task.rewards.{name}: the {task} task has no such component.{hint} It has {', '.join(defaults)}"
            )
    return dict(defaults) | dict(overrides or {})


def stack(rows: Sequence[Mapping[str, float]], names: Iterable[str]) -> dict[str, np.ndarray]:
    """Per-row components to arrays; a component that a row lacks is 0."""
    return {name: np.array([row.get(name, 0.0) for row in rows], np.float32) for name in names}


class RewardError(RuntimeError):
    """A task's score cannot be used; the message names the task, the component and the first sample at fault.

    Nothing is replaced by 0: a silent 0 is a wrong reward that nobody finds.
    """


def checked_score(
    task: Task,
    prompts: Sequence[Prompt],
    completions: Sequence[Any],
    completion_ids: Sequence[Sequence[int]] = (),
    state: TrainerState = TrainerState(0, 0),  # noqa: B008 (immutable)
) -> dict[str, np.ndarray]:
    """`task.score` of texts, or of episodes; each component float32 [B] and finite; masked, and 0, where it is not about the row.

    Raises:
        RewardError: it raises, or a component is missing, None, NaN or of the wrong length.
        EngineError: the engine's own failure, as it is.
    """
    task.begin(state, completion_ids)
    try:
        components = task.score(prompts, completions)
    except (EngineError, RewardError):
        raise
    except Exception as error:  # a task is anybody's code
        raise RewardError(_blame(task, prompts, completions, completion_ids, state, error)) from error
    if not isinstance(components, Mapping) or set(components) != set(task.component_weights):
        returned = ", ".join(map(str, components)) if isinstance(components, Mapping) else repr(components)[:80]
        raise RewardError(
            f"task {task.name!r}: score returned {returned}; expected an array for each of "
            f"{', '.join(task.component_weights)}"
        )
    return {
        name: _checked(f"task {task.name!r}: reward component {name!r}", values, prompts, completions)
        for name, values in components.items()
    }


def _checked(where: str, values: object, prompts: Sequence[Prompt], completions: Sequence[Any]) -> np.ndarray:
    count = len(completions)
    if values is None:
        raise RewardError(f"{where} is None; expected {count} numbers. {sample_text(prompts, completions, 0)}")
    values_B = values if isinstance(values, np.ma.MaskedArray) else np.asarray(values)
    if values_B.shape != (count,):
        raise RewardError(f"{where} has shape {values_B.shape}; expected one number for each of the {count} samples")
    # A masked array's own `all` is not true where everything is masked: no row of this batch is what the component is about.
    filled_B = np.ma.filled(values_B, 0)
    if values_B.dtype.kind not in "fiub" or not np.isfinite(filled_B).all():
        for row, value in enumerate(filled_B):
            if not (isinstance(value, int | float | np.number | np.bool_) and np.isfinite(value)):
                sample = sample_text(prompts, completions, row)
                raise RewardError(f"{where} is {value!r}; expected a finite number. {sample}")
    return values_B.astype(np.float32)


def _blame(task: Task, prompts, completions, completion_ids, state: TrainerState, error: Exception) -> str:
    """Scores one by one, to find the sample that raises."""
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        task.begin(state, completion_ids[row : row + 1])
        try:
            task.score([prompt], [completion])
        except Exception as single:
            said = (
                f"{where(single, source_file(type(task)))}: task {task.name!r} raised {type(single).__name__}: {single}"
            )
            return f"{said}. {sample_text(prompts, completions, row)}"
    said = f"{where(error, source_file(type(task)))}: task {task.name!r} raised {type(error).__name__}: {error}"
    return f"{said}; it does so on the batch of {len(completions)}, on none of its samples alone"


def sample_text(prompts: Sequence[Prompt], completions: Sequence[Any], row: int) -> str:
    """A sample as errors show it; an episode as all that was said."""
    return f"Sample {row}: prompt {prompts[row].text[:120]!r}, completion {str(completions[row])[:120]!r}"


def not_negative(rewards_B: np.ndarray) -> None:
    """Refuses, with a RewardError, a reward below 0, where advantages are divided by a group's mean reward."""
    if (rewards_B < 0).any():
        row = int(np.argmin(rewards_B))
        raise RewardError(
            f"the reward of completion {row} is {float(rewards_B[row]):g}; advantage.scale maxrl divides by a group's mean reward "
            "and needs rewards of at least 0"
        )


def about_every_row(components: Mapping[str, np.ndarray], weights: Mapping[str, float]) -> None:
    """Refuses, with a RewardError, a weighted component that is not about some row, where they are compared one by one."""
    for name, values in components.items():
        if weights.get(name) and np.ma.is_masked(values):
            raise RewardError(
                f"reward component {name!r} is None for {int(np.ma.getmaskarray(values).sum())} of {len(values)} completions; "
                "advantage.components other than sum_first needs a number of each component for each completion"
            )
