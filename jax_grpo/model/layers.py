"""GPT-2's architecture and the layers around attention: linear maps, norms, the MLP.

Attribute names follow Hugging Face's, so that a parameter's path is its checkpoint name. Everywhere `how` is what all layers of a
model have in common: Flax's `rngs`, `param_dtype`, and `dtype`, which is the compute dtype.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jax_grpo.config.sections import VOCAB_MULTIPLE


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
            heads = f"num_heads {self.num_heads}"
            raise ValueError(f"GPT2Config.hidden_size {self.hidden_size} is not a multiple of {heads}")

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding parameter. Rows >= vocab_size are zero and never enter a softmax."""
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


def wide_dtype(x: jax.Array):
    """The dtype that sums over x's elements are taken in: at least float32."""
    return jnp.promote_types(x.dtype, jnp.float32)


class Linear(nnx.Linear):
    """x W + b in the compute dtype, but for the addition of b.

    That one is in at least float32: the gradient of b is a sum over every token of a batch, which bfloat16 would round
    after each (6 % off for 5,000 tokens).
    """

    def product(self, inputs: jax.Array) -> jax.Array:
        """x W in the compute dtype."""
        return inputs.astype(self.dtype) @ self.kernel[...].astype(self.dtype)

    def __call__(self, inputs: jax.Array) -> jax.Array:
        assert self.bias is not None
        product = self.product(inputs)
        wide = wide_dtype(product)
        return (product.astype(wide) + self.bias[...].astype(wide)).astype(self.dtype)


def cast_matrices(params: nnx.State, dtype: jax.typing.DTypeLike) -> nnx.State:
    """Weights of linear maps, which each of their products would cast, cast once; embeddings, biases and norms as stored."""

    def cast(path: tuple, leaf: nnx.Variable) -> nnx.Variable:
        return leaf.replace(leaf[...].astype(dtype)) if path[-1] == "kernel" else leaf

    return nnx.from_flat_state([(path, cast(path, leaf)) for path, leaf in nnx.to_flat_state(params)])


def inwards(config: GPT2Config, wider: int, **how: Any) -> Linear:
    """H to `wider` H, of what a block reads: weights from N(0, 0.02)."""
    init = nnx.initializers.normal(0.02)
    return Linear(config.hidden_size, wider * config.hidden_size, kernel_init=init, **how)


def residual(config: GPT2Config, wider: int, **how: Any) -> Linear:
    """`wider` H to H, added to the residual stream: weights from N(0, 0.02 / sqrt(2 L)), since 2 L of them add up there."""
    init = nnx.initializers.normal(0.02 / math.sqrt(2 * config.num_layers))
    return Linear(wider * config.hidden_size, config.hidden_size, kernel_init=init, **how)


class MLP(nnx.Module):
    """Width H to 4 H and back, with GPT-2's tanh approximation of GELU (`gelu_new`)."""

    def __init__(self, config: GPT2Config, **how: Any):
        self.c_fc = inwards(config, 4, **how)
        self.c_proj = residual(config, 4, **how)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.c_proj(jax.nn.gelu(self.c_fc(x), approximate=True))


def layer_norm(config: GPT2Config, **how: Any) -> nnx.LayerNorm:
    """GPT-2's norm over the last axis, variance about the mean."""
    # Fast variance, E[x^2] - E[x]^2, cancels in float32.
    return nnx.LayerNorm(config.hidden_size, epsilon=config.layer_norm_epsilon, use_fast_variance=False, **how)
