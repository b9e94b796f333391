"""No door writes over what is there already: each says so before it does any work. Runs' folders are in `test_resume`."""

import shutil

import pytest
from test_report import run_folder

from jax_grpo.chess.data.__main__ import main as data
from jax_grpo.chess.evaluate.__main__ import main as evaluate
from jax_grpo.chess.play.match import main as match
from jax_grpo.config.files import PACKAGED_MODELS
from jax_grpo.export.__main__ import main as export
from jax_grpo.report.__main__ import main as report
from jax_grpo.sft.__main__ import main as sft
from jax_grpo.sft.words import main as words

MODEL = ["--weights", "packaged:words-small"]
SFT = "out: {out}\nstages: [{{mixture: {{instructions: 1.0}}, rows: 64, learning_rate: 1.0e-3}}]\n"
DOORS = {
    "evaluation.json": (evaluate, [*MODEL, "--out", "."], "--out: evaluation.json is there already"),
    "games.pgn": (match, [*MODEL, "--games", "1", "--pgn", "games.pgn"], "--pgn: games.pgn is there already"),
    "match.json": (match, [*MODEL, "--games", "1", "--json", "match.json"], "--json: match.json is there already"),
    "mates.jsonl": (data, ["mates", "--out", "mates.jsonl"], "--out: mates.jsonl is there already"),
    "sft.jsonl": (sft, ["--config", "c.yaml"], "out: sft.jsonl is there already"),
    "tokenizer.json": (words, ["--out", "."], "--out: tokenizer.json is there already"),
    "notes.html": (report, ["run", "--out", "notes.html"], "--out notes.html is there already and is no report"),
}


@pytest.mark.parametrize("name", DOORS)
def test_a_file_that_is_there_is_not_written_over(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_folder(tmp_path / "run")
    (tmp_path / "c.yaml").write_text(SFT.format(out="."))
    (tmp_path / name).write_text("dear to me")
    door, arguments, words_of_it = DOORS[name]
    before = sorted(tmp_path.iterdir())
    with pytest.raises(SystemExit) as raised:
        door(arguments)
    assert words_of_it in str(raised.value) and "\n" not in str(raised.value)
    assert (tmp_path / name).read_text() == "dear to me" and sorted(tmp_path.iterdir()) == before


def test_a_report_replaces_a_report(tmp_path, monkeypatch):
    run_folder(tmp_path / "run")
    for _ in range(2):
        report([str(tmp_path / "run"), "--out", str(tmp_path / "r.html")])


def test_an_export_replaces_no_model_that_is_no_export(tmp_path):
    """A user's model has files of the same names."""
    own = tmp_path / "own"
    shutil.copytree(PACKAGED_MODELS / "words-small", own)
    (own / "README.md").write_text("# Mine\n")
    with pytest.raises(SystemExit, match="own holds a model that is no earlier export; give a new folder"):
        export([*MODEL, "--out", str(own)])
    assert (own / "README.md").read_text() == "# Mine\n"
