"""Which prompts a run asks: those of its data set's order, or a curriculum's, and how far refill has gone beyond them.

Owns a run's place among its prompts, which is part of a checkpoint. Knows nothing of completions but their rewards.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

import jax_grpo
from jax_grpo.config import Config
from jax_grpo.model.tokenizer import Tokenizer
from jax_grpo.positions.checked_files import Remembered
from jax_grpo.positions.curriculum import Curriculum
from jax_grpo.positions.dataset import PromptDataset, sampling_numbers
from jax_grpo.positions.table import Rows
from jax_grpo.positions.values import NotATable
from jax_grpo.rollout.generate import encode_fitting
from jax_grpo.tasks.base import Prompt, Task


class Asked(NamedTuple):
    """The P prompts of one draw."""

    numbers: list[int]  # in their data set
    prompts: list[Prompt]
    sampling_P: np.ndarray  # int32: what each is sampled under, another number for each time in an iteration


class Draws:
    """The prompts of a run, in draws of `prompts.per_iteration`: one an iteration, and with refill further ones.

    `further` counts the further ones of all iterations so far: rewards decide how many, so that it is part of a checkpoint.
    """

    def __init__(self, config: Config, task: Task, positions: Rows[Any]):
        self._config, self._task, self._identity = config, task, positions.identity
        self._size = config.prompts.per_iteration
        self.dataset = PromptDataset(positions, config.seed)
        self.further = 0
        self._asked: list[int] = []  # numbers of the iteration's prompts so far
        self.curriculum = None
        if (how := config.prompts.curriculum) is not None:
            self.curriculum = Curriculum(how, config.seed, len(self.dataset), lambda place: self.dataset.at(place)[0])

    def in_order(self, draw: int) -> tuple[list[int], list[Prompt]]:
        """The numbers of a draw's positions in their data set, and its prompts; without refill a draw is an iteration.

        With a curriculum these are the order that it draws new ones from.
        """
        numbers = [number for number, _ in self.dataset.batch(draw, self._size)]
        return numbers, self._made(numbers)

    def next(self, iteration: int, number: int = 0) -> Asked:
        """The iteration's draw of this number. A prompt that comes again in a later one is sampled anew, as within a draw."""
        earlier = self._asked if number else []
        if self.curriculum is None:
            numbers, prompts = self.in_order(iteration + self.further + number)
        else:
            numbers = self.curriculum.draw(self._size, earlier)
            prompts = self._made(numbers)
        self._asked = [*earlier, *numbers]
        sampled_under = sampling_numbers(self._asked, len(self.dataset))[-len(prompts) :]
        return Asked(numbers, prompts, np.array(sampled_under, np.int32))

    def observe(self, numbers: Sequence[int], rewards_B: np.ndarray) -> None:
        """Tells a curriculum the rewards [B] of a draw's groups."""
        if self.curriculum is not None:
            self.curriculum.observe(numbers, rewards_B)

    @property
    def place(self) -> tuple[int, int, int] | None:
        """Where a curriculum's draws have got to, which `back_to` takes them back to."""
        return None if self.curriculum is None else self.curriculum.place

    def back_to(self, place: tuple[int, int, int] | None) -> None:
        """Takes back a curriculum's draws since `place`; what has no curriculum is drawn by its number."""
        if self.curriculum is not None and place is not None:
            self.curriculum.back_to(place)

    def metrics(self) -> dict[str, float]:
        """What a curriculum tells of the iteration."""
        return {} if self.curriculum is None else self.curriculum.metrics()

    def next_prompt(self, iterations_done: int) -> int:
        """The position in the order of prompts, for a checkpoint."""
        return (iterations_done + self.further) * self._size

    def restore(self, next_prompt: int, iterations_done: int, curriculum: Mapping[str, Any]) -> None:
        """Takes what `next_prompt` gave, and the arrays of a curriculum, which are not read where there is none."""
        self.further = next_prompt // self._size - iterations_done
        if self.curriculum is not None:
            self.curriculum.restore(curriculum)

    def require_fitting(self, tokenizer: Tokenizer) -> None:
        """Refuses, before anything is compiled, a run that would come upon a too long prompt.

        Raises:
            PromptTooLong: names the longest prompt, its length and the config key.
        """
        config = self._config
        rounds = 1 if config.rollout.refill is None else 1 + config.rollout.refill.rounds
        epoch = -(-len(self.dataset) // self._size)
        drawn = min(config.iterations * rounds, epoch)
        # An engine changes no prompt; but `value` without one has every position looked at.
        task = [config.task.model_dump(exclude={"engine"}), config.task.engine is None]
        order = [config.seed, drawn, self._size]
        what = [jax_grpo.__version__, self._identity, tokenizer.fingerprint(), task, order]
        own = any(inspect.isclass(made) and not made.__module__.startswith("jax_grpo.") for made in self._task.code())
        remembered = Remembered(None if own else config.compilation_cache, "longest_prompt", what)
        if isinstance(remembered.value, int) and remembered.value <= config.prompts.max_prompt_tokens:
            return
        longest = 0
        for draw in range(drawn):
            texts = [prompt.text for prompt in self.in_order(draw)[1]]
            encoded = encode_fitting(texts, tokenizer, config.prompts.max_prompt_tokens)
            longest = max(longest, *map(len, encoded))
        remembered.keep(longest)

    def _made(self, numbers: Sequence[int]) -> list[Prompt]:
        """The prompts of the positions of these numbers."""
        seed = self._config.seed * 1_000_003
        try:
            return [self._task.prompt(self.dataset.positions[number], seed + number) for number in numbers]
        except NotATable as error:
            raise NotATable(f"prompts.source {self._config.prompts.source!r}: {error}") from error
