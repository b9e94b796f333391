"""The public face: every name is there and on its page, and a notebook's few lines train with a reward of their own."""

import os
import re
import subprocess
import sys

import pytest
from architecture import ROOT
from conftest import PATIENCE_S, config

import jax_grpo
from jax_grpo.config import ConfigError
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
    assert sys.modules["jax_grpo.train"] is jax_grpo.train, "the command's module, which can be called"


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
    said = re.search(r"mean reward ([\d.]+) -> ([\d.]+)", done.stdout)
    assert said and float(said[1]) < 0.2 and float(said[2]) > 0.8, done.stdout


class Own(jax_grpo.Task):
    name, component_weights, stop_rule = "own", {"own": 1.0}, jax_grpo.word_stop()


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"task": {"name": "length"}}, "task: beside a task that is given"),
        ({"update": {"micro_batches": "auto"}}, "update.micro_batches is 'auto'"),
    ],
)
def test_settings_of_the_built_in_tasks_are_refused_beside_ones_own(sections, words, tmp_path):
    with pytest.raises(ConfigError, match=words):
        jax_grpo.train(config(run_dir=str(tmp_path / "run"), **sections), task=Own())


def test_a_run_with_a_task_of_its_own_is_continued_with_it_alone(tmp_path):
    names = {"architecture": {}, "reference": None, "positions": "p"}
    saved = Origin(tmp_path, {"identity": names | {"task": "module.Own"}}, {})
    require_same_data(saved, names | {"task": "module.Own"})
    with pytest.raises(CheckpointError, match=r"its task is None; it was module.Own"):
        require_same_data(saved, names | {"task": None})
    require_same_data(Origin(tmp_path, {"identity": names}, {}), names | {"task": None})  # of an earlier version
