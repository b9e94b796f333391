"""Several tasks in one batch: each prompt is one task's, with its stop rule, its cap and its rewards.

Components carry their task's name (`policy/legal`) and are 0 for other tasks' prompts; `<task>/reward` is a task's own weighted
sum, of weight 0. Which task asks about a position is a function of the prompt's seed, so a share is met on average; but a
position that comes with a move and its outcome is the environment task's.
"""

import dataclasses
import random
from collections.abc import Mapping, Sequence

import numpy as np

from jax_grpo.config.sections import MixturePart
from jax_grpo.positions.position import Position
from jax_grpo.tasks.base import Prompt, Task, total_reward
from jax_grpo.tasks.stop import union


class MixedTask(Task):
    """See the module; tasks by name, with the share and cap of each by the same names."""

    name = "mixed"

    def __init__(self, tasks: Mapping[str, Task], parts: Mapping[str, MixturePart]):
        self._tasks, self._parts = tasks, parts
        rule, offsets = union([task.stop_rule for task in tasks.values()])
        self.stop_rule, self._offsets = rule, dict(zip(tasks, offsets, strict=True))
        self.component_weights = {
            f"{name}/{component}": weight
            for name, task in tasks.items()
            for component, weight in (*task.component_weights.items(), ("reward", 0.0))
        }

    def prepare(self, prompts: Sequence[Prompt]) -> None:
        for name, task in self._tasks.items():
            task.prepare([prompt for prompt in prompts if prompt.task == name])

    def close(self) -> None:
        for task in self._tasks.values():
            task.close()

    def prompt(self, position: Position, seed: int) -> Prompt:
        names = list(self._tasks)
        drawn = random.Random(f"task/{seed}")  # not the stream that the task itself draws from
        (name,) = drawn.choices(names, [self._parts[name].share for name in names])
        if position.move is not None and "environment" in names:
            name = "environment"
        prompt = self._tasks[name].prompt(position, seed)
        return dataclasses.replace(
            prompt,
            start_state=prompt.start_state + self._offsets[name],
            task=name,
            max_new_tokens=self._parts[name].max_new_tokens,
        )

    def score(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> dict[str, np.ndarray]:
        scores = {name: np.zeros(len(prompts), np.float32) for name in self.component_weights}
        for name, task in self._tasks.items():
            rows = [row for row, prompt in enumerate(prompts) if prompt.task == name]
            if not rows:
                continue
            components = task.score([prompts[row] for row in rows], [completions[row] for row in rows])
            components = {**components, "reward": total_reward(components, task.component_weights)}
            for component, values in components.items():
                scores[f"{name}/{component}"][rows] = values
        return scores
