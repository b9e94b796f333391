"""A benchmark of `test_bench` with a variant for each way to end: done, failed inside JAX, killed, and never done."""

import os
import signal
import time

import numpy as np

from jax_grpo.bench.harness import Bench, Prepared, main


def _product(problem: str) -> Prepared:
    """Without JAX, which takes seconds to import: it is done on a busy machine too."""
    square = np.ones((8, 8))
    return Prepared(lambda: square @ square, {"flops": 2 * 8**3, "problem": problem})


def _wrong_shape(problem: str) -> Prepared:
    import jax
    import jax.numpy as jnp

    multiply = jax.jit(lambda x: jnp.ones((8, 8)) @ x)
    return Prepared(lambda: multiply(jnp.ones((7, 8))), {"problem": problem})


def _killed(problem: str) -> Prepared:
    os.kill(os.getpid(), signal.SIGKILL)  # as the system does when memory is short
    raise AssertionError(problem)


def _slow(problem: str) -> Prepared:
    return Prepared(lambda: time.sleep(3600), {"problem": problem})


BENCH = Bench(
    "tiny_bench",
    "Variants of every ending.",
    {
        "done": _product,
        "wrong-shape": _wrong_shape,
        "killed": _killed,
        "torch-slow": _slow,
    },
    {"only": "8 x 8"},
)

if __name__ == "__main__":
    main(BENCH)
