"""Every wrong setting is one clear error before anything runs."""

import itertools
import re
import subprocess
import sys
from pathlib import Path

import pydantic
import pytest
import yaml
from conftest import config as tiny_config
from hypothesis import given, settings
from hypothesis import strategies as st

import jax_grpo
from jax_grpo.bench.trl_settings import trl_settings
from jax_grpo.config import Config, ConfigError, check_files, load_config, load_yaml, parse_cli, trl_names
from jax_grpo.config.loading import flat
from jax_grpo.config.loading import settings as known_settings
from jax_grpo.config.objectives import OBJECTIVES
from jax_grpo.train import main

CONFIGS = Path(__file__).parents[2] / "configs"
LEGALITY = str(CONFIGS / "legality.yaml")
BASE = "iterations: 3\nrun_dir: x\nmodel: {weights: packaged:rook-small}\n"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("[!s]*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_config_loads_and_round_trips(path, tmp_path):
    config = load_config(str(path))
    (tmp_path / "resolved.yaml").write_text(config.resolved_yaml())
    assert load_config(str(tmp_path / "resolved.yaml")) == config


# The section as earlier versions wrote it into run folders and checkpoints, whatever the objective.
FLAT = {
    "name": "clip", "epsilon_low": 0.2, "epsilon_high": 0.2, "delta": None, "tau_pos": 1.0, "tau_neg": 1.05,
    "vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0, "cov_share": 0.0002,
    "cov_low": 1.0, "cov_high": 5.0, "cov_penalty": 1.0, "importance_level": "token", "aggregation": "dapo",
    "entropy_coefficient": 0.0, "entropy_target": None, "entropy_step": 0.005, "entropy_coefficient_min": 0.0,
    "entropy_coefficient_max": 1.0, "entropy_quantile": 0.0, "mask_truncated": False, "overlong_penalty": None,
    "mismatch_cap": None, "mismatch_floor": None, "mismatch_mode": "token_truncate",
}  # fmt: skip


EARLIER = {
    "kl": {"beta_min": 0.02, "beta_max": 0.5}, "update": {"beta1": 0.8, "beta2": 0.9}, "model": {"remat_keeps": "matmuls"},
    "prompts": {"selfplay_games": 30, "format": "auto"}, "mesh": {"processes": 2},
    "rollout": {"compaction": True}, "checkpoint": {"best_is": "smallest"},
}  # fmt: skip


def test_a_setting_that_went_is_translated_where_a_version_resolved_it_and_names_what_to_give_where_a_user_did(
    tmp_path,
):
    given = ["--model.remat", "true", "--checkpoint.best_metric", "kl/mean", "--prompts.source", "selfplay"]
    values = load_config(LEGALITY, given).model_dump()
    for section, keys in EARLIER.items():
        values[section] |= keys
    values["mesh"] |= {"data": 2, "coordinator": "a:1", "process": 1}
    new = {"kl": "beta_bounds", "update": "betas"}
    for section, key in new.items():
        del values[section][key]
    for section, keys in EARLIER.items():
        for key, value in keys.items():
            with pytest.raises(
                ConfigError,
                match=rf"^command line: {section}.{key} is no longer a setting: .*(give {section}\.|leave it out|rename the file)",
            ):
                load_config(LEGALITY, [f"--{section}.{key}", yaml.safe_dump(value).split("\n")[0]])
    with pytest.raises(
        ConfigError,
        match=r"c.yaml:5: objective.cov_low is no longer a setting: give objective.cov_bounds, a list of the two",
    ):
        (tmp_path / "c.yaml").write_text(BASE + "objective:\n  cov_low: 1\n")
        load_config(tmp_path / "c.yaml")
    resolved = tmp_path / "config.yaml"
    resolved.write_text(yaml.safe_dump(values | {"objective": FLAT | {"name": "sapo", "tau_neg": 3.0}}))
    config = load_config(resolved)
    assert (config.kl.beta_bounds, config.update.betas, config.objective.tau) == ((0.02, 0.5), (0.8, 0.9), (1.0, 3.0))
    assert config.mesh.place == (1, 2)
    assert (config.model.remat, config.prompts.source) == ("keep_matmuls", "selfplay:30")
    assert (config.checkpoint.best_metric, config.best_metric()) == ("-kl/mean", "kl/mean")


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_config_that_an_earlier_version_resolved_is_read_where_it_says_nothing_else(name, tmp_path):
    values = load_config(LEGALITY, ["--objective.name", name]).model_dump()
    resolved = tmp_path / "config.yaml"
    resolved.write_text(yaml.safe_dump(values | {"objective": FLAT | {"name": name}}))
    assert load_config(resolved).objective == load_config(LEGALITY, ["--objective.name", name]).objective
    foreign = "delta" if name in ("sapo", "vespo", "kl_cov") else "cov_penalty"
    resolved.write_text(yaml.safe_dump(values | {"objective": FLAT | {"name": name, foreign: 3.0}}))
    with pytest.raises(
        ConfigError, match=rf"config.yaml:\d+: objective.{foreign} 3.0 is of objective.name .*{name} would ig"
    ):
        load_config(resolved)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("[!s]*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_config_can_be_tried_for_two_iterations(path):
    config = load_config(str(path), ["--iterations", "2"])
    steps, output = config.optimizer_steps(), [line for line in config.cautions() if "warmup" in line]
    shortened = config.update.total_steps is None and config.update.warmup_steps >= steps
    assert (
        output
        == [f"update.warmup_steps {config.update.warmup_steps} is {steps - 1} in a run of {steps} optimiser steps"]
        * shortened
    )


TRL_SAME = {
    "num_generations": (4, {"rollout.group_size": 4}),
    "max_completion_length": (7, {"rollout.max_new_tokens": 7}),
    "temperature": (0.7, {"rollout.temperature": 0.7}),
    "top_k": (None, {"rollout.top_k": 0}),
    "top_p": (0.9, {"rollout.top_p": 0.9}),
    "min_p": (None, {"rollout.min_p": 0.0}),
    "beta": (0.1, {"kl.beta": 0.1}),
    "learning_rate": (1e-4, {"update.learning_rate": 1e-4}),
    "num_iterations": (2, {"update.epochs": 2}),
    "adam_beta2": (0.8, {"update.betas": [0.9, 0.8]}),
    "epsilon": (0.1, {"objective.epsilon_low": 0.1, "objective.epsilon_high": 0.1}),
    "epsilon_high": (0.3, {"objective.epsilon_low": 0.2, "objective.epsilon_high": 0.3}),
    "scale_rewards": (False, {"advantage.scale": "none"}),
    "loss_type": ("sapo", {"objective.name": "sapo", "objective.aggregation": "grpo"}),
    "per_device_train_batch_size": (16, {"prompts.per_iteration": 2, "update.micro_batches": 1}),
    "output_dir": ("runs/there", {"run_dir": "runs/there"}),
    "reward_funcs": ("r.py:f", {"task.rewards_from": ["r.py:f"]}),
}


@pytest.mark.parametrize("name", TRL_SAME)
def test_a_name_of_trls_is_ours_in_a_file_in_a_dictionary_and_on_the_command_line(name, tmp_path):
    value, expected = TRL_SAME[name]
    values = {"iterations": 3, "run_dir": "x", "model": {"weights": "packaged:rook-small"}, "task": {"name": "prompts"}}
    values["prompts"] = {"source": "rows.jsonl"}
    if name == "output_dir":
        del values["run_dir"]
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(values | {name: value}))
    (tmp_path / "b.yaml").write_text(yaml.safe_dump({"run_dir": "y"} | values))
    ways = [
        load_config(tmp_path / "a.yaml"),
        load_config(values | {name: value}),
        load_config(str(tmp_path / "b.yaml"), [f"--{name}", yaml.safe_dump(value).split("\n")[0]]),
    ]
    for config in ways:
        flattened = flat(config.model_dump())
        assert {key: flattened[key] for key in expected} == expected


def test_two_of_trls_names_are_the_two_numbers_of_one_setting():
    base = {"iterations": 3, "run_dir": "x", "model": {"weights": "packaged:rook-small"}}
    assert load_config(base | {"adam_beta1": 0.7, "adam_beta2": 0.8}).update.betas == (0.7, 0.8)
    vespo = load_config(base | {"loss_type": "vespo", "vespo_k_neg": 1.5, "vespo_lambda_pos": 2.5}).objective
    assert (vespo.power, vespo.decay) == ((2.0, 1.5), (2.5, 2.0))
    sapo = load_config(base | {"loss_type": "sapo"}, ["--sapo_temperature_neg", "2"]).objective
    assert sapo.tau == (1.0, 2.0)
    defaults = {name: field.default for name, field in known_settings(Config)}
    assert {key: default for key, (_, default) in trl_names.PAIRS.items()} == {
        key: defaults[key] for key in trl_names.PAIRS
    }
    with pytest.raises(ConfigError, match=r"adam_beta1 is TRL's name of update.betas, which is given too"):
        load_config(base | {"adam_beta1": 0.7, "update": {"betas": [0.9, 0.95]}})


def test_a_config_in_trls_words_is_the_config_again():
    """`trl_settings` is what a benchmark gives TRL for a config of ours: the way back is its inverse."""
    changes = [
        "--advantage.scale",
        "none",
        "--objective.name",
        "cispo",
        "--objective.epsilon_high",
        "5",
        "--kl.beta",
        "0.1",
    ]
    config = load_config(
        LEGALITY, [*changes, "--prompts.per_iteration", "2", "--update.epochs", "2", "--task.rewards", "null"]
    )
    theirs = {name: value for name, value in trl_settings(config).items() if name in trl_names.TAKEN}
    ours = config.model_dump(
        exclude={"advantage", "kl", "objective", "rollout", "update", "prompts"}, exclude_defaults=True
    )
    again = flat(load_config(ours | theirs).model_dump())
    expected = flat(config.model_dump())
    keys = {*trl_names.SAME.values(), "prompts.per_iteration", "objective.name", "objective.aggregation"} & {*expected}
    assert {key: again[key] for key in keys} == {key: expected[key] for key in keys} and len(theirs) > 20


def test_trls_names_go_before_and_behind_ours_as_files_and_the_command_line_do(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(
        BASE + "num_generations: 4\nepsilon: 0.1\nper_device_train_batch_size: 4\nobjective: {epsilon_high: 0.3}\n"
    )
    config = load_config(path)
    assert (config.rollout.group_size, config.prompts.per_iteration, config.objective.epsilon_high) == (4, 1, 0.3)
    assert load_config(path, ["--rollout.group_size", "2"]).prompts.per_iteration == 2
    assert load_config(path, ["--num_generations", "2", "--gradient_accumulation_steps", "2"]).update.micro_batches == 2
    assert load_config(path, ["--epsilon", "0.15"]).objective.epsilon_low == 0.15
    path.write_text(BASE + "num_generations: 4\nrollout: {group_size: 4}\n")
    with pytest.raises(
        ConfigError, match=r"c.yaml:4: num_generations is TRL's name of rollout.group_size, which is given too"
    ):
        load_config(path)
    path.write_text(BASE + "num_generations: 1\n")
    with pytest.raises(ConfigError, match=r"c.yaml:4: rollout.group_size 1 gives every"):
        load_config(path)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"max_prompt_length": 64},
            "max_prompt_length is TRL's, and not the same here: TRL cuts a longer prompt; here prompts.max",
        ),
        ({"repetition_penalty": 1.2}, "rollout.repetition_penalty those of the completion alone"),
        ({"max_steps": 10}, "TRL counts optimiser steps"),
        ({"lora_r": 8}, "lora_r is TRL's, and not the same here: its place is model.adapter.rank"),
        ({"gradient_accumulation_steps": 2}, "multiplies per_device_train_batch_size: give that too"),
        ({"per_device_train_batch_size": 3}, "a step has 3 completions, which are no whole groups of 8"),
        ({"per_device_train_batch_size": "8"}, "it is '8'; expected a whole number"),
        ({"per_device_train_batch_size": 8, "steps_per_generation": 2}, "mix completions of a group"),
        ({"loss_type": "clip"}, "it is 'clip'; expected grpo, bnpo, dapo, dr_grpo, luspo, cispo, sapo, vespo"),
        ({"beta": "x"}, "kl.beta is 'x'; expected a number"),
        ({"rollout.group_size": 4}, "Dots are for the command line"),
        ({"scale_rewards": "std"}, "advantage.scale is 'std'; expected one of"),
    ],
)
def test_a_name_of_trls_that_means_something_else_says_what(given, message):
    with pytest.raises(ConfigError, match=rf"^config: .*{re.escape(message)}"):
        load_config({"iterations": 3, "run_dir": "x", "model": {"weights": "packaged:rook-small"}} | given)


