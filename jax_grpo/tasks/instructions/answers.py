"""Answers that follow every instruction of a drawn row, in the same small English: to teach a model from, and a proof that the
instructions of a row do not contradict. Knows no tasks and no models."""

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax_grpo.tasks.instructions.catalogue import follows, instructions_of
from jax_grpo.tasks.instructions.formats import RESPONSES
from jax_grpo.tasks.instructions.lengths import PARAGRAPH
from jax_grpo.tasks.instructions.vocabulary import ADJECTIVES, TOPICS
from jax_grpo.tasks.instructions.whole import ANSWERS

COUNTS = ("num_paragraphs", "num_sections", "num_bullets")  # arguments that are a number of segments
TRIES, LONGEST = 50, 40  # texts that are begun, and sentences that are added to one


def answer(row: Mapping[str, Any], seed: int | str) -> str:
    """A text that follows every instruction of a row of `generate.draw`, strictly; the same for the same arguments."""
    instructions = instructions_of(row["instruction_id_list"], row["kwargs"], "the row")
    arguments = {one.identifier: dict(one.arguments) for one in instructions}
    topic = row["prompt"].split(".")[0].split()[-1]
    rng = random.Random(f"{seed} {row['prompt']}")
    for _ in range(TRIES):
        segments = [
            _opening(rng, topic, arguments) if at == 0 else [_sentence(rng, topic)] for at in range(_count(arguments))
        ]
        for _ in range(LONGEST):
            text = _written(rng, topic, segments, arguments)
            if all(follows(text, one) for one in instructions):
                return text
            rng.choice(segments).append(_sentence(rng, topic))
    raise AssertionError(f"no answer to {row}: its instructions contradict")


def _sentence(rng: random.Random, topic: str) -> str:
    one, other = rng.sample(ADJECTIVES, 2)
    noun = rng.choice(TOPICS)
    return rng.choice(
        (
            f"The {topic} is {one}.",
            f"The {one} {topic} is {other}.",
            f"We see the {one} {topic} and the {noun}.",
            f"The {noun} has the {one} {topic}.",
            f"Is the {topic} {one} or {other}?",
        )
    )


def _opening(rng: random.Random, topic: str, arguments: Mapping[str, Any]) -> list[str]:
    """The first segment: a sentence for each word, placeholder and mark that is asked for."""
    words = list(arguments.get("keywords:existence", {"keywords": []})["keywords"])
    counted = arguments.get("keywords:frequency")
    if counted and counted["relation"] == "at least":
        words += [counted["keyword"]] * counted["frequency"]
    words += ["[name]"] * arguments.get("detectable_content:number_placeholders", {"num_placeholders": 0})[
        "num_placeholders"
    ]
    highlights = arguments.get("detectable_format:number_highlighted_sections", {"num_highlights": 0})["num_highlights"]
    words += [f"*{rng.choice(ADJECTIVES)}*" for _ in range(highlights)]
    capitals = arguments.get("change_case:capital_word_frequency")
    if capitals and capitals["capital_relation"] == "at least":
        words += [rng.choice(ADJECTIVES).upper() for _ in range(capitals["capital_frequency"])]
    return [_sentence(rng, topic), *([f"We like {' and '.join(words)}."] if words else [])]


def _count(arguments: Mapping[str, Any]) -> int:
    """Segments of the text, by its shape."""
    counts = [given[name] for given in arguments.values() for name in COUNTS if name in given]
    return counts[0] if counts else 1 + ("combination:two_responses" in arguments)


def _written(rng: random.Random, topic: str, segments: Sequence[Sequence[str]], arguments: Mapping[str, Any]) -> str:
    """The text that these segments make in the shape, between the start and end, and in the case that are asked for."""
    text = _shaped(rng, [" ".join(segment) for segment in segments], arguments)
    if "detectable_format:title" in arguments:
        text = f"<<The {topic.capitalize()}>>\n{text}"
    if given := arguments.get("multi-turn:constrained_start"):
        text = f"{given['starter']} this is {rng.choice(ADJECTIVES)}.\n{text}"
    if given := arguments.get("combination:repeat_prompt"):
        text = f"{given['prompt_to_repeat']}\n{text}"
    if given := arguments.get("detectable_content:postscript"):
        text = f"{text}\n{given['postscript_marker']} {_sentence(rng, topic)}"
    if given := arguments.get("startend:end_checker"):
        text = f"{text}\n{given['end_phrase']}"
    if "startend:quotation" in arguments:
        text = f'"\n{text}\n"' if text.startswith("*") else f'"{text}"'
    upper, lower = (f"change_case:english_{case}" in arguments for case in ("capital", "lowercase"))
    return text.upper() if upper else text.lower() if lower else text


def _nth_paragraph(rng: random.Random, segments: Sequence[str], given: Mapping[str, Any]) -> str:
    nth, word = given["nth_paragraph"] - 1, given["first_word"].capitalize()
    opened = f"{word} {segments[nth][0].lower()}{segments[nth][1:]}"
    return "\n\n".join(opened if at == nth else segment for at, segment in enumerate(segments))


SHAPES: Mapping[str, Callable[[random.Random, Sequence[str], Mapping[str, Any]], str]] = {
    "length_constraints:number_paragraphs": lambda rng, segments, given: f"\n{PARAGRAPH}\n".join(segments),
    "length_constraints:nth_paragraph_first_word": _nth_paragraph,
    "detectable_format:number_bullet_lists": lambda rng, segments, given: "\n".join(f"* {one}" for one in segments),
    "detectable_format:multiple_sections": lambda rng, segments, given: "\n".join(
        f"{given['section_spliter']} {number}\n{segment}" for number, segment in enumerate(segments, 1)
    ),
    "detectable_format:json_format": lambda rng, segments, given: json.dumps({"answer": segments[0]}),
    "detectable_format:constrained_response": lambda rng, segments, given: rng.choice(RESPONSES),
    "detectable_format:rephrase": lambda rng, segments, given: re.sub(
        r"\*.*?\*", lambda change: f"*{rng.choice(ADJECTIVES)}*", given["original_message"]
    ),
    "detectable_content:rephrase_paragraph": lambda rng, segments, given: (
        f"{' '.join(given['original_paragraph'].split()[: given['low'] + 1])}."
    ),
    "combination:two_responses": lambda rng, segments, given: f"\n{ANSWERS}\n".join(segments),
}
"""The text that segments make, by the type that asks for its shape."""


def _shaped(rng: random.Random, segments: Sequence[str], arguments: Mapping[str, Any]) -> str:
    shape = next((identifier for identifier in SHAPES if identifier in arguments), None)
    return SHAPES[shape](rng, segments, arguments[shape]) if shape else segments[0]
