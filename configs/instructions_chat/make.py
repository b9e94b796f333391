"""Makes prompts.jsonl, beside this file: `python configs/instructions_chat/make.py`."""

import json
from pathlib import Path

from jax_grpo.tasks.instructions.generate import draw

PROMPTS = 400
TYPES = (  # those that one or two sentences can follow
    "change_case:english_capital",
    "change_case:english_lowercase",
    "detectable_format:number_highlighted_sections",
    "detectable_format:title",
    "keywords:existence",
    "multi-turn:constrained_start",
    "punctuation:no_comma",
    "startend:end_checker",
    "startend:quotation",
)


def row(seed: int) -> str:
    """A drawn prompt of one or two instructions as a chat message, with the word that it is about."""
    made = draw(seed, TYPES, most=2)
    request, _, instructions = made["prompt"].partition(". ")
    prompt = f"{request} in one or two short sentences. {instructions}"
    columns = {name: made[name] for name in ("instruction_id_list", "kwargs")}
    return json.dumps({"messages": [{"role": "user", "content": prompt}], "topic": request.split()[-1], **columns})


def main() -> None:
    rows = dict.fromkeys(row(seed) for seed in range(PROMPTS))
    Path(__file__).with_name("prompts.jsonl").write_text("\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
