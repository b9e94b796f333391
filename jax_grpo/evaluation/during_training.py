"""Scores of a policy on fixed prompts, one completion a prompt: greedy, and sampled at the training temperature.

Every number is a function of (weights, prompts, seed). Knows nothing of training.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jax_grpo.loading import Policy
from jax_grpo.rollout import decode_completions, encode_prompts, make_generate
from jax_grpo.sampling import Sampling
from jax_grpo.tasks.base import Prompt, Task, applicable, caps, total_reward
from jax_grpo.tasks.checked import checked_score
from jax_grpo.tokenizer import Tokenizer

BATCH = 64  # prompts generated together; the last batch is filled up and the fill dropped


def make_programs(
    graphdef: Any, tokenizer: Tokenizer, task: Task, *, max_new_tokens: int, temperature: float
) -> dict[str, Callable[..., Any]]:
    """The compiled generation of each mode, by name; the memory report compiles these very ones, for `BATCH` prompts."""
    return {
        mode: make_generate(
            graphdef,
            vocab_size=tokenizer.vocab_size,
            pad_id=tokenizer.pad_id,
            group_size=1,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            stop_table_SV=task.stop_rule.token_table(tokenizer),
            accept_state=task.stop_rule.accept,
        )
        for mode, sampling in {"greedy": Sampling(temperature=0.0), "sampled": Sampling(temperature)}.items()
    }


class Evaluation(NamedTuple):
    """`metrics` holds `eval/<mode>/<component>` means and `eval/<mode>/reward`; completions by mode."""

    metrics: dict[str, float]
    completions: dict[str, list[str]]
    components: dict[str, dict[str, np.ndarray]]


class Evaluator:
    """Compiled once, called with the parameters of the moment.

    Args:
        policy: model and tokenizer.
        task: prompts' task; gives the stop rule and the components.
        prompts: what to ask, fixed.
        max_new_tokens: the cap.
        max_prompt_tokens: longest allowed prompt.
        temperature: of the sampled mode.
        seed: of the sampled mode.
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
        self._tokenizer, self._task, self._seed = policy.tokenizer, task, seed
        self._batches = []
        for start in range(0, len(self.prompts), BATCH):
            rows = np.resize(np.arange(start, min(start + BATCH, len(self.prompts))), BATCH)
            tokens = encode_prompts([self.prompts[i].text for i in rows], self._tokenizer, max_prompt_tokens)
            states = np.array([self.prompts[i].start_state for i in rows], np.int32)
            self._batches.append((rows, tokens, states, caps([self.prompts[i] for i in rows], max_new_tokens)))
        self._generate = make_programs(
            policy.graphdef, self._tokenizer, task, max_new_tokens=max_new_tokens, temperature=temperature
        )

    def __call__(self, params: Any) -> Evaluation:
        """Generates and scores every prompt in both modes."""
        metrics, completions, components = {}, {}, {}
        for mode, generate in self._generate.items():
            texts: list[str] = []
            for rows, tokens, states, caps_P in self._batches:
                numbers = rows.astype(np.int32)
                rollout = generate(params, *tokens, states, numbers, self._seed, jnp.int32(0), caps_P)
                texts += decode_completions(rollout, self._tokenizer)
            texts = texts[: len(self.prompts)]
            texts = [
                self._task.stop_rule.truncate(text, prompt.start_state)[0]
                for text, prompt in zip(texts, self.prompts, strict=True)
            ]
            scores = checked_score(self._task, self.prompts, texts)
            metrics[f"eval/{mode}/reward"] = float(total_reward(scores, self._task.component_weights).mean())
            for name, values in applicable(scores, self.prompts).items():
                metrics[f"eval/{mode}/{name}"] = float(values.mean())
            completions[mode], components[mode] = texts, scores
        return Evaluation(metrics, completions, components)
