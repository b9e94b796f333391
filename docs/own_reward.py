"""Trains the length toy from Python, with a reward of its own: `python docs/own_reward.py [RUN_DIR]`."""

import sys

import numpy as np

import jax_grpo


class Vowels(jax_grpo.Task):
    """The share of the letter e in the first word, of which 20 characters count."""

    name, reads = "vowels", "positions"  # of chess, which are in the package
    component_weights = {"vowels": 1.0}  # noqa: RUF012 (as a notebook would write it)
    stop_rule = jax_grpo.word_stop()

    def prompt(self, row, seed):
        return jax_grpo.Prompt(f"{row.fen}\n", 0, row)

    def score(self, prompts, completions):
        return {"vowels": np.array([text[:20].count("e") / 10 for text in completions], np.float32)}


config = jax_grpo.Config.model_validate(
    {
        "run_dir": sys.argv[1] if len(sys.argv) > 1 else "runs/vowels",
        "iterations": 40,
        "model": {
            "tokenizer": "chess",
            "num_layers": 1,
            "num_heads": 2,
            "hidden_size": 32,
            "max_position_embeddings": 128,
        },
        "prompts": {"per_iteration": 8, "max_prompt_tokens": 80},
        "rollout": {"group_size": 8, "max_new_tokens": 16},
        "kl": {"beta": 0.0},
        "update": {"learning_rate": 1e-2},
    }
)
run = jax_grpo.train.train(config, task=Vowels())
rewards = [record["reward/mean"] for record in jax_grpo.read_records(run / "metrics.jsonl") if "reward/mean" in record]
print(f"mean reward {np.mean(rewards[:5]):.2f} -> {np.mean(rewards[-5:]):.2f}")
