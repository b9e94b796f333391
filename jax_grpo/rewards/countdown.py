"""The reward of Countdown: an expression of the row's numbers that equals its target (the data are TinyZero's, Pan et al. 2025)."""

import ast
import operator
import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

from jax_grpo.rewards.texts import Completion, between_tags, content

LONGEST = 200  # characters of an expression: six numbers need a quarter of that, and the parser recurses
WRITTEN = re.compile(r"[0-9+\-*/() ]+")
OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
SIGNS = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def countdown(
    completions: Sequence[Completion], target: Sequence[Any], nums: Sequence[Sequence[Any]], **columns: Any
) -> list[float]:
    """1 where the expression in the last `<answer>...</answer>` uses each of `nums` exactly once and equals `target`, else 0.

    An expression has whole numbers, + - * / and parentheses; its value is exact. It is parsed, never evaluated as Python.
    `nums` and `target` are numbers, or texts of them.

    >>> countdown(["<answer>(44 - 19) * 2</answer>", "<answer>(44 - 19) * 2 = 50</answer>"], [50] * 2, [[19, 2, 44]] * 2)
    [1.0, 0.0]
    """
    return [
        float(_reaches(between_tags(content(c), "answer"), goal, numbers))
        for c, goal, numbers in zip(completions, target, nums, strict=True)
    ]


def _reaches(text: str | None, target: Any, numbers: Sequence[Any]) -> bool:
    if text is None or len(text) > LONGEST or not WRITTEN.fullmatch(text):
        return False
    try:
        tree = ast.parse(text, mode="eval").body
        return sorted(_leaves(tree)) == sorted(map(int, numbers)) and _value(tree) == Fraction(target)
    except (
        SyntaxError,
        RecursionError,
        MemoryError,
        KeyError,
        ZeroDivisionError,
    ):  # no expression, or one without a value
        return False


def _leaves(tree: ast.AST) -> Iterator[int]:
    return (int(str(node.value)) for node in ast.walk(tree) if isinstance(node, ast.Constant))


def _value(tree: ast.AST) -> Fraction:
    """The value of a parsed expression; a KeyError where it has anything that is not allowed."""
    if isinstance(tree, ast.Constant):
        return Fraction(str(tree.value))  # a whole number: `WRITTEN` leaves no other constant
    if isinstance(tree, ast.UnaryOp):
        return SIGNS[type(tree.op)](_value(tree.operand))
    if isinstance(tree, ast.BinOp):
        return OPERATIONS[type(tree.op)](_value(tree.left), _value(tree.right))
    raise KeyError(type(tree))
