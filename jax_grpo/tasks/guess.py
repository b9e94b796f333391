"""The toy of several turns: guess the number that the task hides, by its answers.

A policy that ignores the answers finds one of N numbers with T guesses in at most T of N episodes, whatever it guesses; halving
what is left finds every number as soon as N < 2^T. Between the two lies only what the model makes of observations.
"""

import random
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from jax_grpo.config.tasks import EpisodicSettings
from jax_grpo.tasks.base import Prompt, stack, with_overrides
from jax_grpo.tasks.episodes import Episode, EpisodicTask
from jax_grpo.tasks.stop import number_stop

WEIGHTS = {"found": 1.0, "sooner": 0.5, "number": 0.2}


class GuessSettings(EpisodicSettings):
    """`guess`: the toy of several turns."""

    guess_numbers: Annotated[int, Field(ge=2, le=9)] = 7
    """Guess task: the hidden number is one of 1 to this."""


class Hidden:
    """One hidden number of 1 to `most`, and how many guesses there are."""

    def __init__(self, number: int, most: int, guesses: int):
        self.number, self.guesses = number, guesses
        self.numbers = [str(one) for one in range(1, most + 1)]
        self.guessed: list[int | None] = []  # None where none of the numbers was written

    @property
    def found(self) -> bool:
        return self.number in self.guessed

    def step(self, completion: str) -> tuple[str, bool]:
        written = completion.strip(" ")
        guess = int(written) if written in self.numbers else None
        self.guessed.append(guess)
        return f" {self._answer(guess)}:", self.found or len(self.guessed) == self.guesses

    def _answer(self, guess: int | None) -> str:
        if guess is None:
            return "what"
        return "right" if guess == self.number else "higher" if guess < self.number else "lower"


class GuessTask(EpisodicTask):
    """Components (raw values in [0, 1]):

    found: the number was guessed.  sooner: the share of guesses that were left.  number: the share that were numbers in range.
    """

    name, noun, reads, Settings = "guess", "prompts", "positions", GuessSettings

    def __init__(self, settings: GuessSettings):
        self._most, self._guesses = settings.guess_numbers, settings.episode.turns if settings.episode else 1
        self.component_weights = with_overrides(self.name, WEIGHTS, settings.rewards)
        self.stop_rule, self.answers = number_stop(), [str(number + 1) for number in range(self._most)]

    def prompt(self, row: Any, seed: int) -> Prompt:
        """The same text for all; the row only counts the prompts."""
        return Prompt(f"1-{self._most}:", 0, answer=str(random.Random(f"guess/{seed}").randint(1, self._most)))

    def reset(self, prompt: Prompt) -> Hidden:
        return Hidden(int(prompt.answer or 0), self._most, self._guesses)

    def score(self, prompts: Sequence[Prompt], episodes: Sequence[Episode]) -> dict[str, np.ndarray]:
        return stack([self._row(episode.environment) for episode in episodes], self.component_weights)

    def _row(self, hidden: object) -> dict[str, float]:
        assert isinstance(hidden, Hidden), "what `reset` returns"
        return {
            "found": float(hidden.found),
            "sooner": hidden.found * (1 - len(hidden.guessed) / self._guesses),
            "number": sum(guess is not None for guess in hidden.guessed) / len(hidden.guessed),
        }
