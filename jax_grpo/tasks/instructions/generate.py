"""Prompts with one to three instructions that go together, in a small English, and answers that follow them. All by seed.

A model of a few million parameters can learn to read these: some 60 nouns and one sentence for each type of instruction.
`CONFLICTS` keeps apart types that contradict; that no other two do is proved by `answers`, which writes for any row a text that
follows all of it. Knows no tasks and no models.
"""

import random
from collections.abc import Callable, Collection, Mapping
from typing import Any

from jax_grpo.tasks.instructions.catalogue import CATALOGUE
from jax_grpo.tasks.instructions.formats import RESPONSES
from jax_grpo.tasks.instructions.vocabulary import (
    COUNTED,
    ENDINGS,
    FIRST_WORDS,
    FORBIDDEN,
    KEYWORDS,
    ORIGINALS,
    PARAGRAPHS,
    STARTERS,
    TOPICS,
)

Arguments = dict[str, Any]
_Maker = Callable[[random.Random, str], tuple[Arguments, str]]


def _relation(rng: random.Random, lower: tuple[int, int], upper: tuple[int, int]) -> tuple[str, int]:
    relation = rng.choice(("at least", "less than"))
    return relation, rng.randint(*(lower if relation == "at least" else upper))


def _existence(rng: random.Random, topic: str) -> tuple[Arguments, str]:
    words = rng.sample(KEYWORDS, rng.randint(1, 2))
    return {"keywords": words}, f"Use the word{'s' if len(words) > 1 else ''} {' and '.join(words)}."


def _frequency(rng: random.Random, topic: str) -> tuple[Arguments, str]:
    word, (relation, count) = rng.choice(COUNTED), _relation(rng, (2, 4), (1, 3))
    return {
        "keyword": word,
        "frequency": count,
        "relation": relation,
    }, f"Use the word {word} {relation} {_times(count)}."


def _forbidden(rng: random.Random, topic: str) -> tuple[Arguments, str]:
    words = rng.sample(FORBIDDEN, rng.randint(1, 2))
    return {"forbidden_words": words}, f"Do not use the word{'s' if len(words) > 1 else ''} {' or '.join(words)}."


def _letter(rng: random.Random, topic: str) -> tuple[Arguments, str]:
    letter, count = rng.choice("aeot"), rng.randint(3, 6)
    arguments = {"letter": letter, "let_frequency": count, "let_relation": "at least"}
    return arguments, f"Use the letter {letter} at least {_times(count)}."


def _words(rng: random.Random, topic: str) -> tuple[Arguments, str]:
    relation, count = _relation(rng, (5, 20), (40, 60))
    return {"num_words": count, "relation": relation}, f"Use {relation} {count} words."


def _sentences(rng: random.Random, topic: str) -> tuple[Arguments, str]:
    relation, count = _relation(rng, (2, 4), (9, 12))
    return {"num_sentences": count, "relation": relation}, f"Write {relation} {count} sentences."


def _paragraphs(rng: random.Random, topic: str) -> tuple[Arguments, str]:
    count = rng.randint(2, 4)
    return {"num_paragraphs": count}, f"Write {count} paragraphs with *** between them."


def _nth_paragraph(rng: random.Random, topic: str) -> tuple[Arguments, str]:
    count, word = rng.randint(2, 3), rng.choice(FIRST_WORDS)
    nth = rng.randint(1, count)
    arguments = {"num_paragraphs": count, "nth_paragraph": nth, "first_word": word}
    return arguments, f"Write {count} paragraphs with an empty line between them. Begin paragraph {nth} with {word}."


def _sections(rng: random.Random, topic: str) -> tuple[Arguments, str]:
    count, word = rng.randint(2, 3), rng.choice(("Section", "SECTION"))
    return {
        "section_spliter": word,
        "num_sections": count,
    }, f"Write {count} sections that begin with {word} 1 and so on."


def _capital_words(rng: random.Random, topic: str) -> tuple[Arguments, str]:
    relation, count = _relation(rng, (1, 4), (9, 12))
    arguments = {"capital_frequency": count, "capital_relation": relation}
    return arguments, f"Use words in capital letters {relation} {_times(count)}."


def _times(count: int) -> str:
    return f"{count} time{'s' if count > 1 else ''}"


def _counted(argument: str, most: int, sentence: str) -> _Maker:
    """A type that has a count from 1 up to `most`."""

    def make(rng: random.Random, topic: str) -> tuple[Arguments, str]:
        count = rng.randint(1, most)
        return {argument: count}, sentence.format(count=count, s="s" if count > 1 else "")

    return make


def _chosen(argument: str, choices: tuple[str, ...], sentence: str) -> _Maker:
    """A type that has one of these texts."""

    def make(rng: random.Random, topic: str) -> tuple[Arguments, str]:
        choice = rng.choice(choices)
        return {argument: choice}, sentence.format(choice)

    return make


def _plain(sentence: str) -> _Maker:
    """A type without arguments."""
    return lambda rng, topic: ({}, sentence)


def _rephrased(rng: random.Random, topic: str) -> tuple[Arguments, str]:
    paragraph, low = rng.choice(PARAGRAPHS), rng.randint(2, 3)
    arguments = {"original_paragraph": paragraph, "low": low, "high": low + 2}
    return arguments, f"Say this again with {low} to {low + 2} of its words: {paragraph}"


