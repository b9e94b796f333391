"""Every wrong setting is one clear error before anything runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from jax_grpo.config import ConfigError, load_config

CONFIGS = Path(__file__).parents[1] / "configs"
QUICKSTART = str(CONFIGS / "quickstart.yaml")


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("[!s]*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_config_loads_and_round_trips(path, tmp_path):
    config = load_config(str(path))
    (tmp_path / "resolved.yaml").write_text(config.resolved_yaml())
    assert load_config(str(tmp_path / "resolved.yaml")) == config


def test_overrides_take_both_forms_and_yaml_numbers():
    config = load_config(QUICKSTART, ["--update.learning_rate", "3e-5", "--rollout.top_k=7", "--kl.beta", "0"])
    assert config.update.learning_rate == 3e-5 and config.rollout.top_k == 7 and config.kl.beta == 0
    assert load_config(QUICKSTART, ["--task.rewards.legal", "2"]).task.rewards["legal"] == 2


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
            "objective.name is 'clop'; expected one of 'clip', 'cispo', 'sapo' or 'reinforce'",
        ),
        (["--objective.delta", "1.1"], "objective.delta 1.1 must exceed 1 + objective.epsilon_high"),
        (["--kl.beta_min", "3"], "kl.beta_min 3.0 must not exceed kl.beta_max 1.0"),
        (["--kl.beta", ".nan"], "kl.beta is nan; expected a finite number"),
        (["--update.micro_batches", "7"], "update.micro_batches 7 must cut 64 prompts x 16 completions"),
        (["--update.minibatches", "5"], "update.minibatches 5 must divide prompts.per_iteration 64"),
        (["--update.warmup_steps", "9999"], "update.warmup_steps 9999 exceeds the run's 160 optimiser steps"),
        (["--model.weights", "null"], "model.weights is null, so model.num_layers"),
        (["--task.engine.nodes", "0"], "task.engine.nodes is 0; expected at least 1"),
        (["--seed"], "command line: --seed has no value"),
        (["seed", "1"], "command line: 'seed' has no key"),
        (["--model", "3"], "model is 3; expected a mapping of settings"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_settings_name_key_value_and_expectation(override, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_config(QUICKSTART, override)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "iterations: 3\nrun_dir: x\nmodel: {weights: packaged:rook-small}\nupdat: {}\n",
            r"c.yaml:4: unknown key updat. Did you mean update?",
        ),
        ("iterations: 3\niterations: 4\n", "c.yaml:2: iterations is given twice (first on line 1)"),
        ("iterations: [\n", "c.yaml:2: not valid YAML"),
        ("- 1\n", "c.yaml: expected a mapping of settings, found list"),
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
    with pytest.raises(ConfigError, match="cannot read the config"):
        load_config(str(tmp_path / "absent.yaml"))


def _train(*arguments) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "jax_grpo.train", "--config", QUICKSTART, *arguments]
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
        (["--prompts.source", "/no/such.pgn"], r"/no/such.pgn: no such file"),
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
def test_unusable_inputs_end_the_run_with_one_clear_line_and_no_traceback(arguments, message, tmp_path):
    failed = _train(*arguments, "--run_dir", str(tmp_path / "run"), "--evaluation.positions", "0")
    assert failed.returncode == 1, failed.stderr
    assert re.search(message, failed.stderr.replace("\n", " ")), failed.stderr
    assert "Traceback" not in failed.stderr
