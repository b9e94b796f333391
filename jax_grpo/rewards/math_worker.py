"""The process that compares expressions for `mathematics`: a score for the row's answer and a text."""

import logging

from math_verify import parse, verify  # pyright: ignore[reportMissingImports] (an extra)

from jax_grpo.rewards.worker import serve

SECONDS = 2  # that parsing or comparing may take; by a signal, which ends most things


def score(answer: str, text: str) -> float | None:
    """1 where the text's expression equals the answer's, else 0; None: the answer has none."""
    right = parse(answer if "$" in answer or "\\boxed" in answer else f"\\boxed{{{answer}}}", parsing_timeout=SECONDS)
    if not right:
        return None
    return float(verify(right, parse(text, parsing_timeout=SECONDS), timeout_seconds=SECONDS))


if __name__ == "__main__":
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of each that takes too long
    serve(lambda settings: score)
