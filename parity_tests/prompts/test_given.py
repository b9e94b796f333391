"""Rows given by a Python program: what is written of them, that a run is continued on it, and what is refused."""

import ast
import json
import re
from pathlib import Path

import numpy as np
import pytest
from architecture import ROOT
from short_runs import lines_without_times

from jax_grpo.config import Config, ConfigError, load_config
from jax_grpo.prompts.chat import ChatTemplate
from jax_grpo.prompts.given import with_dataset
from jax_grpo.prompts.rows import PromptFileError, load_prompts
from jax_grpo.run.files import CheckpointError
from jax_grpo.train import train

ROWS = [
    {"prompt": "Häuser\n", "n": np.int64(3), "x": np.float32(0.5), "list": np.arange(2), "nothing": None},
    {"prompt": [{"role": "user", "content": "2+2?"}], "n": 4, "x": 1.0, "list": [], "nothing": None},
]


def settings(folder, **sections):
    return {
        "run_dir": str(folder / "run"), "iterations": 2, "task": {"name": "prompts"},
        "model": {"tokenizer": "chess", "num_layers": 1, "num_heads": 2, "hidden_size": 16, "max_position_embeddings": 32},
        "prompts": {"split": "all", "per_iteration": 2, "max_prompt_tokens": 16},
        "rollout": {"group_size": 2, "max_new_tokens": 4}, "logging": {"samples_every": 0, "tensorboard": False},
    } | sections  # fmt: skip


def test_rows_are_a_file_of_the_runs_folder_that_is_named_by_them(tmp_path):
    config = with_dataset(settings(tmp_path), ROWS)
    lines = Path(config.prompts.source).read_text(encoding="utf-8").splitlines()
    assert config.prompts.source.startswith(f"{tmp_path}/run/prompts-") and config.prompts.per_iteration == 2
    assert json.loads(lines[0]) == {"prompt": "Häuser\n", "n": 3, "x": 0.5, "list": [0, 1], "nothing": None}
    assert with_dataset(settings(tmp_path), iter(ROWS)) == config, "the same rows, the same file"
    other = with_dataset(settings(tmp_path), ROWS[:1])
    assert other.prompts.source != config.prompts.source and len(load_prompts(other.prompts)) == 1


def test_a_file_of_settings_gets_them_too_and_trls_name_of_the_folder_is_known(tmp_path):
    (tmp_path / "c.yaml").write_text("iterations: 1\nmodel: {weights: packaged:words-small}\ntask: {name: prompts}\n")
    with pytest.raises(ConfigError, match="run_dir is missing"):
        with_dataset(tmp_path / "c.yaml", ROWS)
    values = {"iterations": 1, "model": {"weights": "packaged:words-small"}, "task": {"name": "prompts"}}
    config = with_dataset(values | {"output_dir": str(tmp_path / "yes: [no]")}, ROWS)
    assert (
        config.prompts.source.startswith(f"{tmp_path}/yes: [no]/prompts-")
        and load_config(config.model_dump()) == config
    )


def test_the_settings_of_the_page_for_those_who_come_from_trl_are_accepted(tmp_path):
    page = (ROOT / "docs" / "trl_differences.md").read_text()
    (block,) = re.findall(r"^settings = (\{.*?^\})$", page, re.DOTALL | re.MULTILINE)
    own = {"output_dir": str(tmp_path), "model": {"weights": "packaged:words-small"}}
    config = with_dataset(ast.literal_eval(block) | own, ROWS)
    assert (config.prompts.per_iteration, config.rollout.group_size, config.rollout.max_new_tokens) == (8, 8, 256)
    assert (config.objective.name, config.objective.aggregation, config.kl.beta) == ("clip", "dapo", 0)


