"""Several tasks in one batch: each prompt is one task's, with its stop rule, its cap and its rewards.

Components carry their task's name (`policy/legal`) and are 0 for other tasks' prompts; `<task>/reward` is a task's own weighted
sum, of weight 0, and a component called `reward` is `<task>/reward/reward`. Which task asks about a row is a function of the
prompt's seed, so a share is met on average; but a row that a task claims is that task's. Tasks with a source of their own, or
that make their rows, take turns with those in their shares, each going through its own rows (`tasks.interleaved`).
"""

import dataclasses
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jax_grpo.config import ConfigError
from jax_grpo.config.sections import PromptsConfig
from jax_grpo.config.tasks import MixturePart
from jax_grpo.tasks.base import Component, Logged, Prompt, Task, TrainerState, as_component, total_reward
from jax_grpo.tasks.interleaved import Interleaved, TableRow
from jax_grpo.tasks.stop import union

SHARED = "prompts.source"  # whose rows the tasks without a source of their own draw from
TOTAL = "reward"  # what a task's own weighted sum is called


class MixedTask(Task[Any]):
    """See the module; tasks by name, with the share and cap of each by the same names."""

    name, reads = "mixed", "positions"

    def __init__(self, tasks: Mapping[str, Task], parts: Mapping[str, MixturePart]):
        self._tasks, self._parts = tasks, parts
        # Ask about rows of `SHARED`: those that name no source and make no rows by themselves.
        own_rows = {name for name, task in tasks.items() if type(task).read is not Task.read}
        self._shared = [name for name, part in parts.items() if part.source is None and name not in own_rows]
        rule, offsets = union([task.stop_rule for task in tasks.values()])
        self.stop_rule, self._offsets = rule, dict(zip(tasks, offsets, strict=True))
        self.headlines = list(dict.fromkeys(each for task in tasks.values() for each in task.headlines))
        self.shown = list(dict.fromkeys(each for task in tasks.values() for each in task.shown))
        self.has_suites = any(task.has_suites for task in tasks.values())
        self.answers = [answer for task in tasks.values() for answer in task.answers]
        self.component_weights = {}
        for name, task in tasks.items():
            own = {_full(name, component): weight for component, weight in task.component_weights.items()}
            self.component_weights |= own | {f"{name}/{TOTAL}": 0.0}
        self.begin(TrainerState(0, 0), ())

    def read(self, prompts: PromptsConfig, seed: int, cache: str | None) -> Any:
        """The positions of `prompts.source`, or they and the rows of the parts' own sources, in turn."""
        default = PromptsConfig().source
        sources = {name: part.source or default for name, part in self._parts.items() if name not in self._shared}
        for name in self._shared:
            if self._tasks[name].reads == "prompts":
                raise ConfigError(
                    f"task.mixture.{name} reads prompts and has no source; expected task.mixture.{name}.source"
                )
        rows = {name for name, task in self._tasks.items() if task.reads == "prompts"}
        made = {name for name in sources if self._parts[name].source is None}
        none = {"template": None, "chat_template_kwargs": {}}
        without_file = prompts.model_copy(update=none) if rows | made else prompts  # for what reads no file of prompts
        without_template = prompts.model_copy(update={"template": None}) if rows else prompts  # for what makes its rows
        if not sources:
            return super().read(prompts, seed, cache)
        if not self._shared and prompts.source != default:
            raise ConfigError(
                f"prompts.source is {prompts.source!r}, but each task of the mixture has a source of its own"
            )
        tables = {SHARED: super().read(without_file, seed, cache)} if self._shared else {}
        shares = {SHARED: sum(self._parts[name].share for name in self._shared)} if self._shared else {}
        for name, source in sources.items():
            own = prompts if name in rows else without_template if name in made else without_file
            own = own.model_copy(update={"source": source})
            tables[name], shares[name] = self._tasks[name].read(own, seed, cache), self._parts[name].share
        return Interleaved(tables, shares)

    def begin(self, state: TrainerState, completion_ids: Sequence[Sequence[int]]) -> None:
        self._state, self._ids, self._logged = state, completion_ids, Logged({}, {})

    def logged(self) -> Logged:
        return self._logged

    def require_weights(self, weights: str | None) -> None:
        for task in self._tasks.values():
            task.require_weights(weights)

    def model_settings(self) -> dict[str, Any]:
        return {key: value for task in self._tasks.values() for key, value in task.model_settings().items()}

    def sample_fields(self, prompt: Prompt, completion: str) -> dict[str, Any]:
        return self._tasks[prompt.task].sample_fields(prompt, completion)

    def save_pictures(self, folder: Path, prompts: Sequence[Prompt], completions: Sequence[str]) -> list[Path]:
        pairs, pictures = list(zip(prompts, completions, strict=True)), []
        for name, task in self._tasks.items():
            if own := [pair for pair in pairs if pair[0].task == name]:
                pictures += task.save_pictures(folder, *zip(*own, strict=True))
        return pictures

    def code(self) -> list[Any]:
        return [each for task in self._tasks.values() for each in task.code()]

    def prepare(self, prompts: Sequence[Prompt]) -> None:
        for name, task in self._tasks.items():
            task.prepare([prompt for prompt in prompts if prompt.task == name])

    def close(self) -> None:
        for task in self._tasks.values():
            task.close()

    def prompt(self, row: Any, seed: int) -> Prompt:
        return self._prompt(row, seed, "prompt")

    def heldout_prompt(self, row: Any, seed: int) -> Prompt:
        return self._prompt(row, seed, "heldout_prompt")

    def _prompt(self, row: Any, seed: int, method: str) -> Prompt:
        """What the method of the task that is about the row returns."""
        name, row = row if isinstance(row, TableRow) else (SHARED, row)
        if name == SHARED:
            name = self._task_of(row, seed)
        prompt: Prompt = getattr(self._tasks[name], method)(row, seed)
        caps = [cap for cap in (prompt.max_new_tokens, self._parts[name].max_new_tokens) if cap is not None]
        return dataclasses.replace(
            prompt,
            start_state=prompt.start_state + self._offsets[name],
            task=name,
            max_new_tokens=min(caps, default=None),
        )

    def _task_of(self, row: Any, seed: int) -> str:
        """The task that is about a row of the shared source."""
        rng = random.Random(f"task/{seed}")  # not the stream that the task itself draws from
        (name,) = rng.choices(self._shared, [self._parts[name].share for name in self._shared])
        return next((other for other in self._shared if self._tasks[other].claims(row)), name)

    def score(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> dict[str, Component]:
        count = len(prompts)
        scores = {name: Component(np.zeros(count, np.float32), np.ones(count, bool)) for name in self.component_weights}
        for name, task in self._tasks.items():
            rows = [row for row, prompt in enumerate(prompts) if prompt.task == name]
            if not rows:
                continue
            task.begin(self._state, [self._ids[row] for row in rows] if len(self._ids) else ())
            scored = task.score([prompts[row] for row in rows], [completions[row] for row in rows])
            components = {component: as_component(values) for component, values in scored.items()}
            parts = {_full(name, component): own for component, own in components.items()}
            parts[f"{name}/{TOTAL}"] = as_component(total_reward(components, task.component_weights))
            for full, own in parts.items():
                values_B, about_B = scores[full]
                values_B[rows], about_B[rows] = own
            self._log(name, rows, count, task.logged())
        return scores

    def _log(self, name: str, rows: Sequence[int], count: int, logged: Logged) -> None:
        """Adds what a part logged, under its name; None for the completions of others."""
        self._logged.metrics.update({f"{name}/{metric}": values for metric, values in logged.metrics.items()})
        for column, values in logged.extras.items():
            own = dict(zip(rows, values, strict=True))
            self._logged.extras[f"{name}/{column}"] = [own.get(row) for row in range(count)]


def _full(name: str, component: str) -> str:
    """The name in the mixture of a task's component."""
    return f"{name}/{TOTAL}/{TOTAL}" if component == TOTAL else f"{name}/{component}"
