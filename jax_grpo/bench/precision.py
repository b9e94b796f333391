"""The optimiser step and its matmuls in float32, TF32 (where the device has it) and bfloat16."""

import jax
import jax.numpy as jnp

from jax_grpo.bench.harness import Bench, Prepared, main
from jax_grpo.bench.update import jax_step
from jax_grpo.bench.update_problem import ABOUT, RESOLVE

SQUARE = {"cpu": 1024}  # rows of the plain matmul; a GPU needs larger ones to be busy
SQUARE_ELSEWHERE = 8192


def _matmul(dtype: str, precision: str) -> Prepared:
    size = SQUARE.get(jax.devices()[0].platform, SQUARE_ELSEWHERE)
    square = jnp.ones((size, size), dtype)
    multiply = jax.jit(lambda x: jnp.matmul(x, x, precision=precision))
    return Prepared(lambda: jax.block_until_ready(multiply(square)), {"flops": 2 * size**3, "rows": size})


def _step(name: str, dtype: str, precision: str, rounded: str | None = None) -> Prepared:
    jax.config.update("jax_default_matmul_precision", precision)
    return jax_step(name, dtype=dtype, rounded=rounded)


BENCH = Bench(
    "jax_grpo.bench.precision",
    (__doc__ or "").splitlines()[0],
    {
        "update-float32": lambda name: _step(name, "float32", "highest"),
        "update-tf32": lambda name: _step(name, "float32", "default", "tf32"),
        "update-bfloat16": lambda name: _step(name, "bfloat16", "default"),
        "matmul-float32": lambda name: _matmul("float32", "highest"),
        "matmul-tf32": lambda name: _matmul("float32", "default"),
        "matmul-bfloat16": lambda name: _matmul("bfloat16", "default"),
    },
    ABOUT,
    reads_configs=True,
    resolve=RESOLVE,
)

if __name__ == "__main__":
    main(BENCH)
