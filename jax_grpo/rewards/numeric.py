"""Rewards of a number: the last one of a completion, or the one behind GSM8K's mark. Numbers are compared by their values."""

from collections.abc import Sequence
from typing import Any

from jax_grpo.rewards.texts import MARK, NUMBER, Completion, content, last_number_of, value


def last_number(completions: Sequence[Completion], answer: Sequence[Any], **columns: Any) -> list[float | None]:
    """1 where the last number of a completion is the row's `answer`, 0 elsewhere; None where the answer has no number.

    An answer is a number, or a text of which the last number counts: so is GSM8K's solution, which ends in `#### 72`.

    >>> last_number(["So it is 1,234.50 dollars.", "72", "71 or 72?", "none"], ["1234.5", 72, "... #### 71", 1])
    [1.0, 1.0, 0.0, 0.0]
    """
    return [_equal(last_number_of(content(c)), right) for c, right in zip(completions, answer, strict=True)]


def gsm8k_answer(completions: Sequence[Completion], answer: Sequence[Any], **columns: Any) -> list[float | None]:
    """1 where the number behind the last `####` of a completion is the row's `answer`, 0 elsewhere and where there is no `####`.

    As GSM8K's own rule (Cobbe et al. 2021), but for the last mark instead of the first, and for values instead of characters: 72.0
    and $72 are 72. Answers as in `last_number`.

    >>> gsm8k_answer(["6 * 12\\n#### 72", "#### $72.00", "72", "#### about 72"], ["so 72\\n#### 72"] * 4)
    [1.0, 1.0, 0.0, 0.0]
    """
    return [_equal(_marked(content(c)), right) for c, right in zip(completions, answer, strict=True)]


def _marked(text: str):
    """The value of the number behind the last mark; None: there is none."""
    _, marked, after = text.rpartition(MARK)
    match = NUMBER.match(after.strip().removeprefix("$"))
    return value(match[0]) if marked and match else None


def _equal(number: Any, answer: Any) -> float | None:
    right = last_number_of(str(answer))
    return None if right is None else float(number == right)
