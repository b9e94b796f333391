"""Every wrong setting is one clear error before anything runs."""

import re
import subprocess
import sys
from pathlib import Path

import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_grpo.config import Config, ConfigError, check_files, load_config, load_yaml, parse_cli
from jax_grpo.config.loading import settings as known_settings
from jax_grpo.train import main

CONFIGS = Path(__file__).parents[1] / "configs"
LEGALITY = str(CONFIGS / "legality.yaml")
BASE = "iterations: 3\nrun_dir: x\nmodel: {weights: packaged:rook-small}\n"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("[!s]*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_config_loads_and_round_trips(path, tmp_path):
    config = load_config(str(path))
    (tmp_path / "resolved.yaml").write_text(config.resolved_yaml())
    assert load_config(str(tmp_path / "resolved.yaml")) == config


def test_overrides_take_both_forms_and_yaml_numbers():
    config = load_config(LEGALITY, ["--update.learning_rate", "3e-5", "--rollout.top_k=7", "--kl.beta", "0"])
    assert config.update.learning_rate == 3e-5 and config.rollout.top_k == 7 and config.kl.beta == 0
    assert load_config(LEGALITY, ["--task.rewards.legal", "2"]).task.rewards["legal"] == 2


def test_plain_words_that_old_yaml_reads_as_something_else_stay_words(tmp_path):
    (tmp_path / "c.yaml").write_text(BASE + "update: {learning_rate: 3e-5}\nlogging: {wandb: off}\n")
    config = load_config(str(tmp_path / "c.yaml"), ["--run_dir", "2026-01-32"])
    assert (config.update.learning_rate, config.logging.wandb, config.run_dir) == (3e-5, "off", "2026-01-32")


@settings(max_examples=200, deadline=None)
@given(
    run_dir=st.one_of(
        st.text(min_size=1), st.sampled_from(["3e-5", "1e5", "off", "null", "1:30", "0x1f", "<<", "=", "010"])
    ),
    rate=st.floats(min_value=0, exclude_min=True, allow_infinity=False),
    legal=st.floats(allow_nan=False, allow_infinity=False),
)
def test_any_text_and_number_survives_the_resolved_yaml(run_dir, rate, legal, tmp_path_factory):
    values = load_config(LEGALITY).model_dump()
    values |= {"run_dir": run_dir, "update": values["update"] | {"learning_rate": rate}}
    values["task"] |= {"rewards": {"legal": legal}}
    config = Config.model_validate(values)
    file = tmp_path_factory.getbasetemp() / "any.yaml"
    file.write_text(config.resolved_yaml(), encoding="utf-8")
    assert load_config(str(file)) == config


def test_an_override_of_a_section_shared_by_an_alias_changes_that_section_only(tmp_path):
    text = "iterations: 3\nrun_dir: x\nmodel: {weights: a}\nboth: {left: &s {n: 1}, right: *s}\n"

    class Side(pydantic.BaseModel):
        n: int

    class Both(pydantic.BaseModel):
        left: Side
        right: Side

    class Root(pydantic.BaseModel):
        both: Both

    (tmp_path / "c.yaml").write_text(text)
    root = load_yaml(Root, str(tmp_path / "c.yaml"), ["--both.left.n", "2"])
    assert (root.both.left.n, root.both.right.n) == (2, 1)


def test_a_list_of_sections_names_the_item_and_its_line(tmp_path):
    class Stage(pydantic.BaseModel, extra="forbid"):
        rows: int

    class Stages(pydantic.BaseModel, extra="forbid"):
        stages: list[Stage]

    (tmp_path / "c.yaml").write_text("stages:\n  - rows: 1\n  - rows: many\n  - {rows: 2, row: 3}\n")
    with pytest.raises(ConfigError) as error:
        load_yaml(Stages, str(tmp_path / "c.yaml"))
    assert "c.yaml:3: stages.1.rows is 'many'; expected a whole number" in str(error.value)
    assert "c.yaml:4: unknown key stages.2.row. Did you mean stages.rows?" in str(error.value)
    with pytest.raises(ConfigError, match=r"^command line: stages.0.rows is 'few'"):
        load_yaml(Stages, str(tmp_path / "c.yaml"), ["--stages", "[{rows: few}]"])


def test_every_setting_is_documented_and_listed_by_help(capsys):
    with pytest.raises(SystemExit):
        parse_cli(["--help"], "train")
    shown = capsys.readouterr().out
    for name, _ in known_settings(Config):
        assert re.search(rf"^  {re.escape(name)}: .*\n      \S", shown, re.MULTILINE), f"{name} has no documentation"
    assert "update.learning_rate: number = 1e-05" in shown and "(TRL: num_generations)" in shown


def test_a_config_whose_files_are_elsewhere_is_shown_but_not_run(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rookworld = ["--config", str(CONFIGS / "rookworld_4090.yaml")]
    with pytest.raises(SystemExit) as stopped:
        parse_cli([*rookworld, "--print-config"], "train")
    assert stopped.value.code == 0 and "weights/RookWorld-LM-124M" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"put the model's config.json and model.safetensors in /.*RookWorld-LM-124M"):
        parse_cli(rookworld, "train")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            ["--model.weights", "packaged:rook-smal"],
            "the packaged models are packaged:rook-deep, packaged:rook-endings, packaged:rook-small, .*. Did you mean "
            "packaged:rook-small",
        ),
        (["--prompts.source", "packagd"], "prompts.source is 'packagd': no such file; .* Did you mean packaged?"),
        (["--run_dir", f"{LEGALITY}/run"], "run_dir is '.*', but .*legality.yaml is a file; expected a folder"),
    ],
    ids=["weights", "source", "run_dir"],
)
def test_missing_files_are_refused_with_the_nearest_name(override, message):
    check_files(load_config(LEGALITY))
    with pytest.raises(ConfigError, match=message):
        check_files(load_config(LEGALITY, override))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            ["--update.learning_rat", "1"],
            r"command line: unknown key update.learning_rat. Did you mean update.learning_rate?",
        ),
        (["--objectve.name", "clip"], r"unknown key objectve.name. Did you mean objective.name?"),
        (["--learning_rate", "1"], r"unknown key learning_rate. Did you mean update.learning_rate?"),
        (["--rollout.top_p", "2"], "rollout.top_p is 2; expected at most 1.0"),
        (["--rollout.temperature", "0"], "rollout.temperature is 0; expected more than 0"),
        (["--rollout.group_size", "many"], "rollout.group_size is 'many'; expected a whole number"),
        (["--rollout.group_size", "2.5"], "rollout.group_size is 2.5; expected a whole number"),
        (["--rollout.group_size", "1"], "rollout.group_size 1 gives every completion advantage 0"),
        (
            ["--objective.name", "clop"],
            "objective.name is 'clop'; expected one of 'clip', 'cispo', 'sapo', 'reinforce', 'dppo_tv', 'dppo_kl', "
            "'gmpo', 'vespo', 'clip_cov' or 'kl_cov'",
        ),
        (["--objective.delta", "1.1"], "objective.delta 1.1 must exceed 1 + objective.epsilon_high"),
        (["--kl.beta_min", "3"], "kl.beta_min 3.0 must not exceed kl.beta_max 1.0"),
        (["--kl.beta", ".nan"], "kl.beta is nan; expected a finite number"),
        (["--update.micro_batches", "7"], "update.micro_batches 7 must cut 64 prompts x 16 completions"),
        (["--update.minibatches", "5"], "update.minibatches 5 must divide prompts.per_iteration 64"),
        (
            ["--objective.name", "reinforce", "--rollout.group_size", "1"],
            "command line: rollout.group_size 1 gives every",
        ),
        (
            ["--objective.name", "reinforce", "--objective.importance_level", "sequence"],
            "importance_level must be token",
        ),
        (
            ["--objective.name", "cispo", "--objective.delta", "2"],
            "objective.delta 2.0 is of objective.name clip, dppo_tv, dppo_kl; cispo",
        ),
        (
            ["--kl.adaptive", "true", "--kl.beta", "2"],
            "kl.beta 2.0 must lie between kl.beta_min 0.0001 and kl.beta_max 1",
        ),
        (["--update.warmup_steps", "160"], "update.warmup_steps 160 must be below the schedule's 160 optimiser steps"),
        (["--update.learning_rate", "'3e-5'"], "update.learning_rate is '3e-5'; expected a number"),
        (["--seed", "2147483648"], "command line: seed is 2147483648; expected less than 2147483648"),
        (["--seed", "true"], "seed is true; expected a whole number"),
        (["--seed", "010"], "seed is '010'; expected a whole number"),
        (["--seed", "!!int abc"], "command line: --seed: '!!int abc' is not a YAML value"),
        (["--prompts.per_iteration", "1:30"], "prompts.per_iteration is '1:30'; expected a whole number"),
        (["--kl.beta="], "kl.beta is null; expected a number"),
        (["--run_dir", "''"], "run_dir is ''; expected a text that is not empty"),
        (["--seed.x", "1"], "command line: unknown key seed.x. Did you mean seed?"),
        (["--kl", "3", "--kl.beta", "1"], "command line: --kl.beta goes into kl, which is 3; expected a mapping"),
        (["--kl", "{bet: 3}"], "command line: unknown key kl.bet. Did you mean kl.beta?"),
        (["--objective.overlong_penalty.length", "2"], "command line: objective.overlong_penalty.weight is missing"),
        (["--task.rewards", "{1: 2}"], "command line: task.rewards.1 is 1; expected a text as the key"),
        (["--rollout.group_size", "--seed", "3"], "command line: --rollout.group_size has no value"),
        (["--model.weights", "null"], "model.weights is null, so model.num_layers"),
        (["--task.engine.nodes", "0"], "task.engine.nodes is 0; expected at least 1"),
        (["--task.engine.multipv", "4"], "task.engine.multipv is 4; expected at least 5: top_five and"),
        (["--seed"], "command line: --seed has no value"),
        (["seed", "1"], "command line: 'seed' has no key"),
        (["--model", "3"], "model is 3; expected a mapping of settings"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_settings_name_key_value_and_expectation(override, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_config(LEGALITY, override)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "iterations: 3\nrun_dir: x\nmodel: {weights: packaged:rook-small}\nupdat: {}\n",
            r"c.yaml:4: unknown key updat. Did you mean update?",
        ),
        ("iterations: 3\niterations: 4\n", "c.yaml:2: iterations is given twice (first on line 1)"),
        ("iterations: [\n", "c.yaml:2: not valid YAML"),
        ("- 1\n", "c.yaml: expected a mapping of settings, found a list"),
        ("# nothing\n", "c.yaml: expected a mapping of settings, found null"),
        ("seed: !!int abc\n", "c.yaml: not valid YAML (invalid literal for int()"),
        ("kl: &a {beta: *a}\n", "c.yaml: not valid YAML (nested too deeply)"),
        (BASE + "kl.beta: 1\n", "c.yaml:4: unknown key kl.beta. Dots are for the command line; in a file, indent"),
        (BASE + "1: 2\n", "c.yaml:4: 1 is 1; expected a text as the key"),
        (BASE + "kl:\n", "c.yaml:4: kl is null; expected a mapping of settings"),
        (
            BASE + "task: {rewards: {legal: 1, legal: 2}}\n",
            "c.yaml:4: task.rewards.legal is given twice (first on line 4)",
        ),
        (BASE + "rollout:\n  top_k: 0\n  group_size: 1\n", "c.yaml:6: rollout.group_size 1 gives every completion"),
        (BASE + "kl:\n  beta_max: 0.1\n  beta_min: 1\n", "c.yaml:6: kl.beta_min 1.0 must not exceed kl.beta_max 0.1"),
        (
            BASE + "objective:\n  overlong_penalty: {length: 3}\n",
            "c.yaml:5: objective.overlong_penalty.weight is missing",
        ),
        ("run_dir: x\nmodel: {weights: packaged:rook-small}\n", "c.yaml: iterations is missing"),
        (
            "iterations: 3\nrun_dir: x\nmodel:\n  weights: packaged:rook-small\n  remat: 1\n",
            "c.yaml:5: model.remat is 1; expected true or false",
        ),
    ],
)
def test_wrong_files_name_their_line(text, message, tmp_path):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_config(str(tmp_path / "c.yaml"))


