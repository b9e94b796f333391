"""`bench.variants`: settings against each other over seeds, each a real run."""

import json

import pytest

from jax_grpo.bench import variants
from jax_grpo.bench.variants import main, parse_variant, summary

TINY = """
run_dir: runs/never
iterations: 3
model: {tokenizer: chess, num_layers: 1, num_heads: 1, hidden_size: 16, max_position_embeddings: 128}
task: {name: length}
prompts: {per_iteration: 2, max_prompt_tokens: 80}
rollout: {group_size: 4, max_new_tokens: 6}
kl: {beta: 0.0}
update: {learning_rate: 1.0e-2}
logging: {tensorboard: false}
checkpoint: {every: 0}
"""


def test_a_variant_is_a_name_and_words_of_a_command_line():
    assert parse_variant("sum first") == ("sum first", [])
    assert parse_variant("no KL: --kl.beta 0 --seed '3'") == ("no KL", ["--kl.beta", "0", "--seed", "3"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--variant", "a", "--variant", "a"], "no name twice"),
        (["--variant", ": --kl.beta 0"], "expected a name"),
        (["--variant", "a: --kl.bta 0"], "kl.bta"),
        (["--variant", "a", "--seeds", "1,x"], "--seeds '1,x'"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_is(words, message, tmp_path, capsys):
    (tmp_path / "c.yaml").write_text(TINY)
    with pytest.raises(SystemExit):
        main(["--config", str(tmp_path / "c.yaml"), "--out", str(tmp_path / "out"), *words])
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_table_has_the_last_values_mean_and_ends_and_what_failed():
    def run(last: float, entropy: float) -> dict:
        return {"points": [[0, 0.0], [1, last]], "entropy": entropy, "seconds": 2.0}

    record = {
        "metric": "m",
        "variants": {"a": [], "b": ["--kl.beta", "0"]},
        "runs": {"a": {"0": run(0.25, 1.0), "1": run(0.75, 2.0)}, "b": {"0": {"error": "broke"}}},
    }
    _, _, first, second = summary(record).splitlines()
    assert "| 0.500 | 0.250 to 0.750 | 1.50 | 2 | 2 |" in first
    assert "seed 0: broke" in second and "`--kl.beta 0`" in second


@pytest.mark.slow  # six runs, each a process
def test_settings_are_run_over_seeds_and_those_that_are_done_are_kept(tmp_path, capsys, monkeypatch):
    (tmp_path / "c.yaml").write_text(TINY)
    shared = [
        "--config",
        str(tmp_path / "c.yaml"),
        "--out",
        str(tmp_path / "out"),
        "--variant",
        "still: --update.learning_rate 1e-12",
    ]
    main([*shared, "--seeds", "0,1"])
    file = tmp_path / "out" / "variants.json"
    first = json.loads(file.read_text())["runs"]
    assert [len(run["points"]) for run in first["still"].values()] == [3, 3]
    assert first["still"]["0"]["points"] != first["still"]["1"]["points"], "seeds draw otherwise"

    calls, train = [], variants.train
    monkeypatch.setattr(variants, "train", lambda *given: calls.append(given) or train(*given))
    main([*shared, "--variant", "moves", "--seeds", "0,1"])
    runs = json.loads(file.read_text())["runs"]
    assert len(calls) == 2 and runs["still"] == first["still"]
    assert runs["moves"]["0"]["points"][0] == runs["still"]["0"]["points"][0], "one start, one draw"
    assert runs["moves"]["0"]["points"][-1] != runs["still"]["0"]["points"][-1]
    assert (tmp_path / "out" / "variants.png").stat().st_size > 0

    with pytest.raises(SystemExit, match=r"1 run\(s\) failed: the run has no rewrd; expected one of .*reward/mean"):
        main([*shared, "--seeds", "0", "--metric", "rewrd"])
