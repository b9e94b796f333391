"""Which prompts a run draws: those of its data set's order, or a curriculum's, and how far refill has gone beyond them.

Owns a run's place among its prompts, which is part of a checkpoint. Knows nothing of completions but their rewards.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

import jax_grpo
from jax_grpo.config import Config
from jax_grpo.model.tokenizer import Tokenizer
from jax_grpo.prompts.curriculum import Curriculum
from jax_grpo.prompts.dataset import PromptDataset, sampling_numbers
from jax_grpo.prompts.table import Rows, UnsuitableRow
from jax_grpo.rollout.generate import PromptTokens, Rollout, encode_fitting
from jax_grpo.system.whole_files import Remembered
from jax_grpo.tasks.base import Prompt, Task
from jax_grpo.tasks.checked import CapOutOfRange, caps, made_prompt


class Draw(NamedTuple):
    """P prompts and their completions, without rewards; the device may still be computing them."""

    numbers: list[int]  # of the prompts in their data set
    prompts: list[Prompt]
    tokens: PromptTokens
    rollout: Rollout


class PromptSampler:
    """The prompts of a run, in draws of `prompts.per_iteration`: one an iteration, and with refill further ones.

    `further` counts the further ones of all iterations so far: rewards decide how many, so that it is part of a checkpoint.
    """

    def __init__(self, config: Config, task: Task, positions: Rows[Any]):
        self._config, self._task, self._identity = config, task, positions.identity
        self._size = config.prompts.per_iteration
        self.dataset = PromptDataset(positions, config.seed)
        self.further = 0
        self._before = 0, 0, 0  # the place of the curriculum before its last draw
        self._numbers: list[int] = []  # of the iteration's prompts so far
        self.picked = 0  # of the first draw's prompts, those at its beginning that a curriculum picked by their rewards
        self.curriculum = None
        if (how := config.prompts.curriculum) is not None:
            self.curriculum = Curriculum(how, config.seed, len(self.dataset), lambda place: self.dataset.at(place)[0])

    def in_order(self, draw: int) -> tuple[list[int], list[Prompt]]:
        """The numbers of a draw's rows in their data set, and its prompts; without refill a draw is an iteration.

        With a curriculum these are the order that it draws new ones from.
        """
        numbers = [number for number, _ in self.dataset.batch(draw, self._size)]
        return numbers, self._made(numbers)

    def next(self, iteration: int, number: int = 0) -> tuple[list[int], list[Prompt], np.ndarray]:
        """The iteration's draw of this number: the prompts' numbers, the prompts, and what each is sampled under, int32 [P].

        A prompt that comes again in the iteration is sampled under another number, and so anew.
        """
        earlier = self._numbers if number else []
        if self.curriculum is None:
            numbers, prompts = self.in_order(iteration + self.further + number)
        else:
            self._before = self.curriculum.place
            numbers = self.curriculum.draw(self._size, earlier)
            prompts = self._made(numbers)
            self.picked = self.picked if number else self.curriculum.place[2]
        self._numbers = [*earlier, *numbers]
        sampled_under = sampling_numbers(self._numbers, len(self.dataset))[-len(prompts) :]
        return numbers, prompts, np.array(sampled_under, np.int32)

    def observe(self, numbers: Sequence[int], rewards_B: np.ndarray) -> None:
        """Tells a curriculum the rewards [B] of a draw's groups."""
        if self.curriculum is not None:
            self.curriculum.observe(numbers, rewards_B)

    def undo(self) -> None:
        """Takes back a curriculum's last draw; without one prompts are drawn by their draw's number."""
        if self.curriculum is not None:
            self.curriculum.back_to(self._before)

    def metrics(self) -> dict[str, float]:
        """Of a curriculum, after an iteration."""
        return {} if self.curriculum is None else self.curriculum.metrics()

    def next_prompt(self, iterations_done: int) -> int:
        """The place in the order of prompts, for a checkpoint."""
        return (iterations_done + self.further) * self._size

    def restore(self, next_prompt: int, iterations_done: int, curriculum: Mapping[str, Any]) -> None:
        """Takes what `next_prompt` gave, and the arrays of a curriculum, which are not read where there is none."""
        self.further = next_prompt // self._size - iterations_done
        if self.curriculum is not None:
            self.curriculum.restore(curriculum)

    def require_fitting(self, tokenizer: Tokenizer) -> None:
        """Refuses, before anything is compiled, a run that would come upon a too long prompt, or one whose own cap is none.

        Raises:
            PromptTooLong: names the longest prompt, its length and the config key.
            CapOutOfRange: as `tasks.base.caps`, or the penalty for long completions begins before a prompt's first token.
        """
        config = self._config
        rounds = 1 if config.rollout.refill is None else 1 + config.rollout.refill.rounds
        epoch = -(-len(self.dataset) // self._size)
        draws = min(config.iterations * rounds, epoch)
        order = [config.seed, draws, self._size]
        what = [jax_grpo.__version__, self._identity, tokenizer.fingerprint(), config.task.model_dump(), order]
        own = any(inspect.isclass(made) and not made.__module__.startswith("jax_grpo.") for made in self._task.code())
        remembered = Remembered(None if own else config.compilation_cache, "longest_prompt", what)
        limit = config.prompt_limit()
        if isinstance(remembered.value, int) and remembered.value <= limit:
            return
        longest = 0
        for draw in range(draws):
            prompts = self.in_order(draw)[1]
            self._require_fitting_caps(prompts)
            texts = [prompt.text for prompt in prompts]
            encoded = encode_fitting(texts, tokenizer, limit)
            longest = max(longest, *map(len, encoded))
        remembered.keep(longest)

    def _require_fitting_caps(self, prompts: Sequence[Prompt]) -> None:
        penalty, caps_P = self._config.objective.overlong_penalty, caps(prompts, self._config.rollout.max_new_tokens)
        if penalty is not None and penalty.length > (least := caps_P.min()):
            raise CapOutOfRange(
                f"prompt {prompts[int(caps_P.argmin())].text[:80]!r} has max_new_tokens {least}; expected at least "
                f"objective.overlong_penalty.length = {penalty.length}: it would lose reward from before its first token"
            )

    def _made(self, numbers: Sequence[int]) -> list[Prompt]:
        """The prompts of the rows of these numbers."""
        seed = self._config.seed * 1_000_003
        try:
            return [made_prompt(self._task, self.dataset.rows[number], seed + number) for number in numbers]
        except UnsuitableRow as error:
            raise type(error)(f"prompts.source {self._config.prompts.source!r}: {error}") from error
