"""GPT-2 in Flax NNX: token ids to final hidden states, with and without a key-value cache.

The language-model head is not here: `jax_grpo.lm_head` turns hidden states and `wte.embedding` into log-probabilities.
Attribute names follow Hugging Face's, so that a parameter's path is its checkpoint name. Knows nothing of tokens' text,
sampling or losses.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

VOCAB_MULTIPLE = 128  # aligned rows of the [V, H] embedding; avoids a pad of the odd 50257 in every step


@dataclasses.dataclass(frozen=True)
class GPT2Config:
    """Architecture of a GPT-2 (Radford et al. 2019); field meanings are those of Hugging Face's `GPT2Config`.

    Raises:
        ValueError: a size is not positive, or `hidden_size` is not a multiple of `num_heads`.
    """

    vocab_size: int
    num_layers: int
    num_heads: int
    hidden_size: int
    max_position_embeddings: int
    layer_norm_epsilon: float = 1e-5

    def __post_init__(self) -> None:
        for field in ("vocab_size", "num_layers", "num_heads", "hidden_size", "max_position_embeddings"):
            if getattr(self, field) < 1:
                raise ValueError(f"GPT2Config.{field} is {getattr(self, field)}; expected at least 1")
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"GPT2Config.hidden_size {self.hidden_size} is not a multiple of num_heads {self.num_heads}"
            )

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding parameter. Rows >= vocab_size are zero and never enter a softmax."""
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


class KV(NamedTuple):
    """Keys and values of one layer; the axes before [N, D] depend on the cache (prompt or completion)."""

    k: jax.Array
    v: jax.Array


def position_ids(attention_mask_BT: jax.Array) -> jax.Array:
    """Positions counted over real tokens only, so that left padding and right padding give the same model.

    The count is clipped at 0 on left padding; multiplying it by the mask instead would give real tokens wrong
    positions as soon as the mask has holes. Shape [B, T], int32.
    """
    return jnp.maximum(jnp.cumsum(attention_mask_BT.astype(jnp.int32), axis=-1) - 1, 0)


def causal_mask(attention_mask_BT: jax.Array) -> jax.Array:
    """[B, 1, T, T] boolean: query t sees key s when s <= t and s is a real token."""
    length = attention_mask_BT.shape[-1]
    causal_TT = jnp.tril(jnp.ones((length, length), bool))
    return causal_TT[None, None] & attention_mask_BT.astype(bool)[:, None, None, :]


def _wide_dtype(x: jax.Array):
    return jnp.promote_types(x.dtype, jnp.float32)


def _joint_softmax(
    prompt_scores: jax.Array, prompt_seen: jax.Array, own_scores: jax.Array, own_seen: jax.Array, head_dim: int
) -> tuple[jax.Array, jax.Array]:
    """Attention weights of one softmax over two sets of keys, the prompt's and the completion's own."""
    lowest = jnp.finfo(prompt_scores.dtype).min
    scores = jnp.concatenate(
        [jnp.where(prompt_seen, prompt_scores, lowest), jnp.where(own_seen, own_scores, lowest)], axis=-1
    )
    weights = jax.nn.softmax(scores / math.sqrt(head_dim), axis=-1)
    split = prompt_scores.shape[-1]
    return weights[..., :split], weights[..., split:]


def _normal(std: float):
    return nnx.initializers.normal(std)


class Linear(nnx.Linear):
    """x W + b in the compute dtype, but for the addition of b.

    That one is in at least float32: the gradient of b is a sum over every token of a batch, which bfloat16 would round
    after each (6 % off for 5,000 tokens).
    """

    def __call__(self, inputs: jax.Array) -> jax.Array:
        assert self.bias is not None
        product = inputs.astype(self.dtype) @ self.kernel[...].astype(self.dtype)
        wide = _wide_dtype(product)
        return (product.astype(wide) + self.bias[...].astype(wide)).astype(self.dtype)


