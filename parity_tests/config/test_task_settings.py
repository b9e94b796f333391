"""A task's settings are those of its own class, wherever it is named, and what is wrong with one is one error."""

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from jax_grpo.config import Config, ConfigError, load_config
from jax_grpo.config.tasks import task_of
from jax_grpo.run import resume
from jax_grpo.run.checkpoints import Origin
from jax_grpo.tasks import make_task

BASE = {"iterations": 3, "run_dir": "x", "model": {"weights": "packaged:rook-small"}}
OWN = '''
import jax_grpo
import numpy as np


class Counted(jax_grpo.Task):
    """Rewards words."""

    name, component_weights, stop_rule = "counted", {"words": 1.0}, jax_grpo.word_stop()

    class Settings(jax_grpo.Settings):
        most: int = 3
        """Words that are rewarded."""
        kind: str

    def __init__(self, settings):
        self.most, self.kind = settings.most, settings.kind

    def prompt(self, row, seed):
        return jax_grpo.Prompt(row.prompt, 0)

    def score(self, prompts, completions):
        return {"words": np.array([min(len(text.split()), self.most) for text in completions], np.float32)}


class Plain(Counted):
    class Settings(jax_grpo.Settings):
        most: int = 2
        kind: str = "plain"


class Taken(Counted):
    class Settings(jax_grpo.Settings):
        share: float = 2.0


class NoSettings(Counted):
    Settings = dict
'''


@pytest.fixture
def own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    return "own.py:Counted"


def test_a_task_of_ones_own_is_made_with_its_settings(own, tmp_path):
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(BASE | {"task": {"name": own, "kind": "noun"}}))
    config = load_config("c.yaml", ["--task.most", "5"])
    assert config.task.model_dump()["most"] == 5 and (make_task(config.task).most, make_task(config.task).kind) == (
        5,
        "noun",
    )
    (tmp_path / "resolved.yaml").write_text(config.resolved_yaml())
    assert load_config("resolved.yaml") == config == pickle.loads(pickle.dumps(config))


def test_a_task_of_ones_own_is_read_only_where_something_of_its_own_is_set(own, tmp_path):
    config = load_config(BASE | {"task": {"name": "nowhere.py:T", "episode": {"turns": 2}}})
    assert (config.task.name, config.task.episode.turns) == ("nowhere.py:T", 2)
    assert make_task(load_config(BASE | {"task": {"name": "own.py:Plain"}}).task).most == 2
    with pytest.raises(ConfigError, match=r"^task: kind is missing$"):
        make_task(load_config(BASE | {"task": {"name": own}}).task)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"mots": 5, "kind": "a"}, r"c.yaml:\d+: unknown key task.mots. Did you mean task.most\?"),
        ({"most": "many", "kind": "a"}, r"c.yaml:\d+: task.most is 'many'; expected a whole number"),
        ({"most": 5}, r"c.yaml:\d+: task.kind is missing"),
        ({"length_cap": 5}, r"c.yaml:\d+: task.length_cap is 5, which does nothing unless task.name is length; it is own.py:C"),
        ({"name": "own.py:Taken", "x": 1}, r"c.yaml:\d+: task.name .*: its Settings have 'share', which is a setting of every"),
        ({"name": "own.py:NoSettings", "x": 1}, r"c.yaml:\d+: .* expected a class derived from jax_grpo.Settings"),
        ({"name": "nowhere.py:T", "x": 1}, r"c.yaml:\d+: task.name is 'nowhere.py:T': there is no file"),
        ({"name": "own.py:Count", "x": 1}, r"c.yaml:\d+: task.name is 'own.py:Count': .*has no 'Count'; it has .*Counted"),
    ],
)  # fmt: skip
def test_a_wrong_setting_of_ones_own_task_is_one_error_with_its_line(own, task, message, tmp_path):
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(BASE | {"task": {"name": own} | task}, sort_keys=False))
    with pytest.raises(ConfigError, match=rf"^{message}") as error:
        load_config("c.yaml")
    assert "\n" not in str(error.value)


