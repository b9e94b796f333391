"""`keywords:` and `punctuation:`: which words, letters and marks a text has.

A keyword counts wherever its letters stand, `rain` in `training` too; a forbidden word only where it is a whole word.
Keywords are texts, never patterns. Every checker is a pure function of the text and its arguments (Zhou et al. 2023,
arXiv 2311.07911, table 3).
"""

import re
from collections.abc import Sequence

from jax_grpo.tasks.instructions.arguments import related


def existence(text: str, keywords: Sequence[str]) -> bool:
    """Every keyword stands in the text, in any case."""
    return all(re.search(re.escape(keyword), text, re.IGNORECASE) for keyword in keywords)


def frequency(text: str, keyword: str, frequency: int, relation: str) -> bool:
    """The keyword stands there less than, or at least, so many times, in any case."""
    return related(len(re.findall(re.escape(keyword.strip()), text, re.IGNORECASE)), relation, frequency)


def forbidden_words(text: str, forbidden_words: Sequence[str]) -> bool:
    """None of the words stands in the text as a whole word, in any case."""
    return not any(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE) for word in forbidden_words)


def letter_frequency(text: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    """The character stands there less than, or at least, so many times, in either case."""
    return related(text.lower().count(letter.strip().lower()), let_relation, let_frequency)


def no_comma(text: str) -> bool:
    """There is no comma."""
    return "," not in text
