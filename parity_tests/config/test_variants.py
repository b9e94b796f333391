"""`bench.variants`: settings against each other over seeds, each a real run."""

import json
import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest

from jax_grpo.bench import variants
from jax_grpo.bench.curves import arrivals, summary
from jax_grpo.bench.variants import main, parse_variant, read_variants
from jax_grpo.config import load_config

REPOSITORY = Path(__file__).parents[2]
METHODS, TOY = REPOSITORY / "docs" / "experiments" / "methods.yaml", REPOSITORY / "configs" / "methods_toy.yaml"
TABLES = [
    page for page in sorted((REPOSITORY / "docs/results").rglob("*.md")) if "| variant | settings |" in page.read_text()
]

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
        (["--variant", "a", "--last", "0"], "--last 0: expected a number of points from 1"),
        ([], "expected --variant or --variants"),
        (["--variants", "absent.yaml"], "absent.yaml"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_is(words, message, tmp_path, capsys):
    (tmp_path / "c.yaml").write_text(TINY)
    with pytest.raises(SystemExit):
        main(["--config", str(tmp_path / "c.yaml"), "--out", str(tmp_path / "out"), *words])
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "text", ["- a\n- b\n", "a: [--kl.beta, 0]\n", "1: --kl.beta 0\n", "a: {kl.beta: 0}\n", "a: 'b\n"]
)
def test_a_file_of_other_things_than_names_and_settings_is_named(text, tmp_path):
    (tmp_path / "v.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"v\.yaml: "):
        read_variants(tmp_path / "v.yaml")


def test_a_file_of_variants_is_read_in_its_order_and_each_of_the_repository_s_is_accepted():
    listed = read_variants(METHODS)
    assert listed[0] == ("GRPO (default)", [])
    assert ("refill", ["--rollout.refill", "{rounds: 3}"]) in listed
    for _, overrides in listed:
        load_config(str(TOY), overrides)


@pytest.mark.parametrize("page", TABLES, ids=lambda page: f"{page.parent.name}-{page.stem}")
def test_the_settings_of_a_measured_table_are_todays_or_its_first_line_gives_todays(page, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    lines = page.read_text().splitlines()
    command = next(line for line in lines if line.startswith("`python -m jax_grpo.bench.variants"))
    renamed = re.findall("`([^`]*)` is `([^`]*)`", lines[0])
    settings = [row.split(" | ")[1].strip("`") for row in lines if " | `--" in row]
    for text in [command, *settings]:
        for old, new in renamed:
            text = text.replace(old, new)  # noqa: PLW2901
        words = shlex.split(text.strip("`"))
        if text.startswith("--"):
            load_config(re.findall(r"--config (\S+)", command)[0], words)
        elif "--variants" in words:
            assert Path(words[words.index("--variants") + 1]).is_file()
    assert settings


def run(*values: float, entropy: float = 1.0) -> dict:
    return {"points": [[step, value] for step, value in enumerate(values)], "entropy": entropy, "seconds": 2.0}


def test_the_table_has_the_last_values_mean_its_interval_and_what_failed():
    record = {
        "metric": "m",
        "last": 1,
        "variants": {"a": [], "b": ["--kl.beta", "0"]},
        "runs": {"a": {"0": run(0, 0.25), "1": run(0, 0.75, entropy=2.0)}, "b": {"0": {"error": "broke"}}},
    }
    _, _, first, second = summary(record).splitlines()
    # Student's t of one degree of freedom, 12.706 (any table), times sqrt(1/8) / sqrt(2)
    assert "| 0.500 | -2.677 to 3.677 | - | 1.50 | 2 | 2 |" in first
    assert "seed 0: broke" in second and "`--kl.beta 0`" in second


def test_a_score_is_the_mean_of_the_last_points_and_stands_beside_the_first_variant_s():
    a, b = [(9, 1, 3), (9, 2, 6), (9, 1, 5)], [(9, 8, 10), (9, 7, 9), (9, 8, 12)]
    record = {
        "metric": "m",
        "last": 2,
        "variants": {"a": [], "b": []},
        "runs": {
            "a": {str(i): run(*row) for i, row in enumerate(a)},
            "b": {str(i): run(*row) for i, row in enumerate(b)},
        },
    }
    _, _, first, second = summary(record).splitlines()
    # Means 2, 4, 3 and 9, 8, 10: variances 1 and 1, so Welch's has 4 degrees of freedom: 2.7764 * sqrt(2 / 3) = 2.267
    assert "m, mean of the last 2" in summary(record)
    assert "| 3.000 | 0.516 to 5.484 | - |" in first
    assert "| 9.000 | 6.516 to 11.484 | +6.000 (+3.733 to +8.267) |" in second


def test_the_way_to_a_score_is_measured_in_iterations_and_in_seconds_and_the_first_variant_s_stands_over_it():
    record = {
        "metric": "m",
        "variants": {"a": [], "b": [], "c": []},
        "runs": {
            # 0.5 after 3 and 30 s; never
            "a": {
                "0": run(0, 0.1, 0.3, 0.5, 0.6) | {"clock": [0, 10, 20, 30, 40]},
                "1": run(0, 0.4) | {"clock": [0, 9]},
            },
            # 0.5 between the first two points, at five eighths: 0.625 and 15 s; of seed 1 there is nothing to compare with
            "b": {"0": run(0, 0.8) | {"clock": [0, 24]}, "1": run(0.1, 0.5) | {"clock": [0, 25]}},
            "c": {"0": {"error": "broke"}},
        },
    }
    _, _, first, second, third = arrivals(record, 0.5).splitlines()
    assert first == "| a | 3 not by seed 1 | 1.00 (1.00 to 1.00) | 30 | 1.00 (1.00 to 1.00) |"
    assert second == "| b | 1 | 4.80 (4.80 to 4.80) | 20 | 2.00 (2.00 to 2.00) |"
    assert third == "| c | not by seed 0 |  |  |  |"


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
    main([*shared, "--variant", "moves", "--seeds", "0,1", "--reach", "2"])
    runs = json.loads(file.read_text())["runs"]
    assert all(0 < earlier < later for run in first["still"].values() for earlier, later in pairwise(run["clock"]))
    assert len(calls) == 2 and runs["still"] == first["still"]
    assert runs["moves"]["0"]["points"][0] == runs["still"]["0"]["points"][0], "one start, one draw"
    assert runs["moves"]["0"]["points"][-1] != runs["still"]["0"]["points"][-1]
    assert "| moves | not by seed 0, 1 |" in capsys.readouterr().out, "a reward of at most 1"
    assert (tmp_path / "out" / "variants.png").stat().st_size > 0

    with pytest.raises(
        SystemExit, match=r"1 run\(s\) failed: seed 0: the run has no rewrd; expected one of .*reward/mean"
    ):
        main([*shared, "--seeds", "0", "--metric", "rewrd"])
