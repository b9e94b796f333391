"""docs/experiments/instructions_chat.py: the answers of a tiny model, and the tables of two models' answers."""

import json
import shutil
from pathlib import Path

import pytest
from conftest import experiment
from flax import nnx
from test_tokenizer_folders import CHATML, END, byte_level, write

from jax_grpo.model.architecture import Architecture
from jax_grpo.model.decoder import Decoder
from jax_grpo.model.tokenizer import Tokenizer
from jax_grpo.model.weights import save_hf

script = experiment("instructions_chat")
MOON = "The silver moon is a bright round light that we all see at night. [a] [b] [c]"
BOAT = "<<Our boats>>\nThe boat sails over a calm lake towards the small town in the south."


@pytest.fixture
def rows(monkeypatch, request, tmp_path) -> list[dict]:
    """The first ten held-out prompts, each of which the script's folder has twice, as it is shipped."""
    monkeypatch.chdir(request.config.rootpath)
    lines = (script.FOLDER / "heldout.jsonl").read_text().splitlines()[:10]
    (tmp_path / "heldout.jsonl").write_text("\n".join(lines + lines))
    shutil.copy(script.FOLDER / "rewards.py", tmp_path)
    monkeypatch.setattr(script, "FOLDER", tmp_path)
    return [json.loads(line) for line in lines]


def test_every_prompt_has_an_answer(rows, monkeypatch, tmp_path):
    model, config = tmp_path / "model", tmp_path / "config.yaml"
    write(model, byte_level(), tokenizer_config={"eos_token": END, "chat_template": CHATML})
    tokenizer = Tokenizer.load(str(model))
    sizes = Architecture(tokenizer.vocab_size, num_layers=1, num_heads=2, hidden_size=16, max_position_embeddings=256)
    save_hf(model, sizes, nnx.split(Decoder(sizes, rngs=nnx.Rngs(0)), nnx.Param)[1], tokenizer)
    config.write_text(Path(script.CONFIG).read_text().replace("smollm2-135m-instruct", str(model)))
    monkeypatch.setattr(script, "CONFIG", str(config))
    answers = script.greedy(str(model), rows)
    assert len(answers) == 10 and all(isinstance(answer, str) for answer in answers) and any(answers)


def test_rates_by_type_and_the_answers_stand_side_by_side(rows, monkeypatch, capsys):
    after = [MOON, *["moon moon"] * 9]
    after[2] = BOAT
    answers = {"old": ["moon moon"] * 10, "new": after}
    monkeypatch.setattr(script, "greedy", lambda weights, asked: answers[weights] if asked == rows else None)
    monkeypatch.setattr("sys.argv", ["instructions_chat.py", "--before", "old", "--after", "new"])
    script.main()
    shown = capsys.readouterr().out
    assert "| `detectable_content:number_placeholders` | 1 | 0 % | 100 % |" in shown
    assert "| `detectable_format:title` | 4 | 0 % | 25 % |" in shown
    moon, boat = (rows[number]["messages"][0]["content"] for number in (0, 2))
    assert f"| {moon} | moon moon | {MOON} **(followed)** |" in shown
    assert f"| {boat} | moon moon | {' '.join(BOAT.split())} **(followed)** |" in shown
