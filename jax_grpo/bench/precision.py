"""The optimiser step and its matmuls in float32, TF32 (where the device has it) and bfloat16."""

import jax
import jax.numpy as jnp

from jax_grpo.bench.harness import Prepared, main
from jax_grpo.bench.machine import square
from jax_grpo.bench.problems import bench_of
from jax_grpo.bench.update import jax_step


def _matmul(dtype: str, precision: str) -> Prepared:
    size = square()
    ones = jnp.ones((size, size), dtype)
    multiply = jax.jit(lambda x: jnp.matmul(x, x, precision=precision))
    return Prepared(lambda: jax.block_until_ready(multiply(ones)), {"flops": 2 * size**3, "rows": size})


def _step(name: str, dtype: str, precision: str, rounded: str | None = None) -> Prepared:
    jax.config.update("jax_default_matmul_precision", precision)
    return jax_step(name, dtype=dtype, rounded=rounded)


BENCH = bench_of(
    "jax_grpo.bench.precision",
    __doc__,
    {
        "update-float32": lambda name: _step(name, "float32", "highest"),
        "update-tf32": lambda name: _step(name, "float32", "default", "tf32"),
        "update-bfloat16": lambda name: _step(name, "bfloat16", "default"),
        "matmul-float32": lambda name: _matmul("float32", "highest"),
        "matmul-tf32": lambda name: _matmul("float32", "default"),
        "matmul-bfloat16": lambda name: _matmul("bfloat16", "default"),
    },
)

if __name__ == "__main__":
    main(BENCH)
