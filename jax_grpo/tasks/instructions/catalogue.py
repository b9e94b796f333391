"""The instructions by their published ids, and whether a text follows one, strictly or loosely.

The ids and the arguments' names are IFEval's (Zhou et al. 2023, arXiv 2311.07911). Knows no rows and no rewards.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jax_grpo.config.loading import did_you_mean
from jax_grpo.tasks.instructions import formats, keywords, lengths, whole
from jax_grpo.tasks.instructions.arguments import (
    CHANGEABLE,
    CHARACTER,
    COUNT,
    ORDINAL,
    RELATION,
    TEXT,
    TEXTS,
    BadInstruction,
    Kind,
    parsed,
)


@dataclasses.dataclass(frozen=True)
class Checker:
    """How texts are checked for a type of instruction."""

    check: Callable[..., bool]  # of a text and, by name, the arguments
    arguments: Mapping[str, Kind] = dataclasses.field(default_factory=dict)


class Instruction(NamedTuple):
    """One instruction of a prompt, its arguments checked."""

    identifier: str
    arguments: Mapping[str, Any]


CATALOGUE: dict[str, Checker] = {
    "keywords:existence": Checker(keywords.existence, {"keywords": TEXTS}),
    "keywords:frequency": Checker(keywords.frequency, {"keyword": TEXT, "frequency": COUNT, "relation": RELATION}),
    "keywords:forbidden_words": Checker(keywords.forbidden_words, {"forbidden_words": TEXTS}),
    "keywords:letter_frequency": Checker(
        keywords.letter_frequency, {"letter": CHARACTER, "let_frequency": COUNT, "let_relation": RELATION}
    ),
    "length_constraints:number_words": Checker(lengths.number_words, {"num_words": COUNT, "relation": RELATION}),
    "length_constraints:number_sentences": Checker(
        lengths.number_sentences, {"num_sentences": COUNT, "relation": RELATION}
    ),
    "length_constraints:number_paragraphs": Checker(lengths.number_paragraphs, {"num_paragraphs": COUNT}),
    "length_constraints:nth_paragraph_first_word": Checker(
        lengths.nth_paragraph_first_word, {"num_paragraphs": COUNT, "nth_paragraph": ORDINAL, "first_word": TEXT}
    ),
    "detectable_content:number_placeholders": Checker(formats.number_placeholders, {"num_placeholders": COUNT}),
    "detectable_content:postscript": Checker(formats.postscript, {"postscript_marker": TEXT}),
    "detectable_content:rephrase_paragraph": Checker(
        whole.rephrase_paragraph, {"original_paragraph": TEXT, "low": COUNT, "high": COUNT}
    ),
    "detectable_format:number_bullet_lists": Checker(formats.number_bullet_lists, {"num_bullets": COUNT}),
    "detectable_format:number_highlighted_sections": Checker(
        formats.number_highlighted_sections, {"num_highlights": COUNT}
    ),
    "detectable_format:multiple_sections": Checker(
        formats.multiple_sections, {"section_spliter": TEXT, "num_sections": COUNT}
    ),
    "detectable_format:json_format": Checker(formats.json_format),
    "detectable_format:title": Checker(formats.title),
    "detectable_format:constrained_response": Checker(formats.constrained_response),
    "detectable_format:rephrase": Checker(formats.rephrase, {"original_message": CHANGEABLE}),
    "combination:two_responses": Checker(whole.two_responses),
    "combination:repeat_prompt": Checker(whole.repeat_prompt, {"prompt_to_repeat": TEXT}),
    "multi-turn:constrained_start": Checker(whole.constrained_start, {"starter": TEXT}),
    "startend:end_checker": Checker(whole.end_checker, {"end_phrase": TEXT}),
    "startend:quotation": Checker(whole.quotation),
    "change_case:english_capital": Checker(lengths.english_capital),
    "change_case:english_lowercase": Checker(lengths.english_lowercase),
    "change_case:capital_word_frequency": Checker(
        lengths.capital_word_frequency, {"capital_frequency": COUNT, "capital_relation": RELATION}
    ),
    "punctuation:no_comma": Checker(keywords.no_comma),
}
# Published ids that are not checked here, and why.
NOT_OFFERED = {"language:response_language": "it needs a detector of languages"}


def instructions_of(
    identifiers: Sequence[str], arguments: Sequence[Mapping[str, Any] | None], where: str
) -> tuple[Instruction, ...]:
    """A row's instructions, checked; `where` names the row in the message of a BadInstruction."""
    if not len(identifiers) or len(identifiers) != len(arguments):
        raise BadInstruction(
            f"{where}: instruction_id_list has {len(identifiers)} entries and kwargs {len(arguments)}; expected one of each "
            "for every instruction, and an instruction"
        )
    return tuple(_instruction(*pair, where) for pair in zip(identifiers, arguments, strict=True))


def _instruction(identifier: str, arguments: Mapping[str, Any] | None, where: str) -> Instruction:
    if identifier in NOT_OFFERED:
        raise BadInstruction(f"{where}: {identifier} is not offered, {NOT_OFFERED[identifier]}; leave such rows out")
    if identifier not in CATALOGUE:
        raise BadInstruction(
            f"{where}: {identifier!r} is no instruction.{did_you_mean(str(identifier), [*CATALOGUE])} See docs/instructions.md"
        )
    values = parsed(f"{where}: {identifier}", arguments, CATALOGUE[identifier].arguments)
    for lower, upper in (("nth_paragraph", "num_paragraphs"), ("low", "high")):
        if lower in values and values[lower] > values[upper]:
            raise BadInstruction(
                f"{where}: {identifier}: {lower} is {values[lower]}; expected at most {upper}, {values[upper]}"
            )
    return Instruction(identifier, values)


def follows(text: str, instruction: Instruction) -> bool:
    """Whether the text follows the instruction as it stands. A blank text follows none."""
    return bool(text.strip()) and CATALOGUE[instruction.identifier].check(text, **instruction.arguments)


def variants(text: str) -> list[str]:
    """The eight texts of the loose accuracy (section 3.1): without asterisks or with; without first line, last line, both or none.

    A text of which a line was dropped is stripped.
    """
    lines = text.split("\n")
    texts = [text, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    return texts + [part.replace("*", "") for part in texts]


def follows_loosely(text: str, instruction: Instruction) -> bool:
    """Whether one of the text's eight variants follows the instruction."""
    return any(follows(variant, instruction) for variant in variants(text))
