"""Completions of any number of prompts, one each, in batches of a fixed size; each independent of the order of the prompts.

A prompt's random numbers come from its own text (or the number the caller gives), and prompts are batched by length and text,
so that the same set of prompts is always cut the same way. Knows nothing of scores.
"""

import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

import jax.numpy as jnp
import numpy as np

from jax_grpo.loading import Policy
from jax_grpo.rollout import PROMPT_MULTIPLE, decode_completions, encode_prompts, make_generate
from jax_grpo.sampling import Sampling
from jax_grpo.tasks.base import Prompt
from jax_grpo.tasks.stop import StopRule

BATCH = 64  # prompts generated together; the last batch is filled up and the fill dropped


Tick = Callable[[int], None]


def unwatched(done: int) -> None:
    """Progress that nobody looks at."""


class EvaluationError(ValueError):
    """An evaluation cannot be made; the message names the argument or file, what was found and what to do."""


class Complete(Protocol):
    """What a suite asks for: stop-truncated completions of the prompts, in their order."""

    def __call__(
        self, prompts: Sequence[Prompt], *, numbers: Sequence[int] | None = None, step: int = 0, tick: Tick = unwatched
    ) -> list[str]:
        """
        Args:
            prompts: any number.
            numbers: of the prompts, for sampling; None: a checksum of each prompt's text and how often it came before.
            step: for sampling; another step gives other samples of the same prompts.
            tick: called with how many prompts are done.
        """
        ...


def _checksums(texts: Sequence[str]) -> list[int]:
    """A number of each text; the second time a text is there it has another one, or its samples would be the same twice."""
    before: Counter[str] = Counter()
    numbers = []
    for text in texts:
        again = f"{before[text]}/" if before[text] else ""
        numbers.append(zlib.crc32(f"{again}{text}".encode()) & 0x7FFFFFFF)
        before[text] += 1
    return numbers


class Generator:
    """`Complete` by our own rollout. Compiled once for each padded prompt width, which only grows.

    Args:
        policy: model, parameters and tokenizer.
        stop_rule: ends completions.
        max_new_tokens: the cap.
        temperature: 0 is greedy.
        seed: of sampling.
    """

    def __init__(self, policy: Policy, stop_rule: StopRule, max_new_tokens: int, temperature: float, seed: int):
        self._policy, self._stop_rule, self._seed = policy, stop_rule, seed
        self._max_prompt = policy.architecture.max_position_embeddings - max_new_tokens
        self._width = 0
        if self._max_prompt < PROMPT_MULTIPLE:
            raise EvaluationError(
                f"the model has {policy.architecture.max_position_embeddings} positions; completions of up to "
                f"{max_new_tokens} tokens leave no room for a prompt"
            )
        self._generate = make_generate(
            policy.graphdef,
            vocab_size=policy.tokenizer.vocab_size,
            pad_id=policy.tokenizer.pad_id,
            group_size=1,
            max_new_tokens=max_new_tokens,
            sampling=Sampling(temperature),
            stop_table_SV=stop_rule.token_table(policy.tokenizer),
            accept_state=stop_rule.accept,
        )

    def __call__(
        self, prompts: Sequence[Prompt], *, numbers: Sequence[int] | None = None, step: int = 0, tick: Tick = unwatched
    ) -> list[str]:
        """See `Complete`.

        Raises:
            PromptTooLong: a prompt and its completion would not fit the model's positions.
        """
        if numbers is None:
            numbers = _checksums([prompt.text for prompt in prompts])
        order = sorted(range(len(prompts)), key=lambda i: (len(prompts[i].text), prompts[i].text, numbers[i]))
        texts = [""] * len(prompts)
        if not prompts:
            return texts
        ids_NT, mask_NT = self._encode([prompt.text for prompt in prompts])
        for start in range(0, len(order), BATCH):
            real = order[start : start + BATCH]
            rows = np.resize(real, BATCH)
            rollout = self._generate(
                self._policy.params,
                ids_NT[rows],
                mask_NT[rows],
                np.array([prompts[i].start_state for i in rows], np.int32),
                np.array([numbers[i] for i in rows], np.int32),
                self._seed,
                jnp.int32(step),
            )
            for i, text in zip(rows[: len(real)], decode_completions(rollout, self._policy.tokenizer), strict=False):
                texts[i] = self._stop_rule.truncate(text, prompts[i].start_state)[0]
            tick(start + len(real))
        return texts

    def _encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Ids and mask of all prompts at the widest width so far: one program, and the same one however they are cut."""
        ids_NT, mask_NT = encode_prompts(texts, self._policy.tokenizer, self._max_prompt)
        self._width = max(self._width, ids_NT.shape[1])
        left = ((0, 0), (self._width - ids_NT.shape[1], 0))
        return np.pad(ids_NT, left, constant_values=self._policy.tokenizer.pad_id), np.pad(mask_NT, left)
