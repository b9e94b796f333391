"""Products of matrices in bfloat16 that CPUs compute by their instructions for bfloat16 (AVX512-BF16, AMX), where they have them.

XLA:CPU computes a product that returns bfloat16 in float32, after converting both matrices. For one of the same matrices that
returns float32 it has kernels of twice the speed, unless the sum runs over the rows of the left one. Elsewhere, and for other
dtypes, these functions are JAX's own products. Knows nothing of layers.
"""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

CPU_FACTS = Path("/proc/cpuinfo")


@functools.cache
def has_instructions() -> bool:
    """Whether Linux lists instructions for bfloat16 of this CPU."""
    return CPU_FACTS.exists() and not {"avx512_bf16", "amx_bf16"}.isdisjoint(CPU_FACTS.read_text().split())


def contract(a: jax.Array, b: jax.Array, axes: tuple[int, int], dtype: jax.typing.DTypeLike) -> jax.Array:
    """The product of two matrices over one axis of each, (1, 0), (1, 1) or (0, 0): summed in at least float32, as `dtype`."""

    def product(a: jax.Array, b: jax.Array, out: jax.typing.DTypeLike) -> jax.Array:
        return jax.lax.dot_general(a, b, (((axes[0],), (axes[1],)), ((), ())), preferred_element_type=out)

    def on_cpu(a: jax.Array, b: jax.Array) -> jax.Array:
        if axes[0] == 1:
            return product(a, b, jnp.float32).astype(dtype)
        transposed = with_layout_constraint(a.T, Layout((0, 1)))  # written out, or XLA folds it into the product
        return jax.lax.dot(transposed, b, preferred_element_type=jnp.float32).astype(dtype)

    by_default = functools.partial(product, out=dtype)
    if not (a.dtype == b.dtype == jnp.bfloat16 and has_instructions()):
        return by_default(a, b)
    return jax.lax.platform_dependent(a, b, cpu=on_cpu, default=by_default)


@jax.custom_vjp
def _matmul(x_NI: jax.Array, w_IO: jax.Array) -> jax.Array:
    return contract(x_NI, w_IO, (1, 0), x_NI.dtype)


def _backward(saved: tuple[jax.Array, jax.Array], to_NO: jax.Array) -> tuple[jax.Array, jax.Array]:
    x_NI, w_IO = saved
    return contract(to_NO, w_IO, (1, 1), x_NI.dtype), contract(x_NI, to_NO, (0, 0), w_IO.dtype)


_matmul.defvjp(lambda x_NI, w_IO: (_matmul(x_NI, w_IO), (x_NI, w_IO)), _backward)


def matmul(x: jax.Array, w_IO: jax.Array) -> jax.Array:
    """x W [..., out] of x [..., in], both of one dtype; its products backwards are `contract`'s too."""
    if x.dtype != jnp.bfloat16:
        return x @ w_IO
    return _matmul(x.reshape(-1, x.shape[-1]), w_IO).reshape(*x.shape[:-1], w_IO.shape[-1])
