"""Texts of any number of prompts, one each, in batches of a fixed size: for evaluations, self-play and play.

`Texts` completes one batch. `Generator` orders and numbers prompts by themselves, so that a completion does not depend on the
order in which prompts are given. Knows nothing of scores.
"""

import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jax_grpo.config.tasks import Windows
from jax_grpo.mesh import ONE_DEVICE, Layout
from jax_grpo.mesh.processes import gathered
from jax_grpo.model.named import Policy
from jax_grpo.model.tokenizer import Tokenizer
from jax_grpo.rollout import generate, turns
from jax_grpo.rollout.decoding import DecodingSettings
from jax_grpo.rollout.generate import PromptTokens
from jax_grpo.rollout.sampling import Sampling
from jax_grpo.tasks.base import Prompt, caps
from jax_grpo.tasks.stop import StopRule

BATCH = 64  # prompts generated together; the last batch is filled up and the fill dropped

# What a suite asks for: stop-truncated completions of prompts, in their order; see `Generator.__call__`.
Complete = Callable[..., list[str]]
Tick = Callable[[int], object]  # called with how much is done


class Texts(NamedTuple):
    """What a completion is: its vocabulary, what ends it, and its cap in tokens. Knows neither weights nor sampling."""

    tokenizer: Tokenizer
    stop_rule: StopRule
    max_new_tokens: int

    def program(
        self,
        graphdef: Any,
        sampling: Sampling,
        *,
        group_size: int = 1,
        compacts: bool = True,
        layout: Layout = ONE_DEVICE,
    ) -> Callable[..., Any]:
        """The compiled generation of `group_size` completions a prompt; see `make_generate`."""
        settings, cap = self._settings(sampling, compacts), self.max_new_tokens
        return generate.make_generate(graphdef, settings, group_size=group_size, max_new_tokens=cap, layout=layout)

    def episode_programs(
        self,
        graphdef: Any,
        windows: Windows,
        sampling: Sampling,
        *,
        group_size: int = 1,
        compacts: bool = True,
        layout: Layout = ONE_DEVICE,
    ) -> tuple[Callable[..., Any], Callable[..., Any] | None]:
        """The first turn of episodes and, where there are several, the later ones; see `make_generate` and `make_next_turn`."""
        settings, later = self._settings(sampling, compacts), turns.past_columns(windows)
        first = generate.make_generate(
            graphdef,
            settings,
            group_size=group_size,
            max_new_tokens=self.max_new_tokens,
            past_columns=later,
            layout=layout,
        )
        if not later:
            return first, None
        return first, turns.make_next_turn(graphdef, settings, group_size=group_size, windows=windows, layout=layout)

    def _settings(self, sampling: Sampling, compacts: bool) -> DecodingSettings:
        return DecodingSettings(
            vocab_size=self.tokenizer.vocab_size,
            pad_id=self.tokenizer.pad_id,
            sampling=sampling,
            stop_table_SV=self.stop_rule.token_table(self.tokenizer),
            accept_state=self.stop_rule.accept,
            compacts=compacts,
        )

    def complete(
        self,
        program: Callable[..., Any],
        params: Any,
        prompts: Sequence[Prompt],
        tokens: PromptTokens,
        numbers: Sequence[int],
        seed: int,
        step: int = 0,
        batch: int = BATCH,
    ) -> list[str]:
        """Stop-truncated completions by a `program` of `batch` rows, which are filled up by repeating the prompts.

        A prompt's are next to each other, as many as the program makes. What is sampled is decided by the seed, the step and the
        prompts' numbers.
        """
        rows = np.resize(np.arange(len(prompts)), batch)
        states = np.array([prompt.start_state for prompt in prompts], np.int32)
        numbers_P, caps_P = np.array(numbers, np.int32), caps(prompts, self.max_new_tokens)
        asked = tokens.ids_PT[rows], tokens.mask_PT[rows], states[rows], numbers_P[rows]
        rollout = gathered(program(params, *asked, seed, jnp.int32(step), caps_P[rows]))
        samples = rollout.completion_ids_PGC.shape[1]
        states_B = np.repeat(states[rows], samples).tolist()
        return generate.decode_completions(rollout, self.tokenizer, self.stop_rule, states_B)[: len(prompts) * samples]


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
    """Completes any prompts by our own rollout, each as it would be in any order and beside any others.

    Random numbers come from a prompt's own text, and prompts are batched by length and text, so that the same set of prompts is
    always cut the same way. Compiled once for each padded prompt width, which only grows. Temperature 0 is greedy. With `samples`,
    each prompt is completed so many times.

    Raises:
        PromptTooLong: the cap leaves no room for a prompt.
    """

    def __init__(
        self, policy: Policy, stop_rule: StopRule, max_new_tokens: int, temperature: float, seed: int, samples: int = 1
    ):
        self._params, self._seed, self._width = policy.params, seed, 0
        positions = policy.architecture.max_position_embeddings
        self._max_prompt = positions - max_new_tokens
        if self._max_prompt < generate.PROMPT_MULTIPLE:
            raise generate.PromptTooLong(
                f"the model has {positions} positions; completions of up to {max_new_tokens} tokens leave no room for a prompt"
            )
        self._texts = Texts(policy.tokenizer, stop_rule, max_new_tokens)
        self._samples = samples
        self._program = self._texts.program(policy.graphdef, Sampling(temperature), group_size=samples)

    def __call__(
        self,
        prompts: Sequence[Prompt],
        *,
        numbers: Sequence[int] | None = None,
        step: int = 0,
        tick: Tick = lambda done: None,
    ) -> list[str]:
        """Stop-truncated completions of the prompts, in their order; a prompt's samples are next to each other.

        Sampling goes by the prompts' numbers (None: a checksum of each prompt's text and how often it came before) and the
        step: another one gives other samples of the same prompts.

        Raises:
            PromptTooLong: a prompt and its completion would not fit the model's positions.
        """
        if not prompts:
            return []
        asked = [prompt.text for prompt in prompts]
        numbers = _checksums(asked) if numbers is None else numbers
        tokenizer = self._texts.tokenizer
        ids_PT, mask_PT = generate.encode_prompts(asked, tokenizer, self._max_prompt, least=self._width)
        self._width = ids_PT.shape[1]
        order = sorted(range(len(prompts)), key=lambda i: (len(asked[i]), asked[i], numbers[i]))
        texts: list[list[str]] = [[]] * len(prompts)
        for start in range(0, len(order), BATCH):
            rows = order[start : start + BATCH]
            batch = [prompts[i] for i in rows], PromptTokens(ids_PT[rows], mask_PT[rows]), [numbers[i] for i in rows]
            completions = self._texts.complete(self._program, self._params, *batch, self._seed, step)
            for at, i in enumerate(rows):
                texts[i] = completions[at * self._samples : (at + 1) * self._samples]
            tick(start + len(rows))
        return [text for of_prompt in texts for text in of_prompt]
