"""The optimiser step and its matmuls in float32, TF32 (where the device has it) and bfloat16."""

from functools import partial

import jax
import jax.numpy as jnp

from jax_grpo.bench.harness import Prepared, main
from jax_grpo.bench.machine import square
from jax_grpo.bench.problems import Problem, bench_of
from jax_grpo.bench.update import jax_step


def _matmul(_: Problem, dtype: str, precision: str) -> Prepared:
    size = square()
    ones = jnp.ones((size, size), dtype)
    multiply = jax.jit(lambda x: jnp.matmul(x, x, precision=precision))
    return Prepared(lambda: multiply(ones), {"flops": 2 * size**3, "rows": size})


def _step(problem: Problem, dtype: str, precision: str, rounded: str | None = None) -> Prepared:
    jax.config.update("jax_default_matmul_precision", precision)
    return jax_step(problem, dtype=dtype, rounded=rounded)


BENCH = bench_of(
    "jax_grpo.bench.precision",
    __doc__,
    {
        "update-float32": partial(_step, dtype="float32", precision="highest"),
        "update-tf32": partial(_step, dtype="float32", precision="default", rounded="tf32"),
        "update-bfloat16": partial(_step, dtype="bfloat16", precision="default"),
        "matmul-float32": partial(_matmul, dtype="float32", precision="highest"),
        "matmul-tf32": partial(_matmul, dtype="float32", precision="default"),
        "matmul-bfloat16": partial(_matmul, dtype="bfloat16", precision="default"),
    },
)

if __name__ == "__main__":
    main(BENCH)
