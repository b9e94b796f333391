"""Calls of a task's code, which is anybody's, with every fault of it as one error that names the line and the sample.

What a task is given it may change: each call has its own. Knows no tokens or models.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jax_grpo.config import Config, ConfigError
from jax_grpo.config.imported import source_file, where
from jax_grpo.config.loading import did_you_mean
from jax_grpo.prompts.table import UnsuitableRow
from jax_grpo.tasks.base import (
    Component,
    Prompt,
    RewardError,
    Task,
    TaskError,
    TrainerState,
    as_component,
    total_reward,
)
from jax_grpo.tasks.copies import copied


def own_prompt(prompt: Prompt) -> Prompt:
    """The prompt for one call of a task's own code: a change of its columns or messages reaches no other completion or call."""
    if type(prompt) is Prompt and not prompt.columns and prompt.messages is None:
        return prompt  # nothing in it can be changed
    fields = {field.name: getattr(prompt, field.name) for field in dataclasses.fields(prompt) if field.init}
    own = {name: copied(value) for name, value in fields.items() if name != "row"}
    return dataclasses.replace(prompt, **own)


def made_prompt(task: Task, row: Any, seed: int, *, heldout: bool = False) -> Prompt:
    """`task.prompt` of a row, or `task.heldout_prompt`.

    Raises:
        RewardError: it raises, or returns something else; names its line and the row.
        UnsuitableRow: the row lacks something that the task needs.
    """
    make = task.heldout_prompt if heldout else task.prompt
    try:
        prompt = make(row, seed)
    except UnsuitableRow:
        raise
    except (Exception, SystemExit) as error:  # a task is anybody's code
        message = raised(task, f"task {task.name!r}: {make.__name__}", error)
        raise RewardError(f"{message}. It was asked about {row!r:.160}") from error
    if not isinstance(prompt, Prompt):
        returned = f"{make.__name__} returned {prompt!r:.80}; expected a jax_grpo.Prompt"
        raise RewardError(f"task {task.name!r}: {returned}. It was asked about {row!r:.160}")
    return prompt


class CapOutOfRange(ValueError):
    """A prompt's own cap is no number of tokens, or above the run's."""


def caps(prompts: Sequence[Prompt], cap: int) -> np.ndarray:
    """Most tokens of each prompt's completion, int32 [P]; the run's `cap` where a prompt has none of its own.

    Raises:
        CapOutOfRange: names the prompt, its cap and the config key.
    """
    for prompt in prompts:
        if (own := prompt.max_new_tokens) is not None and not 1 <= own <= cap:
            raise CapOutOfRange(
                f"prompt {prompt.text[:80]!r} has max_new_tokens {own}; expected 1 to rollout.max_new_tokens = {cap}, or None"
            )
    return np.array([cap if prompt.max_new_tokens is None else prompt.max_new_tokens for prompt in prompts], np.int32)


def checked_score(
    task: Task,
    prompts: Sequence[Prompt],
    completions: Sequence[Any],
    completion_ids: Sequence[Sequence[int]] = (),
    state: TrainerState = TrainerState(0, 0),  # noqa: B008 (immutable)
) -> dict[str, Component]:
    """`task.score` of texts, or of episodes; each component float32 [B] and finite.

    Raises:
        RewardError: it raises; a component is missing, None, NaN, beyond float32 or of the wrong length; or so is their sum.
        TaskError: the task's own failure, as it is.
    """
    task.begin(state, completion_ids)
    try:
        components = task.score([own_prompt(prompt) for prompt in prompts], list(completions))
    except TaskError:
        raise
    except (Exception, SystemExit) as error:  # a task is anybody's code
        raise RewardError(_blame(task, prompts, completions, completion_ids, state, error)) from error
    if not isinstance(components, Mapping) or set(components) != set(task.component_weights):
        returned = ", ".join(map(str, components)) if isinstance(components, Mapping) else repr(components)[:80]
        raise RewardError(
            f"task {task.name!r}: score returned {returned}; expected an array for each of "
            f"{', '.join(task.component_weights)}"
        )
    scores = {
        name: _checked(f"task {task.name!r}: reward component {name!r}", values, prompts, completions)
        for name, values in components.items()
    }
    with np.errstate(over="ignore", invalid="ignore"):
        total_B = total_reward(scores, task.component_weights)
    if not np.isfinite(total_B).all():
        row = int(np.argmin(np.isfinite(total_B)))
        of = ", ".join(f"{weight:g} {name}" for name, weight in task.component_weights.items())
        raise RewardError(
            f"task {task.name!r}: the reward, {of}, is {total_B[row]} in float32; expected a finite number. "
            f"{sample_text(prompts, completions, row)}"
        )
    return scores


