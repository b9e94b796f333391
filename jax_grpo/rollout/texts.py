"""Texts of any number of prompts in batches of a fixed size: for evaluations, self-play, play and notebooks.

`TextProgram` completes encoded prompts in the order in which they come. `Generator` orders and numbers prompts by themselves, so
that a completion does not depend on the order in which prompts are given. `Policy` is the public `jax_grpo.Policy`. Knows nothing
of scores.
"""

import functools
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jax_grpo.mesh import ONE_DEVICE, Layout
from jax_grpo.mesh.processes import gathered
from jax_grpo.model.tokenizer import Tokenizer
from jax_grpo.policy import named
from jax_grpo.rollout import generate
from jax_grpo.rollout.generate import PromptTokens
from jax_grpo.rollout.sampling import Sampling
from jax_grpo.tasks.base import Prompt
from jax_grpo.tasks.checked import caps
from jax_grpo.tasks.stop import StopRule, text_stop

BATCH = 64  # prompts generated together; the last batch is filled up and the fill dropped

# What a suite calls: stop-truncated completions of prompts, in their order; see `Generator.__call__`.
Complete = Callable[..., list[str]]
Tick = Callable[[int], object]  # called with how many prompts are done


class TextProgram(NamedTuple):
    """A compiled generation, and what makes texts of its tokens."""

    generate: Callable[..., Any]  # see `make_generate`
    tokenizer: Tokenizer
    stop_rule: StopRule
    max_new_tokens: int

    def complete(
        self,
        params: Any,
        prompts: Sequence[Prompt],
        tokens: PromptTokens,
        numbers: Sequence[int],
        seed: int,
        step: int = 0,
        *,
        batch: int = BATCH,
        tick: Tick = lambda done: None,
    ) -> tuple[list[str], list[list[int]]]:
        """Stop-truncated completions, and the tokens that were sampled for each, the one that ended it included.

        They are made `batch` prompts at a time; a last batch is filled up by repeating its prompts. A prompt's are next to each
        other, as many as the program makes. What is sampled is decided by the seed, the step and the prompts' numbers.
        """
        states_P = np.array([prompt.start_state for prompt in prompts], np.int32)
        arrays = *tokens, states_P, np.array(numbers, np.int32)
        caps_P = caps(prompts, self.max_new_tokens)
        texts: list[str] = []
        ids: list[list[int]] = []
        for start in range(0, len(prompts), batch):
            count = min(batch, len(prompts) - start)
            rows = start + np.resize(np.arange(count), batch)
            inputs = (x[rows] for x in arrays)
            rollout = gathered(self.generate(params, *inputs, seed, jnp.int32(step), caps_P[rows]))
            samples = rollout.stopped_PG.shape[1]
            states_B = np.repeat(states_P[rows], samples).tolist()
            made = generate.decode_completions(rollout, self.tokenizer, self.stop_rule, states_B)
            texts += made[: count * samples]
            ids += generate.completion_ids(rollout)[: count * samples]
            tick(start + count)
        return texts, ids


def text_program(
    graphdef: Any,
    tokenizer: Tokenizer,
    stop_rule: StopRule,
    max_new_tokens: int,
    sampling: Sampling,
    *,
    group_size: int = 1,
    layout: Layout = ONE_DEVICE,
) -> TextProgram:
    """The program of `group_size` completions a prompt; compiled at its first call."""
    settings = generate.decoding_settings(tokenizer, stop_rule, sampling)
    sizes = {"group_size": group_size, "max_new_tokens": max_new_tokens}
    program = generate.make_generate(graphdef, settings, **sizes, layout=layout)
    return TextProgram(program, tokenizer, stop_rule, max_new_tokens)


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
        self,
        policy: named.Policy,
        stop_rule: StopRule,
        max_new_tokens: int,
        temperature: float,
        seed: int,
        samples: int = 1,
    ):
        self._params, self._seed, self._width = policy.params, seed, 0
        positions = policy.architecture.max_position_embeddings
        self._max_prompt = positions - max_new_tokens
        if self._max_prompt < generate.PROMPT_MULTIPLE:
            raise generate.PromptTooLong(
                f"the model has {positions} positions; completions of up to {max_new_tokens} tokens leave no room for a prompt"
            )
        self._samples = samples
        self._program = text_program(
            policy.graphdef, policy.tokenizer, stop_rule, max_new_tokens, Sampling(temperature), group_size=samples
        )

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
        texts = [prompt.text for prompt in prompts]
        numbers = _checksums(texts) if numbers is None else numbers
        tokenizer = self._program.tokenizer
        ids_PT, mask_PT = generate.encode_prompts(texts, tokenizer, self._max_prompt, least=self._width)
        self._width = ids_PT.shape[1]
        order = sorted(range(len(prompts)), key=lambda i: (len(texts[i]), texts[i], numbers[i]))
        ordered = [prompts[i] for i in order], PromptTokens(ids_PT[order], mask_PT[order]), [numbers[i] for i in order]
        completions, _ = self._program.complete(self._params, *ordered, self._seed, step, tick=tick)
        places = np.argsort(order)
        return [completions[at * self._samples + sample] for at in places for sample in range(self._samples)]


class Policy(named.Policy):
    """See `policy.named.Policy`, to which it adds `generate`."""

    @functools.cached_property
    def _generators(self) -> dict[tuple, Generator]:
        """Compiled programs by what they were made for."""
        return {}

    def generate(
        self,
        texts: str | Sequence[str],
        *,
        max_new_tokens: int = 64,
        temperature: float = 0.0,
        samples: int = 1,
        stop: Sequence[str] = (),
        seed: int = 0,
    ) -> list[str]:
        """Completions of the texts, `samples` of each next to each other, without what they continue.

        One ends at end-of-text, before the first of the texts in `stop`, or after `max_new_tokens` tokens. Temperature 0 is greedy;
        else a text's samples follow from the seed and the text alone. The first call of its kind compiles.

        Raises:
            ValueError: a number is out of its range.
            PromptTooLong: a text and its completion would not fit the model's positions.
        """
        if max_new_tokens < 1 or samples < 1 or temperature < 0:
            given = f"max_new_tokens {max_new_tokens}, samples {samples}, temperature {temperature:g}"
            raise ValueError(f"generate: {given}; expected at least 1, 1 and 0")
        key = (max_new_tokens, temperature, samples, tuple(stop), seed)
        if key not in self._generators:
            rule = text_stop(*stop)
            self._generators[key] = Generator(self, rule, max_new_tokens, temperature, seed, samples)
        texts = [texts] if isinstance(texts, str) else texts
        return self._generators[key]([Prompt(text, 0) for text in texts])


def load_named(name: str, *, tokenizer: str | None = None, context: int = 1) -> Policy:
    """See `policy.named.load_named`."""
    return Policy(*named.load_named(name, tokenizer=tokenizer, context=context))
