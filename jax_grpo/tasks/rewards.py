"""Prompts of the user's file, rewarded by the user's functions, which have the signature of TRL's reward functions.

    def reward(prompts, completions, completion_ids, **columns) -> list[float | None]

A function is called by name with what it takes of: `prompts` and `completions` (texts), `completion_ids` (lists of token ids),
every other column of the file (lists, one value a completion), `trainer_state` (`TrainerState`), `log_metric(name, value)` and
`log_extra(column, values)`. None says that a function is not about that row. Functions may be coroutines. Where a row has messages,
its prompt is they, and its completion a list of one message of the assistant's, as in TRL.
"""

import contextlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import numpy as np
from pydantic import BeforeValidator, Field

from jax_grpo.config import ConfigError
from jax_grpo.config.imported import imported, where
from jax_grpo.config.loading import did_you_mean
from jax_grpo.config.sections import Home, Positive, PromptsConfig, Text
from jax_grpo.config.tasks import Settings
from jax_grpo.prompts.rows import PromptTable, Row, load_prompts
from jax_grpo.tasks.base import Component, Logged, Prompt, RewardError, Task, TrainerState, component
from jax_grpo.tasks.checked import sample_text
from jax_grpo.tasks.copies import plain
from jax_grpo.tasks.functions import Calls, Function, RewardFunction, named
from jax_grpo.tasks.stop import text_stop, with_tokens

GIVEN = ("prompts", "completions", "completion_ids", "trainer_state", "log_metric", "log_extra")  # beside the columns


def _as_list(value: Any) -> Any:
    """A single text as a list of it."""
    return [value] if isinstance(value, str) else value


class PromptsSettings(Settings):
    """`prompts`: those of a file of yours, rewarded by functions of yours."""

    rewards_from: Annotated[list[Annotated[Text, Home]] | None, BeforeValidator(_as_list)] = None
    """`prompts`: reward functions with TRL's signature, `my_module:reward` or `my_file.py:reward`, one or a list (TRL:
    reward_funcs); see docs/extending.md."""
    reward_weights: list[float] | None = None
    """`prompts`: one for each function; null: 1 for each (TRL: reward_weights)."""
    stop: list[Text] = Field(default=[])
    """`prompts`: texts before which a completion ends; end-of-text always ends it (TRL: generation_kwargs stop_strings)."""
    stop_tokens: list[Any] = Field(default=[])
    """`prompts`: tokens that end a completion too, by their text or id, such as ["<|im_end|>", 198] (TRL: generation_kwargs
    eos_token_id); they are trained on, and no part of the text."""
    timeout_s: Positive = 60.0
    """`prompts`: seconds after which a reward function counts as hanging, and the run ends."""

    def _refusals(self) -> Iterator[str]:
        for token in self.stop_tokens:
            if isinstance(token, bool) or not isinstance(token, str | int) or token == "":
                yield f"task.stop_tokens has {token!r}; expected texts of single tokens, or ids"
        yield from super()._refusals()