def _checked(where: str, values: Any, prompts: Sequence[Prompt], completions: Sequence[Any]) -> Component:
    count = len(completions)
    if values is None:
        raise RewardError(f"{where} is None; expected {count} numbers. {sample_text(prompts, completions, 0)}")
    values_B, about_B = as_component(values)
    if values_B.shape != (count,):
        raise RewardError(f"{where} has shape {values_B.shape}; expected one number for each of the {count} samples")
    with np.errstate(over="ignore"):  # beyond float32 it is an infinity
        for row, value in enumerate(values_B):
            if not (
                isinstance(value, int | float | np.integer | np.floating | np.bool_) and np.isfinite(np.float32(value))
            ):
                sample = sample_text(prompts, completions, row)
                raise RewardError(f"{where} is {value!r}; expected a finite number. {sample}")
    return Component(values_B.astype(np.float32), about_B)


def _blame(task: Task, prompts, completions, completion_ids, state: TrainerState, error: BaseException) -> str:
    """Scores one by one, to find the sample that raises."""
    name = f"task {task.name!r}"
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        task.begin(state, completion_ids[row : row + 1])
        try:
            task.score([own_prompt(prompt)], [completion])
        except (Exception, SystemExit) as single:
            return f"{raised(task, name, single)}. {sample_text(prompts, completions, row)}"
    alone = f"it does so on the batch of {len(completions)}, on none of its samples alone"
    return f"{raised(task, name, error)}; {alone}"


def raised(task: Task, what: str, error: BaseException) -> str:
    """An exception as errors show it: the line of the task's file, what raised it, and its own words."""
    return f"{where(error, source_file(type(task)))}: {what} raised {type(error).__name__}: {error}"


def sample_text(prompts: Sequence[Prompt], completions: Sequence[Any], row: int) -> str:
    """A sample as errors show it; an episode as all of its turns."""
    return f"Sample {row}: prompt {prompts[row].text[:120]!r}, completion {str(completions[row])[:120]!r}"


def require_outcome(task: Task, config: Config) -> None:
    """Refuses, with a ConfigError, a `rollout.refill.by` that the task does not have, or that is all that the reward is.

    Also a reward of no component where each is compared by itself.
    """
    weights = task.component_weights
    parts = config.advantage.components
    if parts != "sum_first" and not any(weights.values()) and config.objective.overlong_penalty is None:
        raise ConfigError(
            f"advantage.components is {parts!r}, and the weights of {', '.join(weights)} are 0; expected one that is not"
        )
    if config.rollout.refill is None or (by := config.rollout.refill.by) is None:
        return
    if by not in weights:
        hint = did_you_mean(by, [*weights])
        raise ConfigError(
            f"rollout.refill.by is {by!r}: task {task.name!r} has no such component.{hint} It has {', '.join(weights)}"
        )
    if {name for name, weight in weights.items() if weight} == {by} and config.objective.overlong_penalty is None:
        raise ConfigError(
            f"rollout.refill.by {by!r} would do nothing: it is the only component of the reward; leave it out"
        )


def not_negative(rewards_B: np.ndarray) -> None:
    """Refuses, with a RewardError, a reward below 0, where advantages are divided by a group's mean reward."""
    if (rewards_B < 0).any():
        row = int(np.argmin(rewards_B))
        raise RewardError(
            f"the reward of completion {row} is {float(rewards_B[row]):g}; advantage.scale maxrl divides by a group's mean reward "
            "and needs rewards of at least 0"
        )


def about_every_row(components: Mapping[str, Component], weights: Mapping[str, float]) -> None:
    """Refuses, with a RewardError, a weighted component that is not about some row, where they are compared one by one."""
    for name, component in components.items():
        if weights.get(name) and not component.about_B.all():
            raise RewardError(
                f"reward component {name!r} is None for {int((~component.about_B).sum())} of {len(component.about_B)} completions; "
                "advantage.components other than sum_first needs a number of each component for each completion"
            )