@pytest.mark.slow  # `datasets` takes seconds to import
def test_a_data_set_of_the_library_is_what_it_is_when_saved(tmp_path):
    """Arrow gives every tool the keys that another one has, as None, which a chat template would show."""
    from datasets import Dataset

    def tools(name):
        return [{"type": "function", "function": {"name": "f", "parameters": {name: {"type": "integer"}}}}]

    user = [{"role": "user", "content": "2+2?"}]
    rows = [{"prompt": user, "n": 1, "tools": tools("x")}, {"prompt": user, "n": None, "tools": tools("y")}]
    dataset = Dataset.from_list(rows)
    dataset.save_to_disk(tmp_path / "saved")
    saved = load_config(settings(tmp_path, prompts={"source": str(tmp_path / "saved"), "split": "all"})).prompts
    given = with_dataset(settings(tmp_path), dataset).prompts
    (tmp_path / "chat").mkdir()
    (tmp_path / "chat" / "tokenizer.json").write_text(
        json.dumps({"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}})
    )
    (tmp_path / "chat" / "tokenizer_config.json").write_text(json.dumps({"eos_token": "a"}))
    (tmp_path / "chat" / "chat_template.jinja").write_text("{{ messages[0].content }}{{ tools | tojson }}")
    chat = ChatTemplate(str(tmp_path / "chat"))
    tables = [load_prompts(prompts, chat) for prompts in (given, saved)]
    assert [*tables[0]] == [*tables[1]] and "null" not in tables[0][0].prompt and '"x"' in tables[0][0].prompt


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["text"], "dataset: row 0 is 'text'; expected a mapping of columns"),
        (
            [{"prompt": "a"}, {"prompt": {1, 2}}],
            r"dataset: row 1 cannot be written as JSON: \{1, 2\} is a set; expected texts",
        ),
        (
            [{"prompt": "a", "x": [{"y": {1: "b"}}]}],
            "dataset: row 0 cannot be written as JSON: the key 1 is a int; expected a text",
        ),
        ([{"prompt": "a", "x": float("nan")}], "dataset: row 0 cannot be written as JSON: Out of range"),
    ],
)
def test_a_row_that_is_none_is_refused_by_its_number_and_nothing_is_written(rows, message, tmp_path):
    with pytest.raises(PromptFileError, match=message):
        with_dataset(settings(tmp_path), rows)
    assert not (tmp_path / "run").exists()


def test_a_dataset_beside_a_source_and_a_folder_that_is_a_file_are_refused(tmp_path):
    given = settings(tmp_path, prompts={"source": "a.jsonl"})
    with pytest.raises(ConfigError, match=r"^prompts.source is 'a.jsonl', and a dataset is given: leave one out"):
        train(given, dataset=ROWS)
    with pytest.raises(ConfigError, match=r"^dataset is 'a.jsonl'; expected rows, .* a file's path is prompts.source"):
        train(settings(tmp_path), dataset="a.jsonl")  # pyright: ignore[reportArgumentType]
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}\n')
    whole = Config.model_validate(settings(tmp_path, prompts={"source": str(tmp_path / "a.jsonl")}))
    with pytest.raises(ConfigError, match=r"dataset: a Config has its prompts\.source already"):
        train(whole, dataset=ROWS)
    (tmp_path / "run").write_text("mine")
    with pytest.raises(ConfigError, match="is a file; expected a folder"):
        train(settings(tmp_path), dataset=ROWS)


@pytest.mark.slow
def test_a_run_is_continued_on_the_same_rows_and_refused_on_others(tmp_path):
    rows = [{"prompt": f"{n}: ", "n": n} for n in range(4)]

    def reward(completions, n, **columns):
        return [len(text) + each / 8 for text, each in zip(completions, n, strict=True)]

    whole = train(settings(tmp_path / "whole", iterations=2), rewards=[reward], dataset=rows)
    cut = train(settings(tmp_path / "cut", iterations=1), rewards=[reward], dataset=rows)
    longer = settings(tmp_path / "cut", iterations=2)
    with pytest.raises(CheckpointError, match=r"prompts.source"):
        train(longer, rewards=[reward], dataset=rows[:3], resume="auto")
    train(longer, rewards=[reward], dataset=rows, resume="auto")
    assert lines_without_times(cut) == lines_without_times(whole)
    assert load_config(cut / "config.yaml").prompts.source == with_dataset(longer, rows).prompts.source
