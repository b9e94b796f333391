"""Texts of completions, and what is found in a text: its last number, what stands between tags. Knows nothing of rewards."""

import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

Completion = str | Sequence[Mapping[str, Any]]  # of a prompt that is a text; of one that is messages

MARK = "####"  # before the answer of a row of GSM8K
# Commas stand between groups of three digits, a minus in front of the number, or of its dollar sign, and behind nothing that it
# could be subtracted from.
NUMBER = re.compile(
    r"(?:(?<![\w)\].])[-−]\$?)?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+"
)


def content(completion: Completion) -> str:
    """The text of a completion: its own, or that of its last message."""
    return completion if isinstance(completion, str) else completion[-1]["content"] or ""


def figures(number: str) -> str:
    """What `NUMBER` matches as Python writes it.

    >>> figures("-$1,234.50")
    '-1234.50'
    """
    return number.replace("−", "-").translate(str.maketrans("", "", "$,"))


def value(number: str) -> Decimal:
    """The value of what `NUMBER` matches."""
    return Decimal(figures(number))


def last_figures_of(text: str) -> str | None:
    """The last number in a text as Python writes it; None: there is none."""
    matches = NUMBER.findall(text)
    return figures(matches[-1]) if matches else None


def last_number_of(text: str) -> Decimal | None:
    """The value of the last number in a text; None: there is none.

    >>> [str(last_number_of(text)) for text in ("17 of 1,234.50.", "7-3 = 4", "It is -5", "seven")]
    ['1234.50', '4', '-5', 'None']
    """
    last = last_figures_of(text)
    return None if last is None else Decimal(last)


def between_tags(text: str, tag: str) -> str | None:
    """What stands between the last `<tag>` that is closed and its `</tag>`, without blanks around it; None: there is none.

    >>> between_tags("<answer>1</answer> or <answer> 2 </answer>", "answer")
    '2'
    """
    before, closed, _ = text.rpartition(f"</{tag}>")
    _, opened, inside = before.rpartition(f"<{tag}>")
    return inside.strip() if closed and opened else None
