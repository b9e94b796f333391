"""How many English sentences a text has, as Punkt cuts them (Kiss & Strunk 2006), which IFEval counts with.

A text is cut behind `.`, `?` or `!` before white space or punctuation. Whether a full stop is an abbreviation's, Punkt reads off
statistics, which are a download; here a list of abbreviations and one of words that open sentences stand for them, and
`docs/instructions.md` says how far the two agree. Knows no instructions.
"""

import itertools
import re

_PUNCTUATION = r"""[)";}\]*:@'({\[!?‘’“”«»]"""
_INSIDE = re.compile(rf"[.?!](?={_PUNCTUATION})")  # a mark that is not the last character of its chunk
_CLOSERS = re.compile(r"""["')\]}]+(?:\s+|(?=--)|$)""")  # belong to the sentence before them
_TITLES = re.compile(r"mr|mrs|ms|dr|prof|st|gen|sen|rep|lt|col|messrs|gov|capt|sgt|rev|hon")
_ABBREVIATIONS = re.compile(
    r"aug|ave|bros|co|corp|dec|dept|e\.g|feb|fri|i\.e|inc|jan|jr|ltd|nov|oct|ph\.d|sept?|sr|tues|vs|wed"
    r"|(?!p\.(?:p\.)?s)(?:[a-z]\.)*[a-z]"  # initials, a.m., U.S., but not P.S.
)
_NUMBER = re.compile(r"-?[.,]?\d[\d,.-]*")
# Words that open a sentence more often than they are part of a name.
_OPENING = re.compile(
    r"a|after|all|although|an|and|as|at|but|by|each|for|he|her|his|how|however|i|if|in|its?|many|my|no|now|of|on|one|our|she|so"
    r"|some|that|the|their|then|there|these|they|this|those|to|we|what|when|where|which|while|who|why|with|your?"
)


def count_sentences(text: str) -> int:
    """Sentences of the text; what follows the last mark is one more."""
    count = start = 0
    chunks = [*re.finditer(r"\S+", text), None]
    for chunk, following in itertools.pairwise(chunks):
        assert chunk is not None
        if (end := _end(chunk[0], following[0] if following else None)) is not None:
            end += chunk.start()
            closers = _CLOSERS.match(text, end)
            count, start = count + 1, closers.end() if closers else end
    return count + bool(text[start:].strip())


def _end(chunk: str, following: str | None) -> int | None:
    """Where in a chunk between white space the sentence ends, or None. Only the last mark can end one."""
    inside = [match.end() for match in _INSIDE.finditer(chunk)]
    last = chunk[-1] in ".?!" and following is not None
    if not last and not inside:
        return None
    end = len(chunk) if last else inside[-1]
    return end if _ends(chunk[:end], following if last and following else "") else None


def _ends(head: str, following: str) -> bool:
    """Whether what ends in a mark ends a sentence; `following` is empty where punctuation follows."""
    if re.search(r"[?!]", head):
        return True
    word = re.split(r"[^\w.,'‘’-]", head[:-1])[-1].lower().rpartition("-")[2]
    if _TITLES.fullmatch(word):
        return False
    if _NUMBER.fullmatch(word):
        return not following[:1].islower()
    if word.endswith("."):  # dots of omission
        return following[:1].isupper()
    if _ABBREVIATIONS.fullmatch(word):
        return following[:1].isupper() and bool(_OPENING.fullmatch(re.split(r"\W", following.lower())[0]))
    return True
