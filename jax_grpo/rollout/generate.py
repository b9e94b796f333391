"""Generation: P prompts, G completions each, in one compiled program (prefill, then a decode loop until all rows stopped).

The prompt's keys and values are computed and kept once per prompt and shared by its G completions. Randomness is counted,
not drawn from a stream: a completion's depend on (seed, step, prompt's number, sample) only. Stop rules are automata over bytes,
lifted to tokens. Knows nothing of rewards or training.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_grpo.mesh import ONE_DEVICE, Layout, Part, by_heads
from jax_grpo.model.attention import KV, Past
from jax_grpo.model.gpt2 import GPT2
from jax_grpo.model.layers import cast_matrices
from jax_grpo.model.tokenizer import Tokenizer
from jax_grpo.rollout.decoding import Decoder, DecodingSettings, Progress, Prompts
from jax_grpo.tasks.stop import StopRule

PROMPT_MULTIPLE = 16  # prompts are padded to a multiple of this many tokens, which bounds recompilation


class PromptTooLong(ValueError):
    """A prompt has more tokens than the config allows; it is never cut silently."""


class PromptTokens(NamedTuple):
    """Left-padded prompts, int32."""

    ids_PT: np.ndarray
    mask_PT: np.ndarray


class Rollout(NamedTuple):
    """Completions of P prompts, G each. Arrays live on the device."""

    completion_ids_PGC: jax.Array  # int32, padding after the stop
    completion_mask_PGC: jax.Array  # int32, 1 up to and including the stop token
    sampling_logp_PGC: jax.Array  # of each token under softmax(logits / temperature) as sampled; 0 where masked
    stopped_PG: jax.Array  # whether the stop rule or end-of-text ended the completion (else it was cut at the cap)


class Kept(NamedTuple):
    """What an episode's next turn reads again: everything but the last token of each completion is in a cache."""

    prompts: list[KV]  # per layer [P, N, T, D]
    past: Past  # of turns before the newest, S columns in all: see `rollout.turns`
    newest: list[KV]  # of the newest turn's tokens but its last, per layer [P, G, N, C - 1, D]
    seen_PGV: jax.Array | None  # tokens that count as repeated; None without a repetition penalty


