"""Verifiable instructions: each type by hand, bad arguments, rows, drawn prompts, rewards, and IFEval's own code beside ours."""

import json
import re

import ifeval_peer
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_grpo.chess.positions.position import Position
from jax_grpo.config import load_config
from jax_grpo.config.tasks import task_of
from jax_grpo.iteration.draw import PromptSampler
from jax_grpo.prompts.dataset import heldout_rows
from jax_grpo.tasks import make_task
from jax_grpo.tasks.checked import checked_score, made_prompt
from jax_grpo.tasks.instructions import (
    CATALOGUE,
    NOT_OFFERED,
    BadInstruction,
    followed,
    loose,
    read_rows,
    score,
    share,
    strict,
    write_rows,
)
from jax_grpo.tasks.instructions.answers import answer
from jax_grpo.tasks.instructions.catalogue import follows, instructions_of, variants
from jax_grpo.tasks.instructions.generate import CONFLICTS, MAKERS, draw
from jax_grpo.tasks.instructions.sentences import count_sentences

# By type: arguments, texts that follow, texts that do not.
CASES = [
    ("keywords:existence", {"keywords": ["rain", "C++"]}, ["Training in c++."], ["Rain in C.", "C++", "Rain, Cab"]),
    ("keywords:frequency", {"keyword": "a.b", "frequency": 2, "relation": "at least"}, ["a.b A.B"], ["a.b", "a.b axb"]),
    (
        "keywords:frequency",
        {"keyword": "cat", "frequency": 2, "relation": "less than"},
        ["Cat", "no"],
        ["cat, Catfish"],
    ),
    ("keywords:forbidden_words", {"forbidden_words": ["rain", "C++"]}, ["Training in C."], ["RAIN!", "in c++."]),
    (
        "keywords:letter_frequency",
        {"letter": "E", "let_frequency": 2, "let_relation": "at least"},
        ["See", "eE"],
        ["he"],
    ),
    ("keywords:letter_frequency", {"letter": "#", "let_frequency": 2, "let_relation": "less than"}, ["#a"], ["#a #b"]),
    (
        "length_constraints:number_words",
        {"num_words": 3, "relation": "at least"},
        ["a-b c", "one_1 2 é"],
        ["one two !", "it"],
    ),
    ("length_constraints:number_words", {"num_words": 2, "relation": "less than"}, ["one!"], ["one two"]),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 2, "relation": "at least"},
        ["Go. Why?", "Yes! no"],
        ["Mr. A", "3.5"],
    ),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 2, "relation": "less than"},
        ["I met Dr. Moon."],
        ["No. Yes."],
    ),
    (
        "length_constraints:number_paragraphs",
        {"num_paragraphs": 2},
        ["a***b", "***\na\n***\nb\n***"],
        ["a", "a******b", "a\n\nb"],
    ),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 3}, ["a***b***c"], ["a******b", "a***b"]),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Well"},
        ["a\n\nwell, b", "a\n\n\"Well's b\n\n"],
        ["a\n\nWells", "well\n\na", "a\n\nb\n\nwell", "a\n\nwell\n\nb", "a\nwell", "a\n\n\n\nwell"],
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, ["[a] [b]", "[[a]][]"], ["[a]", "[a\n] [b]"]),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, ["x\nP. S. y", "p.s."], ["PS", "P.S"]),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, ["P.P.S x", "p. p. s"], ["P.S."]),
    ("detectable_content:postscript", {"postscript_marker": "N.B."}, ["x n.b. y"], ["NOBE", "P.S."]),
    (
        "detectable_content:rephrase_paragraph",
        {"original_paragraph": "The cat the dog", "low": 2, "high": 3},
        ["the The big DOG", "the cat"],
        ["the", "The cat the dog", "none"],
    ),
    (
        "detectable_format:number_bullet_lists",
        {"num_bullets": 2},
        ["* a\n - b", "*a\n**b\n- c"],
        ["* a", "- a\n- b\n- c", "a * b"],
    ),
    (
        "detectable_format:number_highlighted_sections",
        {"num_highlights": 2},
        ["*a* *b c*", "**a** *b*"],
        ["*a*", "*a\nb* *c*", "** *a* * *"],
    ),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "Part (", "num_sections": 2},
        ["Part (1\nPart ( 2", "Part (1 Part (2 Part (3"],
        ["Part (1", "PART (1 PART (2", "Part (a Part (b"],
    ),
    (
        "detectable_format:json_format",
        {},
        ['{"a": [1]}', "```json\n[]\n```", " 3"],
        ["{a: 1}", "x {}", "NaN", "[1", "[" * 99999],
    ),
    ("detectable_format:title", {}, ["<<A>> x", "x\n<< b >>"], ["<A>", "<<>>", "<< >>", "<<a\nb>>"]),
    (
        "detectable_format:constrained_response",
        {},
        ["My answer is no.", "So: My answer is maybe. "],
        ["my answer is no.", "no"],
    ),
    (
        "detectable_format:rephrase",
        {"original_message": "A *red* boat"},
        ["A *small, blue* boat", "A ** boat"],
        ["A red boat", "The *red* boat", "A *red* boat."],
    ),
    (
        "combination:two_responses",
        {},
        ["a******b", "******\na\n******\nb"],
        ["a", "a******a ", "a******b******c", "a************b"],
    ),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say hi. "}, [" say HI. Hi", "Say hi."], ["Hi", "> Say hi."]),
    (
        "multi-turn:constrained_start",
        {"starter": "I (think)"},
        ["I (think) so", "x\n I (think)"],
        ["So I (think)", "i (think)"],
    ),
    ("startend:end_checker", {"end_phrase": "The end. "}, ["x THE END.", 'x "The end."\n'], ["The end. x", "the end"]),
    ("startend:quotation", {}, ['"a"', ' "a" "b"\n'], ['"', "'a'", '"a', '"a".']),
    ("change_case:english_capital", {}, ["A B!", "É1"], ["a", "Ab", "1!"]),
    ("change_case:english_lowercase", {}, ["a b!"], ["A", "aB", "1!"]),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at least"},
        ["A WELL-KNOWN cat", "DON'T", "U.S. NASA."],
        ["WELL-KNOWN", "Ab A", "I'm 12", "O'NEIL"],
    ),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 1, "capital_relation": "less than"},
        ["Ab c"],
        ["A b"],
    ),
    ("punctuation:no_comma", {}, ["a; b"], ["a, b"]),
]


