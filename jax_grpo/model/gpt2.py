"""GPT-2 in Flax NNX: token ids to final hidden states, with and without a key-value cache.

The language-model head is not here: `jax_grpo.lm_head` turns hidden states and `wte.embedding` into log-probabilities.
Attribute names follow Hugging Face's, so that a parameter's path is its checkpoint name. Knows nothing of tokens' text,
sampling or losses.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from jax_grpo.mesh import looked_up, over_tensor
from jax_grpo.model.attention import KV, Attention, Past, causal_mask, join_rows, split_rows
from jax_grpo.model.layers import MLP, GPT2Config, layer_norm


def position_ids(attention_mask_BT: jax.Array) -> jax.Array:
    """Positions counted over real tokens only, so that left padding and right padding give the same model.

    The count is clipped at 0 on left padding; multiplying it by the mask instead would give real tokens wrong
    positions as soon as the mask has holes. Shape [B, T], int32.
    """
    return jnp.maximum(jnp.cumsum(attention_mask_BT.astype(jnp.int32), axis=-1) - 1, 0)


class Block(nnx.Module):
    """Pre-norm transformer block; its four forms, and what they take beside `x`, are those of `Attention`."""

    def __init__(self, config: GPT2Config, **how: Any):
        self.ln_1 = layer_norm(config, **how)
        self.attn = Attention(config, **how)
        self.ln_2 = layer_norm(config, **how)
        self.mlp = MLP(config, **how)

    def __call__(self, x_BTH: jax.Array, mask_B1TT: jax.Array) -> tuple[jax.Array, KV]:
        attended_BTH, kv = self.attn(self.ln_1(x_BTH), mask_B1TT)
        x_BTH = x_BTH + attended_BTH
        return x_BTH + self.mlp(self.ln_2(x_BTH)), kv

    def grouped(self, x_RH: jax.Array, *masks: jax.Array) -> jax.Array:
        x_RH = x_RH + self.attn.grouped(self.ln_1(x_RH), *masks)
        return x_RH + self.mlp(self.ln_2(x_RH))

    def decode(self, x_PGH: jax.Array, *past: Any, kernel: bool) -> tuple[jax.Array, KV]:
        attended_PGH, last = self.attn.decode(self.ln_1(x_PGH), *past, kernel=kernel)
        x_PGH = x_PGH + attended_PGH
        return x_PGH + self.mlp(self.ln_2(x_PGH)), last

    def extend(self, x_PGEH: jax.Array, *past: Any) -> tuple[jax.Array, KV]:
        attended_PGEH, kv = self.attn.extend(self.ln_1(x_PGEH), *past)
        x_PGEH = x_PGEH + attended_PGEH
        return x_PGEH + self.mlp(self.ln_2(x_PGEH)), kv


Remat = Literal[False, "all", "dots"]
_KEPT = {"all": None, "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable}  # None: a block's inputs alone


def differentiated(method: Callable, remat: Remat) -> Callable:
    """The block's method as a part of a program with a backward pass: recomputed there as asked, and kept to its turn.

    In the backward pass the gradient of `x` waits for those of the block's parameters. Only the optimiser reads these: XLA:CPU
    would put all of them off to the end, with every block's activations. Nor may it fuse a block's residual sums into the next,
    which for equal rows of GPT-2 small doubles the instructions to compile. `compilation.training_options` has it heed the barrier.

    `jax.checkpoint` of a pure function: `nnx.remat` writes a block's parameters back, which fails inside a scan.
    """

    def run(block: Block, x: jax.Array, *masks: jax.Array):
        graphdef, params = nnx.split(block)

        def pure(params: nnx.State, x: jax.Array):
            return method(nnx.merge(graphdef, params), x, *masks)

        barrier = jax.lax.optimization_barrier
        if remat:
            pure = jax.checkpoint(pure, policy=_KEPT[remat])
            # It has barriers of its own, and on a GPU a second one would keep more (0.1 GB of GPT-2 small's update).
            barrier = functools.partial(jax.lax.platform_dependent, cpu=barrier, default=lambda pair: pair)
        return pure(*barrier((params, x)))

    return run


class GPT2(nnx.Module):
    """GPT-2 without its head, initialised as GPT-2 is: N(0, 0.02), scaled residual projections, zero biases.

    Args:
        compute_dtype: dtype of activations and matmuls; norms' statistics and softmax use at least float32.
        remat: recompute each block in the backward pass instead of keeping its activations; `dots` keeps the results of
            its matmuls with weights.
        decode_kernel: attention of a decode step in one Pallas kernel for NVIDIA cards.
        vocabulary: tokens there are, the first columns of the softmax; None: all of `config.vocab_size`. Weights may have more
            rows than their tokenizer has tokens (padded to a round number): none of those is ever sampled, so that the policy,
            and all that is measured of it, is the softmax without them.
    """

    def __init__(
        self,
        config: GPT2Config,
        *,
        rngs: nnx.Rngs,
        param_dtype=jnp.float32,
        compute_dtype=jnp.float32,
        remat: Remat = False,
        vocabulary: int | None = None,
        decode_kernel: bool = False,
    ):
        self.config = config
        self.decode_kernel = decode_kernel
        self.vocabulary = config.vocab_size if vocabulary is None else vocabulary
        self.remat: Remat = remat
        self.compute_dtype = jnp.dtype(compute_dtype)

        def token_init(key, shape, dtype):
            rows = jnp.arange(shape[0])[:, None] < config.vocab_size
            return jnp.where(rows, jax.random.normal(key, shape, dtype) * 0.02, 0).astype(dtype)

        how = {"rngs": rngs, "param_dtype": param_dtype, "dtype": compute_dtype}
        embed = functools.partial(nnx.Embed, features=config.hidden_size, **how | {"dtype": param_dtype})
        self.wte = embed(config.padded_vocab_size, embedding_init=token_init)
        self.wpe = embed(config.max_position_embeddings, embedding_init=nnx.initializers.normal(0.02))
        self.h = nnx.List([Block(config, **how) for _ in range(config.num_layers)])
        self.ln_f = layer_norm(config, **how)

    def _embed(self, ids: jax.Array, positions: jax.Array) -> jax.Array:
        """Token plus position embedding [..., H] in the compute dtype.

        Looked up and added in the parameters' dtype: their gradients are sums over every token of a batch, which
        bfloat16 would round after each.
        """
        tokens = looked_up(self.wte.embedding[...], ids)
        tokens = self.wte(ids) if tokens is None else tokens
        return (tokens + self.wpe(positions)).astype(self.compute_dtype)

    def __call__(self, input_ids_BT: jax.Array, attention_mask_BT: jax.Array) -> jax.Array:
        """Final hidden states [B, T, H] in the compute dtype; row t predicts token t + 1."""
        return self._forward(input_ids_BT, attention_mask_BT, remat=self.remat)[0]

    def prefill(self, input_ids_PT: jax.Array, attention_mask_PT: jax.Array) -> tuple[jax.Array, list[KV]]:
        """Hidden states [P, T, H] and each layer's cache of the prompts, [P, N, T, D]."""
        hidden_PTH, caches = self._forward(input_ids_PT, attention_mask_PT, remat=False)
        return hidden_PTH, [KV(jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)) for k, v in caches]

    def _forward(
        self, input_ids_BT: jax.Array, attention_mask_BT: jax.Array, *, remat: Remat
    ) -> tuple[jax.Array, list[KV]]:
        mask_B1TT = causal_mask(attention_mask_BT)
        x_BTH = self._embed(input_ids_BT, position_ids(attention_mask_BT))
        run = differentiated(Block.__call__, remat)
        caches = []
        for block in self.h:
            x_BTH, kv = run(block, x_BTH, mask_B1TT)
            caches.append(kv)
        return self.ln_f(x_BTH), caches

    def grouped(
        self,
        prompt_ids_PT: jax.Array,
        prompt_mask_PT: jax.Array,
        completion_ids_PGC: jax.Array,
        completion_mask_PGC: jax.Array,
    ) -> jax.Array:
        """Hidden states [P, G, C, H] that predict each completion token; differentiable.

        Equal to `__call__` on the G concatenations of each prompt with its completions, but a prompt is computed once
        instead of G times. Prompts are left-padded (their last column is a real token), completions right-padded.
        """
        mask_P1TT = causal_mask(prompt_mask_PT)
        x_PTH = self._embed(prompt_ids_PT, position_ids(prompt_mask_PT))
        # The last completion token predicts nothing, so C - 1 tokens are read.
        read_PGC, read_mask_PGC = completion_ids_PGC[..., :-1], completion_mask_PGC[..., :-1]
        length_P = jnp.sum(prompt_mask_PT.astype(jnp.int32), axis=-1)
        position_PGC = length_P[:, None, None] + position_ids(read_mask_PGC)
        x_RH = join_rows(x_PTH, self._embed(read_PGC, position_PGC))
        run = differentiated(Block.grouped, self.remat)
        for block in self.h:
            x_RH = run(block, x_RH, mask_P1TT, prompt_mask_PT, read_mask_PGC)
        x_PTH, x_PGCH = split_rows(x_RH, prompt_mask_PT, read_mask_PGC)
        last_PGH = jnp.broadcast_to(x_PTH[:, None, -1], (*completion_ids_PGC.shape[:2], x_PTH.shape[-1]))
        return self.ln_f(jnp.concatenate([last_PGH[:, :, None], x_PGCH], axis=2))

    def decode(
        self,
        token_PG: jax.Array,
        position_PG: jax.Array,
        prompts: list[KV],
        prompt_mask_PT: jax.Array,
        chunks: Sequence[list[KV]],
        step: jax.Array,
        past: Past | None = None,
    ) -> tuple[jax.Array, list[KV]]:
        """One decode step: hidden states [P, G, H] of the tokens just sampled, and the last chunk with these tokens in it.

        Positions count real prompt tokens and steps. The prompts' caches, per layer [P, N, T, D], are read by all G completions.
        `chunks` are the completions' tokens so far, by chunk and layer [P, G, N, S, D]; all but the last are full. A chunk a loop
        makes attention read what is there, not the whole cap. `step` is the token's index within its completion, int32 scalar.
        `past` is what an episode's earlier turns have left; None in the first.
        """
        x_PGH = self._embed(token_PG, position_PG)
        earlier = [()] * len(self.h) if past is None else [(kv, past.mask_PGS) for kv in past.caches]
        grown = []
        for block, prompt, before, *own in zip(self.h, prompts, earlier, *chunks, strict=True):
            x_PGH, last = block.decode(x_PGH, prompt, prompt_mask_PT, own, step, *before, kernel=self.decode_kernel)
            grown.append(last)
        return self.ln_f(x_PGH), grown

    def extend(
        self,
        ids_PGE: jax.Array,
        mask_PGE: jax.Array,
        position_PGE: jax.Array,
        prompts: list[KV],
        prompt_mask_PT: jax.Array,
        past: Past,
    ) -> tuple[jax.Array, list[KV]]:
        """Hidden states [P, G, E, H] of tokens that follow prompt and past all at once, and their caches, [P, G, N, E, D].

        Masked tokens may stand anywhere among them: nothing sees them, and what is returned for them means nothing.
        """
        x_PGEH, caches = self._embed(ids_PGE, position_PGE), []
        for block, prompt, before in zip(self.h, prompts, past.caches, strict=True):
            x_PGEH, kv = block.extend(x_PGEH, mask_PGE, prompt, prompt_mask_PT, before, past.mask_PGS)
            caches.append(kv)
        return self.ln_f(x_PGEH), caches

    def empty_chunk(self, prompts: int, group: int, length: int) -> list[KV]:
        """Zeroed cache of so many tokens a completion, one KV of [P, G, N, S, D] per layer, in the compute dtype."""
        shape = (prompts, group, self.config.num_heads, length, self.config.head_dim)
        zeros = over_tensor(jnp.zeros(shape, self.compute_dtype), axis=2)
        return [KV(zeros, zeros) for _ in range(self.config.num_layers)]
