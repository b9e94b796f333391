"""Makes train.jsonl and heldout.jsonl, beside this file: `python configs/instructions_chat/make.py`."""

import json
from pathlib import Path

from jax_grpo.tasks.instructions.generate import draw
from jax_grpo.tasks.instructions.vocabulary import TOPICS

TYPES = (  # of which SmolLM2-135M-Instruct follows some, not all and not none
    "keywords:existence",
    "keywords:frequency",
    "keywords:forbidden_words",
    "keywords:letter_frequency",
    "length_constraints:number_sentences",
    "detectable_content:number_placeholders",
    "detectable_format:title",
    "punctuation:no_comma",
)
TRAINED, HELD_OUT, COPIES = 300, 200, 2  # a copy is sampled by itself


def row(seed: int) -> dict[str, object]:
    made = draw(seed, TYPES, most=2)
    text = made.pop("prompt")
    topic = next(word for word in text.split(".")[0].split() if word in TOPICS)
    return {"messages": [{"role": "user", "content": text}], "topic": topic} | made


def main() -> None:
    rows = list(dict.fromkeys(json.dumps(row(seed)) for seed in range(4 * (TRAINED + HELD_OUT))))
    parts = {"heldout": rows[:HELD_OUT] * COPIES, "train": rows[HELD_OUT:][:TRAINED]}
    for name, lines in parts.items():
        (Path(__file__).parent / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
