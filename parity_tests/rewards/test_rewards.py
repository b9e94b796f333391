"""Ready-made rewards: texts and messages alike, and each beside the rule that others use, on 200 texts that a seed writes."""

import doctest
import importlib
import importlib.util
import json
import random
import re

import numpy as np
import pytest

import jax_grpo.rewards
from jax_grpo.config import ConfigError, load_config
from jax_grpo.rewards import countdown, gsm8k_answer, last_number, tagged_answer, think_format
from jax_grpo.rewards.texts import NUMBER, between_tags, last_number_of, value
from jax_grpo.tasks import make_task
from jax_grpo.tasks.functions import Calls, named

ROOM = ("texts", "numeric", "formats", "countdown")


def messages(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


@pytest.mark.parametrize("module", ROOM)
def test_examples(module):
    assert doctest.testmod(importlib.import_module(f"jax_grpo.rewards.{module}")).failed == 0


@pytest.mark.parametrize(
    ("text", "last"),
    [
        ("1,234.50", "1234.50"),
        ("so 12,34 are two", "34"),
        ("1,2345", "2345"),
        ("it fell to -5.", "-5"),
        ("it fell to −5 degrees", "-5"),
        ("10-3", "3"),
        ("(4)-3", "3"),
        ("x-3", "3"),
        ("= -$1,000", "-1000"),
        ("$.75", ".75"),
        ("pi is 3.14159.", "3.14159"),
        ("no number, but one word", None),
        ("version 1.2.3", "3"),
    ],
)
def test_the_last_number_of_a_text(text, last):
    actual = last_number_of(text)
    assert actual == (None if last is None else value(last))


def test_texts_and_messages_are_scored_alike():
    texts = ["<think>6*7</think><answer>42</answer>", "#### 42", "41", ""]
    columns = {"answer": ["#### 42", 42, "42", "42"]}
    for reward in (last_number, gsm8k_answer, tagged_answer, think_format):
        assert reward([messages(text) for text in texts], **columns) == reward(texts, **columns), reward.__name__
    given = {"target": [42] * 2, "nums": [[6, 7]] * 2}
    texts = ["<answer>6*7</answer>", "<answer>6+7</answer>"]
    assert countdown([messages(text) for text in texts], **given) == countdown(texts, **given) == [1, 0]
    assert last_number([[{"role": "assistant", "content": None}]], [1]) == [0], "a message that only calls tools"


def test_a_row_without_a_number_is_judged_by_nobody():
    assert last_number(["7"], ["seven"]) == gsm8k_answer(["#### 7"], ["seven"]) == [None]


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("<think>a</think><answer>b</answer>", 1),
        ("\n<think>\na\n</think>\n\n<answer>\nb\n</answer>\n", 1),
        ("<think></think><answer></answer>", 1),
        ("<think>a</think> so <answer>b</answer>", 0),
        ("<think>a</think><answer>b</answer>.", 0),
        ("Well, <think>a</think><answer>b</answer>", 0),
        ("<answer>b</answer><think>a</think>", 0),
        ("<think>a<think>b</think><answer>c</answer>", 0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0),
        ("<think>a</think><answer>b", 0),
        ("a</think><answer>b</answer>", 0),
    ],
)
def test_the_format_of_thoughts_and_answer(text, score):
    assert think_format([text]) == [score]


def test_the_first_tag_may_stand_in_the_prompt():
    assert think_format(["a</think><answer>b</answer>"], prompts=["Let me see.\n<think>\n"]) == [1]
    assert think_format(["<think>a</think><answer>b</answer>"], prompts=["Let me see.\n<think>"]) == [0]
    assert think_format(["<think>a</think><answer>b</answer>"], prompts=[[{"role": "user", "content": "<think>"}]]) == [
        1
    ]


def test_what_stands_between_tags():
    assert between_tags("<answer>1</answer>", "answer") == "1"
    assert between_tags("<answer>1</answer><answer>2", "answer") == "1"
    assert between_tags("1</answer>", "answer") is between_tags("<answer>1", "answer") is None
    answers = ["42", "1,000.0", "Paris", "1 + 1", "x"]
    texts = [f"<answer>{text}</answer>" for text in ("42.0", " 1000 ", "PARIS", "2", "")]
    assert tagged_answer(texts, answers) == [1, 1, 1, 0, 0]


