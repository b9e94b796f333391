"""Held-out scores of a policy: greedy and sampled completions of fixed prompts, scored by the task."""

from collections.abc import Sequence

import torch

from jax_grpo.config import Config
from jax_grpo.tasks.base import Prompt, applicable, total_reward
from torch_ref.rollout import Texts

BATCH = 64  # prompts generated together


def evaluate(texts: Texts, prompts: Sequence[Prompt], config: Config) -> dict[str, float]:
    """`eval/<mode>/<component>` means and `eval/<mode>/reward`, by the names that `jax_grpo` logs."""
    metrics: dict[str, float] = {}
    for mode in ("greedy", "sampled"):
        generator = None
        if mode == "sampled":
            generator = torch.Generator(texts.device).manual_seed(config.seed)
        completions: list[str] = []
        for start in range(0, len(prompts), BATCH):
            completions += texts.complete(prompts[start : start + BATCH], generator).completions
        texts.task.begin(0, texts.tokenizer.encode_batch(completions))
        scores = texts.task.score(prompts, completions)
        metrics[f"eval/{mode}/reward"] = float(total_reward(scores, texts.task.component_weights).mean())
        for name, values in applicable(scores, prompts).items():
            metrics[f"eval/{mode}/{name}"] = float(values.mean())
    return metrics