def padded_length(tokens: int, multiple: int = PROMPT_MULTIPLE) -> int:
    """Columns that a batch takes whose longest prompt has so many tokens."""
    return -(-tokens // multiple) * multiple


def encode_fitting(texts: Sequence[str], tokenizer: Tokenizer, max_tokens: int) -> list[list[int]]:
    """Ids of prompts of 1 to `max_tokens` tokens.

    Raises:
        PromptTooLong: names the longest prompt, its length and the config key.
    """
    encoded = tokenizer.encode_batch(texts)
    for pick in (max, min):
        ids, text = pick(zip(encoded, texts, strict=True), key=lambda pair: len(pair[0]))
        if not 1 <= len(ids) <= max_tokens:
            raise PromptTooLong(
                f"prompt {text[:80]!r} has {len(ids)} tokens; expected 1 to prompts.max_prompt_tokens = {max_tokens}"
            )
    return encoded


def encode_prompts(
    texts: Sequence[str], tokenizer: Tokenizer, max_tokens: int, *, multiple: int = PROMPT_MULTIPLE, least: int = 0
) -> PromptTokens:
    """Ids and mask, padded on the left to the `padded_length` of the longest prompt, and to at least so many tokens.

    Programs are compiled by width. Raises as `encode_fitting` does.
    """
    encoded = encode_fitting(texts, tokenizer, max_tokens)
    width = max(padded_length(max(map(len, encoded)), multiple), least)
    ids_PT = np.full((len(encoded), width), tokenizer.pad_id, np.int32)
    mask_PT = np.zeros((len(encoded), width), np.int32)
    for row, ids in enumerate(encoded):
        ids_PT[row, width - len(ids) :] = ids
        mask_PT[row, width - len(ids) :] = 1
    return PromptTokens(ids_PT, mask_PT)


def row_keys(seed: int | jax.Array, step: jax.Array, prompt_P: jax.Array, group_size: int) -> jax.Array:
    """One PRNG key [P, G] per (seed, step, prompt, sample), whatever else is in the batch."""
    key = jax.random.fold_in(jax.random.key(seed), step)
    keys_P = jax.vmap(lambda prompt: jax.random.fold_in(key, prompt))(prompt_P)
    return jax.vmap(lambda key: jax.vmap(lambda g: jax.random.fold_in(key, g))(jnp.arange(group_size)))(keys_P)


def uniforms(
    keys_PG: jax.Array, length: int, dtype: jax.typing.DTypeLike, first: jax.typing.ArrayLike = 0
) -> jax.Array:
    """The random number in [0, 1) that draws token t of each completion, [P, G, length]; drawn once, outside the decode loop.

    `first` is the number of the first of these tokens: of a later turn, its column among all of the episode's.
    """

    def of_row(key: jax.Array) -> jax.Array:
        tokens = first + jnp.arange(length)
        return jax.vmap(lambda t: jax.random.uniform(jax.random.fold_in(key, t), dtype=dtype))(tokens)

    return jax.vmap(jax.vmap(of_row))(keys_PG)


def make_generate(
    graphdef,
    settings: DecodingSettings,
    *,
    group_size: int,
    max_new_tokens: int,
    past_columns: int = 0,
    layout: Layout = ONE_DEVICE,
) -> Callable[..., Any]:
    """Compiled generation for fixed settings; one program per padded prompt length.

    `graphdef` is of the `GPT2` (`nnx.split`), `group_size` G, and `max_new_tokens` C, the cap.

    Returns:
        Jitted `generate(params, ids_PT, mask_PT, start_state_P, prompt_P, seed, step, cap_P) -> Rollout`; `prompt_P` are
        numbers that tell the prompts apart (`positions.dataset.sampling_numbers`), `cap_P` their own caps, at most C (default: C).
        With `past_columns`, what later turns of an episode will read besides, (Rollout, Kept): see `rollout.turns`.
    """

    def generate(
        params, ids_PT, mask_PT, start_state_P, prompt_P, seed, step, cap_P=None
    ) -> Rollout | tuple[Rollout, Kept]:
        model = decoding_model(graphdef, params, layout)
        shape = (*ids_PT.shape[:1], group_size, max_new_tokens)
        hidden_PTH, caches = model.prefill(ids_PT, mask_PT)
        dtype = jnp.promote_types(hidden_PTH.dtype, jnp.float32)
        prompts = Prompts(
            caches=caches,
            mask_PT=mask_PT,
            length_PG=jnp.broadcast_to(jnp.sum(mask_PT, axis=-1)[:, None], shape[:2]),
            uniform_PGC=uniforms(row_keys(seed, step, prompt_P, group_size), max_new_tokens, dtype),
            cap_P=jnp.full(shape[:1], max_new_tokens) if cap_P is None else cap_P,
        )
        seen_PGV = None
        if settings.sampling.repetition_penalty != 1.0:
            seen_PV = jnp.zeros((shape[0], model.config.padded_vocab_size), bool)
            seen_PV = seen_PV.at[jnp.arange(shape[0])[:, None], ids_PT].max(mask_PT.astype(bool))
            seen_PGV = jnp.broadcast_to(seen_PV[:, None], (*shape[:2], seen_PV.shape[-1]))
        progress = Progress(
            ids_PGC=jnp.full(shape, settings.pad_id, jnp.int32),
            mask_PGC=jnp.zeros(shape, jnp.int32),
            logp_PGC=jnp.zeros(shape, dtype),
            state_PG=jnp.broadcast_to(start_state_P[:, None], shape[:2]).astype(jnp.int32),
            stopped_PG=jnp.zeros(shape[:2], bool),
            seen_PGV=seen_PGV,
        )
        last_PGH = jnp.broadcast_to(hidden_PTH[:, -1:], (*shape[:2], hidden_PTH.shape[-1]))
        done, newest = Decoder(model, settings, keeps=past_columns > 0).run(prompts, progress, last_PGH)
        rollout = Rollout(done.ids_PGC, done.mask_PGC, done.logp_PGC, done.stopped_PG)
        if newest is None:
            return rollout
        nothing = Past(
            model.empty_chunk(shape[0], group_size, past_columns), jnp.zeros((*shape[:2], past_columns), bool)
        )
        return rollout, by_heads(Kept(caches, nothing, newest, done.seen_PGV))

    given = (Part.PARAMETERS, *[Part.PROMPTS] * 4, Part.WHOLE, Part.WHOLE, Part.PROMPTS)
    return jax.jit(layout.by_prompts(generate, given, Part.PROMPTS))


def decoding_model(graphdef, params, layout: Layout = ONE_DEVICE) -> GPT2:
    """The model of the parameters, its matrices in the compute dtype; on a mesh a device has it whole for all of a rollout."""
    compute_dtype = nnx.merge(graphdef, params).compute_dtype
    return nnx.merge(graphdef, layout.whole(cast_matrices(params, compute_dtype)))


def decode_completions(rollout: Rollout, tokenizer: Tokenizer, rule: StopRule, states_B: Sequence[int]) -> list[str]:
    """Texts of the P * G completions, row by row, without their stops; `states_B` are those that the rule begins in."""
    rows = completion_ids(rollout.completion_ids_PGC, rollout.completion_mask_PGC)
    return [rule.text(ids, state, tokenizer) for ids, state in zip(rows, states_B, strict=True)]


def completion_ids(completion_ids_PGC: jax.Array, completion_mask_PGC: jax.Array) -> list[list[int]]:
    """Tokens of the P * G completions, row by row, the one that ended each included; of episodes, those of all turns together."""
    ids_BC, mask_BC = (np.asarray(x).reshape(-1, x.shape[-1]) for x in (completion_ids_PGC, completion_mask_PGC))
    return [ids_C[mask_C == 1].tolist() for ids_C, mask_C in zip(ids_BC, mask_BC, strict=True)]
