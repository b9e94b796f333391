"""Makes train.jsonl and heldout.jsonl, beside this file: `python configs/arithmetic/make.py`."""

import json
import random
from pathlib import Path

HELD_OUT, ONE_DIGIT_COPIES, TWO_DIGIT_COPIES = 40, 10, 2  # a copy is sampled by itself


def row(a: int, sign: str, b: int, digits: int) -> str:
    question = f"What is {a} {sign} {b}? Answer with the number only."
    answer = a + b if sign == "+" else a - b
    return json.dumps({"messages": [{"role": "user", "content": question}], "answer": answer, "digits": digits})


def problems(numbers: range) -> list[tuple[int, str, int]]:
    """Every sum and every difference that is not negative."""
    return [(a, "+", b) for a in numbers for b in numbers] + [(a, "-", b) for a in numbers for b in numbers if b <= a]


def main() -> None:
    rng, folder = random.Random(0), Path(__file__).parent
    one, two = problems(range(10)), problems(range(10, 100))
    rng.shuffle(one)
    heldout = [row(*problem, 1) for problem in one[:HELD_OUT]] * ONE_DIGIT_COPIES
    heldout += [row(*problem, 2) for problem in rng.sample(two, HELD_OUT)] * TWO_DIGIT_COPIES
    for name, rows in (("train", [row(*problem, 1) for problem in one[HELD_OUT:]]), ("heldout", heldout)):
        (folder / f"{name}.jsonl").write_text("\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