def test_a_missing_config_file_names_the_nearest_one(tmp_path):
    (tmp_path / "quickstart.yaml").touch()
    with pytest.raises(
        ConfigError, match=r"quickstrat.yaml: cannot read the config: no such file. Did you mean .*/quickstart"
    ):
        load_config(str(tmp_path / "quickstrat.yaml"))
    with pytest.raises(ConfigError, match=r"cannot read the config \(.*directory"):
        load_config(str(tmp_path))


def _train(*arguments) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "jax_grpo.train", "--config", LEGALITY, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_command_line_shows_the_resolved_config_and_one_line_for_an_error(tmp_path):
    shown = _train("--print-config", "--seed", "5")
    (tmp_path / "shown.yaml").write_text(shown.stdout)
    assert load_config(str(tmp_path / "shown.yaml")).seed == 5
    failed = _train("--rollout.top_p", "2")
    assert (
        failed.returncode == 1
        and failed.stderr.strip() == "ConfigError: command line: rollout.top_p is 2; expected at most 1.0"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--model.weights", "/no/such/folder"],
            r"/no/such/folder/config.json does not exist; expected a Hugging Face folder",
        ),
        (["--prompts.source", "/no/such.pgn"], r"prompts.source is '/no/such.pgn': no such file"),
        (["--task.engine.path", "/no/such"], r"task.engine.path is '/no/such': no such executable"),
        (
            ["--task.rewards.legl", "1"],
            r"task.rewards.legl: the policy task has no such component. Did you mean legal\?",
        ),
        (["--model.tokenizer", "gpt2"], r"model.tokenizer 'gpt2' has 50257 tokens but the model's vocabulary has 585"),
        (["--prompts.max_prompt_tokens", "300"], r"= 308 tokens; the model has 256 positions"),
        (["--logging.wandb", "offline"], r"wandb is not installed: `pip install wandb`"),
    ],
)
def test_unusable_inputs_end_the_run_with_one_clear_line_and_no_traceback(arguments, message, tmp_path, capfd):
    """`SystemExit` with a text is what ends a process with status 1 and that text: see the test above for the process."""
    with pytest.raises(SystemExit) as failed:
        main(["--config", LEGALITY, *arguments, "--run_dir", str(tmp_path / "run"), "--evaluation.positions", "0"])
    said = failed.value.code
    assert isinstance(said, str) and re.search(message, said.replace("\n", " ")), said
    assert "Traceback" not in said + "".join(capfd.readouterr())
