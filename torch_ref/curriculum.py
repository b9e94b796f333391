"""The curriculum from its definition, prompt by prompt: `prompts.curriculum` says what each setting means.

A draw of P prompts takes `again` x P earlier prompts, without replacement, with probability proportional to
exp(-((rate - target) / width)^2 / 2); `revisit` x P of the retired; and goes on in the data set's order for the rest. Shares are
rounded at random so that their mean is exact. The random numbers are those of `numpy.random.default_rng((seed, draw, 0, 0))`: one
for each share, then one for each prompt of the data set.
"""

import math

import numpy as np

from jax_grpo.config.sections import CurriculumConfig
from jax_grpo.prompts.dataset import PromptDataset


class Curriculum:
    """Pass rates of a run's prompts by number, as far as it has drawn them."""

    def __init__(self, settings: CurriculumConfig, seed: int, dataset: PromptDataset):
        self.settings, self.seed, self.dataset = settings, seed, dataset
        self.rates: dict[int, float] = {}
        self.place = self.draws = self.again = 0

    def _solved(self, number: int) -> bool:
        return self.rates.get(number, -1.0) >= self.settings.solved - 1 / 1_000_000

    def draw(self, prompts: int, before: list[int]) -> list[int]:
        """The numbers of a draw's prompts; `before` are those of the iteration's draws before it."""
        how = self.settings
        random = np.random.default_rng((self.seed, self.draws, 0, 0))
        self.draws += 1
        again = min(prompts, int(how.again * prompts + random.random()))
        revisit = int(how.revisit * prompts + random.random())
        u = random.random(len(self.dataset))

        # u^(1/w), largest first, is a weighted draw without replacement; its logarithm has room for the smallest weights.
        def chance(number: int) -> float:
            return math.log(u[number]) * math.exp(((self.rates[number] - how.target) / how.width) ** 2 / 2)

        known = [number for number in self.rates if number not in before]
        active = [number for number in known if not self._solved(number)]
        chosen = sorted(active, key=chance, reverse=True)[:again]
        retired = sorted((number for number in known if self._solved(number)), key=lambda number: u[number])
        chosen += retired[: min(revisit, prompts - len(chosen))]
        self.again = len(chosen) if not before else self.again + len(chosen)
        while len(chosen) < prompts:
            chosen.append(self._next(set(before) | set(chosen)))
        return chosen

    def _next(self, taken: set[int]) -> int:
        for ahead in range(len(self.dataset)):
            number, _ = self.dataset.at(self.place + ahead)
            if number not in taken and not self._solved(number):
                self.place += ahead + 1
                return number
        self.place += 1
        return self.dataset.at(self.place - 1)[0]

    def observe(self, numbers: list[int], rewards: list[float]) -> None:
        """The rewards of a draw's completions, group after group."""
        how, group = self.settings, len(rewards) // len(numbers)
        least = how.passed - max(1.0, abs(how.passed)) / 1_000_000
        for place, number in enumerate(numbers):
            passed = [reward >= least for reward in rewards[place * group : (place + 1) * group]]
            share = sum(passed) / group
            old = self.rates.get(number)
            self.rates[number] = share if old is None else (1 - how.newest) * old + how.newest * share

    def metrics(self) -> dict[str, float]:
        """Of the prompts that were drawn so far, and of the iteration's how many had been before."""
        rates = list(self.rates.values())
        return {
            "curriculum/known": len(rates),
            "curriculum/retired": len([number for number in self.rates if self._solved(number)]),
            "curriculum/never_passed": rates.count(0.0),
            "curriculum/rate": math.fsum(rates) / len(rates),
            "curriculum/again": self.again,
        }
