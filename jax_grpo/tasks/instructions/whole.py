"""`combination:`, `startend:` and their like: how a text begins and ends, and what it repeats.

Every checker is a pure function of the text and its arguments (Zhou et al. 2023, arXiv 2311.07911, table 3).
"""

import collections
import re

ANSWERS = "******"  # the divider of `two_responses`


def two_responses(text: str) -> bool:
    """Two different answers with `******` between them; a divider at either end is allowed, two in a row are not."""
    parts = [part.strip() for part in text.split(ANSWERS)]
    answers = [part for part in parts if part]
    return all(parts[1:-1]) and len(answers) == 2 and answers[0] != answers[1]


def repeat_prompt(text: str, prompt_to_repeat: str) -> bool:
    """The text begins with the request, in any case."""
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def constrained_start(text: str, starter: str) -> bool:
    """A line of the text begins with these words."""
    return bool(re.search(rf"^\s*{re.escape(starter.strip())}", text, re.MULTILINE))


def end_checker(text: str, end_phrase: str) -> bool:
    """The text ends with these words, in any case, before quotation marks that close it."""
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def quotation(text: str) -> bool:
    """The whole text stands between double quotation marks."""
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


def rephrase_paragraph(text: str, original_paragraph: str, low: int, high: int) -> bool:
    """From `low` to `high` words are the paragraph's, in any case, each as often as both have it."""
    words, original = (collections.Counter(re.findall(r"\w+", part.lower())) for part in (text, original_paragraph))
    return low <= (words & original).total() <= high
