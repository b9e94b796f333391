"""Prompts by difficulty: those that are passed about as often as not are drawn again, those that are solved hardly ever.

A group has signal only where some of its completions succeed and others fail (DAPO, Yu et al. 2025, section 3.2), most of it about
a rate of one half: sampling by learnability, Foster et al. 2025, "Learning to reason at the frontier of learnability". What is
drawn next follows from the seed and from what was observed, all of which a checkpoint holds. Knows nothing of prompts' texts or
completions.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from jax_grpo.config.sections import CurriculumConfig

NEVER = -1.0  # the rate of a prompt that was never observed
NEAR = 1e-6  # of a reward, a sum of weighted components in float32, and of a running rate


class Curriculum:
    """The running pass rate of each of a data set's prompts, and the draws that follow from them.

    `order` gives the number of the prompt at each place of an endless order, epoch after epoch; a draw goes on in it where the
    one before stopped.
    """

    def __init__(self, settings: CurriculumConfig, seed: int, size: int, order: Callable[[int], int]):
        self._settings, self._seed, self._order = settings, seed, order
        self.rate_N = np.full(size, NEVER, np.float32)
        self._next = 0  # place in the order
        self._draws = 0
        self._again = 0  # prompts observed before, of this draw and of those that its `taken` are from

    def draw(self, prompts: int, taken: Collection[int] = ()) -> list[int]:
        """The numbers of the next prompts: earlier ones, retired ones, then those of the order.

        Shares of a draw are met on average. None is among the `taken` or comes twice, as long as there are others.
        """
        how, known_N = self._settings, self.rate_N >= 0
        free_N = np.ones(len(known_N), bool)
        free_N[list(taken)] = False
        retired_N = self._retired(self.rate_N)
        rng = np.random.default_rng((self._seed, self._draws, 0, 0))
        again, revisit = (math.floor(share * prompts + rng.random()) for share in (how.again, how.revisit))
        keys_N = rng.random(len(known_N))
        distance_N = (self.rate_N - how.target) / how.width
        # The k smallest -log(u) / w are a draw of k without replacement by the weights w (Efraimidis and Spirakis 2006).
        with np.errstate(divide="ignore"):  # of a 0, which is drawn last
            near_N = np.log(-np.log(keys_N)) + 0.5 * np.square(distance_N, dtype=np.float64)
        numbers = smallest(near_N, known_N & ~retired_N & free_N, min(again, prompts))
        numbers += smallest(keys_N, retired_N & free_N, min(revisit, prompts - len(numbers)))
        self._again = len(numbers) + (self._again if taken else 0)
        numbers += self._in_order(prompts - len(numbers), {*taken, *numbers}, retired_N)
        self._draws += 1
        return numbers

    def _in_order(self, count: int, taken: set[int], retired_N: np.ndarray) -> list[int]:
        """The next of the order that are neither taken nor retired; once round without one, the next, whatever it is."""
        numbers, once_round = [], len(retired_N)
        for _ in range(count):
            for place in range(self._next, self._next + once_round):
                if (number := self._order(place)) not in taken and not retired_N[number]:
                    break
            else:
                place, number, once_round = self._next, self._order(self._next), 0  # nor is there one for those to come
            self._next = place + 1
            taken.add(number)
            numbers.append(number)
        return numbers

    def _retired(self, rates: np.ndarray) -> np.ndarray:
        """Which of these running rates count as solved."""
        return rates >= self._settings.solved - NEAR

    @property
    def place(self) -> tuple[int, int, int]:
        """Where draws have got to; what is observed later does not change it."""
        return self._next, self._draws, self._again

    def back_to(self, place: tuple[int, int, int]) -> None:
        """Takes back the draws since then."""
        self._next, self._draws, self._again = place

    def observe(self, numbers: Sequence[int], rewards_B: np.ndarray) -> None:
        """Takes in the rewards [B] of a draw's groups, one after another."""
        how = self._settings
        passed_B = rewards_B >= how.passed - NEAR * max(1.0, abs(how.passed))
        for number, share in zip(numbers, passed_B.reshape(len(numbers), -1).mean(-1), strict=True):
            before = self.rate_N[number]
            self.rate_N[number] = share if before == NEVER else before + how.newest * (share - before)

    def metrics(self) -> dict[str, float]:
        """Of the prompts that were ever observed, and how many of the last draws were."""
        known = self.rates()
        retired = self._retired(known)
        return {
            "curriculum/known": len(known),
            "curriculum/retired": int(retired.sum()),
            "curriculum/never_passed": int((known == 0).sum()),
            "curriculum/rate": float(known.mean(dtype=np.float64)) if len(known) else math.nan,
            "curriculum/again": self._again,
        }

    def rates(self) -> np.ndarray:
        """The running pass rates of those that were observed."""
        return self.rate_N[self.rate_N >= 0]

    def arrays(self) -> dict[str, np.ndarray]:
        """Everything that draws to come depend on, beside the settings."""
        place, draws = (np.array([count], np.int64) for count in (self._next, self._draws))
        return {"rate_N": np.array(self.rate_N), "next": place, "draws": draws}

    def restore(self, arrays: Mapping[str, Any]) -> None:
        """Takes what `arrays` gave."""
        self.rate_N = np.array(arrays["rate_N"], np.float32)
        self._next, self._draws = int(arrays["next"][0]), int(arrays["draws"][0])


def smallest(keys_N: np.ndarray, allowed_N: np.ndarray, count: int) -> list[int]:
    """The numbers of the `count` smallest keys among the allowed, in their order; fewer where there are not so many."""
    numbers = np.flatnonzero(allowed_N)
    return numbers[np.argsort(keys_N[numbers], kind="stable")[:count]].tolist()
