"""Rewards of the format `<think>...</think><answer>...</answer>` (DeepSeek-R1, 2025), and of what its answer says."""

import re
from collections.abc import Sequence
from typing import Any

from jax_grpo.rewards.texts import NUMBER, Completion, between_tags, content, value

FORMAT = re.compile(r"\s*<think>.*</think>\s*<answer>.*</answer>\s*", re.DOTALL)
TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def think_format(
    completions: Sequence[Completion], prompts: Sequence[Completion] | None = None, **columns: Any
) -> list[float]:
    """1 where a completion is `<think>...</think>` and `<answer>...</answer>` with nothing but blanks around them, each tag once.

    TRL's `think_format_reward` asks for no answer's tags, open-r1's `format_reward` for a line break at each tag. A text as prompt
    may end in `<think>`, which the completion then lacks.

    >>> think_format(["<think>6 * 7</think>\\n<answer>42</answer>", "<answer>42</answer>", "<think>42</think>"])
    [1.0, 0.0, 0.0]
    """
    texts = [""] * len(completions) if prompts is None else prompts
    return [_formatted(prompt, content(c)) for prompt, c in zip(texts, completions, strict=True)]


def _formatted(prompt: Completion, text: str) -> float:
    if isinstance(prompt, str) and prompt.rstrip().endswith("<think>"):
        text = f"<think>{text}"
    return float(FORMAT.fullmatch(text) is not None and all(text.count(tag) == 1 for tag in TAGS))


def tagged_answer(completions: Sequence[Completion], answer: Sequence[Any], **columns: Any) -> list[float]:
    """1 where what stands in the last `<answer>...</answer>` of a completion is the row's `answer`, 0 elsewhere.

    Two numbers are the same where their values are; of other texts neither capitals nor blanks around them count.

    >>> tagged_answer(["<answer> Paris </answer>", "<answer>1,000</answer>", "Paris"], ["paris", 1000, "Paris"])
    [1.0, 1.0, 0.0]
    """
    return [
        float(_same(between_tags(content(c), "answer"), str(right)))
        for c, right in zip(completions, answer, strict=True)
    ]


def _same(text: str | None, answer: str) -> bool:
    if text is None:
        return False
    number, right = (NUMBER.fullmatch(each.strip().removeprefix("$")) for each in (text, answer))
    if number and right:
        return value(number[0]) == value(right[0])
    return text.casefold() == answer.strip().casefold()
