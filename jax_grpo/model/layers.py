"""The layers of a decoder's block: linear maps, norms, the MLP, and attention's projections.

Everywhere `how` is what all layers of a model have in common: Flax's `rngs`, `param_dtype`, and `dtype`, the compute dtype.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jax_grpo.arrays.products import matmul
from jax_grpo.mesh.tensor import over_tensor
from jax_grpo.model.architecture import Architecture
from jax_grpo.model.attention import Turn, turned, wide_dtype

# Of queries, keys and values [..., N or K, D]: the heads' outputs, and the cache for the caller.
Mix = Callable[..., tuple[jax.Array, Any]]  # of what `Attention.parts` returns, or `packed`
PRODUCT = "product"  # of a linear map, to policies of rematerialisation
ACTIVATIONS = {"gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True), "silu": jax.nn.silu}


@jax.custom_vjp
def apart_backwards(x: jax.Array) -> jax.Array:
    """x, whose cotangent is an array of its own to XLA, and not that of the sum that x is a term of."""
    return x


apart_backwards.defvjp(lambda x: (x, None), lambda _, to_x: (jax.lax.optimization_barrier(to_x),))


class Linear(nnx.Linear):
    """x W + b in the compute dtype, but for the addition of b.

    That one is in at least float32: the gradient of b is a sum over every token of a batch, which bfloat16 would round
    after each (6 % off for 5,000 tokens).
    """

    adapters: nnx.Dict | None = None  # what `adapters.attach` gives it, by the part of its columns that each is of
    kernel_scale: nnx.Param | None = None  # of columns [out], where the kernel is in int8: see `model.int8`

    def product(self, inputs: jax.Array) -> jax.Array:
        """x W, and what adapters add to it, in the compute dtype."""
        x = inputs.astype(self.dtype)
        product = checkpoint_name(matmul(x, self.kernel[...].astype(self.dtype)), PRODUCT)
        if self.kernel_scale is not None:
            # After the product: XLA puts both into one kernel, and writes no matrix of floats.
            wide = wide_dtype(product)
            product = (product.astype(wide) * self.kernel_scale[...].astype(wide)).astype(self.dtype)
        return product if self.adapters is None else product + self._low_rank(x)

    def __call__(self, inputs: jax.Array) -> jax.Array:
        product = self.product(inputs)
        if self.bias is None:
            return product
        wide = wide_dtype(product)
        return (product.astype(wide) + self.bias[...].astype(wide)).astype(self.dtype)

    def _low_rank(self, x: jax.Array) -> jax.Array:
        """What the adapters add, [..., out]; 0 in columns that have none."""
        assert self.adapters is not None, "asked by who has looked"
        # XLA joins products of one input on a GPU: without the barriers it copies W beside A in each step of a decode loop, and
        # W beside B for each micro-batch.
        x, parts, done = jax.lax.optimization_barrier(x), [], 0
        for one in sorted(self.adapters.values(), key=lambda one: one.begin):
            parts += [jnp.zeros((*x.shape[:-1], one.begin - done), x.dtype), one(x)]
            done = one.begin + one.columns
        parts.append(jnp.zeros((*x.shape[:-1], self.out_features - done), x.dtype))
        parts = [part for part in parts if part.shape[-1]]
        return apart_backwards(parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1))


def inwards(config: Architecture, size_out: int, bias: bool, **how: Any) -> Linear:
    """Of what a block reads: weights from N(0, 0.02)."""
    return Linear(config.hidden_size, size_out, kernel_init=nnx.initializers.normal(0.02), use_bias=bias, **how)


def residual(config: Architecture, size_in: int, bias: bool, **how: Any) -> Linear:
    """Added to the residual stream: weights from N(0, 0.02 / sqrt(2 L)), since 2 L of them add up there."""
    init = nnx.initializers.normal(0.02 / math.sqrt(2 * config.num_layers))
    return Linear(size_in, config.hidden_size, kernel_init=init, use_bias=bias, **how)


class RMSNorm(nnx.Module):
    """x / sqrt(mean x^2 + epsilon) * (offset + scale) over the last axis, in at least float32, then the compute dtype."""

    def __init__(self, size: int, epsilon: float, offset: float, *, rngs: nnx.Rngs, param_dtype: Any, dtype: Any):
        self.epsilon, self.offset, self.dtype = epsilon, offset, dtype
        self.scale = nnx.Param(jnp.full((size,), 1 - offset, param_dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x.astype(wide_dtype(x))
        unit = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + self.epsilon)
        return (unit * (self.offset + self.scale[...].astype(x.dtype))).astype(self.dtype)


def norm(config: Architecture, size: int, **how: Any) -> nnx.Module:
    """The family's norm over the last axis."""
    if config.rms_norm:
        return RMSNorm(size, config.norm_epsilon, config.norm_offset, **how)
    # Fast variance, E[x^2] - E[x]^2, cancels in float32.
    return nnx.LayerNorm(size, epsilon=config.norm_epsilon, use_fast_variance=False, **how)


