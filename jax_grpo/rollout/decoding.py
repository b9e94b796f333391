"""The decode loop of a rollout: token after token until every completion has stopped, in the arrays of one compiled program.

A step costs what its rows cost and what its attention reads. So the completions' cache grows in chunks, one loop each, and
attention reads only the chunks that exist; and once at most half of the prompts have a completion that goes on, those alone
are decoded further. Knows nothing of prompts' text or of who asks.
"""

import dataclasses
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_grpo.mesh import anywhere, everywhere, over_tensor
from jax_grpo.model.attention import KV, Past
from jax_grpo.model.gpt2 import GPT2
from jax_grpo.rollout.sampling import Sampling, sample

CHUNK_MULTIPLE = 16  # tokens; a chunk's length is a multiple of it
LEAST_CHUNK = 32  # tokens; each chunk is a loop to compile, and a shorter one saves too little reading to be worth that
MOST_CHUNKS = 4


class Prompts(NamedTuple):
    """What a decode step reads and never writes, by prompt."""

    caches: list[KV]  # per layer [P, N, T, D], read by a prompt's G completions
    mask_PT: jax.Array  # 1 on real prompt tokens
    length_PG: jax.Array  # real tokens before the completion's first
    uniform_PGC: jax.Array  # the random number in [0, 1) that draws token t of each completion
    cap_P: jax.Array  # most tokens of its completions
    past: Past | None = None  # what an episode's earlier turns have left


class Progress(NamedTuple):
    """What a decode step writes, by prompt and completion; shapes as in `rollout.generate.Rollout`."""

    ids_PGC: jax.Array
    mask_PGC: jax.Array  # which ids are the completion's
    logp_PGC: jax.Array
    state_PG: jax.Array  # of the stop automaton
    stopped_PG: jax.Array  # it has accepted
    seen_PGV: jax.Array | None  # tokens that count as repeated; None without a repetition penalty

    def done_PG(self, t: jax.Array, prompts: Prompts) -> jax.Array:
        """Whether a completion has no token t."""
        return self.stopped_PG | (t >= prompts.cap_P)[:, None]

    def live_P(self, t: jax.Array, prompts: Prompts) -> jax.Array:
        """Whether some completion of a prompt has a token t."""
        return jnp.any(~self.done_PG(t, prompts), axis=1)


