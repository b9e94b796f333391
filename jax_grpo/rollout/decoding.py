"""The decode loop of a rollout: token after token until every completion has stopped, in the arrays of one compiled program.

A step costs what its rows cost and what its attention reads. So the completions' cache grows in chunks, one loop each, and
attention reads only the chunks that exist; and once at most half of the prompts have a completion that goes on, those alone
are decoded further. Knows nothing of texts.
"""

import dataclasses
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_grpo.mesh.tensor import anywhere, over_tensor
from jax_grpo.model.attention import KV, EarlierTurns
from jax_grpo.model.decoder import Decoder
from jax_grpo.rollout.sampling import Sampling, sample

CHUNK_MULTIPLE = 16  # tokens; a chunk's length is a multiple of it
LEAST_CHUNK = 32  # tokens; each chunk is a loop to compile, and a shorter one saves too little reading to be worth that
MOST_CHUNKS = 4


class DecodeInputs(NamedTuple):
    """What a decode step reads and never writes, by prompt."""

    caches: list[KV]  # per layer [P, N, T, D], read by a prompt's G completions
    mask_PT: jax.Array  # 1 on real prompt tokens
    length_PG: jax.Array  # real tokens before the completion's first
    uniform_PGC: jax.Array  # the random number in [0, 1) that draws token t of each completion
    cap_P: jax.Array  # most tokens of its completions
    earlier: EarlierTurns | None = None  # of an episode


class DecodeState(NamedTuple):
    """What a decode step writes, by prompt and completion."""

    ids_PGC: jax.Array  # int32, padding after the stop
    mask_PGC: jax.Array  # int32, 1 up to and including the token that stopped it
    logp_PGC: jax.Array  # of each token as sampled; 0 where masked
    stop_state_PG: jax.Array  # of the stop automaton
    stopped_PG: jax.Array  # it has accepted
    seen_PGV: jax.Array | None  # tokens that count as repeated; None without a repetition penalty

    def done_PG(self, t: jax.Array, prompts: DecodeInputs) -> jax.Array:
        """Whether a completion has no token t."""
        return self.stopped_PG | (t >= prompts.cap_P)[:, None]

    def live_P(self, t: jax.Array, prompts: DecodeInputs) -> jax.Array:
        """Whether some completion of a prompt has a token t."""
        return jnp.any(~self.done_PG(t, prompts), axis=1)


