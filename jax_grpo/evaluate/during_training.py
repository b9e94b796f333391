"""Scores of a policy on fixed prompts, one completion a prompt: greedy, and sampled at the training temperature.

Every number is a function of (weights, prompts, seed). Of training it knows the config alone.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jax_grpo.config import Config
from jax_grpo.model.named import Policy
from jax_grpo.model.tokenizer import Tokenizer
from jax_grpo.rollout.generate import encode_prompts
from jax_grpo.rollout.sampling import Sampling
from jax_grpo.rollout.texts import BATCH, Texts
from jax_grpo.tasks.base import Prompt, Task, TrainerState, applicable, checked_score, total_reward


def make_programs(graphdef: Any, tokenizer: Tokenizer, task: Task, config: Config) -> dict[str, Callable[..., Any]]:
    """The compiled generation of each mode, by name; the memory report compiles these very ones, for `BATCH` prompts."""
    texts, temperatures = _texts(tokenizer, task, config), {"greedy": 0.0, "sampled": config.rollout.temperature}
    return {mode: texts.program(graphdef, Sampling(temperature)) for mode, temperature in temperatures.items()}


def _texts(tokenizer: Tokenizer, task: Task, config: Config) -> Texts:
    return Texts(tokenizer, task.stop_rule, config.rollout.max_new_tokens)


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
    """Compiled once for the task's prompts, called with the parameters of the moment."""

    def __init__(self, policy: Policy, task: Task, prompts: Sequence[Prompt], config: Config):
        self.prompts = list(prompts)
        self._task, self._seed, self._tokenizer = task, config.seed, policy.tokenizer
        self._iterations = config.iterations
        self._texts = _texts(policy.tokenizer, task, config)
        self._generate = make_programs(policy.graphdef, policy.tokenizer, task, config)
        self._batches = []
        for start in range(0, len(self.prompts), BATCH):
            batch = self.prompts[start : start + BATCH]
            texts = [prompt.text for prompt in batch]
            tokens = encode_prompts(texts, policy.tokenizer, config.prompts.max_prompt_tokens)
            self._batches.append((batch, tokens, range(start, start + len(batch))))

    def __call__(self, params: Any, iteration: int = 0) -> Evaluation:
        """Generates and scores every prompt in both modes, with the weights after so many iterations."""
        metrics, completions, components = {}, {}, {}
        for mode, program in self._generate.items():
            texts: list[str] = []
            for prompts, tokens, numbers in self._batches:
                texts += self._texts.complete(program, params, prompts, tokens, numbers, self._seed)
            ids = self._tokenizer.encode_batch(texts)  # of the texts: the tokens that were drawn may be others
            scores = checked_score(self._task, self.prompts, texts, ids, TrainerState(iteration, self._iterations))
            metrics[f"eval/{mode}/reward"] = float(total_reward(scores, self._task.component_weights).mean())
            for name, values in applicable(scores, self.prompts).items():
                metrics[f"eval/{mode}/{name}"] = float(values.mean())
            completions[mode], components[mode] = texts, scores
        return Evaluation(metrics, completions, components)
