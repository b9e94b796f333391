"""The data and rewards of the configs that have a folder of their own: arithmetic.yaml and instructions_chat.yaml."""

import json
import runpy

import pytest

ARITHMETIC, INSTRUCTIONS = "configs/arithmetic", "configs/instructions_chat"
ROW = {
    "prompts": [
        {"role": "user", "content": "Write about a lake. Do not use commas. Give it a title such as <<name>>."}
    ],
    "topic": "lake",
    "instruction_id_list": ["punctuation:no_comma", "detectable_format:title"],
    "kwargs": [{}, {}],
}
GOOD = "<<Still water>>\nThe lake near my town is cold and clear in the early morning."


@pytest.fixture(autouse=True)
def in_repository(monkeypatch, request):
    monkeypatch.chdir(request.config.rootpath)


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(("folder", "sizes"), [(ARITHMETIC, [115, 80]), (INSTRUCTIONS, [300, 200])])
def test_the_data_are_what_the_script_writes_and_no_held_out_prompt_is_trained(folder, sizes, request, tmp_path):
    folder = request.config.rootpath / folder
    (tmp_path / "make.py").write_text((folder / "make.py").read_text())
    runpy.run_path(str(tmp_path / "make.py"), run_name="__main__")
    train, heldout = (rows(folder / f"{name}.jsonl") for name in ("train", "heldout"))
    assert train == rows(tmp_path / "train.jsonl") and heldout == rows(tmp_path / "heldout.jsonl")
    prompts = [{row["messages"][0]["content"] for row in part} for part in (train, heldout)]
    assert not prompts[0] & prompts[1] and [len(part) for part in prompts] == sizes


def test_questions_of_one_digit_alone_are_trained(request):
    assert {row["digits"] for row in rows(request.config.rootpath / ARITHMETIC / "train.jsonl")} == {1}


def test_a_question_is_judged_by_the_reward_of_its_digits_alone():
    rewards = runpy.run_path(f"{ARITHMETIC}/rewards.py")
    texts = [[{"role": "assistant", "content": text}] for text in ("7 + 3 = 10", "It is 9.", "83")]
    given = {"completions": texts, "answer": [10, 8, 83], "digits": [1, 1, 2]}
    assert rewards["right"](**given) == [1.0, 0.0, None] and rewards["two_digits"](**given) == [None, None, 1.0]


@pytest.mark.parametrize(
    "text, form, followed, partly",
    [
        (GOOD, 1, 1, 1),
        (GOOD.replace("cold and clear", "cold, clear"), 0, 0, 0.5),
        (GOOD.replace("lake", "pond"), 1, 0, 0),  # about something else
        ("<<Lake>>\nA lake.", 1, 0, 0),  # a few words
        (
            "<<Lake>>\nI do not use commas. Give it a title. The lake is cold and clear today.",
            1,
            0,
            0,
        ),  # the prompt's words
        ("<<Lake>>\nThe lake is cold. The lake is cold. The lake is cold. The lake is cold.", 1, 0, 0),  # one sentence
        (GOOD.replace("Still water", "name"), 1, 0, 0),  # the example of a title
    ],
)
def test_a_text_that_only_passes_the_checks_of_form_is_paid_nothing(text, form, followed, partly):
    rewards = runpy.run_path(f"{INSTRUCTIONS}/rewards.py")
    given = {name: [value] for name, value in ROW.items()} | {"completions": [[{"role": "assistant", "content": text}]]}
    actual = [rewards[name](**given) for name in ("form", "followed", "partly")]
    assert actual == [[form], [followed], [partly]]
