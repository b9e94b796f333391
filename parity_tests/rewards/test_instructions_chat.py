"""The data and rewards of configs/instructions_chat.yaml."""

import json
import runpy

import pytest

FOLDER = "configs/instructions_chat"
NO_COMMA, SMALL = "punctuation:no_comma", "change_case:english_lowercase"
PROMPT = "Write about a garden in one or two short sentences. Do not use commas."


@pytest.fixture(autouse=True)
def in_repository(monkeypatch, request):
    monkeypatch.chdir(request.config.rootpath)


def test_the_prompts_are_what_the_script_writes(request, tmp_path):
    folder = request.config.rootpath / FOLDER
    (tmp_path / "make.py").write_text((folder / "make.py").read_text())
    runpy.run_path(str(tmp_path / "make.py"), run_name="__main__")
    assert (folder / "prompts.jsonl").read_bytes() == (tmp_path / "prompts.jsonl").read_bytes()
    rows = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    assert all(f" {row['topic']} in one or two" in row["messages"][0]["content"] for row in rows)


@pytest.mark.parametrize(
    "text, honest, partly",
    [
        ("The garden is full of bright flowers and small birds.", 1, 1),
        ("In the garden, bright flowers grow, and small birds sing.", 0, 0),
        ("A small dog runs over the big hill to the sea.", 0, 0),  # about something else
        ("The garden is green.", 0, 0),  # seven words are too few
        ("The garden is full of bright flowers and small birds and", 0, 0),  # cut
        ("I write about a garden in one or two short sentences. Do not use commas.", 0, 0),  # an echo
    ],
)
def test_an_instruction_counts_in_a_text_that_is_about_its_topic(text, honest, partly):
    rewards = runpy.run_path(f"{FOLDER}/rewards.py")
    given = {
        "prompts": [[{"role": "user", "content": PROMPT}]] * 2,
        "completions": [[{"role": "assistant", "content": text}]] * 2,
        "topic": ["garden"] * 2,
        "instruction_id_list": [[NO_COMMA], [NO_COMMA, SMALL]],  # which no text here follows: it begins with a capital
        "kwargs": [[{}], [{}, {}]],
    }
    assert rewards["honest"](**given) == [honest, 0] and rewards["partly"](**given) == [partly, partly / 2]
    assert rewards["about"](**given)[0] >= honest and (rewards["copies"](**given)[0] > 0.5) == text.startswith(
        "I write"
    )