# Of the loop: the next token's number, what is written, the cache's last chunk.
Carry = tuple[jax.Array, DecodeState, list[KV]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodingSettings:
    """What a program that decodes is compiled with, whoever's prompts it completes."""

    vocab_size: int  # real vocabulary; ids beyond it are never sampled
    pad_id: int  # fills completions after their stop
    sampling: Sampling  # shared by every completion
    stop_table_SV: np.ndarray  # state of the stop automaton after a token, by state and token (`StopRule.token_table`)
    accept_state: int  # the state that ends a completion
    compacts: bool = True  # go on with half of the prompts once no more are needed; changes time and memory, no token


class DecodingLoop:
    """The loop, with a model (and the parameters to decode with) and its settings."""

    def __init__(self, model: Decoder, settings: DecodingSettings):
        self.model, self.settings = model, settings
        self.embedding_VH = model.head_VH.astype(model.compute_dtype)
        self.table_SV = jnp.asarray(settings.stop_table_SV, jnp.int32)

    def run(
        self,
        prompts: DecodeInputs,
        hidden_PGH: jax.Array,
        stop_state_PG: jax.Array,
        stopped_PG: jax.Array,
        seen_PGV: jax.Array | None,
        *,
        keep_cache: bool,
    ) -> tuple[DecodeState, list[KV] | None]:
        """All tokens of all completions, and with `keep_cache` their cache, per layer [P, G, K, C - 1, D].

        A completion's last token is not in it: nothing has read it. `hidden_PGH` predicts the first tokens, `stop_state_PG` is
        where the stop automaton begins, and completions that are `stopped_PG` (bool) at the beginning stay empty.
        """
        shape = count, group, cap = prompts.uniform_PGC.shape
        state = DecodeState(
            ids_PGC=jnp.full(shape, self.settings.pad_id, jnp.int32),
            mask_PGC=jnp.zeros(shape, jnp.int32),
            logp_PGC=jnp.zeros(shape, prompts.uniform_PGC.dtype),
            stop_state_PG=stop_state_PG.astype(jnp.int32),
            stopped_PG=stopped_PG,
            seen_PGV=seen_PGV,
        )
        few = count // 2 if self.settings.compacts and cap > LEAST_CHUNK else 0
        t, state = jnp.int32(1), self._sample(hidden_PGH, jnp.int32(0), prompts, state)
        chunks: list[list[KV]] = []
        lengths = chunk_lengths(cap, whole=self.model.decode_kernel)
        for length, until in zip(lengths, itertools.accumulate(lengths), strict=True):
            carry = t, state, self.model.empty_chunk(count, group, length)
            t, state, chunk = self._loop(carry, prompts, chunks, until, few)
            chunks.append(chunk)
        cache = None
        if keep_cache:
            cache = joined(chunks) if chunks else self.model.empty_chunk(count, group, 0)
        if not few:
            return state, cache

        # The rest of at most `few` prompts' completions, without the other prompts. Not under a condition, even where nothing is
        # left: its operands would live on beside their halves, where now a layer's cache is free once its half is taken.
        live_K = jax.lax.top_k(state.live_P(t, prompts).astype(jnp.int32), few)[1]
        their_state, theirs = jax.tree.map(lambda x: x[live_K], (state, prompts))
        start = t, their_state, taken(chunks, live_K)
        _, their_state, their_cache = self._loop(start, theirs, [], cap - 1, few=0)

        def put_back(x: jax.Array, new: jax.Array) -> jax.Array:
            return x.at[live_K].set(new)

        return jax.tree.map(put_back, state, their_state), cache and jax.tree.map(put_back, cache, their_cache)

    def _loop(self, carry: Carry, prompts: DecodeInputs, full: list[list[KV]], until: int, few: int) -> Carry:
        """Tokens up to number `until`, while more than `few` prompts have completions that go on; `full` are earlier chunks."""

        def goes_on(carry: Carry) -> jax.Array:
            t, state, _ = carry
            return (t <= until) & anywhere(jnp.sum(state.live_P(t, prompts)) > few)

        def step(carry: Carry) -> Carry:
            t, state, chunk = carry
            read_PG = jax.lax.dynamic_index_in_dim(state.ids_PGC, t - 1, axis=2, keepdims=False)
            position_PG = prompts.length_PG + t - 1
            hidden_PGH, chunk = self.model.decode(
                read_PG, position_PG, prompts.caches, prompts.mask_PT, [*full, chunk], t - 1, prompts.earlier
            )
            return t + 1, self._sample(hidden_PGH, t, prompts, state), chunk

        return jax.lax.while_loop(goes_on, step, carry)

    def _sample(self, hidden_PGH: jax.Array, t: jax.Array, prompts: DecodeInputs, state: DecodeState) -> DecodeState:
        """Samples token t of every completion and moves its stop automaton."""
        shape = hidden_PGH.shape[:2]
        rows = shape[0] * shape[1]
        dtype = jnp.promote_types(hidden_PGH.dtype, jnp.float32)
        logits_RV = jnp.einsum(
            "rh,vh->rv", hidden_PGH.reshape(rows, -1), self.embedding_VH, preferred_element_type=dtype
        )
        logits_RV = over_tensor(over_tensor(logits_RV, axis=1), axis=0)  # computed by columns, sampled by rows
        uniform_R = jax.lax.dynamic_index_in_dim(prompts.uniform_PGC, t, axis=2, keepdims=False).reshape(rows)
        seen_RV = None if state.seen_PGV is None else state.seen_PGV.reshape(rows, -1)
        token_R, logp_R = sample(logits_RV, uniform_R, self.settings.sampling, seen_RV, self.settings.vocab_size)
        live_PG = ~state.done_PG(t, prompts)
        token_PG = jnp.where(live_PG, token_R.reshape(shape), self.settings.pad_id)
        stop_state_PG = jnp.where(live_PG, self.table_SV[state.stop_state_PG, token_PG], state.stop_state_PG)
        if seen_RV is not None:
            # A row that has stopped waits with padding, which it did not write: how long depends on its neighbours.
            seen_RV = seen_RV.at[jnp.arange(rows), token_PG.reshape(rows)].max(live_PG.reshape(rows))
        return DecodeState(
            ids_PGC=state.ids_PGC.at[:, :, t].set(token_PG),
            mask_PGC=state.mask_PGC.at[:, :, t].set(live_PG.astype(jnp.int32)),
            logp_PGC=state.logp_PGC.at[:, :, t].set(jnp.where(live_PG, logp_R.reshape(shape), 0)),
            stop_state_PG=stop_state_PG,
            stopped_PG=stop_state_PG == self.settings.accept_state,
            seen_PGV=None if seen_RV is None else seen_RV.reshape(*shape, -1),
        )


def joined(chunks: list[list[KV]]) -> list[KV]:
    """By layer, the chunks of the cache as one."""
    return [jax.tree.map(lambda *x: jnp.concatenate(x, axis=3), *layer) for layer in zip(*chunks, strict=True)]


def taken(chunks: list[list[KV]], rows_K: jax.Array) -> list[KV]:
    """By layer, some prompts' chunks of the cache as one; each layer's once the one before is copied, or XLA copies all at once."""
    layers = []
    for layer in zip(*chunks, strict=True):
        (one,) = joined([[jax.tree.map(lambda x, rows_K=rows_K: x[rows_K], chunk)] for chunk in layer])
        rows_K, one = jax.lax.optimization_barrier((rows_K, one))
        layers.append(one)
    return layers


def chunk_lengths(cap: int, *, whole: bool = False) -> list[int]:
    """Tokens of each chunk of the completions' cache; the last token of a completion is never read.

    The `whole` is one chunk for a kernel that reads no further than there are tokens.
    """
    size = max(LEAST_CHUNK, -(-cap // (MOST_CHUNKS * CHUNK_MULTIPLE)) * CHUNK_MULTIPLE)
    read = cap - 1
    if whole:
        return [read] if read else []
    return [min(size, read - start) for start in range(0, read, size)]