def test_every_type_has_a_case_and_there_are_25_or_more():
    assert {case[0] for case in CASES} == set(CATALOGUE) == set(MAKERS) and len(CATALOGUE) >= 25


@pytest.mark.parametrize(("identifier", "arguments", "good", "bad"), CASES, ids=[case[0] for case in CASES])
def test_a_type_by_hand(identifier, arguments, good, bad):
    (one,) = instructions_of([identifier], [arguments], "here")
    assert [text for text in good if not follows(text, one)] == []
    assert [text for text in [*bad, "", " \n"] if follows(text, one)] == []


def test_sentences_end_where_they_do_in_prose():
    texts = {
        "": 0,
        "No mark": 1,
        "One. Two? Three! four": 4,
        "Dr. J. K. Moon came at 3 p.m. that day.": 1,
        "It is 5 p.m. The sun sets.": 2,
        "Wait... no. Wait... Now!": 3,
        'He said "Stop." Then (he left.) Why?': 3,
        "Acme Inc. has 3.5 million. See e.g. the U.S. army": 2,
        "P.S. Write soon.": 2,
    }
    assert {text: count_sentences(text) for text in texts} == texts


def test_the_eight_texts_of_the_loose_accuracy():
    inner = ["*a*\nb\n c *", "b\n c *", "*a*\nb", "b"]
    assert sorted(variants("*a*\nb\n c *")) == sorted([*inner, "a\nb\n c ", "b\n c ", "a\nb", "b"])