class Attention(nnx.Module):
    """Causal multi-head attention, `softmax(q k^T / sqrt(D)) v`, softmax in at least float32."""

    def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs, param_dtype, compute_dtype):
        width = config.hidden_size
        self.num_heads, self.head_dim = config.num_heads, config.head_dim
        self.c_attn = Linear(
            width, 3 * width, kernel_init=_normal(0.02), dtype=compute_dtype, param_dtype=param_dtype, rngs=rngs
        )
        # GPT-2 scales the residual projections by 1/sqrt(2 L): 2 L of them add up in the residual stream.
        self.c_proj = Linear(
            width,
            width,
            kernel_init=_normal(0.02 / math.sqrt(2 * config.num_layers)),
            dtype=compute_dtype,
            param_dtype=param_dtype,
            rngs=rngs,
        )

    def qkv(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """[..., H] to three arrays [..., N, D]."""
        q, k, v = (
            part.reshape(*part.shape[:-1], self.num_heads, self.head_dim)
            for part in jnp.split(self.c_attn(x), 3, axis=-1)
        )
        return q, k, v

    def project(self, heads: jax.Array) -> jax.Array:
        """[..., N, D] to [..., H]."""
        return self.c_proj(heads.reshape(*heads.shape[:-2], self.num_heads * self.head_dim))

    def __call__(self, x_BTH: jax.Array, mask_B1TT: jax.Array) -> tuple[jax.Array, KV]:
        q_BTND, k_BTND, v_BTND = self.qkv(x_BTH)
        # Written out: `jax.nn.dot_product_attention` takes its softmax in float32 even for float64 inputs.
        dtype = _wide_dtype(x_BTH)
        scores_BNTS = jnp.einsum("btnd,bsnd->bnts", q_BTND, k_BTND, preferred_element_type=dtype)
        scores_BNTS = jnp.where(mask_B1TT, scores_BNTS / math.sqrt(self.head_dim), jnp.finfo(dtype).min)
        weights_BNTS = jax.nn.softmax(scores_BNTS, axis=-1).astype(x_BTH.dtype)
        out_BTND = jnp.einsum("bnts,bsnd->btnd", weights_BNTS, v_BTND)
        return self.project(out_BTND), KV(k_BTND, v_BTND)

    def grouped(
        self, x_PGCH: jax.Array, prompt: KV, prompt_mask_PT: jax.Array, completion_mask_PGC: jax.Array
    ) -> jax.Array:
        """All tokens of all completions at once: each sees its prompt's shared keys [P, T, N, D] and its own past."""
        q, k, v = self.qkv(x_PGCH)
        causal_CC = jnp.tril(jnp.ones((q.shape[2], q.shape[2]), bool))
        own_PGCS = causal_CC & completion_mask_PGC.astype(bool)[:, :, None, :]
        weights = _joint_softmax(
            jnp.einsum("pgcnd,ptnd->pgnct", q, prompt.k, preferred_element_type=_wide_dtype(q)),
            prompt_mask_PT.astype(bool)[:, None, None, None, :],
            jnp.einsum("pgcnd,pgsnd->pgncs", q, k, preferred_element_type=_wide_dtype(q)),
            own_PGCS[:, :, None],
            self.head_dim,
        )
        on_prompt, on_own = (w.astype(q.dtype) for w in weights)
        return self.project(
            jnp.einsum("pgnct,ptnd->pgcnd", on_prompt, prompt.v) + jnp.einsum("pgncs,pgsnd->pgcnd", on_own, v)
        )

    def decode(
        self,
        x_PGH: jax.Array,
        prompt: KV,  # [P, T, N, D], shared by the G completions of a prompt
        prompt_mask_PT: jax.Array,
        completion: KV,  # [P, G, C, N, D]
        step: jax.Array,
    ) -> tuple[jax.Array, KV]:
        """One token per completion: attends to the shared prompt cache and to its own tokens 0..step."""
        q_PGND, k_PGND, v_PGND = self.qkv(x_PGH)
        completion = KV(
            jax.lax.dynamic_update_slice_in_dim(completion.k, k_PGND[:, :, None], step, axis=2),
            jax.lax.dynamic_update_slice_in_dim(completion.v, v_PGND[:, :, None], step, axis=2),
        )
        seen_C = jnp.arange(completion.k.shape[2]) <= step
        weights = _joint_softmax(
            jnp.einsum("pgnd,ptnd->pgnt", q_PGND, prompt.k, preferred_element_type=_wide_dtype(x_PGH)),
            prompt_mask_PT.astype(bool)[:, None, None, :],
            jnp.einsum("pgnd,pgcnd->pgnc", q_PGND, completion.k, preferred_element_type=_wide_dtype(x_PGH)),
            seen_C,
            self.head_dim,
        )
        on_prompt, on_own = (w.astype(x_PGH.dtype) for w in weights)
        out_PGND = jnp.einsum("pgnt,ptnd->pgnd", on_prompt, prompt.v) + jnp.einsum(
            "pgnc,pgcnd->pgnd", on_own, completion.v
        )
        return self.project(out_PGND), completion


class MLP(nnx.Module):
    """Width H to 4 H and back, with GPT-2's tanh approximation of GELU (`gelu_new`)."""

    def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs, param_dtype, compute_dtype):
        width = config.hidden_size
        self.c_fc = Linear(
            width, 4 * width, kernel_init=_normal(0.02), dtype=compute_dtype, param_dtype=param_dtype, rngs=rngs
        )
        self.c_proj = Linear(
            4 * width,
            width,
            kernel_init=_normal(0.02 / math.sqrt(2 * config.num_layers)),
            dtype=compute_dtype,
            param_dtype=param_dtype,
            rngs=rngs,
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.c_proj(jax.nn.gelu(self.c_fc(x), approximate=True))


class Block(nnx.Module):
    """Pre-norm transformer block."""

    def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs, param_dtype, compute_dtype):
        self.ln_1 = _layer_norm(config, rngs, param_dtype, compute_dtype)
        self.attn = Attention(config, rngs=rngs, param_dtype=param_dtype, compute_dtype=compute_dtype)
        self.ln_2 = _layer_norm(config, rngs, param_dtype, compute_dtype)
        self.mlp = MLP(config, rngs=rngs, param_dtype=param_dtype, compute_dtype=compute_dtype)

    def __call__(self, x_BTH: jax.Array, mask_B1TT: jax.Array) -> tuple[jax.Array, KV]:
        attended_BTH, kv = self.attn(self.ln_1(x_BTH), mask_B1TT)
        x_BTH = x_BTH + attended_BTH
        return x_BTH + self.mlp(self.ln_2(x_BTH)), kv

    def grouped(
        self,
        x_PTH: jax.Array,
        x_PGCH: jax.Array,
        mask_P1TT: jax.Array,
        prompt_mask_PT: jax.Array,
        completion_mask_PGC: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        x_PTH, prompt = self(x_PTH, mask_P1TT)
        x_PGCH = x_PGCH + self.attn.grouped(self.ln_1(x_PGCH), prompt, prompt_mask_PT, completion_mask_PGC)
        return x_PTH, x_PGCH + self.mlp(self.ln_2(x_PGCH))

    def decode(
        self, x_PGH: jax.Array, prompt: KV, prompt_mask_PT: jax.Array, completion: KV, step: jax.Array
    ) -> tuple[jax.Array, KV]:
        attended_PGH, completion = self.attn.decode(self.ln_1(x_PGH), prompt, prompt_mask_PT, completion, step)
        x_PGH = x_PGH + attended_PGH
        return x_PGH + self.mlp(self.ln_2(x_PGH)), completion


def _layer_norm(config: GPT2Config, rngs: nnx.Rngs, param_dtype, compute_dtype) -> nnx.LayerNorm:
    return nnx.LayerNorm(
        config.hidden_size,
        epsilon=config.layer_norm_epsilon,
        use_fast_variance=False,  # E[x^2] - E[x]^2 cancels in float32
        dtype=compute_dtype,
        param_dtype=param_dtype,
        rngs=rngs,
    )


Remat = Literal[False, "all", "dots"]
_KEPT = {"all": None, "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable}  # None: a block's inputs alone


def _recomputed(method: Callable, remat: Remat) -> Callable:
    """The block's method, recomputed in the backward pass as asked.

    `jax.checkpoint` of a pure function: `nnx.remat` writes a block's parameters back, which fails inside a scan.
    """
    if not remat:
        return method

    def run(block: Block, *arguments: jax.Array):
        graphdef, params = nnx.split(block)
        pure = jax.checkpoint(lambda params, *rest: method(nnx.merge(graphdef, params), *rest), policy=_KEPT[remat])
        return pure(params, *arguments)

    return run


class GPT2(nnx.Module):
    """GPT-2 without its head.

    Args:
        config: architecture.
        rngs: initialises weights as GPT-2 does, N(0, 0.02) with scaled residual projections and zero biases.
        param_dtype: dtype the parameters are stored in.
        compute_dtype: dtype of activations and matmuls; norms' statistics and softmax use at least float32.
        remat: recompute each block in the backward pass instead of keeping its activations; `dots` keeps the results of
            its matmuls with weights.
    """

    def __init__(
        self,
        config: GPT2Config,
        *,
        rngs: nnx.Rngs,
        param_dtype=jnp.float32,
        compute_dtype=jnp.float32,
        remat: Remat = False,
    ):
        self.config = config
        self.remat: Remat = remat
        self.compute_dtype = jnp.dtype(compute_dtype)

        def embedding_init(key, shape, dtype):
            rows = jnp.arange(shape[0])[:, None] < config.vocab_size
            return jnp.where(rows, jax.random.normal(key, shape, dtype) * 0.02, 0).astype(dtype)

        self.wte = nnx.Embed(
            config.padded_vocab_size,
            config.hidden_size,
            embedding_init=embedding_init,
            dtype=param_dtype,
            param_dtype=param_dtype,
            rngs=rngs,
        )
        self.wpe = nnx.Embed(
            config.max_position_embeddings,
            config.hidden_size,
            embedding_init=_normal(0.02),
            dtype=param_dtype,
            param_dtype=param_dtype,
            rngs=rngs,
        )
        self.h = nnx.List(
            [
                Block(config, rngs=rngs, param_dtype=param_dtype, compute_dtype=compute_dtype)
                for _ in range(config.num_layers)
            ]
        )
        self.ln_f = _layer_norm(config, rngs, param_dtype, compute_dtype)

    def _embed(self, ids: jax.Array, positions: jax.Array) -> jax.Array:
        """Token plus position embedding [..., H] in the compute dtype.

        Looked up and added in the parameters' dtype: their gradients are sums over every token of a batch, which
        bfloat16 would round after each.
        """
        return (self.wte(ids) + self.wpe(positions)).astype(self.compute_dtype)

    def __call__(self, input_ids_BT: jax.Array, attention_mask_BT: jax.Array) -> jax.Array:
        """Final hidden states [B, T, H] in the compute dtype; row t predicts token t + 1."""
        return self._forward(input_ids_BT, attention_mask_BT, remat=self.remat)[0]

    def prefill(self, input_ids_PT: jax.Array, attention_mask_PT: jax.Array) -> tuple[jax.Array, list[KV]]:
        """Hidden states [P, T, H] and each layer's keys and values [P, T, N, D] of the prompts."""
        return self._forward(input_ids_PT, attention_mask_PT, remat=False)

    def _forward(
        self, input_ids_BT: jax.Array, attention_mask_BT: jax.Array, *, remat: Remat
    ) -> tuple[jax.Array, list[KV]]:
        mask_B1TT = causal_mask(attention_mask_BT)
        x_BTH = self._embed(input_ids_BT, position_ids(attention_mask_BT))
        run = _recomputed(Block.__call__, remat)
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
        x_PGCH = self._embed(read_PGC, position_PGC)
        run = _recomputed(Block.grouped, self.remat)
        for block in self.h:
            x_PTH, x_PGCH = run(block, x_PTH, x_PGCH, mask_P1TT, prompt_mask_PT, read_mask_PGC)
        last_PGH = jnp.broadcast_to(x_PTH[:, None, -1], (*completion_ids_PGC.shape[:2], x_PTH.shape[-1]))
        return self.ln_f(jnp.concatenate([last_PGH[:, :, None], x_PGCH], axis=2))

    def decode(
        self,
        token_PG: jax.Array,
        position_PG: jax.Array,
        prompts: list[KV],
        prompt_mask_PT: jax.Array,
        completions: list[KV],
        step: jax.Array,
    ) -> tuple[jax.Array, list[KV]]:
        """One decode step: hidden states [P, G, H] of the given tokens, and the completions' grown caches.

        Args:
            token_PG: the token just sampled for each completion, int32.
            position_PG: its position (real prompt tokens + step), int32.
            prompts: per layer [P, T, N, D]; stored once per prompt and read by all G completions.
            prompt_mask_PT: 1 on real prompt tokens.
            completions: per layer [P, G, C, N, D]; entries >= step are unwritten.
            step: index of this token within its completion, int32 scalar.
        """
        x_PGH = self._embed(token_PG, position_PG)
        grown = []
        for block, prompt, completion in zip(self.h, prompts, completions, strict=True):
            x_PGH, longer = block.decode(x_PGH, prompt, prompt_mask_PT, completion, step)
            grown.append(longer)
        return self.ln_f(x_PGH), grown

    def empty_completions(self, prompts: int, group: int, length: int) -> list[KV]:
        """Zeroed completion caches, one KV of [P, G, C, N, D] per layer, in the compute dtype."""
        shape = (prompts, group, length, self.config.num_heads, self.config.head_dim)
        zeros = jnp.zeros(shape, self.compute_dtype)
        return [KV(zeros, zeros) for _ in range(self.config.num_layers)]
