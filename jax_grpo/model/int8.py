"""The matrices of a decoder's blocks as int8, with one float32 scale for each output column: W is about q scale.

Symmetric: scale = max |column| / 127 and q = round(W / scale), half to even. Embeddings, head, norms and biases stay floats, in
bfloat16. NumPy does it, in float32: its divisions are IEEE's on any machine, so that a base has the same values, and hash, on
each of them; XLA may multiply by a reciprocal.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_grpo.model.architecture import Architecture
from jax_grpo.model.decoder import Decoder

INT8, OTHERS = np.dtype("int8"), jnp.bfloat16
KERNEL, SCALE = "kernel", "kernel_scale"  # of a `layers.Linear`
LARGEST = np.float32(127)
LEAST = np.finfo(np.float32).tiny


def quantised(weights: np.ndarray, axis: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """int8 of the weights' shape, and float32 scales [out] of what they hold; `axis` is that of the inputs.

    A column whose scale would be below float32's smallest normal number, such as one of zeros, is held as zeros, of scale 1.
    """
    wide = np.asarray(weights, np.float32)
    scale = np.maximum(wide.max(axis), -wide.min(axis)) / LARGEST
    scale = np.where(scale < LEAST, np.float32(1), scale)
    steps = wide / np.expand_dims(scale, axis)
    return np.rint(steps, out=steps).astype(INT8), scale


def decoder(config: Architecture, dtype: Any, **how: Any) -> Decoder:
    """A decoder whose parameters are held in `dtype`; `how` are `Decoder`'s other arguments. Of int8 it has zeros for matrices:
    a model of shapes, or one that is given values from files.
    """
    if np.dtype(dtype) != INT8:
        return Decoder(config, param_dtype=dtype, **how)
    model = Decoder(config, param_dtype=OTHERS, **how)
    for block in model.h:
        for linear in (block.attn.c_attn, block.attn.c_proj, block.mlp.c_fc, block.mlp.c_proj):
            linear.kernel = nnx.Param(jnp.zeros(linear.kernel.shape, INT8))
            linear.kernel_scale = nnx.Param(jnp.ones(linear.out_features, jnp.float32))
    return model
