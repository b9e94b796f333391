"""Prompts of the user's file, rewarded by the user's functions, which have the signature of TRL's reward functions.

    def reward(prompts, completions, completion_ids, **columns) -> list[float | None]

A function is called by name with what it takes of: `prompts` and `completions` (texts), `completion_ids` (lists of token ids),
every other column of the file (lists, one value a completion), `trainer_state` (`global_step`), `log_metric(name, value)` and
`log_extra(column, values)`. None says that a function is not about that row. Functions may be coroutines.
"""

import asyncio
import inspect
import itertools
import math
import threading
import types
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jax_grpo.config.sections import TaskConfig
from jax_grpo.prompts.rows import Row
from jax_grpo.tasks.base import Logged, Prompt, RewardError, Task, sample_text
from jax_grpo.tasks.imported import imported, where
from jax_grpo.tasks.stop import text_stop

Function = Callable[..., Any]
Sample = tuple[Prompt, str, Sequence[int]]  # prompt, completion, its tokens
NUMBERS = (int, float, np.number, np.bool_)


class Reward(NamedTuple):
    """A user's function under the name of its component, with where it stands."""

    name: str
    function: Function
    file: str
    line: int

    @property
    def place(self) -> str:
        """As errors name it."""
        return f"{self.file}:{self.line}: {self.name}"

    def takes(self, argument: str) -> bool:
        """Whether it can be called with that argument."""
        parameters = inspect.signature(self.function).parameters
        return argument in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


class _Call(threading.Thread):
    """A function at work, in a thread of its own so that one that hangs can be named; it ends with the process at the latest."""

    def __init__(self, function: Function, given: Mapping[str, Any]):
        super().__init__(daemon=True)
        self._function, self._given = function, given
        self.answer: Any = None
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.answer = self._function(**self._given)
            if inspect.isawaitable(self.answer):
                self.answer = asyncio.run(_awaited(self.answer))
        except BaseException as error:
            self.error = error


async def _awaited(answer: Awaitable[Any]) -> Any:
    return await answer


