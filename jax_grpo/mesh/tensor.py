"""Inside programs that are cut over the mesh's axis `tensor`: where arrays are cut, lookups of own rows, conditions of loops.

Everywhere else, on one device too, these functions do nothing. Knows nothing of what is computed.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jax_grpo.mesh import HEADS_AXIS, OF_PROMPTS, TENSOR


def _tensor_parts() -> int:
    """Devices of `tensor` that the program being traced is cut over: 1 outside `Layout.per_device`."""
    return jax.sharding.get_abstract_mesh().shape.get(TENSOR, 1)


def over_tensor(x: jax.Array, axis: int | None) -> jax.Array:
    """The array with one axis (None: no axis) cut over `tensor` and the others whole, where such a mesh divides the axis."""
    if (parts := _tensor_parts()) == 1:
        return x
    cut: list[str | None] = [None] * x.ndim
    if axis is not None:
        cut[axis] = TENSOR if x.shape[axis] % parts == 0 else None
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*cut))


def by_heads(tree: Any) -> Any:
    """Keys and values [P, ..., N, tokens, D] cut over `tensor`, where there is such a mesh; what is less deep whole."""
    return jax.tree.map(lambda x: over_tensor(x, axis=x.ndim - HEADS_AXIS if x.ndim > HEADS_AXIS else None), tree)


def anywhere(holds: jax.Array) -> jax.Array:
    """Whether it holds on some device of `data` and `fsdp`, bool scalar, where the program is cut over `tensor`; else as it is.

    For loops whose trip counts depend on a device's own prompts. Exchanges that the partitioner puts into them for `tensor`
    meet all devices (a collective permute has no groups): one that has left the loop would be waited for without end.
    """
    axes = jax.sharding.get_abstract_mesh().shape
    several = tuple(axis for axis in OF_PROMPTS if axes.get(axis, 1) > 1)
    return holds if _tensor_parts() == 1 or not several else jax.lax.pmax(holds.astype(jnp.int32), several) > 0


def looked_up(table_VH: jax.Array, ids: jax.Array) -> jax.Array | None:
    """Rows of a table whose rows are cut over `tensor`, [..., H]; None where they are not.

    Each device gives the rows that it has, and zeros. The partitioner would gather the table.
    """
    if (parts := _tensor_parts()) == 1:
        return None
    count = table_VH.shape[0] // parts

    def own_rows(table_VH: jax.Array, first_1: jax.Array, ids: jax.Array) -> jax.Array:
        row = ids - first_1[0]
        own = (row >= 0) & (row < count)
        rows = jnp.where(own[..., None], table_VH[jnp.where(own, row, 0)], 0)
        return jax.lax.psum(rows, TENSOR)

    cut, whole = PartitionSpec(TENSOR), PartitionSpec()
    lookup = jax.shard_map(own_rows, in_specs=(cut, cut, whole), out_specs=whole, axis_names={TENSOR}, check_vma=False)
    return lookup(table_VH, jnp.arange(parts, dtype=ids.dtype) * count, ids)
