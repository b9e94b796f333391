"""Rewards of configs/arithmetic.yaml: whether the last number of the answer is the right one."""

from jax_grpo.rewards import last_number


def right(completions, answer, digits, **columns):
    """1.0 or 0.0 for a question of one digit; None, so not judged, for one of two."""
    return [score if d == 1 else None for score, d in zip(last_number(completions, answer), digits, strict=True)]


def two_digits(completions, answer, digits, **columns):
    """The same for questions of two digits, which are never trained."""
    return [score if d == 2 else None for score, d in zip(last_number(completions, answer), digits, strict=True)]
