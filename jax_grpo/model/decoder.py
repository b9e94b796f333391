"""A decoder in Flax NNX: token ids to final hidden states, with and without a key-value cache. One class for all families.

The language-model head is not here: `jax_grpo.lm_head` turns hidden states and `head_VH` into log-probabilities. Knows nothing of
tokens' text, sampling or losses.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from jax_grpo.arrays.token_rows import TokenRows
from jax_grpo.mesh.tensor import looked_up, over_tensor
from jax_grpo.model import decode_kernel
from jax_grpo.model.architecture import Architecture
from jax_grpo.model.attention import BLOCKS, KV, EarlierTurns, Seen, Turn, attend, heads_first, turn_of
from jax_grpo.model.layers import PRODUCT, Block, Mix, norm


def position_ids(attention_mask_BT: jax.Array) -> jax.Array:
    """Positions counted over real tokens only, so that left padding and right padding give the same model.

    The count is clipped at 0 on left padding; multiplying it by the mask instead would give real tokens wrong
    positions as soon as the mask has holes. Shape [B, T], int32.
    """
    return jnp.maximum(jnp.cumsum(attention_mask_BT.astype(jnp.int32), axis=-1) - 1, 0)


Remat = Literal[False, "all", "dots"]
# None: a block's inputs alone.
REMAT_POLICIES = {"all": None, "dots": jax.checkpoint_policies.save_only_these_names(PRODUCT)}


def differentiated(block: Block, x: jax.Array, turn: Turn | None, mix: Mix, remat: Remat) -> tuple[jax.Array, Any]:
    """The block as a part of a program with a backward pass: recomputed there as `remat` says, and in its turn.

    In the backward pass the gradient of `x` waits for those of the block's parameters. Only the optimiser reads these: XLA:CPU
    would put all of them off to the end, with every block's activations. Nor may it fuse a block's residual sums into the next,
    which for equal rows of GPT-2 small doubles the instructions to compile. `compilation.training_options` has it heed the barrier.

    `jax.checkpoint` of a pure function: `nnx.remat` writes a block's parameters back, which fails inside a scan.

    Of a block with adapters only these have gradients, and the rest stays outside the barrier, which would give it gradients too.
    """
    graphdef, adapters, others = nnx.split(block, nnx.LoRAParam, ...)
    params, frozen = (adapters, others) if jax.tree.leaves(adapters) else (others, adapters)

    def pure(params: nnx.State, x: jax.Array):
        return nnx.merge(graphdef, params, frozen)(x, turn, mix)

    barrier = jax.lax.optimization_barrier
    if remat:
        pure = jax.checkpoint(pure, policy=REMAT_POLICIES[remat])
        # It has barriers of its own, and on a GPU a second one would keep more (0.1 GB of GPT-2 small's update).
        barrier = functools.partial(jax.lax.platform_dependent, cpu=barrier, default=lambda pair: pair)
    return pure(*barrier((params, x)))


class Decoder(nnx.Module):
    """A decoder without its head, initialised as GPT-2 is: N(0, 0.02), scaled residual projections, zero biases.

    Args:
        compute_dtype: dtype of activations and matmuls; norms' statistics and softmax use at least float32.
        remat: recompute each block in the backward pass instead of keeping its activations; `dots` keeps the results of
            its matmuls with weights.
        attention: a name of `attention.BLOCKS`.
        decode_kernel: attention of a decode step in one Pallas kernel for NVIDIA cards.
        vocabulary: tokens there are, the first columns of the softmax; None: all of `config.vocab_size`. Weights may have more
            rows than their tokenizer has tokens (padded to a round number): none of those is ever sampled, so that the policy,
            and all that is measured of it, is the softmax without them.
    """

    def __init__(
        self,
        config: Architecture,
        *,
        rngs: nnx.Rngs,
        param_dtype=jnp.float32,
        compute_dtype=jnp.float32,
        remat: Remat = False,
        vocabulary: int | None = None,
        attention: str = "auto",
        decode_kernel: bool = False,
    ):
        self.config = config
        self.blocks = BLOCKS[attention]
        self.decode_kernel = decode_kernel
        self.vocabulary = config.vocab_size if vocabulary is None else vocabulary
        self.remat: Remat = remat
        self.merges_adapters = False  # in rollouts, where there are adapters
        self.compute_dtype = jnp.dtype(compute_dtype)

        def token_init(key, shape, dtype):
            rows = jnp.arange(shape[0])[:, None] < config.vocab_size
            return jnp.where(rows, jax.random.normal(key, shape, dtype) * 0.02, 0).astype(dtype)

        how = {"rngs": rngs, "param_dtype": param_dtype, "dtype": compute_dtype}
        embed = functools.partial(nnx.Embed, features=config.hidden_size, **how | {"dtype": param_dtype})
        self.wte = embed(config.padded_vocab_size, embedding_init=token_init)
        if config.rope is None:
            self.wpe = embed(config.max_position_embeddings, embedding_init=nnx.initializers.normal(0.02))
        self.h = nnx.List([Block(config, **how) for _ in range(config.num_layers)])
        self.ln_f = norm(config, config.hidden_size, **how)
        if not config.tied:
            self.head = embed(config.padded_vocab_size, embedding_init=token_init)

    @property
    def head_VH(self) -> jax.Array:
        """The matrix of the logits, as stored; rows beyond `vocabulary` are no tokens'."""
        return (self.wte if self.config.tied else self.head).embedding[...]

    def _embed(self, ids: jax.Array, positions: jax.Array) -> jax.Array:
        """What the first block reads [..., H] in the compute dtype.

        Looked up and added in the parameters' dtype: their gradients are sums over every token of a batch, which
        bfloat16 would round after each.
        """
        tokens = looked_up(self.wte.embedding[...], ids)
        tokens = self.wte(ids) if tokens is None else tokens
        tokens = tokens.astype(jnp.promote_types(tokens.dtype, self.compute_dtype))  # wider than a base in bfloat16
        if self.config.embedding_scaled:
            # The factor is rounded as the model was trained with it.
            tokens = tokens * jnp.asarray(self.config.hidden_size**0.5, self.compute_dtype).astype(tokens.dtype)
        if self.config.rope is None:
            tokens = tokens + self.wpe(positions)
        return tokens.astype(self.compute_dtype)

    def _turns(self, positions: jax.Array) -> list[Turn | None]:
        """By layer, what its queries and keys are turned by; made once for all layers that share it."""
        config, dtype = self.config, jnp.promote_types(self.compute_dtype, jnp.float32)
        ropes = {window: config.rope_of(window) for window in config.windows}
        turns = {w: rope and turn_of(rope, positions, config.head_dim, dtype) for w, rope in ropes.items()}
        return [turns[window] for window in config.windows]

    def _attend(self, q: jax.Array, axes: str, at: jax.Array, sets: Sequence[Seen], window: int | None) -> jax.Array:
        return attend(q, axes, at, sets, self.config.score_divisor, window, self.blocks)

    def __call__(self, input_ids_BT: jax.Array, attention_mask_BT: jax.Array) -> jax.Array:
        """Final hidden states [B, T, H] in the compute dtype; row t predicts token t + 1."""
        return self._forward(input_ids_BT, attention_mask_BT, remat=self.remat)[0]

    def prefill(self, input_ids_PT: jax.Array, attention_mask_PT: jax.Array) -> tuple[jax.Array, list[KV]]:
        """Hidden states [P, T, H] and each layer's cache of the prompts, [P, K, T, D]."""
        hidden_PTH, caches = self._forward(input_ids_PT, attention_mask_PT, remat=False)
        return hidden_PTH, [KV(*map(heads_first, kv)) for kv in caches]

    def _forward(
        self, input_ids_BT: jax.Array, attention_mask_BT: jax.Array, *, remat: Remat
    ) -> tuple[jax.Array, list[KV]]:
        positions_BT, real_BT = position_ids(attention_mask_BT), attention_mask_BT.astype(bool)

        def mix(q_BTND, k_BTKD, v_BTKD, window):
            kv = KV(k_BTKD, v_BTKD)
            sets = [Seen(kv, positions_BT, real_BT, heads_first=False)]
            return self._attend(q_BTND, "pe", positions_BT, sets, window), kv

        x_BTH, caches = self._embed(input_ids_BT, positions_BT), []
        for block, turn, window in zip(self.h, self._turns(positions_BT), self.config.windows, strict=True):
            x_BTH, kv = differentiated(block, x_BTH, turn, functools.partial(mix, window=window), remat)
            caches.append(kv)
        return self.ln_f(x_BTH), caches

    def grouped(
        self,
        prompt_ids_PT: jax.Array,
        prompt_mask_PT: jax.Array,
        completion_ids_PGC: jax.Array,
        completion_mask_PGC: jax.Array,
        rows: int | None = None,
    ) -> jax.Array:
        """Hidden states [P, G, C, H] that predict each completion token; differentiable.

        Equal to `__call__` on the G concatenations of each prompt with its completions, but a prompt is computed once
        instead of G times, and what is done to each row by itself is one product for both kinds. Prompts are left-padded (their
        last column is a real token), completions right-padded. With `rows`, no fewer than the real tokens that are read, padding
        is in no product but attention's; hidden states behind a completion's end are then others, which mean as little.
        """
        # The last completion token predicts nothing, so C - 1 tokens are read.
        read_PGC, real_PGC = completion_ids_PGC[..., :-1], completion_mask_PGC[..., :-1]
        position_PT = position_ids(prompt_mask_PT)
        length_P = jnp.sum(prompt_mask_PT.astype(jnp.int32), axis=-1)
        position_PGC = length_P[:, None, None] + position_ids(real_PGC)
        prompt_real_PT, own_real_PGC = prompt_mask_PT.astype(bool), real_PGC.astype(bool)

        token_rows = TokenRows(prompt_mask_PT, real_PGC, rows)

        def mix(*of_rows, window):
            (q_PTND, q_PGCND), *keys_and_values = map(token_rows.split, of_rows)
            prompt, own = (KV(*pair) for pair in zip(*keys_and_values, strict=True))
            of_prompt = Seen(prompt, position_PT, prompt_real_PT, heads_first=False)
            sets = [of_prompt._replace(past=True), Seen(own, position_PGC, own_real_PGC, heads_first=False)]
            out_PTND = self._attend(q_PTND, "pe", position_PT, [of_prompt], window)
            return token_rows.join(out_PTND, self._attend(q_PGCND, "pge", position_PGC, sets, window)), None

        x_RH = token_rows.join(self._embed(prompt_ids_PT, position_PT), self._embed(read_PGC, position_PGC))
        turns = self._turns(token_rows.join(position_PT, position_PGC))
        for block, turn, window in zip(self.h, turns, self.config.windows, strict=True):
            x_RH, _ = differentiated(block, x_RH, turn, functools.partial(mix, window=window), self.remat)
        x_PTH, x_PGCH = token_rows.split(x_RH)
        last_PGH = jnp.broadcast_to(x_PTH[:, None, -1], (*completion_ids_PGC.shape[:2], x_PTH.shape[-1]))
        return self.ln_f(jnp.concatenate([last_PGH[:, :, None], x_PGCH], axis=2))

    def _before(self, prompts: list[KV], prompt_mask_PT: jax.Array, earlier: EarlierTurns | None) -> list[list[Seen]]:
        """By layer, what is before a turn's own tokens: the prompt, and an episode's earlier turns."""
        prompt_PT, real_PT = position_ids(prompt_mask_PT), prompt_mask_PT.astype(bool)
        sets = [[Seen(kv, prompt_PT, real_PT, past=True)] for kv in prompts]
        if earlier is not None:
            at_PGS = jnp.sum(prompt_mask_PT, axis=-1)[:, None, None] + position_ids(earlier.mask_PGS)
            for seen, kv in zip(sets, earlier.caches, strict=True):
                seen.append(Seen(kv, at_PGS, earlier.mask_PGS, past=True))
        return sets

    def decode(
        self,
        token_PG: jax.Array,
        position_PG: jax.Array,
        prompts: list[KV],
        prompt_mask_PT: jax.Array,
        chunks: Sequence[list[KV]],
        step: jax.Array,
        earlier: EarlierTurns | None = None,
    ) -> tuple[jax.Array, list[KV]]:
        """One decode step: hidden states [P, G, H] of the tokens just sampled, and the last chunk with these tokens in it.

        Positions count real prompt tokens and steps. The prompts' caches, per layer [P, K, T, D], are read by all G completions.
        `chunks` are the completions' tokens so far, by chunk and layer [P, G, K, S, D]; all but the last are full. A chunk a loop
        makes attention read what is there, not the whole cap. `step` is the token's index within its completion, int32 scalar.
        `earlier` are the turns of an episode before this one; None in the first.
        """
        x_PGH, grown = self._embed(token_PG, position_PG), []
        sizes = [chunk[0].k.shape[3] for chunk in chunks]
        place = step - sum(sizes[:-1])  # of this token in the last chunk
        columns_S = jnp.split(jnp.arange(sum(sizes)), list(itertools.accumulate(sizes))[:-1])
        at_PGS = [position_PG[..., None] - step + column_S for column_S in columns_S]

        before, packed = self._before(prompts, prompt_mask_PT, earlier), self.decode_kernel and earlier is None
        layers = zip(
            self.h, self._turns(position_PG), self.config.windows, before, zip(*chunks, strict=True), strict=True
        )
        for block, turn, window, seen, own in layers:

            def in_kernel(qkv_PGXD, bias_XD, window=window, seen=seen, own=own):
                caches, divisor = (seen[0].kv, prompt_mask_PT, own[0], step), self.config.score_divisor
                return decode_kernel.decode(qkv_PGXD, bias_XD, *caches, divisor=divisor, window=window)

            def mix(q_PGND, k_PGKD, v_PGKD, window=window, seen=seen, own=own):
                write = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=place, axis=3)
                last = KV(*(write(old, new[:, :, :, None]) for old, new in zip(own[-1], (k_PGKD, v_PGKD), strict=True)))
                # What the last chunk has no token for yet is behind this one's position.
                full = [Seen(kv, at_PGS[i], past=True) for i, kv in enumerate(own[:-1])]
                sets = [*seen, *full, Seen(last, at_PGS[-1])]
                return self._attend(q_PGND, "pg", position_PG, sets, window), last

            x_PGH, last = block(x_PGH, turn, in_kernel if packed else mix, packed=packed)
            grown.append(last)
        return self.ln_f(x_PGH), grown

    def extend(
        self,
        ids_PGE: jax.Array,
        mask_PGE: jax.Array,
        position_PGE: jax.Array,
        prompts: list[KV],
        prompt_mask_PT: jax.Array,
        earlier: EarlierTurns,
    ) -> tuple[jax.Array, list[KV]]:
        """Hidden states [P, G, E, H] of tokens that follow prompt and earlier turns all at once, and their caches, [P, G, K, E, D].

        Masked tokens may stand anywhere among them: nothing sees them, and what is returned for them means nothing.
        """
        x_PGEH, caches = self._embed(ids_PGE, position_PGE), []
        before, real_PGE = self._before(prompts, prompt_mask_PT, earlier), mask_PGE.astype(bool)
        for block, turn, window, seen in zip(
            self.h, self._turns(position_PGE), self.config.windows, before, strict=True
        ):

            def mix(q_PGEND, k_PGEKD, v_PGEKD, window=window, seen=seen):
                kv = KV(heads_first(k_PGEKD), heads_first(v_PGEKD))
                sets = [*seen, Seen(kv, position_PGE, real_PGE)]
                return self._attend(q_PGEND, "pge", position_PGE, sets, window), kv

            x_PGEH, kv = block(x_PGEH, turn, mix)
            caches.append(kv)
        return self.ln_f(x_PGEH), caches

    def empty_chunk(self, prompts: int, group: int, length: int) -> list[KV]:
        """Zeroed cache of so many tokens a completion, one KV of [P, G, K, S, D] per layer, in the compute dtype."""
        shape = (prompts, group, self.config.kv_heads, length, self.config.head_dim)
        zeros = over_tensor(jnp.zeros(shape, self.compute_dtype), axis=2)
        return [KV(zeros, zeros) for _ in range(self.config.num_layers)]
