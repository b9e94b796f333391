"""What a task of several turns is: it answers completions with more prompt, until it says that the episode is done.

An environment is the task's side of one episode. The model writes the completions and reads the observations. Knows nothing of
tokens, models or training.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

import numpy as np

from jax_grpo.tasks.base import Prompt, RewardError, Task, TaskError
from jax_grpo.tasks.checked import own_prompt, raised

Policy = Literal["self", "reference"]  # as it is now, and as it was when the run began
# A policy's stop-truncated completions of prompts, each drawn by the number, below 2^31, that stands with it.
Write = Callable[[Sequence[Prompt], Sequence[int]], list[str]]


class Environment(Protocol):
    """One episode's state. What is random in it follows from the prompt (its `draw`), else a run could not be continued exactly."""

    def step(self, completion: str) -> tuple[str, bool]:
        """The observation that answers a stop-truncated completion, and whether the episode is done.

        The last observation is part of the episode, and the model does not read it.
        """
        ...


class Elsewhere:
    """Of several processes, the environment of an episode that another one answers, which sends the answers."""

    def step(self, completion: str) -> tuple[str, bool]:
        raise AssertionError("another process answers this episode")


class Turn(NamedTuple):
    """A completion up to its stop, and what it was answered."""

    completion: str
    observation: str


@dataclasses.dataclass
class Episode:
    """The turns of one episode, and the environment as it stands after them."""

    environment: Environment
    turns: list[Turn] = dataclasses.field(default_factory=list)
    done: bool = False  # the task said so; else the turns were used up
    cut: bool = False  # a completion was cut at its cap

    def __str__(self) -> str:
        """The texts of all turns, in order."""
        return "".join(text for turn in self.turns for text in turn)


class StepFailed(Exception):
    """The step of one environment raised, which is its cause; the argument is the environment's place in the list."""


class EpisodicTask(Task):
    """A task that answers completions. It has `Task`'s `name`, `stop_rule`, `component_weights` and `prompt`.

    The stop rule begins in the prompt's `start_state` in every turn.
    """

    asks: Policy | None = None  # the policy that completes prompts of the task's own between turns

    def meet(self, write: Write) -> None:
        """Called before each `reset` of a batch where `asks` names a policy: `write` is that policy, as it is now."""

    def observation(self, prompt: Prompt) -> str | None:
        """An observation as long as those to come, which must fit before anything is compiled; None: nobody knows."""
        return None

    def reset(self, prompt: Prompt) -> Environment:
        """A fresh episode of the prompt; each of its G completions has one."""
        raise NotImplementedError

    def steps(self, environments: Sequence[Environment], completions: Sequence[str]) -> list[tuple[str, bool]]:
        """`step` of each; a task whose environments share work (a pool of processes, say) does it for all of them at once here."""
        answers = []
        for place, (environment, text) in enumerate(zip(environments, completions, strict=True)):
            try:
                answers.append(environment.step(text))
            except TaskError:
                raise
            except (Exception, SystemExit) as error:  # a task is anybody's code
                raise StepFailed(place) from error
        return answers

    def score(self, prompts: Sequence[Prompt], episodes: Sequence[Episode]) -> dict[str, np.ndarray]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Raw components [B] float32 of whole episodes, by name, in the order of `component_weights`."""
        raise NotImplementedError


def checked_reset(task: EpisodicTask, prompts: Sequence[Prompt]) -> list[Episode]:
    """A fresh episode of each prompt. Raises RewardError: `reset` raises; names its line and the sample."""
    episodes = []
    for row, prompt in enumerate(prompts):
        try:
            episodes.append(Episode(task.reset(own_prompt(prompt))))
        except TaskError:
            raise
        except (Exception, SystemExit) as error:  # a task is anybody's code
            raise RewardError(raised(task, f"{_sample(task, prompts, row)}: reset", error)) from error
    return episodes


def checked_steps(
    task: EpisodicTask, prompts: Sequence[Prompt], episodes: Mapping[int, Episode], completions: Sequence[str]
) -> list[tuple[str, bool]]:
    """`task.steps` of the episodes, which are given by their rows: a text and a bool for each.

    Raises:
        RewardError: it raises, or returns something else; names the line, the task and the first sample at fault.
        TaskError: the task's own failure, as it is.
    """
    environments, rows = [episode.environment for episode in episodes.values()], list(episodes)
    try:
        answers = task.steps(environments, completions)
    except TaskError:
        raise
    except StepFailed as failed:
        (place,), cause = failed.args, failed.__cause__
        assert cause is not None, "see `EpisodicTask.steps`"
        sample = f"{_sample(task, prompts, rows[place])}, completion {completions[place][:120]!r}"
        raise RewardError(raised(task, f"{sample}: step", cause)) from cause
    except (Exception, SystemExit) as error:
        raise RewardError(raised(task, f"task {task.name!r}: steps of {len(rows)} samples", error)) from error
    if not isinstance(answers, Sequence) or len(answers) != len(rows):
        raise RewardError(f"task {task.name!r}: steps returned {answers!r:.80}; expected {len(rows)} answers")
    for row, text, answer in zip(rows, completions, answers, strict=True):
        match answer:
            case (str(), bool() | np.bool_()):
                continue
        sample = f"{_sample(task, prompts, row)}, completion {text[:120]!r}"
        raise RewardError(f"{sample}: step returned {answer!r:.80}; expected (observation text, done)")
    return list(answers)


def _sample(task: Task, prompts: Sequence[Prompt], row: int) -> str:
    return f"task {task.name!r}, sample {row}: prompt {prompts[row].text[:120]!r}"
