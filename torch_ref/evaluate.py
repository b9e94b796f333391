"""Held-out scores of a policy: greedy and sampled completions of fixed prompts, scored by the task."""

from collections.abc import Sequence

import torch

from jax_grpo.tasks.base import Prompt, TrainerState, held_out_means
from jax_grpo.tasks.checked import checked_score
from torch_ref.rollout import Texts

BATCH = 64  # prompts generated together


def evaluate(texts: Texts, prompts: Sequence[Prompt], iteration: int = 0) -> dict[str, float]:
    """`eval/<mode>/<component>` means and `eval/<mode>/reward`, by the names that `jax_grpo` logs, after so many iterations.

    Of the policy itself: at the rollout's temperature, and with none of the settings that draw from something else.
    """
    config = texts.config
    metrics: dict[str, float] = {}
    for mode in ("greedy", "sampled"):
        generator = None
        if mode == "sampled":
            generator = torch.Generator(texts.device).manual_seed(config.seed)
        completions: list[str] = []
        ids: list[list[int]] = []
        for start in range(0, len(prompts), BATCH):
            rollout = texts.complete(prompts[start : start + BATCH], generator, temperature_alone=True)
            completions += rollout.completions
            ids += rollout.completion_ids()
        state = TrainerState(iteration, config.iterations)
        scores = checked_score(texts.task, prompts, completions, ids, state)
        means = held_out_means(scores, prompts, texts.task.component_weights)
        metrics |= {f"eval/{mode}/{name}": mean for name, mean in means.items()}
    return metrics
