"""The public face: every name is there and on its page, and a notebook's few lines train with a reward of their own."""

import importlib
import os
import re
import subprocess
import sys
import tomllib

import pytest
import torch
from architecture import ROOT
from conftest import PATIENCE_S, config

import jax_grpo
from jax_grpo.__main__ import DOORS
from jax_grpo.config import ConfigError
from jax_grpo.config.files import PACKAGED_MODELS
from jax_grpo.run.checkpoints import Origin
from jax_grpo.run.files import CheckpointError
from jax_grpo.run.resume import require_same_data


def test_every_public_name_is_there_and_on_the_page():
    page = (ROOT / "docs" / "api.md").read_text()
    for name in jax_grpo.__all__:
        assert callable(getattr(jax_grpo, name)), name
        assert re.search(rf"`{name}\b", page), f"{name} is not in docs/api.md"
    with pytest.raises(AttributeError, match="no attribute 'trian'; its names: Config, EpisodicTask, Policy, "):
        getattr(jax_grpo, "trian")  # noqa: B009
    assert jax_grpo.train is sys.modules["jax_grpo.train"] and "`train.train(" in page, "the command's module"


def test_one_command_opens_every_door(capsys):
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, name = scripts["jax-grpo"].partition(":")
    command = getattr(importlib.import_module(module), name)
    for door in DOORS:
        with pytest.raises(SystemExit) as ended:
            command([door, "--help"])
        assert not ended.value.code and "usage: " in capsys.readouterr().out, door
    command([])
    shown = capsys.readouterr().out
    assert all(f"\n  {door} " in shown for door in DOORS)
    with pytest.raises(SystemExit, match=r"jax-grpo: no command 'trian'; expected one of train, evaluate"):
        command(["trian"])


@pytest.mark.slow
def test_a_policy_answers_texts_as_transformers_does():
    """Greedy, of texts of unequal lengths side by side; sampled, each by its own text and the seed."""
    transformers = pytest.importorskip("transformers")
    policy = jax_grpo.load_named("packaged:words-small")
    assert isinstance(policy, jax_grpo.Policy)
    texts = ["Write about a cat.\n", "Write about a garden. Do not use commas. Use only small letters.\n", "Sing."]
    judge = transformers.AutoModelForCausalLM.from_pretrained(PACKAGED_MODELS / "words-small")
    expected = []
    for text in texts:
        ids = policy.tokenizer.encode(text)
        made = judge.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False, pad_token_id=0)[0, len(ids) :]
        expected.append(policy.tokenizer.decode([i for i in made.tolist() if i != policy.tokenizer.eos_id]))
    assert policy.generate(texts, max_new_tokens=12) == expected
    assert policy.generate(texts[0], max_new_tokens=12) == expected[:1]
    stop = expected[0][3:5]
    assert policy.generate(texts[0], max_new_tokens=12, stop=[stop]) == [expected[0].split(stop)[0]]
    sampled = policy.generate(texts, max_new_tokens=12, temperature=1.0, samples=2, seed=1)
    assert (
        len(sampled) == 6
        and sampled[0] != sampled[1]
        and sampled[:2] == policy.generate(texts[:1], max_new_tokens=12, temperature=1.0, samples=2, seed=1)
    )
    with pytest.raises(ValueError, match="generate: max_new_tokens 0, samples 1, temperature 0; expected at least 1"):
        policy.generate(texts, max_new_tokens=0)


def test_the_version_is_a_number():
    assert re.fullmatch(r"\d+\.\d+\.\d+", jax_grpo.__version__), "records of runs, sets and matches name it"


@pytest.mark.slow  # a whole training
def test_the_examples_own_reward_is_learnt(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "MPLBACKEND": "Agg"}
    command = [sys.executable, str(ROOT / "docs" / "own_reward.py"), str(tmp_path / "run")]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_S, env=environment, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    output = re.search(r"mean reward ([\d.]+) -> ([\d.]+)", done.stdout)
    assert output and float(output[1]) < 0.2 and float(output[2]) > 0.8, done.stdout


class Own(jax_grpo.Task):
    name, component_weights, stop_rule = "own", {"own": 1.0}, jax_grpo.word_stop()


def test_a_task_of_the_settings_is_refused_beside_ones_own(tmp_path):
    with pytest.raises(ConfigError, match="task: beside a task that is given"):
        jax_grpo.train.train(config(run_dir=str(tmp_path / "run"), task={"name": "length"}), task=Own())


def test_a_run_with_a_task_of_its_own_is_continued_with_it_alone(tmp_path):
    names = {"architecture": {}, "reference": None, "positions": "p"}
    saved = Origin(tmp_path, {"identity": names | {"task": "module.Own"}}, {})
    require_same_data(saved, names | {"task": "module.Own"})
    with pytest.raises(CheckpointError, match=r"its task is None; it was module.Own"):
        require_same_data(saved, names | {"task": None})
    require_same_data(Origin(tmp_path, {"identity": names}, {}), names | {"task": None})  # of an earlier version
