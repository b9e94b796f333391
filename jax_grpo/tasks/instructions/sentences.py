"""Where English sentences end: at `.`, `?` or `!` before white space, but for abbreviations, initials and dots of omission.

IFEval counts with NLTK's Punkt model (Kiss & Strunk 2006), whose English statistics are a download; these are rules, and
`docs/instructions.md` says how far the two agree. Knows no instructions.
"""

import re

# A mark, what may close behind it, and white space; the word before it is looked at where the mark is a full stop.
_END = re.compile(r"""(?P<word>\S*?)(?P<mark>[.?!]+)(?P<closers>["'”’)\]}*]*)(?=\s+(?P<next>\S+)|\s*$)""")
_TITLES = re.compile(r"mr|mrs|ms|dr|prof|st|gen|sen|rep|lt|col|messrs|gov|capt|sgt|rev|hon")
_ABBREVIATIONS = re.compile(
    r"e\.g|i\.e|etc|vs|inc|ltd|co|corp|jr|sr|bros|ph\.d|no|fig|al|cf|approx|dept|est"
    r"|jan|feb|mar|apr|aug|sept?|oct|nov|dec|(?:[a-z]\.)*[a-z]"  # the last: initials, a.m., U.S., P.S.
)
# Words that open a sentence more often than they are part of a name.
_STARTERS = re.compile(
    r"a|after|all|an|and|as|at|but|by|each|for|he|her|his|how|i|if|in|its?|many|my|no|now|of|on|one|our|she|so|some|that|the"
    r"|their|then|there|these|they|this|those|to|we|what|when|where|which|who|why|with|your?"
)


def count_sentences(text: str) -> int:
    """Sentences of the text; what follows the last mark is one more."""
    count = end = 0
    for match in _END.finditer(text):
        if _ends(match["word"], match["mark"], match["next"]):
            count, end = count + 1, match.end()
    return count + bool(text[end:].strip())


def _ends(word: str, mark: str, following: str | None) -> bool:
    """Whether a sentence ends at the mark between these words."""
    if following is None or mark.strip("."):  # a question or exclamation mark
        return True
    begins = following.lstrip("\"'“‘([{*")
    word = word.lstrip("\"'“‘([{*").lower()
    if _TITLES.fullmatch(word):
        return False
    if len(mark) == 1 and not _ABBREVIATIONS.fullmatch(word):
        return True
    return begins[:1].isupper() and bool(_STARTERS.fullmatch(re.split(r"\W", begins.lower())[0]))
