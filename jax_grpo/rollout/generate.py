"""Generation: P prompts, G completions each, in one compiled program (prefill, then a decode loop until all rows stopped).

A prompt's keys and values are computed once and shared by its G completions. Random numbers are counted, not taken from a
stream: a completion's depend on (seed, step, prompt's number, sample) only. Stop rules are automata over bytes, lifted to tokens.
Later turns of episodes are in `rollout.turns`. Knows nothing of rewards or training.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_grpo.config.sections import PROMPT_MULTIPLE
from jax_grpo.mesh import ONE_DEVICE, Layout, Part
from jax_grpo.mesh.tensor import by_heads
from jax_grpo.model.attention import KV, EarlierTurns
from jax_grpo.model.decoder import Decoder
from jax_grpo.model.layers import cast_matrices
from jax_grpo.model.tokenizer import Tokenizer
from jax_grpo.policy.adapters import merge
from jax_grpo.rollout.decoding import DecodeInputs, DecodingLoop, DecodingSettings
from jax_grpo.rollout.sampling import Sampling
from jax_grpo.tasks.episodes import Episode
from jax_grpo.tasks.stop import StopRule


class PromptTooLong(ValueError):
    """A prompt has more tokens than the config allows; it is never cut silently."""


class PromptTokens(NamedTuple):
    """Left-padded prompts, int32."""

    ids_PT: np.ndarray
    mask_PT: np.ndarray


class Rollout(NamedTuple):
    """Completions of P prompts, G each, or episodes, whose C columns are those of all turns. Arrays live on the device."""

    completion_ids_PGC: jax.Array  # int32, padding after the stop; of an episode, observations among them
    completion_mask_PGC: jax.Array  # int32, 1 up to and including the stop token, and on what is written in an episode
    sampling_logp_PGC: jax.Array  # of each token under softmax(logits / temperature) as sampled; 0 where masked
    stopped_PG: jax.Array  # whether the stop rule or end-of-text ended the completion (else it was cut at the cap)
    read_mask_PGC: jax.Array | None = None  # int32, of episodes: 1 on what the model wrote and on observations
    episodes: list[Episode] | None = None  # one a row

    @property
    def read_PGC(self) -> jax.Array:
        """1 on every token that the model reads again, its own or an observation's."""
        return self.completion_mask_PGC if self.read_mask_PGC is None else self.read_mask_PGC


class EpisodeCache(NamedTuple):
    """What an episode's next turn reads again: keys and values of every token but the last of the newest completion."""

    prompts: list[KV]  # per layer [P, N, T, D]
    earlier: EarlierTurns  # before the newest one, S columns in all: see `rollout.turns`
    newest: list[KV]  # per layer [P, G, N, C - 1, D]
    seen_PGV: jax.Array | None  # tokens that count as repeated; None without a repetition penalty