def test_the_place_of_a_name_of_trls_is_a_setting_that_there_is():
    known = {name for name, _ in known_settings(Config)}
    known |= {section for name in known for section in itertools.accumulate(name.split("."), "{}.{}".format)}
    for name, place in (trl_names.ELSEWHERE | trl_names.DIFFERENT).items():
        for key in re.findall(r"\b[a-z]+\.[a-z_.]*[a-z]", place):
            assert key in known, (name, key)
    assert not {*trl_names.ELSEWHERE} & {*trl_names.TAKEN, *trl_names.DIFFERENT}
    # A name that is also a setting of ours, such as `seed`, keeps its meaning.
    assert not {*trl_names.NAMES.names} & {*Config.model_fields}


def test_a_run_is_started_with_a_path_or_a_dictionary(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"^nowhere.yaml: cannot read the config"):
        jax_grpo.train.train("nowhere.yaml")
    with pytest.raises(ConfigError, match=r"^config: unknown key kl.bet. Did you mean"):
        jax_grpo.train.train(
            {"iterations": 1, "run_dir": "x", "model": {"weights": "packaged:rook-small"}, "kl": {"bet": 1}}
        )
    (tmp_path / "c.yaml").write_text(BASE + "prompts: {source: nowhere.jsonl}\n")
    with pytest.raises(ConfigError, match=r"prompts.source is 'nowhere.jsonl': no such file"):
        jax_grpo.train.train(tmp_path / "c.yaml")


