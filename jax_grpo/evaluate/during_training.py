"""Scores of a policy on fixed prompts, one completion a prompt: greedy, and sampled at the training temperature.

Every number is a function of (weights, prompts, seed). Knows nothing of training.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jax_grpo.model.named import Policy
from jax_grpo.model.tokenizer import Tokenizer
from jax_grpo.rollout.generate import encode_prompts
from jax_grpo.rollout.sampling import Sampling
from jax_grpo.rollout.texts import BATCH, Texts
from jax_grpo.tasks.base import Prompt, Task, applicable, checked_score, total_reward


def make_programs(
    graphdef: Any, tokenizer: Tokenizer, task: Task, *, max_new_tokens: int, temperature: float
) -> dict[str, Callable[..., Any]]:
    """The compiled generation of each mode, by name; the memory report compiles these very ones, for `BATCH` prompts."""
    texts = Texts(tokenizer, task.stop_rule, max_new_tokens)
    return {mode: texts.program(graphdef, Sampling(t)) for mode, t in {"greedy": 0.0, "sampled": temperature}.items()}


class Evaluation(NamedTuple):
    """`metrics` holds `eval/<mode>/<component>` means and `eval/<mode>/reward`; completions by mode."""

    metrics: dict[str, float]
    completions: dict[str, list[str]]
    components: dict[str, dict[str, np.ndarray]]

    def moves(self, prompts: Sequence[Prompt]) -> list[tuple[Prompt, str]]:
        """The prompts of labelled positions that ask for a move, with their greedy completions; none where no task asks for one."""
        if not any(name.endswith("legal") for name in self.components["greedy"]):
            return []
        pairs = zip(prompts, self.completions["greedy"], strict=True)
        return [(p, text) for p, text in pairs if p.task in ("", "policy") and p.position and p.position.moves]


class Evaluator:
    """Compiled once, called with the parameters of the moment.

    Args:
        policy: model and tokenizer.
        task: gives the stop rule and the components.
        prompts: of that task, fixed.
        max_new_tokens: the cap.
        max_prompt_tokens: longest allowed prompt.
        temperature, seed: of the sampled mode.
    """

    def __init__(
        self,
        policy: Policy,
        task: Task,
        prompts: Sequence[Prompt],
        *,
        max_new_tokens: int,
        max_prompt_tokens: int,
        temperature: float,
        seed: int,
    ):
        self.prompts = list(prompts)
        self._task, self._seed = task, seed
        self._texts = Texts(policy.tokenizer, task.stop_rule, max_new_tokens)
        self._batches = []
        for start in range(0, len(self.prompts), BATCH):
            batch = self.prompts[start : start + BATCH]
            tokens = encode_prompts([prompt.text for prompt in batch], policy.tokenizer, max_prompt_tokens)
            self._batches.append((batch, tokens, range(start, start + len(batch))))
        self._generate = make_programs(
            policy.graphdef, policy.tokenizer, task, max_new_tokens=max_new_tokens, temperature=temperature
        )

    def __call__(self, params: Any) -> Evaluation:
        """Generates and scores every prompt in both modes."""
        metrics, completions, components = {}, {}, {}
        for mode, program in self._generate.items():
            texts: list[str] = []
            for prompts, tokens, numbers in self._batches:
                texts += self._texts.complete(program, params, prompts, tokens, numbers, self._seed)
            scores = checked_score(self._task, self.prompts, texts)
            metrics[f"eval/{mode}/reward"] = float(total_reward(scores, self._task.component_weights).mean())
            for name, values in applicable(scores, self.prompts).items():
                metrics[f"eval/{mode}/{name}"] = float(values.mean())
            completions[mode], components[mode] = texts, scores
        return Evaluation(metrics, completions, components)