class MLP(nnx.Module):
    """Width H to the inner width and back; gated, `c_fc` holds the gate's columns and then the others."""

    def __init__(self, config: Architecture, **how: Any):
        self.gated, self.activation = config.gated, config.activation
        self.c_fc = inwards(config, config.inner * (1 + config.gated), config.mlp_bias, **how)
        self.c_proj = residual(config, config.inner, config.mlp_bias, **how)

    def __call__(self, x: jax.Array) -> jax.Array:
        activation, inner = ACTIVATIONS[self.activation], self.c_fc(x)
        if not self.gated:
            return self.c_proj(activation(inner))
        gate, up = jnp.split(inner, 2, axis=-1)
        return self.c_proj(activation(gate) * up)


class Attention(nnx.Module):
    """Queries, keys and values of tokens, what `mix` makes of them, and the projection back."""

    def __init__(self, config: Architecture, **how: Any):
        self.config = config
        self.c_attn = inwards(config, sum(config.qkv), config.qkv_bias, **how)
        self.c_proj = residual(config, config.qkv[0], config.output_bias, **how)
        if config.qk_norm:
            self.q_norm, self.k_norm = (norm(config, config.head_dim, **how) for _ in range(2))

    def __call__(self, x: jax.Array, turn: Turn | None, mix: Mix, *, packed: bool = False) -> tuple[jax.Array, Any]:
        heads, cache = mix(*(self.packed(x, turn) if packed else self.parts(x, turn)))
        return self.c_proj(heads.reshape(*heads.shape[:-2], -1)), cache

    def parts(self, x: jax.Array, turn: Turn | None) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries [..., N, D], and keys and values [..., K, D]."""
        config = self.config
        parts = jnp.split(self.c_attn(x), list(itertools.accumulate(config.qkv))[:2], axis=-1)
        q, k, v = (over_tensor(part.reshape(*x.shape[:-1], -1, config.head_dim), axis=-2) for part in parts)
        if config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        return (q, k, v) if turn is None else (turned(q, turn), turned(k, turn), v)

    def packed(self, x: jax.Array, turn: Turn | None) -> tuple[jax.Array, jax.Array | None]:
        """The three in one array [..., N + 2 K, D], and the bias [N + 2 K, D] that a kernel is to add to it; None: it has been."""
        heads = -1, self.config.head_dim
        if turn is None and not self.config.qk_norm and self.c_attn.bias is not None:
            return self.c_attn.product(x).reshape(*x.shape[:-1], *heads), self.c_attn.bias[...].reshape(heads)
        return jnp.concatenate(self.parts(x, turn), axis=-2), None


class Block(nnx.Module):
    """Pre-norm transformer block; with post-norms what attention and MLP give back is normed before it is added."""

    def __init__(self, config: Architecture, **how: Any):
        self.ln_1 = norm(config, config.hidden_size, **how)
        self.attn = Attention(config, **how)
        self.ln_2 = norm(config, config.hidden_size, **how)
        self.mlp = MLP(config, **how)
        self.post_norms = config.post_norms
        if config.post_norms:
            self.post_1, self.post_2 = (norm(config, config.hidden_size, **how) for _ in range(2))

    def __call__(self, x: jax.Array, turn: Turn | None, mix: Mix, *, packed: bool = False) -> tuple[jax.Array, Any]:
        attended, cache = self.attn(self.ln_1(x), turn, mix, packed=packed)
        x = x + (self.post_1(attended) if self.post_norms else attended)
        inner = self.mlp(self.ln_2(x))
        return x + (self.post_2(inner) if self.post_norms else inner), cache


def cast_matrices(params: nnx.State, dtype: jax.typing.DTypeLike) -> nnx.State:
    """Weights of linear maps, which each of their products would cast, cast once; embeddings, biases and norms as stored.

    Those in int8 stay so: a copy of them in floats is what they are to save.
    """

    def cast(path: tuple, leaf: nnx.Variable) -> nnx.Variable:
        matrix = path[-1] == "kernel" or isinstance(leaf, nnx.LoRAParam)
        floats = jnp.issubdtype(leaf.get_value().dtype, jnp.floating)
        return leaf.replace(leaf[...].astype(dtype)) if matrix and floats else leaf

    return nnx.from_flat_state([(path, cast(path, leaf)) for path, leaf in nnx.to_flat_state(params)])