# Of the loop: the next token's number, what is written, the cache's last chunk.
Carry = tuple[jax.Array, Progress, list[KV]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodingSettings:
    """What a program that decodes is compiled with, whoever's prompts it completes."""

    vocab_size: int  # real vocabulary; ids beyond it are never sampled
    pad_id: int  # fills completions after their stop
    sampling: Sampling  # shared by every completion
    stop_table_SV: np.ndarray  # state of the stop automaton after a token, by state and token (`StopRule.token_table`)
    accept_state: int  # the state that ends a completion
    compacts: bool = True  # go on with half of the prompts once no more are needed; changes time and memory, no token


class Decoder:
    """The loop, with a model (and the parameters to decode with) and its settings.

    `keeps` asks for the completions' caches, for another turn to read.
    """

    def __init__(self, model: GPT2, settings: DecodingSettings, *, keeps: bool):
        self.model, self.settings, self.keeps = model, settings, keeps
        self.embedding_VH = model.wte.embedding[...].astype(model.compute_dtype)
        self.table_SV = jnp.asarray(settings.stop_table_SV, jnp.int32)

    def run(self, prompts: Prompts, progress: Progress, hidden_PGH: jax.Array) -> tuple[Progress, list[KV] | None]:
        """All tokens of all completions, and what `keeps` asks for; `hidden_PGH` predicts the first.

        What is kept is of all columns but the last, [P, G, N, C - 1, D]: a completion's own last token has not been read.
        """
        count, group, cap = progress.ids_PGC.shape
        few = count // 2 if self.settings.compacts and cap > LEAST_CHUNK else 0
        t, progress = jnp.int32(1), self._sample(hidden_PGH, jnp.int32(0), prompts, progress)
        full: list[list[KV]] = []
        lengths = chunk_lengths(cap, whole=self.model.decode_kernel)
        for length, until in zip(lengths, itertools.accumulate(lengths), strict=True):
            carry = t, progress, self.model.empty_chunk(count, group, length)
            t, progress, chunk = self._loop(carry, prompts, full, until, few)
            full.append(chunk)
        kept = self._joined(full, count, group) if self.keeps else None
        if not few:
            return progress, kept
        return jax.lax.cond(
            everywhere(jnp.all(progress.done_PG(t, prompts))),
            lambda: (progress, kept),
            lambda: self._finish(t, prompts, progress, full, few, kept),
        )

    def _joined(self, chunks: list[list[KV]], count: int, group: int) -> list[KV]:
        """The chunks as one; of no columns where a completion is of one token."""
        if not chunks:
            return self.model.empty_chunk(count, group, 0)
        return [jax.tree.map(lambda *x: jnp.concatenate(x, axis=3), *layer) for layer in zip(*chunks, strict=True)]

    def _finish(
        self,
        t: jax.Array,
        prompts: Prompts,
        progress: Progress,
        chunks: list[list[KV]],
        few: int,
        kept: list[KV] | None,
    ) -> tuple[Progress, list[KV] | None]:
        """The rest of at most `few` prompts' completions, without the other prompts."""
        live_K = jax.lax.top_k(progress.live_P(t, prompts).astype(jnp.int32), few)[1]
        some = jax.tree.map(lambda x: x[live_K], progress)

        def joined(*of_chunks: jax.Array) -> jax.Array:
            return jnp.concatenate([x[live_K] for x in of_chunks], axis=3)

        cache = [jax.tree.map(joined, *layer) for layer in zip(*chunks, strict=True)]
        last = progress.ids_PGC.shape[-1] - 1
        _, some, cache = self._loop((t, some, cache), jax.tree.map(lambda x: x[live_K], prompts), [], last, few=0)

        def back(x: jax.Array, new: jax.Array) -> jax.Array:
            return x.at[live_K].set(new)

        return jax.tree.map(back, progress, some), None if kept is None else jax.tree.map(back, kept, cache)

    def _loop(self, carry: Carry, prompts: Prompts, full: list[list[KV]], until: int, few: int) -> Carry:
        """Tokens up to number `until`, while more than `few` prompts have completions that go on."""

        def goes_on(carry: Carry) -> jax.Array:
            t, progress, _ = carry
            return (t <= until) & anywhere(jnp.sum(progress.live_P(t, prompts)) > few)

        def step(carry: Carry) -> Carry:
            t, progress, chunk = carry
            read_PG = jax.lax.dynamic_index_in_dim(progress.ids_PGC, t - 1, axis=2, keepdims=False)
            position_PG = prompts.length_PG + t - 1
            hidden_PGH, chunk = self.model.decode(
                read_PG, position_PG, prompts.caches, prompts.mask_PT, [*full, chunk], t - 1, prompts.past
            )
            return t + 1, self._sample(hidden_PGH, t, prompts, progress), chunk

        return jax.lax.while_loop(goes_on, step, carry)

    def _sample(self, hidden_PGH: jax.Array, t: jax.Array, prompts: Prompts, progress: Progress) -> Progress:
        """Samples token t of every completion and moves its stop automaton."""
        shape = hidden_PGH.shape[:2]
        rows = shape[0] * shape[1]
        dtype = jnp.promote_types(hidden_PGH.dtype, jnp.float32)
        logits_RV = jnp.einsum(
            "rh,vh->rv", hidden_PGH.reshape(rows, -1), self.embedding_VH, preferred_element_type=dtype
        )
        logits_RV = over_tensor(over_tensor(logits_RV, axis=1), axis=0)  # found by columns, drawn from by rows
        uniform_R = jax.lax.dynamic_index_in_dim(prompts.uniform_PGC, t, axis=2, keepdims=False).reshape(rows)
        seen_RV = None if progress.seen_PGV is None else progress.seen_PGV.reshape(rows, -1)
        token_R, logp_R = sample(logits_RV, uniform_R, self.settings.sampling, seen_RV, self.settings.vocab_size)
        live_PG = ~progress.done_PG(t, prompts)
        token_PG = jnp.where(live_PG, token_R.reshape(shape), self.settings.pad_id)
        state_PG = jnp.where(live_PG, self.table_SV[progress.state_PG, token_PG], progress.state_PG)
        if seen_RV is not None:
            seen_RV = seen_RV.at[jnp.arange(rows), token_PG.reshape(rows)].set(True)
        return Progress(
            ids_PGC=progress.ids_PGC.at[:, :, t].set(token_PG),
            mask_PGC=progress.mask_PGC.at[:, :, t].set(live_PG.astype(jnp.int32)),
            logp_PGC=progress.logp_PGC.at[:, :, t].set(jnp.where(live_PG, logp_R.reshape(shape), 0)),
            state_PG=state_PG,
            stopped_PG=state_PG == self.settings.accept_state,
            seen_PGV=None if seen_RV is None else seen_RV.reshape(*shape, -1),
        )


def chunk_lengths(cap: int, *, whole: bool = False) -> list[int]:
    """Tokens of each chunk of the completions' cache; the last token of a completion is never read.

    The `whole` is one chunk for a kernel that reads no further than there are tokens.
    """
    size = max(LEAST_CHUNK, -(-cap // (MOST_CHUNKS * CHUNK_MULTIPLE)) * CHUNK_MULTIPLE)
    read = cap - 1
    if whole:
        return [read] if read else []
    return [min(size, read - start) for start in range(0, read, size)]