MAKERS: Mapping[str, _Maker] = {
    "keywords:existence": _existence,
    "keywords:frequency": _frequency,
    "keywords:forbidden_words": _forbidden,
    "keywords:letter_frequency": _letter,
    "length_constraints:number_words": _words,
    "length_constraints:number_sentences": _sentences,
    "length_constraints:number_paragraphs": _paragraphs,
    "length_constraints:nth_paragraph_first_word": _nth_paragraph,
    "detectable_content:number_placeholders": _counted(
        "num_placeholders", 3, "Use at least {count} placeholder{s} such as [name]."
    ),
    "detectable_content:postscript": _chosen("postscript_marker", ("P.S.", "P.P.S"), "Add a line that begins with {}"),
    "detectable_content:rephrase_paragraph": _rephrased,
    "detectable_format:number_bullet_lists": _counted(
        "num_bullets", 4, "Write {count} line{s} that begin with * as a list."
    ),
    "detectable_format:number_highlighted_sections": _counted(
        "num_highlights", 3, "Put stars around at least {count} part{s} such as *this*."
    ),
    "detectable_format:multiple_sections": _sections,
    "detectable_format:json_format": _plain("Answer in JSON."),
    "detectable_format:title": _plain("Give it a title such as <<name>>."),
    "detectable_format:constrained_response": _plain(f"Answer with {' or '.join(RESPONSES)}"),
    "detectable_format:rephrase": _chosen(
        "original_message", ORIGINALS, "Say this again and change only what is between the stars: {}"
    ),
    "combination:two_responses": _plain("Give two answers with ****** between them."),
    "combination:repeat_prompt": lambda rng, topic: (
        {"prompt_to_repeat": request(topic)},
        "First repeat the sentence before this one.",
    ),
    "multi-turn:constrained_start": _chosen("starter", STARTERS, "Begin with: {}"),
    "startend:end_checker": _chosen("end_phrase", ENDINGS, "End with: {}"),
    "startend:quotation": _plain("Put double quotation marks around all of it."),
    "change_case:english_capital": _plain("Use only capital letters."),
    "change_case:english_lowercase": _plain("Use only small letters."),
    "change_case:capital_word_frequency": _capital_words,
    "punctuation:no_comma": _plain("Do not use commas."),
}
"""What is drawn for each type: its arguments, and the sentence that asks for it."""

_SHAPES = (  # of which a text has one
    "length_constraints:number_paragraphs",
    "length_constraints:nth_paragraph_first_word",
    "detectable_format:number_bullet_lists",
    "detectable_format:multiple_sections",
    "detectable_format:json_format",
    "detectable_format:constrained_response",
    "detectable_format:rephrase",
    "detectable_content:rephrase_paragraph",
    "combination:two_responses",
)
_STARTS = ("combination:repeat_prompt", "multi-turn:constrained_start", "startend:quotation", "detectable_format:title")
_ENDS = ("detectable_content:postscript", "startend:end_checker", "startend:quotation")
_CASES = ("change_case:english_capital", "change_case:english_lowercase", "change_case:capital_word_frequency")
_FIXED = (
    "detectable_format:constrained_response",
    "detectable_format:rephrase",
    "detectable_content:rephrase_paragraph",
)
_HARMLESS = ("keywords:forbidden_words", "punctuation:no_comma")  # what a fixed answer can still follow


def _together(*groups: Collection[str]) -> set[frozenset[str]]:
    return {frozenset((one, other)) for group in groups for one in group for other in group if one != other}


def _between(ones: Collection[str], others: Collection[str]) -> set[frozenset[str]]:
    return {frozenset((one, other)) for one in ones for other in others if one != other}


CONFLICTS: frozenset[frozenset[str]] = frozenset(
    _together(_SHAPES, _STARTS, _ENDS, _CASES)
    | _between(_FIXED, [name for name in MAKERS if name not in _HARMLESS])
    | _between(["detectable_format:json_format"], [*_STARTS, *_ENDS])
    # The first paragraph begins with its own word; sections and starters are written in their own case.
    | _between(["length_constraints:nth_paragraph_first_word"], _STARTS)
    | _between(["detectable_format:multiple_sections", "multi-turn:constrained_start"], _CASES[:2])
)
"""Pairs of types that no prompt asks for at once."""


def request(topic: str) -> str:
    """What is asked before the instructions."""
    return f"Write about {'an' if topic[0] in 'aeiou' else 'a'} {topic}."


def prompt_text(row: Mapping[str, Any]) -> str:
    """What the model reads of a row; its answer begins on a new line."""
    return row["prompt"] + "\n"


def draw(seed: int | str, types: Collection[str] | None = None, most: int = 3) -> dict[str, Any]:
    """A row of `rows`: one to `most` instructions of these types (None: all) that go together; the same for the same arguments.

    Where fewer go together than were drawn for, the row has fewer.
    """
    rng = random.Random(seed)
    topic, wanted, chosen = rng.choice(TOPICS), rng.randint(1, most), []
    for identifier in rng.sample(sorted(types or CATALOGUE), len(types or CATALOGUE)):
        if len(chosen) < wanted and all(frozenset((identifier, other)) not in CONFLICTS for other in chosen):
            chosen.append(identifier)
    # `repeat_prompt` speaks of the sentence before its own.
    chosen.sort(key=lambda identifier: identifier != "combination:repeat_prompt")
    made = [MAKERS[identifier](rng, topic) for identifier in chosen]
    prompt = " ".join([request(topic), *(sentence for _, sentence in made)])
    return {"prompt": prompt, "instruction_id_list": chosen, "kwargs": [arguments for arguments, _ in made]}
