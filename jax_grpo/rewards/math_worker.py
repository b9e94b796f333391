"""Compares expressions for `mathematics`: a pair of texts as JSON on a line of the input, its score on one of the output."""

import json
import logging
import sys

from math_verify import parse, verify  # pyright: ignore[reportMissingImports] (an extra)

SECONDS = 2  # that parsing or comparing may take; by a signal, which ends most things


def score(answer: str, text: str) -> float | None:
    """1 where the text's expression equals the answer's, else 0; None: the answer has none."""
    right = parse(answer if "$" in answer or "\\boxed" in answer else f"\\boxed{{{answer}}}", parsing_timeout=SECONDS)
    if not right:
        return None
    return float(verify(right, parse(text, parsing_timeout=SECONDS), timeout_seconds=SECONDS))


def main() -> None:
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of each that takes too long
    print("null", flush=True)  # the imports are done
    for line in sys.stdin:
        print(json.dumps(score(*json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
