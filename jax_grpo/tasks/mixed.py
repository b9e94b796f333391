"""Several tasks in one batch: each prompt is one task's, with its stop rule, its cap and its rewards.

Components carry their task's name (`policy/legal`) and are 0 for other tasks' prompts; `<task>/reward` is a task's own weighted
sum, of weight 0. Which task asks about a position is a function of the prompt's seed, so a share is met on average; but a
position that comes with a move and its outcome is the environment task's. Tasks with a source of their own (`tasks.interleaved`)
take turns with those in their shares, each going through its own rows.
"""

import dataclasses
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jax_grpo.config import ConfigError
from jax_grpo.config.sections import PromptsConfig
from jax_grpo.config.tasks import MixturePart
from jax_grpo.positions.position import Position
from jax_grpo.tasks.base import Logged, Prompt, Task, TrainerState, total_reward
from jax_grpo.tasks.interleaved import Asked, Interleaved
from jax_grpo.tasks.stop import union

SHARED = "prompts.source"  # whose rows the tasks without a source of their own draw from


class MixedTask(Task):
    """See the module; tasks by name, with the share and cap of each by the same names."""

    name = "mixed"

    def __init__(self, tasks: Mapping[str, Task], parts: Mapping[str, MixturePart]):
        self._tasks, self._parts = tasks, parts
        self._shared = [name for name, part in parts.items() if part.own_source is None]  # ask about rows of `SHARED`
        rule, offsets = union([task.stop_rule for task in tasks.values()])
        self.stop_rule, self._offsets = rule, dict(zip(tasks, offsets, strict=True))
        self.answers = [answer for task in tasks.values() for answer in task.answers]
        self.component_weights = {
            f"{name}/{component}": weight
            for name, task in tasks.items()
            for component, weight in (*task.component_weights.items(), ("reward", 0.0))
        }
        self.begin(TrainerState(0, 0), ())

    def read(self, prompts: PromptsConfig, seed: int, cache: str | None) -> Any:
        """The positions of `prompts.source`, or they and the rows of the tasks' own sources, in turn."""
        sources = {name: part.own_source for name, part in self._parts.items() if part.own_source is not None}
        shared = self._shared
        for name in shared:
            if self._tasks[name].reads != "positions":
                raise ConfigError(
                    f"task.mixture.{name} reads prompts and has no source; expected task.mixture.{name}.source"
                )
        if not sources:
            return super().read(prompts, seed, cache)
        if not shared and prompts.source != PromptsConfig().source:
            raise ConfigError(
                f"prompts.source is {prompts.source!r}, but each task of the mixture has a source of its own"
            )
        tables = {SHARED: super().read(prompts, seed, cache)} if shared else {}
        shares = {SHARED: sum(self._parts[name].share for name in shared)} if shared else {}
        for name, source in sources.items():
            asked = prompts.model_copy(update={"source": source, "format": "auto"})
            tables[name], shares[name] = self._tasks[name].read(asked, seed, cache), self._parts[name].share
        return Interleaved(tables, shares)

    def begin(self, state: TrainerState, completion_ids: Sequence[Sequence[int]]) -> None:
        self._state, self._ids, self._logged = state, completion_ids, Logged({}, {})

    def logged(self) -> Logged:
        return self._logged

    def code(self) -> list[Any]:
        return [each for task in self._tasks.values() for each in task.code()]

    def prepare(self, prompts: Sequence[Prompt]) -> None:
        for name, task in self._tasks.items():
            task.prepare([prompt for prompt in prompts if prompt.task == name])

    def close(self) -> None:
        for task in self._tasks.values():
            task.close()

    def prompt(self, row: Any, seed: int) -> Prompt:  # pyright: ignore[reportIncompatibleMethodOverride]
        name, row = row if isinstance(row, Asked) else (SHARED, row)
        if name == SHARED:
            name = self._drawn(row, seed)
        prompt = self._tasks[name].prompt(row, seed)
        return dataclasses.replace(
            prompt,
            start_state=prompt.start_state + self._offsets[name],
            task=name,
            max_new_tokens=self._parts[name].max_new_tokens,
        )

    def _drawn(self, position: Position, seed: int) -> str:
        """The task that asks about a position."""
        drawn = random.Random(f"task/{seed}")  # not the stream that the task itself draws from
        (name,) = drawn.choices(self._shared, [self._parts[name].share for name in self._shared])
        return "environment" if position.move is not None and "environment" in self._shared else name

    def score(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> dict[str, np.ndarray]:
        scores = {name: np.zeros(len(prompts), np.float32) for name in self.component_weights}
        for name, task in self._tasks.items():
            rows = [row for row, prompt in enumerate(prompts) if prompt.task == name]
            if not rows:
                continue
            task.begin(self._state, [self._ids[row] for row in rows] if len(self._ids) else ())
            components = task.score([prompts[row] for row in rows], [completions[row] for row in rows])
            components = {**components, "reward": total_reward(components, task.component_weights)}
            for component, values in components.items():
                if np.ma.is_masked(values):
                    scores[f"{name}/{component}"] = np.ma.masked_array(scores[f"{name}/{component}"])
                scores[f"{name}/{component}"][rows] = values
            self._keep(name, rows, len(prompts), task.logged())
        return scores

    def _keep(self, name: str, rows: Sequence[int], count: int, said: Logged) -> None:
        """What a task said, under its name; None for other tasks' completions."""
        self._logged.metrics.update({f"{name}/{metric}": values for metric, values in said.metrics.items()})
        for column, values in said.extras.items():
            own = dict(zip(rows, values, strict=True))
            self._logged.extras[f"{name}/{column}"] = [own.get(row) for row in range(count)]