@pytest.mark.parametrize(
    ("identifier", "arguments", "message"),
    [
        (
            "keywords:frequency",
            {"keyword": "a", "frequency": 1, "relation": "more than"},
            "relation is 'more than'; expected 'less",
        ),
        (
            "keywords:frequency",
            {"keyword": "a", "frequency": 1},
            "relation is missing; expected 'less than' or 'at least'",
        ),
        (
            "keywords:frequency",
            {"keyword": "a", "frequency": 1.5, "relation": "at least"},
            "frequency is 1.5; expected a whole",
        ),
        (
            "keywords:frequency",
            {"keyword": "a", "frequency": True, "relation": "at least"},
            "frequency is True; expected a whole",
        ),
        (
            "keywords:frequency",
            {"keyword": "a", "frequency": float("inf"), "relation": "at least"},
            "frequency is inf; expected",
        ),
        ("keywords:existence", {"keywords": "rain"}, "keywords is 'rain'; expected a list of one or more texts"),
        ("keywords:existence", {"keywords": ["rain", " "]}, "keywords is ['rain', ' ']; expected a list"),
        (
            "keywords:letter_frequency",
            {"letter": "ab", "let_frequency": 1, "let_relation": "at least"},
            "letter is 'ab'; expected one",
        ),
        (
            "detectable_format:number_bullet_lists",
            {"num_bullets": -1},
            "num_bullets is -1; expected a whole number, 0 or more",
        ),
        ("detectable_format:title", {"num_bullets": 1}, "has no argument num_bullets (it is 1); expected none"),
        (
            "detectable_format:rephrase",
            {"original_message": "a *"},
            "original_message is 'a *'; expected a text with a part between",
        ),
        ("startend:end_checker", {"end_phrase": " "}, "end_phrase is ' '; expected a text that is not blank"),
        ("startend:end_checker", ["x"], "its arguments are ['x']; expected a mapping"),
        (
            "length_constraints:nth_paragraph_first_word",
            {"num_paragraphs": 1, "nth_paragraph": 2, "first_word": "a"},
            "nth_paragraph is 2; expected at most num_paragraphs, 1",
        ),
        ("length_constraints:number_wrods", {}, "is no instruction. Did you mean length_constraints:number_words?"),
        (
            "language:response_language",
            {"language": "kn"},
            "is not offered, it needs a detector of languages; leave such rows out",
        ),
    ],
)
def test_a_bad_argument_is_named(identifier, arguments, message):
    with pytest.raises(BadInstruction, match=re.escape(message)) as caught:
        instructions_of([identifier], [arguments], "file.jsonl: line 3")
    assert str(caught.value).startswith("file.jsonl: line 3: ") and identifier in str(caught.value)


def test_rows_are_read_as_published(tmp_path):
    """As the published file has them, and as a table of all arguments fills them in with null and 3.0."""
    rows = [
        {"key": 1, "prompt": "x", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{"num_bullets": None}]},
        {
            "key": 2,
            "prompt": "y",
            "instruction_id_list": ["language:response_language"],
            "kwargs": [{"language": "kn"}],
        },
        {
            "key": 3,
            "prompt": "é",
            "instruction_id_list": ["detectable_format:number_bullet_lists"],
            "kwargs": [{"num_bullets": 1.0}],
        },
    ]
    path = tmp_path / "input_data.jsonl"
    write_rows(path, rows)
    assert read_rows(path, leave_out=NOT_OFFERED) == [rows[0], rows[2]]
    np.testing.assert_array_equal(score([rows[0], rows[2]], ["a, b", "* a"])["strict"], [0, 1])
    with pytest.raises(BadInstruction, match=re.escape(f"{path}: line 2: language:response_language is not offered")):
        read_rows(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"prompt": "x"', "line 1: is not JSON"),
        (b'{"prompt": "\xff"}', "line 1: is not JSON"),
        (b"[1]", "line 1: is [1]; expected a mapping with prompt, instruction_id_list, kwargs"),
        (b'{"prompt": "x", "instruction_id_list": ["a"]}', "line 1: kwargs is missing; expected a list of mappings"),
        (b'{"prompt": 3, "instruction_id_list": [], "kwargs": []}', "line 1: prompt is 3; expected a text"),
        (
            b'{"prompt": "x", "instruction_id_list": [], "kwargs": []}',
            "line 1: instruction_id_list has 0 entries and kwargs 0",
        ),
        (
            b'{"prompt": "x", "instruction_id_list": ["a"], "kwargs": []}',
            "line 1: instruction_id_list has 1 entries and kwargs 0",
        ),
        (b"\n", "has no row to ask"),
    ],
)
def test_a_bad_row_is_named(tmp_path, line, message):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(line)
    with pytest.raises(BadInstruction, match=re.escape(f"{path}: {message}")):
        read_rows(path)