class RewardsTask(Task[Row]):
    """See the module; `functions` are given from Python, where the config has no `rewards_from`.

    Raises:
        ImportedError: `rewards_from` names what cannot be imported.
        ConfigError: there is no function, or both; one cannot be called; or the weights are not one for each.
    """

    name, Settings = "prompts", PromptsSettings

    def __init__(self, settings: PromptsSettings, functions: Sequence[Function] | None = None):
        if callable(functions) or isinstance(functions, str):
            raise ConfigError(f"rewards is {functions!r:.80}; expected a list of functions, such as [reward]")
        if functions is not None and settings.rewards_from is not None:
            raise ConfigError(
                f"task.rewards_from is {settings.rewards_from}, which does nothing beside rewards that Python gives; leave one out"
            )
        if functions is None:
            functions = [imported(spec, "task.rewards_from") for spec in settings.rewards_from or ()]
        if not functions:
            raise ConfigError(
                "task.name prompts needs task.rewards_from, such as [rewards.py:reward]; or rewards=[...] from Python"
            )
        for function in functions:
            if not callable(function):
                kind = type(function).__name__
                raise ConfigError(f"task.rewards_from: {function!r:.80} is of type {kind}; expected a function")
        self._rewards = named(functions)
        weights = [1.0] * len(functions) if settings.reward_weights is None else settings.reward_weights
        if len(weights) != len(functions):
            names = ", ".join(reward.name for reward in self._rewards)
            raise ConfigError(f"task.reward_weights has {len(weights)} numbers; expected one for each of {names}")
        self.component_weights = {reward.name: weight for reward, weight in zip(self._rewards, weights, strict=True)}
        self.stop_rule = with_tokens(text_stop(*settings.stop), settings.stop_tokens)
        self._calls, self._timeout_s = Calls(settings.timeout_s), settings.timeout_s
        self.begin(TrainerState(0, 0), ())

    def read(self, prompts: PromptsConfig, seed: int, cache: str | None) -> PromptTable:
        """Rows of the user's file; a ConfigError where a column is missing or has the name of another argument."""
        table = load_prompts(prompts, self.chat)
        if clash := [name for name in table.columns if name in GIVEN]:
            raise ConfigError(
                f"{prompts.source}: the column {clash[0]!r} has the name of an argument of rewards; rename it"
            )
        for reward in self._rewards:
            try:
                getattr(
                    reward.function, "require", lambda: None
                )()  # what it needs beside its arguments, such as a library
            except ImportError as error:
                raise ConfigError(f"{reward.place}: {error}") from None
            if missing := [name for name in reward.required() if name not in (*GIVEN, *table.columns)]:
                have = ", ".join(table.columns) or "no other than prompt"
                hint = did_you_mean(missing[0], table.columns)
                raise ConfigError(f"{reward.place} needs the column {missing[0]!r}; {prompts.source} has {have}.{hint}")
        return table

    def prompt(self, row: Row, seed: int) -> Prompt:
        return Prompt(row.prompt, 0, columns=row.columns, messages=row.messages)

    def begin(self, state: TrainerState, completion_ids: Sequence[Sequence[int]]) -> None:
        self._state, self._ids, self._logged = state, [list(ids) for ids in completion_ids], Logged({}, {})

    def logged(self) -> Logged:
        return self._logged

    def code(self) -> list[Any]:
        return [reward.function for reward in self._rewards]

    def close(self) -> None:
        self._calls.close()

    def score(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> dict[str, Component]:
        values: dict[str, Component] = {}
        try:
            for reward, answer in self._calls.answers(self._rewards, self._arguments(prompts, completions, self._ids)):
                if (error := answer.exception()) is not None:
                    raise RewardError(self._blame(reward, error, prompts, completions)) from error
                values[reward.name] = _numbers(reward, answer.result(), prompts, completions)
        except TimeoutError as error:
            raise RewardError(str(error)) from None
        values = {name: values[name] for name in self.component_weights}
        rewarded_B = np.any([one.about_B for one in values.values()], axis=0)
        if not rewarded_B.all():
            row = int(np.argmin(rewarded_B))
            raise RewardError(
                f"task.rewards_from: every function returned None; expected a number from one of {', '.join(values)}. "
                f"{sample_text(prompts, completions, row)}"
            )
        return values

    def _arguments(
        self, prompts: Sequence[Prompt], completions: Sequence[str], ids: Sequence[list[int]]
    ) -> dict[str, Any]:
        columns = dict.fromkeys(name for prompt in prompts for name in prompt.columns)
        given: dict[str, Any] = {name: [prompt.columns.get(name) for prompt in prompts] for name in columns}
        questions = [prompt.text if prompt.messages is None else list(prompt.messages) for prompt in prompts]
        answers = [
            text if prompt.messages is None else [{"role": "assistant", "content": text}]
            for prompt, text in zip(prompts, completions, strict=True)
        ]
        others = (questions, answers, ids, self._state, self._log_metric, self._log_extra)
        return given | dict(zip(GIVEN, others, strict=True))

    def _blame(
        self, reward: RewardFunction, error: BaseException, prompts: Sequence[Prompt], completions: Sequence[str]
    ) -> str:
        """An exception in words: file, line, and the sample that raises it alone, where one does within the time limit."""
        message = f"{where(error, reward.file)}: {reward.name} raised {type(error).__name__}: {error}"
        began, everything = time.monotonic(), self._ids
        for row in range(len(prompts)):
            one = slice(row, row + 1)
            self._ids = everything[one]
            try:
                arguments = self._arguments(prompts[one], completions[one], self._ids)
                ((_, alone),) = self._calls.answers([reward], arguments)
            except TimeoutError:
                break
            if alone.exception() is not None:
                return f"{message}. {sample_text(prompts, completions, row)}"
            if time.monotonic() - began > self._timeout_s:
                break
        return f"{message}; it does so on the batch of {len(prompts)}, on none of its samples alone"

    def _log_metric(self, name: str, value: float) -> None:
        self._logged.metrics.setdefault(name, []).append(float(value))

    def _log_extra(self, column: str, values: Sequence[Any]) -> None:
        if len(values) != len(self._ids):
            expected = f"expected one for each of {len(self._ids)} completions"
            raise ValueError(f"log_extra({column!r}) was given {len(values)} values; {expected}")
        self._logged.extras[column] = [plain(value) for value in values]  # now: the function may change them later


def _numbers(reward: RewardFunction, answer: Any, prompts: Sequence[Prompt], completions: Sequence[str]) -> Component:
    """The component of what a function returned. Raises RewardError: it is no list of finite numbers and None."""
    count = len(prompts)
    if isinstance(answer, str | bytes | Mapping) or not hasattr(answer, "__len__"):
        raise RewardError(f"{reward.place} returned {answer!r:.80}; expected a list of {count} numbers")
    if len(answer) != count:
        raise RewardError(f"{reward.place} returned {len(answer)} values; expected one for each of {count} completions")
    values = list(answer)
    with np.errstate(over="ignore"):  # beyond float32 it is an infinity
        rewards = component([None if value is None else _number(value) for value in values])
    for row, number in enumerate(rewards.values_B):
        if not math.isfinite(number):
            sample = sample_text(prompts, completions, row)
            raise RewardError(
                f"{reward.place} returned {values[row]!r:.80}; expected a finite number or None. {sample}"
            )
    return rewards


def _number(value: Any) -> float:
    """A number, or the only one of an array; NaN: it is none."""
    with contextlib.suppress(ArithmeticError, RuntimeError, TypeError, ValueError):
        only = value.item() if hasattr(value, "item") else value
        if hasattr(only, "__float__"):
            return float(only)
    return math.nan