@pytest.mark.parametrize(
    ("expression", "score"),
    [
        ("(44 - 19) * 2", 1),
        (" 2*( 44-19 ) ", 1),
        ("-2 * (19 - 44)", 1),
        ("44 - 19 * 2", 0),  # another value
        ("44 + 6", 0),  # another number
        ("(44 - 19) * 2 + 19 - 19", 0),  # one of them twice
        ("50", 0),
        ("(44 - 19) * 2 = 50", 0),
        ("(44 - 19)(2)", 0),
        ("44 // 19 * 2", 0),
        ("2 ** 44 - 19", 0),
        ("(44 - 19) * 2 if 1 else 0", 0),
        ("__import__('os').getpid()", 0),
        ("44 / (19 - 19) * 2", 0),
        ("(44 - 19) * 2 #", 0),
        ("(44 - 19) * 02", 0),
        ("4_4 - 19 * 2", 0),
        ("", 0),
        ("(" * 90 + "44" + ")" * 90, 0),
        ("-" * 190 + "44", 0),
        ("+".join(["1"] * 5000), 0),
    ],
)
def test_an_expression_uses_each_number_once_and_reaches_the_target(expression, score):
    assert countdown([f"<answer>{expression}</answer>"], [50], [[19, 44, 2]]) == [score]


def test_the_value_of_an_expression_is_exact():
    assert countdown(
        ["<answer>1 / 3 * 3</answer>", "<answer>10 / 4 * 4</answer>"], [1, 10], [[1, 3, 3], [4, 10, 4]]
    ) == [1, 1]
    assert countdown(["<answer>100 / 3</answer>"], [33], [[100, 3]]) == [0]
    assert countdown(["<answer>4 * 3</answer>"] * 2, ["12", "13"], [["3", "4"]] * 2) == [1, 0], "a file's texts"


# How an answer may stand at the end of a text. `{}` is a whole number, right in half of the texts.
FORMS = {
    "mark": "#### {}",
    "mark, commas": "#### {:,}",
    "mark, dollars": "#### ${}",
    "mark, decimals": "#### {}.00",
    "mark, unit": "#### {} apples",
    "mark without a blank": "####{}",
    "mark, full stop": "#### {}.",
    "two marks": "#### 1\nNo, I forgot one.\n#### {}",
    "mark, words": "#### about {}",
    "sentence": "The answer is {}.",
    "commas": "That makes {:,} in all.",
    "bold": "So there are **{}**.",
    "dollars": "She paid ${}.",
    "boxed": "The answer is \\boxed{{{}}}.",
    "boxed, another number after": "The answer is \\boxed{{{}}}, 3 more than before.",
    "fraction": "This is \\boxed{{\\frac{{{twice}}}{{2}}}}.",
    "another number after": "There are {} apples and 3 more.",
    "difference": "She has 10-3 more, so {}.",
    "percent": "That is {}%.",
    "none": "I cannot say.",
}