def padded_length(tokens: int, multiple: int = PROMPT_MULTIPLE) -> int:
    """Columns that a batch takes whose longest prompt has so many tokens."""
    return -(-tokens // multiple) * multiple


def encode_fitting(texts: Sequence[str], tokenizer: Tokenizer, max_tokens: int) -> list[list[int]]:
    """Ids of prompts of 1 to `max_tokens` tokens.

    Raises:
        PromptTooLong: names the longest prompt, its length and the config key.
    """
    encoded = tokenizer.encode_prompts(texts)
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
    """Ids and mask, padded on the left to the `padded_length` of the longest prompt, or of `least` tokens.

    Programs are compiled by width. Raises as `encode_fitting` does.
    """
    encoded = encode_fitting(texts, tokenizer, max_tokens)
    return left_padded(encoded, padded_length(max(least, *map(len, encoded)), multiple), tokenizer.pad_id)


def left_padded(encoded: Sequence[Sequence[int]], width: int, pad_id: int) -> PromptTokens:
    """Rows of ids in so many columns, and their mask."""
    ids_PT = np.full((len(encoded), width), pad_id, np.int32)
    mask_PT = np.zeros_like(ids_PT)
    for row, ids in enumerate(encoded):
        ids_PT[row, width - len(ids) :], mask_PT[row, width - len(ids) :] = ids, 1
    return PromptTokens(ids_PT, mask_PT)


def joined_prompts(parts: Sequence[PromptTokens], rows_P: np.ndarray, pad_id: int) -> PromptTokens:
    """Rows of several batches, numbered through all of them, in as many columns as `encode_prompts` gives them."""
    widest = max(tokens.ids_PT.shape[1] for tokens in parts)

    def joined(arrays: Sequence[np.ndarray], fill: int) -> np.ndarray:
        wide = [np.pad(x, ((0, 0), (widest - x.shape[1], 0)), constant_values=fill) for x in arrays]
        return np.concatenate(wide)[rows_P]

    ids, masks = zip(*parts, strict=True)
    ids_PT, mask_PT = joined(ids, pad_id), joined(masks, 0)
    width = padded_length(int(mask_PT.sum(-1).max()))
    return PromptTokens(ids_PT[:, -width:], mask_PT[:, -width:])


def row_keys(seed: int | jax.Array, step: jax.Array, prompt_P: jax.Array, group_size: int) -> jax.Array:
    """One PRNG key [P, G] per (seed, step, prompt, sample), whatever else is in the batch."""
    key = jax.random.fold_in(jax.random.key(seed), step)
    keys_P = jax.vmap(lambda prompt: jax.random.fold_in(key, prompt))(prompt_P)
    return jax.vmap(lambda key: jax.vmap(lambda g: jax.random.fold_in(key, g))(jnp.arange(group_size)))(keys_P)


def uniforms(
    keys_PG: jax.Array, length: int, dtype: jax.typing.DTypeLike, first: jax.typing.ArrayLike = 0
) -> jax.Array:
    """The random number in [0, 1) that samples token t of each completion, [P, G, length]; made once, outside the decode loop.

    `first` is the number of the first of these tokens: of a later turn, its column among all of the episode's.
    """

    def of_row(key: jax.Array) -> jax.Array:
        tokens = first + jnp.arange(length)
        return jax.vmap(lambda t: jax.random.uniform(jax.random.fold_in(key, t), dtype=dtype))(tokens)

    return jax.vmap(jax.vmap(of_row))(keys_PG)


def decoding_settings(
    tokenizer: Tokenizer, stop_rule: StopRule, sampling: Sampling, *, compacts: bool = True
) -> DecodingSettings:
    """What a program that writes this tokenizer's tokens is compiled with."""
    return DecodingSettings(
        vocab_size=tokenizer.vocab_size,
        pad_id=tokenizer.pad_id,
        sampling=sampling,
        stop_table_SV=stop_rule.token_table(tokenizer),
        accept_state=stop_rule.accept,
        compacts=compacts,
    )


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

    `graphdef` is of the `Decoder` (`nnx.split`), `group_size` G, and `max_new_tokens` C, the cap.

    Returns:
        Jitted `generate(params, ids_PT, mask_PT, start_state_P, prompt_P, seed, step, cap_P) -> Rollout`; `prompt_P` are
        numbers that tell the prompts apart (`prompts.dataset.sampling_numbers`), `cap_P` their own caps, at most C (default: C).
        With `past_columns` (`rollout.turns.past_columns`) (Rollout, EpisodeCache), for an episode's later turns to read.
    """

    def generate(
        params, ids_PT, mask_PT, start_state_P, prompt_P, seed, step, cap_P=None
    ) -> Rollout | tuple[Rollout, EpisodeCache]:
        model = decoding_model(graphdef, params, layout)
        count = len(ids_PT)
        rows = (count, group_size)
        hidden_PTH, caches = model.prefill(ids_PT, mask_PT)
        dtype = jnp.promote_types(hidden_PTH.dtype, jnp.float32)
        prompts = DecodeInputs(
            caches=caches,
            mask_PT=mask_PT,
            length_PG=jnp.broadcast_to(jnp.sum(mask_PT, axis=-1)[:, None], rows),
            uniform_PGC=uniforms(row_keys(seed, step, prompt_P, group_size), max_new_tokens, dtype),
            cap_P=jnp.full(count, max_new_tokens) if cap_P is None else cap_P,
        )
        seen_PGV = None
        if settings.sampling.repetition_penalty != 1.0:
            seen_PV = jnp.zeros((count, model.config.padded_vocab_size), bool)
            seen_PV = seen_PV.at[jnp.arange(count)[:, None], ids_PT].max(mask_PT.astype(bool))
            seen_PGV = jnp.broadcast_to(seen_PV[:, None], (*rows, seen_PV.shape[-1]))
        last_PGH = jnp.broadcast_to(hidden_PTH[:, -1:], (*rows, hidden_PTH.shape[-1]))
        stop_state_PG, stopped_PG = jnp.broadcast_to(start_state_P[:, None], rows), jnp.zeros(rows, bool)
        done, newest = DecodingLoop(model, settings).run(
            prompts, last_PGH, stop_state_PG, stopped_PG, seen_PGV, keep_cache=past_columns > 0
        )
        rollout = Rollout(done.ids_PGC, done.mask_PGC, done.logp_PGC, done.stopped_PG)
        if newest is None:
            return rollout
        none = EarlierTurns(model.empty_chunk(*rows, past_columns), jnp.zeros((*rows, past_columns), bool))
        return rollout, by_heads(EpisodeCache(caches, none, newest, done.seen_PGV))

    given = (Part.PARAMETERS, *[Part.PROMPTS] * 4, Part.WHOLE, Part.WHOLE, Part.PROMPTS)
    return jax.jit(layout.per_device(generate, given, Part.PROMPTS))


def decoding_model(graphdef, params, layout: Layout = ONE_DEVICE) -> Decoder:
    """The model of the parameters, its matrices in the compute dtype; on a mesh a device has it whole for all of a rollout."""
    model = nnx.merge(graphdef, params)
    if model.merges_adapters:
        graphdef, params = nnx.split(merge(nnx.merge(graphdef, layout.gather(params))), nnx.Param)
        return nnx.merge(graphdef, cast_matrices(params, model.compute_dtype))
    return nnx.merge(graphdef, layout.gather(cast_matrices(params, model.compute_dtype)))


def decode_completions(rollout: Rollout, tokenizer: Tokenizer, rule: StopRule, states_B: Sequence[int]) -> list[str]:
    """Texts of the P * G completions, row by row, without their stops; `states_B` are those that the rule begins in."""
    return [rule.text(ids, state, tokenizer) for ids, state in zip(completion_ids(rollout), states_B, strict=True)]


def completion_ids(rollout: Rollout) -> list[list[int]]:
    """Tokens of the P * G completions, row by row, the one that ended each included; of episodes, those of all turns together."""
    ids_BC, mask_BC = (np.asarray(x).reshape(-1, x.shape[-1]) for x in rollout[:2])
    return [ids_C[mask_C == 1].tolist() for ids_C, mask_C in zip(ids_BC, mask_BC, strict=True)]