def test_a_mixture_has_any_number_of_parts_each_with_its_own_settings(own):
    parts = {
        "nouns": {"task": own, "kind": "noun", "source": "n.jsonl"},
        "verbs": {"task": own, "kind": "verb", "most": 9, "source": "v.jsonl"},
        "sums": {"task": "prompts", "rewards_from": "math:fsum", "source": "s.jsonl", "stop": "\n"},
        "texts": {"task": "prompts", "source": "t.jsonl"},
        "length": {"length_cap": 5},
        "policy": {"prompt_style": "own_side"},
        "best": {"task": "policy"},
    }
    parts["sums"]["stop"] = ["\n"]
    beside = {"prompt_style": "best_move", "rewards_from": ["math:sqrt", "math:floor"]}
    config = load_config(BASE | {"task": {"name": "mixed", "mixture": parts} | beside})
    assert list(config.task.mixture) == ["policy", "best", "length", "sums", "texts", "nouns", "verbs"]
    styles = [config.task.mixture[name].prompt_style for name in ("policy", "best")]
    assert styles == ["own_side", "best_move"], "what a part says goes before what stands beside the mixture"
    task = make_task(config.task)
    assert {"sums/fsum", "texts/sqrt", "texts/floor", "nouns/words", "best/legal", "length/length"} <= {
        *task.component_weights
    }
    assert load_config(config.model_dump()) == config


def test_a_config_without_chess_is_read_without_the_room_of_chess():
    code = (
        "import sys; from jax_grpo.config import load_config; "
        "load_config({'iterations': 1, 'run_dir': 'x', 'model': {'weights': 'a'}, 'task': {'name': 'length', 'length_cap': 3}}); "
        "assert 'jax_grpo.chess' not in sys.modules; "
        "load_config({'iterations': 1, 'run_dir': 'x', 'model': {'weights': 'a'}, 'task': {'prompt_style': 'own_side'}}); "
        "sys.exit('chess' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# The section as earlier versions wrote it into run folders and checkpoints, whatever the task.
FLAT = {
    "name": "policy", "mixture": None, "prompt_style": "full", "rewards": None, "best_for_black": "first", "length_cap": 20,
    "guess_numbers": 7, "episode": None, "opponent": "random", "judge": "material", "illegal_fraction": 0.05, "engine": None,
    "rewards_from": None, "reward_weights": None, "stop": [], "stop_tokens": [], "timeout_s": 60.0,
}  # fmt: skip
PART = {"share": 1.0, "max_new_tokens": None, "rewards": None}
SLOTS = dict.fromkeys(("policy", "environment", "length", "instructions", "prompts", "own"))
EARLIER = {
    "policy": ({"prompt_style": "own_side"}, {"prompt_style": "own_side"}),
    "length": ({"length_cap": 5, "prompt_style": "best_move"}, {"length_cap": 5}),  # the style did nothing
    "prompts": ({"rewards_from": ["math:sqrt"], "stop": ["x"]}, {"rewards_from": ["math:sqrt"], "stop": ["x"]}),
    "a.py:T": ({}, {}),
    "mixed": (
        {"prompt_style": "best_move", "mixture": SLOTS | {"policy": PART, "length": PART | {"share": 2.0}}},
        {"mixture": {"policy": {"prompt_style": "best_move"}, "length": {"share": 2.0}}},
    ),
}


@pytest.mark.parametrize("name", EARLIER)
def test_a_task_section_that_an_earlier_version_resolved_is_read_and_its_run_continued(name, tmp_path):
    flat, now = EARLIER[name]
    source = {"prompts": {"source": "a.jsonl"}} if name == "prompts" else {}
    config = load_config(BASE | source | {"task": {"name": name} | now})
    before = config.model_dump() | {"task": FLAT | {"name": name} | flat}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(before))
    assert load_config(tmp_path / "config.yaml") == config
    origin = Origin(Path("000001"), {"config": before, "iteration": 0}, {})
    assert resume.require_same_run(origin, config) == []


def test_a_config_is_what_it_was_when_the_class_of_its_task_is_asked_again():
    one, other = (
        Config.model_validate(BASE | {"task": task_of(name="length", length_cap=4).model_dump()}) for _ in range(2)
    )
    assert one == other and type(one.task) is type(other.task)
