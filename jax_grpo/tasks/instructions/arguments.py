"""What an instruction's arguments must be, and the error where one is not. Knows neither instructions nor texts."""

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

RELATIONS = ("less than", "at least")


class BadInstruction(ValueError):
    """An instruction that cannot be checked; the message names where it stands, its id, the argument, its value and what was
    expected."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """What an argument may be."""

    expected: str  # in words, for the error
    parse: Callable[[Any], Any]  # the value as checkers take it, or None: it is not of this kind


def _whole(value: Any) -> int | None:
    # A table that has null in some rows reads its whole numbers as 3.0.
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        return None
    return int(value) if math.isfinite(value) and value == int(value) else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value.strip() else None


def _texts(value: Any) -> list[str] | None:
    listed = isinstance(value, Collection) and not isinstance(value, str | bytes | Mapping)
    return list(value) if listed and len(value) and all(map(_text, value)) else None


COUNT = Kind("a whole number, 0 or more", _whole)
ORDINAL = Kind("a whole number, 1 or more", lambda value: _whole(value) or None)
RELATION = Kind("'less than' or 'at least'", lambda value: value if value in RELATIONS else None)
TEXT = Kind("a text that is not blank", _text)
TEXTS = Kind("a list of one or more texts that are not blank", _texts)
CHARACTER = Kind("one character", lambda value: value if isinstance(value, str) and len(value.strip()) == 1 else None)
CHANGEABLE = Kind(
    "a text with a part between two asterisks", lambda value: value if (_text(value) or "").count("*") > 1 else None
)


def parsed(where: str, given: Mapping[str, Any] | None, kinds: Mapping[str, Kind]) -> dict[str, Any]:
    """The arguments as checkers take them; those that are None, as tables fill them in, are not given.

    `where` opens the message of a BadInstruction: an argument is missing, unknown, or of the wrong kind.
    """
    if given is not None and not isinstance(given, Mapping):
        raise BadInstruction(f"{where}: its arguments are {given!r}; expected a mapping")
    values = {name: value for name, value in (given or {}).items() if value is not None}
    for name, value in values.items():
        if name not in kinds:
            raise BadInstruction(
                f"{where}: has no argument {name} (it is {value!r}); expected {', '.join(kinds) or 'none'}"
            )
    for name, kind in kinds.items():
        if name not in values:
            raise BadInstruction(f"{where}: {name} is missing; expected {kind.expected}")
        if (value := kind.parse(values[name])) is None:
            raise BadInstruction(f"{where}: {name} is {values[name]!r}; expected {kind.expected}")
        values[name] = value
    return values


def related(count: int, relation: str, threshold: int) -> bool:
    """Whether a count is less than the threshold, or at least that."""
    return count < threshold if relation == "less than" else count >= threshold