class RewardsTask(Task):
    """See the module; `functions` are given from Python, in the place of the config's `rewards_from`.

    Raises:
        ImportedError: `rewards_from` names what cannot be imported.
        RewardError: there is no function, one cannot be called, or the weights are not one for each.
    """

    name = "prompts"
    reads = "prompts"

    def __init__(self, config: TaskConfig, functions: Sequence[Function] | None = None):
        if functions is None:
            functions = [imported(spec, "task.rewards_from") for spec in config.rewards_from or ()]
        if not functions:
            raise RewardError(
                "task.name prompts needs task.rewards_from, such as [rewards.py:reward]; or rewards=[...] from Python"
            )
        self._rewards = _named(functions)
        weights = [1.0] * len(functions) if config.reward_weights is None else config.reward_weights
        if len(weights) != len(functions):
            names = ", ".join(reward.name for reward in self._rewards)
            raise RewardError(f"task.reward_weights has {len(weights)} numbers; expected one for each of {names}")
        self.component_weights = {reward.name: weight for reward, weight in zip(self._rewards, weights, strict=True)}
        self.stop_rule = text_stop(tuple(config.stop))
        self._timeout_s, self._step = config.timeout_s, 0
        self._ids: Sequence[Sequence[int]] = ()
        self._logged = Logged({}, {})

    def prompt(self, row: Row, seed: int) -> Prompt:  # pyright: ignore[reportIncompatibleMethodOverride]
        return Prompt(row.prompt, 0, columns=row.columns)

    def begin(self, step: int, completion_ids: Sequence[Sequence[int]]) -> None:
        self._step, self._ids, self._logged = step, completion_ids, Logged({}, {})

    def logged(self) -> Logged:
        return self._logged

    def score(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> dict[str, np.ndarray]:
        samples = list(zip(prompts, completions, self._ids, strict=True))
        calls: dict[str, _Call] = {}
        for reward in self._rewards:
            calls[reward.name] = self._call(reward, samples)
            if not inspect.iscoroutinefunction(reward.function):  # those wait for something: side by side
                calls[reward.name].join(self._timeout_s)
        values = {reward.name: self._values(reward, calls[reward.name], samples) for reward in self._rewards}
        about_B = np.any([~np.ma.getmaskarray(x_B) for x_B in values.values()], axis=0)
        if not about_B.all():
            row = int(np.flatnonzero(~about_B)[0])
            raise RewardError(
                f"task.rewards_from: every function returned None; expected a number from one of {', '.join(values)}. "
                f"{sample_text(prompts, completions, row)}"
            )
        return values

    def _call(self, reward: Reward, samples: Sequence[Sample]) -> _Call:
        names = dict.fromkeys(name for prompt, _, _ in samples for name in prompt.columns)
        given: dict[str, Any] = {name: [prompt.columns.get(name) for prompt, _, _ in samples] for name in names}
        given |= {
            "prompts": [prompt.text for prompt, _, _ in samples],
            "completions": [completion for _, completion, _ in samples],
            "completion_ids": [list(ids) for _, _, ids in samples],
            "trainer_state": types.SimpleNamespace(global_step=self._step),
            "log_metric": self._log_metric,
            "log_extra": self._log_extra,
        }
        return _Call(reward.function, {name: value for name, value in given.items() if reward.takes(name)})

    def _values(self, reward: Reward, call: _Call, samples: Sequence[Sample]) -> np.ndarray:
        """What a call answered as numbers [B], masked where it is None."""
        call.join(self._timeout_s)
        if call.is_alive():
            raise RewardError(f"{reward.place} has not answered within task.timeout_s {self._timeout_s:g} s")
        if call.error is not None:
            raise RewardError(self._blame(reward, call.error, samples)) from call.error
        answer = call.answer
        if isinstance(answer, str) or not hasattr(answer, "__len__"):
            raise RewardError(f"{reward.place} returned {answer!r:.80}; expected a list of {len(samples)} numbers")
        if len(answer) != len(samples):
            raise RewardError(
                f"{reward.place} returned {len(answer)} values; expected one for each of {len(samples)} completions"
            )
        for row, value in enumerate(answer):
            if value is not None and not (isinstance(value, NUMBERS) and math.isfinite(value)):
                prompts, completions, _ = zip(*samples, strict=True)
                raise RewardError(
                    f"{reward.place} returned {value!r:.80}; expected a finite number or None. "
                    f"{sample_text(prompts, completions, row)}"
                )
        numbers = np.array([0 if value is None else value for value in answer], np.float32)
        return np.ma.masked_array(numbers, [value is None for value in answer])

    def _blame(self, reward: Reward, error: BaseException, samples: Sequence[Sample]) -> str:
        """The message of an exception in a function: file, line, and the sample that raises it alone, where one does."""
        said = f"{where(error, reward.file)}: {reward.name} raised {type(error).__name__}: {error}"
        for row, (prompt, completion, _) in enumerate(samples):
            alone = self._call(reward, samples[row : row + 1])
            alone.join(self._timeout_s)
            if alone.error is not None:
                return f"{said}. {sample_text([prompt] * (row + 1), [completion] * (row + 1), row)}"
        return f"{said}; it does so on the batch of {len(samples)}, on none of its samples alone"

    def _log_metric(self, name: str, value: float) -> None:
        self._logged.metrics.setdefault(name, []).append(float(value))

    def _log_extra(self, column: str, values: Sequence[Any]) -> None:
        if len(values) != len(self._ids):
            raise ValueError(
                f"log_extra({column!r}) was given {len(values)} values; expected one for each of {len(self._ids)} completions"
            )
        self._logged.extras[column] = list(values)


def _named(functions: Sequence[Function]) -> list[Reward]:
    """Functions under names of their own: `reward`, and `reward_2` where two are called so."""
    rewards: dict[str, Reward] = {}
    for function in functions:
        if not callable(function):
            raise RewardError(f"task.rewards_from: {function!r:.80} is {type(function).__name__}; expected a function")
        name = base = getattr(function, "__name__", type(function).__name__)
        for number in itertools.count(2):
            if name not in rewards:
                break
            name = f"{base}_{number}"
        code = getattr(inspect.unwrap(function), "__code__", None) or getattr(type(function).__call__, "__code__", None)
        place = (code.co_filename, code.co_firstlineno) if code else (f"<{type(function).__module__}>", 0)
        rewards[name] = Reward(name, function, *place)
    return list(rewards.values())
