"""A whole tree of parameters in floats, held in int8 or with the values that int8 leaves of them; a matrix is `model.int8`'s."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_grpo.model import int8


def is_held(params: nnx.State) -> bool:
    """Whether the matrices are in int8."""
    return any(path[-1] == int8.SCALE for path, _ in nnx.to_flat_state(params))


def held(params: nnx.State) -> nnx.State:
    """Parameters in floats as int8 holds them: matrices and their scales, and the others in bfloat16."""
    leaves = []
    for path, leaf in nnx.to_flat_state(params):
        if path[-1] == int8.KERNEL:
            values, scale = map(jnp.asarray, int8.quantised(np.asarray(leaf.get_value())))
            leaves += [(path, leaf.replace(values)), ((*path[:-1], int8.SCALE), nnx.Param(scale))]
        else:
            leaves.append((path, leaf.replace(leaf.get_value().astype(int8.OTHERS))))
    return nnx.from_flat_state(leaves)


def rounded(params: nnx.State) -> nnx.State:
    """Parameters in floats, of the values that int8 and bfloat16 leave of them, in the dtypes that they have."""
    small = dict(nnx.to_flat_state(held(params)))

    def of(path: tuple[Any, ...], leaf: nnx.Variable) -> nnx.Variable:
        dtype, value = leaf.get_value().dtype, small[path].get_value().astype(leaf.get_value().dtype)
        if path[-1] == int8.KERNEL:
            value = value * small[*path[:-1], int8.SCALE].get_value().astype(dtype)
        return leaf.replace(value)

    return nnx.from_flat_state([(path, of(path, leaf)) for path, leaf in nnx.to_flat_state(params)])