def test_a_prompt_may_be_as_long_as_the_model_lets_it(monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    base = {"iterations": 1, "run_dir": "x"}
    for name, positions in (("rook-small", 256), ("rook-deep", 256), ("words-small", 192)):
        config = load_config(base | {"model": {"weights": f"packaged:{name}"}})
        assert config.prompts.max_prompt_tokens is None and config.prompt_limit() == (positions - 144) // 16 * 16, name
        assert config.context() <= positions < config.context() + 16
        with pytest.raises(
            ConfigError, match=rf"_tokens = 250 tokens leaves no room for a prompt: packaged:{name} has"
        ):
            load_config(config.model_dump(), ["--rollout.max_new_tokens", "250"]).prompt_limit()
    random = base | {
        "model": dict.fromkeys(("num_layers", "num_heads"), 1) | {"hidden_size": 8, "max_position_embeddings": 4096}
    }
    assert load_config(random).prompt_limit() == 1024
    assert load_config(random, ["--prompts.max_prompt_tokens", "2000"]).prompt_limit() == 2000
    with pytest.raises(
        ConfigError, match=r"a prompt \(16\) \+ rollout.max_new_tokens = 160 exceeds model.max_position"
    ):
        load_config(random, ["--model.max_position_embeddings", "150"])


def test_overrides_take_both_forms_and_yaml_numbers():
    config = load_config(LEGALITY, ["--update.learning_rate", "3e-5", "--rollout.top_k=7", "--kl.beta", "0"])
    assert config.update.learning_rate == 3e-5 and config.rollout.top_k == 7 and config.kl.beta == 0
    assert load_config(LEGALITY, ["--task.rewards.legal", "2"]).task.rewards["legal"] == 2


def test_plain_words_that_old_yaml_reads_as_something_else_stay_words(tmp_path):
    (tmp_path / "c.yaml").write_text(BASE + "update: {learning_rate: 3e-5}\nlogging: {wandb: off}\n")
    config = load_config(str(tmp_path / "c.yaml"), ["--run_dir", "2026-01-32"])
    assert (config.update.learning_rate, config.logging.wandb, config.run_dir) == (3e-5, "off", "2026-01-32")


@settings(max_examples=100, deadline=None)
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
        (["--group_siz", "1"], r"unknown key group_siz. Did you mean rollout.group_size?"),
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
        (["--kl.beta_bounds", "[3, 1]"], "kl.beta_bounds [3.0, 1.0]: the lower bound must not exceed the upper one"),
        (["--kl.beta_bounds", "[3]"], "kl.beta_bounds.1 is missing"),
        (["--kl.beta_bounds", "[1, 2, 3]"], "kl.beta_bounds is [1, 2, 3]; expected at most 2 values"),
        (["--kl.beta_bounds", "3"], "kl.beta_bounds is 3; expected a list"),
        (["--update.betas", "[0.9, 1]"], "update.betas.1 is 1; expected less than 1.0"),
        (["--kl.beta", ".nan"], "kl.beta is nan; expected a finite number"),
        (["--update.micro_batches", "7"], "update.micro_batches 7 must cut 64 prompts x 16 completions"),
        (["--update.minibatches", "5"], "update.minibatches 5 must divide prompts.per_iteration 64"),
        (
            ["--objective.name", "reinforce", "--rollout.group_size", "1"],
            "command line: rollout.group_size 1 gives every",
        ),
        (
            ["--objective.name", "reinforce", "--objective.importance_level", "sequence"],
            "objective.importance_level sequence is of objective.name clip, cispo, sapo; reinforce would ignore it: it reads "
            "aggregation, entropy_coefficient, ",
        ),
        (
            ["--objective.name", "cispo", "--objective.delta", "2"],
            "objective.delta 2 is of objective.name clip, dppo_tv, dppo_kl; cispo would ignore it: it reads importance_level, agg",
        ),
        (
            ["--kl.adaptive", "true", "--kl.beta", "2"],
            "kl.beta 2.0 must lie within kl.beta_bounds [0.0001, 1.0]",
        ),
        (
            ["--update.warmup_steps", "9", "--update.total_steps", "9"],
            "warmup_steps 9 must be below update.total_steps 9",
        ),
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
        (
            BASE + "kl:\n  beta: 0.1\n  beta_bounds: [1, 0.1]\n",
            "c.yaml:6: kl.beta_bounds [1.0, 0.1]: the lower bound must not",
        ),
        (
            BASE + "objective:\n  overlong_penalty: {length: 3}\n",
            "c.yaml:5: objective.overlong_penalty.weight is missing",
        ),
        ("run_dir: x\nmodel: {weights: packaged:rook-small}\n", "c.yaml: iterations is missing"),
        (
            "iterations: 3\nrun_dir: x\nmodel:\n  weights: packaged:rook-small\n  remat: 1\n",
            "c.yaml:5: model.remat is 1; expected true, false or keep_matmuls",
        ),
    ],
)
def test_wrong_files_name_their_line(text, message, tmp_path):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_config(str(tmp_path / "c.yaml"))


