"""The process that asks and scores for `tasks.reasoning_gym`: some of the library's scorers evaluate an answer as Python."""

import functools
import random
from collections.abc import Callable, Mapping
from typing import Any

from reasoning_gym.factory import create_dataset  # pyright: ignore[reportMissingImports] (an extra)

from jax_grpo.rewards.worker import serve


def asked_of(datasets: Mapping[str, Mapping[str, Any]]) -> Callable[..., str | float]:
    """Of data sets by name, with the library's settings: the question of a numbered instance, or the score of an answer to it."""
    made = {name: create_dataset(name, **settings) for name, settings in datasets.items()}

    @functools.lru_cache(maxsize=4096)
    def instance(name: str, number: int) -> dict[str, Any]:
        random.seed(number)  # some data sets choose by Python's own generator, too
        return made[name][number]

    def asked(name: str, number: int, answer: str | None = None) -> str | float:
        entry = instance(name, number)
        if answer is None:
            return entry["question"]
        try:
            return float(made[name].score_answer(answer, entry))
        except BaseException:  # what the scorer cannot read, such as a word in the place of a number; or `exit()`
            return 0.0

    return asked


if __name__ == "__main__":
    serve(asked_of)
