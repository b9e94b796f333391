"""`length_constraints:` and `change_case:`: how many words, sentences, paragraphs and capitals a text has.

A word is a run of letters, digits and underscores. English is not detected: the two `english_` types look at the case alone.
Every checker is a pure function of the text and its arguments (Zhou et al. 2023, arXiv 2311.07911, table 3).
"""

import re

from jax_grpo.tasks.instructions.arguments import related
from jax_grpo.tasks.instructions.sentences import count_sentences

PARAGRAPH = "***"  # the divider of `number_paragraphs`
_CLITICS = re.compile(r"(?i)(?=n['’]t\b)|(?=['’](?:s|m|d|ll|re|ve)\b)")
_CAPITALISABLE = re.compile(r"[^\W_](?:[\w./\\'’-]*[^\W_])?")


def number_words(text: str, num_words: int, relation: str) -> bool:
    """Less than, or at least, so many words."""
    return related(len(re.findall(r"\w+", text)), relation, num_words)


def number_sentences(text: str, num_sentences: int, relation: str) -> bool:
    """Less than, or at least, so many sentences; see `sentences`."""
    return related(count_sentences(text), relation, num_sentences)


def number_paragraphs(text: str, num_paragraphs: int) -> bool:
    """Exactly so many paragraphs with `***` between them; a divider at either end is allowed, two in a row are not."""
    first, *rest = text.split(PARAGRAPH)
    inner, last = rest[:-1], rest[-1:]
    ends = [part for part in (first, *last) if part.strip()]
    return all(part.strip() for part in inner) and len(ends) + len(inner) == num_paragraphs


def nth_paragraph_first_word(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Exactly so many paragraphs with an empty line between them, and the nth begins with the word, in any case.

    A blank paragraph does not count but keeps its place. The word ends at a punctuation mark or an apostrophe.
    """
    paragraphs = text.split("\n\n")
    count = sum(bool(paragraph.strip()) for paragraph in paragraphs)
    if count != num_paragraphs or nth_paragraph > count or not paragraphs[nth_paragraph - 1].strip():
        return False
    opening = paragraphs[nth_paragraph - 1].split()[0].lstrip("'").lstrip('"')
    return re.split(r"[.,?!'\"]", opening)[0].lower() == first_word.lower()


def english_capital(text: str) -> bool:
    """There are letters, and all are capitals."""
    return text.isupper()


def english_lowercase(text: str) -> bool:
    """There are letters, and none is a capital."""
    return text.islower()


def capital_word_frequency(text: str, capital_frequency: int, capital_relation: str) -> bool:
    """Less than, or at least, so many words are all in capitals. A hyphenated word is one; a contraction is its two."""
    words = [part for word in _CAPITALISABLE.findall(text) for part in _CLITICS.split(word)]
    return related(sum(word.isupper() for word in words), capital_relation, capital_frequency)