def test_a_path_of_any_setting_may_begin_at_home(monkeypatch):
    monkeypatch.setenv("HOME", "/home/her")
    config = tiny_config(
        run_dir="~/run",
        model={"weights": "~/base", "tokenizer": "~/base", "adapter": {"weights": "~/adapter"}},
        task={"name": "prompts", "rewards_from": ["~/rewards.py:right", "rewards.py:short"]},
        prompts={"source": "~/rows.jsonl"},
        evaluation={"source": "~/test.jsonl", "positions": 1},
    )
    assert (config.run_dir, config.model.weights, config.model.tokenizer) == ("/home/her/run", *["/home/her/base"] * 2)
    assert config.model.adapter.weights == "/home/her/adapter" and config.evaluation.source == "/home/her/test.jsonl"
    assert config.prompts.source == "/home/her/rows.jsonl"
    assert config.task.rewards_from == ["/home/her/rewards.py:right", "rewards.py:short"]
    mixed = tiny_config(
        task={"name": "mixed", "mixture": {"policy": {}, "sums": {"task": "prompts", "source": "~/s.csv"}}}
    )
    assert mixed.task.sources == {"sums": "/home/her/s.csv"}


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
    # A JAX with its CUDA plugin and without a card writes lines to stderr when it is imported.
    imported = subprocess.run([sys.executable, "-c", "import jax"], capture_output=True, text=True, check=True)
    *others, last = failed.stderr.strip().splitlines()
    assert failed.returncode == 1 and len(others) == len(imported.stderr.splitlines()), failed.stderr
    assert last == "ConfigError: command line: rollout.top_p is 2; expected at most 1.0"


@pytest.mark.default_cases(
    "arguments0-/no/such/folder/config.json does not exist; expected a Hugging Face folder",
    "arguments1-prompts.source is '/no/such.pgn': no such file",
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
    output = failed.value.code
    assert isinstance(output, str) and re.search(message, output.replace("\n", " ")), output
    assert "Traceback" not in output + "".join(capfd.readouterr())