ROWS = [
    {"instruction_id_list": ["punctuation:no_comma", "startend:quotation"], "kwargs": [{}, {}]},
    {
        "instruction_id_list": [*["change_case:capital_word_frequency"] * 2, "startend:quotation"],
        "kwargs": [
            {"capital_frequency": 1, "capital_relation": "at least"},
            {"capital_frequency": 2, "capital_relation": "less than"},
            {},
        ],
    },
]


def test_scores_by_hand():
    scores = score([ROWS[0], ROWS[0], ROWS[1]], ['"a"', 'Here:\n"a"', "A B"])
    assert scores["strict"].tolist() == [1, 0, 0]
    assert scores["loose"].tolist() == [1, 1, 0]
    np.testing.assert_allclose(scores["share"], [1, 0.5, 1 / 3], rtol=1e-6)
    assert scores["startend:quotation"].tolist() == [1, 0, 0]
    np.testing.assert_array_equal(scores["change_case:capital_word_frequency"], np.float32([np.nan, np.nan, 0.5]))
    assert {values.dtype for values in scores.values()} == {np.dtype(np.float32)}


def test_rewards_have_trls_signature():
    columns = {name: [row[name] for row in ROWS] for name in ROWS[0]} | {"prompt": ["x", "y"], "trainer_state": None}
    given = {"prompts": ["x", "y"], "completions": ['"a"', "A"], "completion_ids": [[1], [2]]}
    logged = {}
    assert share(**given, **columns, log_metric=logged.__setitem__) == pytest.approx([1, 2 / 3])
    assert logged == {"punctuation:no_comma": 1, "startend:quotation": 0.5, "change_case:capital_word_frequency": 1}
    assert (strict(**given, **columns), loose(**given, **columns)) == ([1, 0], [1, 0])
    assert followed("punctuation:no_comma")(**given, **columns) == [1, None]
    messages = given | {"completions": [[{"role": "assistant", "content": text}] for text in given["completions"]]}
    assert share(**messages, **columns) == share(**given, **columns)
    assert [reward.__name__ for reward in (strict, loose, share)] == ["strict", "loose", "share"]


@given(st.integers())
def test_what_is_drawn_goes_together(seed):
    """No two instructions of a prompt contradict: `answer` finds a text that follows all of them."""
    row = draw(seed)
    assert row == draw(seed) and 1 <= len(row["kwargs"]) <= 3
    text = answer(row, seed)
    assert score([row], [text])["strict"] == 1 and text == answer(row, seed)
    pairs = {frozenset((one, other)) for one in row["instruction_id_list"] for other in row["instruction_id_list"]}
    assert not pairs & CONFLICTS


def test_every_type_is_drawn_and_every_pair_that_does_not_conflict():
    rows = [draw(seed, most=3) for seed in range(5000)]
    types = sorted(CATALOGUE)
    pairs = {
        frozenset((a, b))
        for row in rows
        for a in row["instruction_id_list"]
        for b in row["instruction_id_list"]
        if a != b
    }
    assert {one for row in rows for one in row["instruction_id_list"]} == set(types)
    assert pairs == {frozenset((a, b)) for a in types for b in types if a < b} - CONFLICTS
    assert {len(row["kwargs"]) for row in rows} == {1, 2, 3}


def test_only_the_wanted_types_are_drawn():
    types = ["punctuation:no_comma", "detectable_format:title"]
    assert {one for seed in range(50) for one in draw(seed, types)["instruction_id_list"]} == set(types)
    assert {len(draw(seed, types, most=1)["kwargs"]) for seed in range(50)} == {1}


