"""Recipes of public data: a dry run of each on ten rows in the published format, with a tiny random model."""

import importlib.util
import json
import shutil

import pyarrow as pa
import pytest
from architecture import ROOT
from pyarrow import parquet

import jax_grpo
from jax_grpo.config import load_config
from jax_grpo.train import train

ARCHITECTURE = {
    "model_type": "qwen2", "vocab_size": 50304, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
    "tie_word_embeddings": True, "hidden_act": "silu",
}  # fmt: skip
TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}<|assistant|>"
SMALL = [
    "--model.weights", "null", "--model.architecture", "tiny.json", "--model.tokenizer", "tokenizer",
    "--prompts.per_iteration", "2", "--rollout.group_size", "2", "--rollout.max_new_tokens", "6", "--update.micro_batches", "1",
    "--iterations", "2", "--evaluation.positions", "1", "--logging.tensorboard", "false", "--compilation_cache", "null",
    "--checkpoint.every", "0", "--prompts.split", "train",
]  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """With a tiny model's config.json and GPT-2's tokenizer under a chat template."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "jax_grpo" / "assets" / "tokenizers" / "gpt2", "tokenizer")
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text(TEMPLATE)
    (tmp_path / "tokenizer" / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    (tmp_path / "tiny.json").write_text(json.dumps(ARCHITECTURE))
    return tmp_path


def first_samples(run) -> list[dict]:
    return json.loads((run / "samples.jsonl").read_text().splitlines()[0])["samples"]


@pytest.mark.slow
def test_gsm8k_as_it_is_published(folder):
    names = ["Ada", "Ben", "Cem", "Dina", "Eli", "Fay", "Gus", "Hana", "Ivo", "Jo"]
    rows = [
        {
            "question": f"{name} has {n} apples and buys {n + 2} more. How many apples does {name} have now?",
            "answer": f"{name} has {n} + {n + 2} = <<{n}+{n + 2}={2 * n + 2}>>{2 * n + 2} apples.\n#### {2 * n + 2}",
        }
        for n, name in enumerate(names, start=3)
    ]
    for file, part in {"train.jsonl": rows[:8], "test.jsonl": rows[8:]}.items():
        (folder / file).write_text("".join(json.dumps(row) + "\n" for row in part))
    own = ["--prompts.source", "train.jsonl", "--evaluation.source", "test.jsonl", "--prompts.split", "all"]
    if importlib.util.find_spec("math_verify") is None:
        own += ["--task.rewards_from", "jax_grpo.rewards:gsm8k_answer"]
    config = load_config(str(ROOT / "configs" / "gsm8k_qwen25_0.5b_4090.yaml"), [*SMALL, *own])
    run = train(config)
    for sample in first_samples(run):
        requested = next(row for row in rows[:8] if row["question"] in sample["prompt"])
        system = "Please reason step by step, and put your final answer within \\boxed{}."
        assert sample["prompt"] == f"<|system|>{system}\n<|user|>{requested['question']}\n<|assistant|>"
    records = jax_grpo.read_records(run / "metrics.jsonl")
    (name,) = {key.split("/")[1] for record in records for key in record if key.startswith("reward/")} - {"mean", "std"}
    assert name in ("math_answer", "gsm8k_answer")
    assert sum("eval/greedy/reward" in record for record in records) == 2


@pytest.mark.slow
def test_countdown_as_it_is_published(folder):
    rows = [{"target": 3 * n + 4, "nums": [n, 3, 4]} for n in range(10, 30)]
    parquet.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    own = ["--prompts.source", "train.parquet", "--model.adapter", "null"]
    config = load_config(str(ROOT / "configs" / "countdown_qwen25_1.5b_4090.yaml"), [*SMALL, *own])
    run = train(config)
    for sample in first_samples(run):
        requested = [
            f"Using the numbers {row['nums']}, create an equation that equals {row['target']}." for row in rows
        ]
        assert sum(each in sample["prompt"] for each in requested) == 1
        assert sample["components"].keys() == {"countdown", "think_format"}
