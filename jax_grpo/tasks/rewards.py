"""Prompts of the user's file, rewarded by the user's functions, which have the signature of TRL's reward functions.

    def reward(prompts, completions, completion_ids, **columns) -> list[float | None]

A function is called by name with what it takes of: `prompts` and `completions` (texts), `completion_ids` (lists of token ids),
every other column of the file (lists, one value a completion), `trainer_state` (`TrainerState`), `log_metric(name, value)` and
`log_extra(column, values)`. None says that a function is not about that row. Functions may be coroutines. Where a row has messages,
its prompt is they, and its completion a list of one message of the assistant's, as in TRL.
"""

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jax_grpo.config import ConfigError
from jax_grpo.config.loading import did_you_mean
from jax_grpo.config.sections import PromptsConfig
from jax_grpo.config.tasks import TaskConfig
from jax_grpo.prompts.rows import PromptTable, Row
from jax_grpo.tasks.base import Logged, Prompt, RewardError, Task, TrainerState, sample_text
from jax_grpo.tasks.functions import Calls, Function, Reward, named
from jax_grpo.tasks.imported import imported, where
from jax_grpo.tasks.stop import text_stop, with_tokens

GIVEN = ("prompts", "completions", "completion_ids", "trainer_state", "log_metric", "log_extra")  # beside the columns


class RewardsTask(Task):
    """See the module; `functions` are given from Python, in the place of the config's `rewards_from`.

    Raises:
        ImportedError: `rewards_from` names what cannot be imported.
        ConfigError: there is no function, one cannot be called, or the weights are not one for each.
    """

    name = "prompts"
    reads = "prompts"

    def __init__(self, config: TaskConfig, functions: Sequence[Function] | None = None):
        if functions is None:
            functions = [imported(spec, "task.rewards_from") for spec in config.rewards_from or ()]
        if not functions:
            raise ConfigError(
                "task.name prompts needs task.rewards_from, such as [rewards.py:reward]; or rewards=[...] from Python"
            )
        for function in functions:
            if not callable(function):
                kind = type(function).__name__
                raise ConfigError(f"task.rewards_from: {function!r:.80} is of type {kind}; expected a function")
        self._rewards = named(functions)
        weights = [1.0] * len(functions) if config.reward_weights is None else config.reward_weights
        if len(weights) != len(functions):
            names = ", ".join(reward.name for reward in self._rewards)
            raise ConfigError(f"task.reward_weights has {len(weights)} numbers; expected one for each of {names}")
        self.component_weights = {reward.name: weight for reward, weight in zip(self._rewards, weights, strict=True)}
        self.stop_rule = with_tokens(text_stop(*config.stop), config.stop_tokens)
        self._calls, self._timeout_s = Calls(config.timeout_s), config.timeout_s
        self.begin(TrainerState(0, 0), ())

    def read(self, prompts: PromptsConfig, seed: int, cache: str | None) -> PromptTable:
        """Rows of the user's file; a ConfigError where a column is missing or has the name of another argument."""
        table: PromptTable = super().read(prompts, seed, cache)
        if clash := [name for name in table.columns if name in GIVEN]:
            raise ConfigError(
                f"{prompts.source}: the column {clash[0]!r} has the name of an argument of rewards; rename it"
            )
        for reward in self._rewards:
            if missing := [name for name in reward.required() if name not in (*GIVEN, *table.columns)]:
                have = ", ".join(table.columns) or "no other than prompt"
                hint = did_you_mean(missing[0], table.columns)
                raise ConfigError(f"{reward.place} needs the column {missing[0]!r}; {prompts.source} has {have}.{hint}")
        return table

    def prompt(self, row: Row, seed: int) -> Prompt:  # pyright: ignore[reportIncompatibleMethodOverride]
        return Prompt(row.prompt, 0, columns=row.columns, messages=row.messages)

    def begin(self, state: TrainerState, completion_ids: Sequence[Sequence[int]]) -> None:
        self._state, self._ids, self._logged = state, [list(ids) for ids in completion_ids], Logged({}, {})

    def logged(self) -> Logged:
        return self._logged

    def code(self) -> list[Any]:
        return [reward.function for reward in self._rewards]

    def close(self) -> None:
        self._calls.close()

    def score(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> dict[str, np.ndarray]:
        try:
            answers = self._calls.answers(self._rewards, self._arguments(prompts, completions, self._ids))
        except TimeoutError as error:
            raise RewardError(str(error)) from None
        values: dict[str, np.ndarray] = {}
        for reward in self._rewards:
            if (error := answers[reward.name].exception()) is not None:
                raise RewardError(self._blame(reward, error, prompts, completions)) from error
            values[reward.name] = _numbers(reward, answers[reward.name].result(), prompts, completions)
        about_B = np.any([~np.ma.getmaskarray(x_B) for x_B in values.values()], axis=0)
        if not about_B.all():
            row = int(np.argmin(about_B))
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
        asked = [prompt.text if prompt.messages is None else list(prompt.messages) for prompt in prompts]
        answered = [
            text if prompt.messages is None else [{"role": "assistant", "content": text}]
            for prompt, text in zip(prompts, completions, strict=True)
        ]
        said = (asked, answered, ids, self._state, self._log_metric, self._log_extra)
        return given | dict(zip(GIVEN, said, strict=True))

    def _blame(
        self, reward: Reward, error: BaseException, prompts: Sequence[Prompt], completions: Sequence[str]
    ) -> str:
        """What is told of an exception: file, line, and the sample that raises it alone, where one is found in time."""
        said = f"{where(error, reward.file)}: {reward.name} raised {type(error).__name__}: {error}"
        began, everything = time.monotonic(), self._ids
        for row in range(len(prompts)):
            one = slice(row, row + 1)
            self._ids = everything[one]
            try:
                (alone,) = self._calls.answers(
                    [reward], self._arguments(prompts[one], completions[one], self._ids)
                ).values()
            except TimeoutError:
                break
            if alone.exception() is not None:
                return f"{said}. {sample_text(prompts, completions, row)}"
            if time.monotonic() - began > self._timeout_s:
                break
        return f"{said}; it does so on the batch of {len(prompts)}, on none of its samples alone"

    def _log_metric(self, name: str, value: float) -> None:
        self._logged.metrics.setdefault(name, []).append(float(value))

    def _log_extra(self, column: str, values: Sequence[Any]) -> None:
        if len(values) != len(self._ids):
            expected = f"expected one for each of {len(self._ids)} completions"
            raise ValueError(f"log_extra({column!r}) was given {len(values)} values; {expected}")
        self._logged.extras[column] = list(values)


def _numbers(reward: Reward, answer: Any, prompts: Sequence[Prompt], completions: Sequence[str]) -> np.ndarray:
    """What a function answered, float32 [B], masked where it is None."""
    count = len(prompts)
    if isinstance(answer, str | bytes | Mapping) or not hasattr(answer, "__len__"):
        raise RewardError(f"{reward.place} returned {answer!r:.80}; expected a list of {count} numbers")
    if len(answer) != count:
        raise RewardError(f"{reward.place} returned {len(answer)} values; expected one for each of {count} completions")
    values = list(answer)
    for row, value in enumerate(values):
        if value is not None and not (hasattr(value, "__float__") and math.isfinite(value)):
            sample = sample_text(prompts, completions, row)
            raise RewardError(f"{reward.place} returned {value!r:.80}; expected a finite number or None. {sample}")
    with np.errstate(over="ignore"):  # an infinity is refused by who asks
        numbers = np.array([0 if value is None else float(value) for value in values], np.float32)
    return np.ma.masked_array(numbers, [value is None for value in values])
