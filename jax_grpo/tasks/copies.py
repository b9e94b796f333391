"""Copies of what the user's code is given, and of what it gives to be shown: a later change of either reaches nobody else."""

import contextlib
import copy
import math
from typing import Any

_NEVER_CHANGES = (str, int, float, bool, type(None), bytes)


def copied(value: Any) -> Any:
    """A value that shares nothing with this one that can be changed. `copy.deepcopy` alone takes ten times as long for lists."""
    kind = type(value)
    if kind in _NEVER_CHANGES:
        return value
    if kind is list:
        return [copied(item) for item in value]
    if kind is dict:
        return {name: copied(item) for name, item in value.items()}
    return copy.deepcopy(value)


def plain(value: Any) -> Any:
    """A value as strict JSON has it: anything it has no word for, an array too, is a text, a number that is not finite null."""
    if isinstance(value, str | int | None):
        return value
    with contextlib.suppress(ArithmeticError, RuntimeError, TypeError, ValueError):
        only = value.item() if hasattr(value, "item") else value
        if hasattr(only, "__float__"):
            return float(only) if math.isfinite(only) else None
    return str(value)
