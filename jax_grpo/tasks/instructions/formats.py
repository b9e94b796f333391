"""`detectable_format:` and `detectable_content:`: what can be seen in a text without reading it.

Every checker is a pure function of the text and its arguments (Zhou et al. 2023, arXiv 2311.07911, table 3). Where the
published code accepts more than the sentence that the model reads, so do these, that figures compare: a postscript or a
section may stand anywhere, and a line of `---` is a bullet.
"""

import json
import re
from typing import Any

RESPONSES = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_POSTSCRIPTS = {"P.S.": r"p\.\s?s\.", "P.P.S": r"p\.\s?p\.\s?s"}  # in these two a space may stand between the letters
_CHANGE = re.compile(r"\*.*?\*")


def number_placeholders(text: str, num_placeholders: int) -> bool:
    """At least so many placeholders such as `[name]`, none over the end of a line."""
    return len(re.findall(r"\[.*?\]", text)) >= num_placeholders


def postscript(text: str, postscript_marker: str) -> bool:
    """The marker stands in the text, in any case."""
    marker = postscript_marker.strip()
    return bool(re.search(_POSTSCRIPTS.get(marker, re.escape(marker)), text, re.IGNORECASE))


def number_bullet_lists(text: str, num_bullets: int) -> bool:
    """Exactly so many lines begin with `-`, or with one `*`."""
    lines = map(str.lstrip, text.split("\n"))
    return sum(line.startswith(("-", "*")) and not line.startswith("**") for line in lines) == num_bullets


def number_highlighted_sections(text: str, num_highlights: int) -> bool:
    """At least so many parts of a line such as `*this*` or `**this**`."""
    single, double = re.findall(r"\*([^\n*]*)\*", text), re.findall(r"\*\*([^\n*]*)\*\*", text)
    return sum(bool(part.strip()) for part in single + double) >= num_highlights


def multiple_sections(text: str, section_spliter: str, num_sections: int) -> bool:
    """At least so many headings: the word, in its own case, and a number."""
    return len(re.findall(re.escape(section_spliter.strip()) + r"\s?\d+", text)) >= num_sections


def json_format(text: str) -> bool:
    """The whole text is one JSON value (RFC 8259), which may stand in a fence of three backticks."""
    text = re.sub(r"\A```(?:json|Json|JSON)?", "", text.strip()).removesuffix("```")
    try:
        json.loads(text.strip(), parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is Python's, not JSON's")


def title(text: str) -> bool:
    """A line has a title such as `<<this>>`."""
    return any(part.lstrip("<").rstrip(">").strip() for part in re.findall(r"<<[^\n]+>>", text))


def constrained_response(text: str) -> bool:
    """One of the three answers stands in the text: My answer is yes., My answer is no., or My answer is maybe."""
    return any(response in text for response in RESPONSES)


def rephrase(text: str, original_message: str) -> bool:
    """Outside the parts between asterisks, of which there is one, the text is the message."""
    changed = re.search(r"\*.*\*", text)
    return bool(changed) and _CHANGE.sub("", text) == _CHANGE.sub("", original_message)