def written(count: int = 200) -> list[tuple[str, str, int]]:
    """(form, text, answer) of so many texts, each form as often."""
    rng, texts = random.Random(37), []
    for number in range(count):
        form = [*FORMS][number % len(FORMS)]
        a, b = rng.randint(4, 4000), rng.randint(4, 4000)
        shown = a + b + (0 if number // len(FORMS) % 2 else rng.choice([-1, 1, 10]))
        first = (
            f"{rng.choice(['Tom', 'Ada', 'Mia'])} has {a} {rng.choice(['apples', 'coins'])} and gets {b}. {a} + {b}.\n"
        )
        texts.append((form, first + FORMS[form].format(shown, twice=2 * shown), a + b))
    return texts


def published_rule(text: str, answer: int) -> float:
    """GSM8K's own (Cobbe et al. 2021): the characters behind the first mark and its blank, without commas."""
    match = re.search(r"#### (\-?[0-9\.\,]+)", text)
    return float(match is not None and match[1].replace(",", "") == str(answer))


def differences(texts, ours, theirs) -> dict[str, str]:
    """Forms on which two rules differ, and which of them is more lenient there."""
    actual = {}
    for (form, *_), a, b in zip(texts, ours, theirs, strict=True):
        if a != b:
            actual.setdefault(form, set()).add("ours" if a > b else "theirs")
    return {form: " and ".join(sorted(which)) for form, which in actual.items()}


def test_the_mark_beside_the_published_rule():
    texts = written()
    assert len(texts) == 200
    ours = gsm8k_answer([text for _, text, _ in texts], [f"so\n#### {answer}" for *_, answer in texts])
    theirs = [published_rule(text, answer) for _, text, answer in texts]
    actual = differences(texts, ours, theirs)
    print(f"{np.mean(ours):.2f} ours, {np.mean(theirs):.2f} the published rule; they differ on {actual}")
    assert actual == {  # docs/reasoning.md lists them
        "mark, dollars": "ours",
        "mark, decimals": "ours",
        "mark without a blank": "ours",
        "mark, full stop": "ours",
        "two marks": "ours",
    }


@pytest.fixture(scope="module")
def mathematics():
    pytest.importorskip("math_verify", reason="needs the extra `math`: pip install 'jax_grpo[math]'")
    module = importlib.import_module("jax_grpo.rewards.mathematics")
    yield module
    module._WORKER.close()


def test_mathematics_beside_the_library_and_the_last_number(mathematics):
    from math_verify import parse, verify

    texts = written()
    answers = [str(answer) for *_, answer in texts]
    (_, given), *others = Calls(60).answers(  # in a thread, as in a run
        named([jax_grpo.rewards.math_answer]), {"completions": [text for _, text, _ in texts], "answer": answers}
    )
    assert not others
    ours = given.result()
    theirs = [float(verify(parse(f"${answer}$"), parse(text))) for _, text, answer in texts]
    assert ours == theirs, "the library's own, called as it is meant to be, in the main thread"
    last = last_number([text for _, text, _ in texts], answers)
    actual = differences(texts, last, ours)
    print(
        f"{np.mean(ours):.2f} math-verify, {np.mean(last):.2f} the last number; they differ on {json.dumps(actual, indent=1)}"
    )
    assert actual == {  # docs/reasoning.md lists them
        "mark without a blank": "ours",
        "boxed, another number after": "theirs",
        "fraction": "theirs",
    }


def test_mathematics_reads_latex_numbers_and_solutions(mathematics):
    rows = [
        (r"\frac{1}{2}", r"\boxed{0.5}", 1),
        (r"$\frac{1}{2}$", r"\boxed{\frac{2}{4}}", 1),
        ("x + 1", r"so $1 + x$", 1),
        (72, "It is 72.", 1),
        ("6 * 12 = 72\n#### 72", r"\boxed{72}", 1),
        ("6 * 12 = 72\n#### 72", r"\boxed{6}", 0),
        (r"\sqrt{8}", r"\boxed{2\sqrt{2}}", 1),
        ("(1, 2)", r"\boxed{(1, 2)}", 1),
        ("72", "", 0),
    ]
    answers, texts, scores = zip(*rows, strict=True)
    assert jax_grpo.rewards.math_answer([messages(text) for text in texts], answers) == [*scores]


# The library's signal comes first, or its process is ended before that.
@pytest.mark.default_cases("1.0")
@pytest.mark.parametrize("limit_s", [60.0, 1.0])
def test_an_expression_that_never_ends_is_wrong_and_holds_up_nobody(mathematics, monkeypatch, limit_s):
    monkeypatch.setattr(mathematics, "LIMIT_S", limit_s)
    towers = [r"\boxed{9^{9^{9}}}", r"\boxed{7}", r"\boxed{(10^9)!}", r"\boxed{7}"]
    (_, given), *_ = Calls(60).answers(named([mathematics.math_answer]), {"completions": towers, "answer": ["7"] * 4})
    assert given.result() == [0, 1, 0, 1]


def test_a_process_that_ends_is_an_error_and_no_wrong_answer(mathematics):
    assert mathematics.math_answer(["7"], [7]) == [1]
    mathematics._WORKER._process.kill()
    with pytest.raises(RuntimeError, match=r"jax_grpo\.rewards\.math_worker.* ended; see its output above"):
        mathematics.math_answer(["7"], [7])
    assert mathematics.math_answer(["7"], [7]) == [1], "a new one"


def test_a_missing_library_is_named_before_a_run(monkeypatch, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": 2}\n')
    config = load_config(
        {
            "iterations": 1,
            "run_dir": "unused",
            "model": {"weights": "packaged:words-small"},
            "task": {"name": "prompts", "rewards_from": "jax_grpo.rewards:math_answer"},
            "prompts": {"source": str(tmp_path / "rows.jsonl"), "split": "all"},
        }
    )
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "math_verify" else find(name, *rest)
    )
    with pytest.raises(ConfigError, match=r"mathematics\.py:\d+: math_answer: .*pip install 'jax_grpo\[math\]'"):
        make_task(config.task).read(config.prompts, 0, None)


def test_numbers_are_found_in_time_however_long_the_text():
    assert len(NUMBER.findall("1," * 100_000 + "-" * 100_000)) == 100_000
    assert last_number(["9" * 100_000], ["9" * 100_000]) == [1]
