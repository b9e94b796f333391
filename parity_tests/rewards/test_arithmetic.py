"""The data and rewards of configs/arithmetic.yaml."""

import json
import runpy

import pytest

FOLDER = "configs/arithmetic"


@pytest.fixture(autouse=True)
def in_repository(monkeypatch, request):
    monkeypatch.chdir(request.config.rootpath)


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_data_are_what_the_script_writes_and_no_held_out_question_is_trained(request, tmp_path):
    folder = request.config.rootpath / FOLDER
    (tmp_path / "make.py").write_text((folder / "make.py").read_text())
    runpy.run_path(str(tmp_path / "make.py"), run_name="__main__")
    train, heldout = (rows(folder / f"{name}.jsonl") for name in ("train", "heldout"))
    assert train == rows(tmp_path / "train.jsonl") and heldout == rows(tmp_path / "heldout.jsonl")
    questions = [{row["messages"][0]["content"] for row in part} for part in (train, heldout)]
    assert not questions[0] & questions[1] and [len(part) for part in questions] == [115, 80]
    assert {row["digits"] for row in train} == {1}


def test_a_question_is_judged_by_the_reward_of_its_digits_alone():
    rewards = runpy.run_path(f"{FOLDER}/rewards.py")
    texts = [[{"role": "assistant", "content": text}] for text in ("7 + 3 = 10", "It is 9.", "83")]
    given = {"completions": texts, "answer": [10, 8, 83], "digits": [1, 1, 2]}
    assert rewards["right"](**given) == [1.0, 0.0, None] and rewards["two_digits"](**given) == [None, None, 1.0]