def test_the_task_asks_and_rewards_as_the_functions_do():
    task = make_task(task_of(name="instructions"))
    position = Position("8/8/8/8/8/8/8/K1k5 w - - 0 1")
    prompts = [task.prompt(position, seed) for seed in range(40)]
    assert task.prompt(position, 0) == prompts[0] and len({prompt.text for prompt in prompts}) > 30
    rows = [json.loads(prompt.answer) for prompt in prompts]
    texts = [answer(row, 0) for row in rows[:30]] + ["a, b"] * 10
    scores, expected = checked_score(task, prompts, texts), score(rows, texts)
    assert scores["strict"].tolist() == expected["strict"].tolist() == [1] * 30 + expected["strict"][30:].tolist()
    raw = task.score(prompts, texts)
    for name in CATALOGUE:
        np.testing.assert_array_equal(raw[name].about_B, ~np.isnan(expected[name]))
        np.testing.assert_array_equal(np.where(raw[name].about_B, raw[name].values_B, np.nan), expected[name])
    assert task.stop_rule.truncate("a\n\nb. ", 0) == ("a\n\nb. ", False)


@pytest.mark.parametrize("mixed", [False, True])
def test_no_held_out_prompt_is_one_that_training_can_ask(mixed, monkeypatch, request):
    """Of `configs/instructions.yaml`, whose short prompts few instructions make; a position of either split gives either."""
    monkeypatch.chdir(request.config.rootpath)
    config = load_config("configs/instructions.yaml")
    if mixed:
        mixture = {"name": "mixed", "mixture": {"instructions": {"share": 20}, "length": {}}}
        config = config.model_copy(update={"task": task_of(**mixture)})
    task = make_task(config.task)
    training = task.read(config.prompts, config.seed, None)
    draws = PromptSampler(config, task, training)
    trained = {prompt.text for step in range(config.iterations) for prompt in draws.in_order(step)[1]}
    held = heldout_rows(config, training, task.read)
    assert held is not None and len(held.rows) == 1000
    requested = [made_prompt(task, row, index, heldout=True) for index, row in enumerate(held.rows)]
    short = sum(prompt.text.count(".") == 2 for prompt in requested)
    print(
        f"{len(trained)} trained, {len({prompt.text for prompt in requested})} texts asked, {short} of them of one instruction"
    )
    assert not trained & {prompt.text for prompt in requested} and short > 200
    again = [made_prompt(task, row, index) for index, row in enumerate(held.rows)]
    own = {prompt.text for prompt in again if not mixed or prompt.task == "instructions"}
    assert own.isdisjoint(prompt.text for prompt in requested), "not of the position but of the text"


@pytest.fixture(scope="module")
def peers():
    try:
        return ifeval_peer.load()
    except ifeval_peer.Missing as missing:
        pytest.skip(f"the published checkers of IFEval: {missing}")


@pytest.mark.parametrize("identifier", CATALOGUE)
def test_the_published_checkers_say_the_same(identifier, peers):
    """On 300 texts here; on 4000, strict and loose, in docs/instructions.md."""
    followed_there, different = ifeval_peer.compared(peers[identifier], identifier, 300)
    print(f"{identifier}: {followed_there} of 300 follow, {len(different)} differ")
    assert 0 < followed_there < 300 and len(different) <= 1, different[:2]


def test_the_pages_example_prints_what_it_says(request, capsys):
    page = (request.config.rootpath / "docs" / "instructions.md").read_text()
    code, printed = re.findall(r"```(?:python|text)\n(.*?)```", page, re.DOTALL)[:2]
    exec(code, {})
    assert capsys.readouterr().out == printed


def test_the_page_has_every_type_with_its_arguments(request):
    page = (request.config.rootpath / "docs" / "instructions.md").read_text()
    for identifier, instruction in CATALOGUE.items():
        assert f"| `{identifier}` | {', '.join(f'`{name}`' for name in instruction.arguments)} |" in page
