"""A benchmark of `test_bench` with a variant for each way to end: done, failed inside JAX, killed, and never done."""

import os
import signal
import time

import jax
import jax.numpy as jnp

from jax_grpo.bench.harness import Bench, Prepared, main


def _product(problem: str, inner: int) -> Prepared:
    square = jnp.ones((inner, 8))
    multiply = jax.jit(lambda x: jnp.ones((8, 8)) @ x)
    return Prepared(lambda: jax.block_until_ready(multiply(square)), {"flops": 2 * 8**3, "problem": problem})


def _killed(problem: str) -> Prepared:
    os.kill(os.getpid(), signal.SIGKILL)  # as the system does when memory is short
    raise AssertionError(problem)


def _slow(problem: str) -> Prepared:
    return Prepared(lambda: time.sleep(3600), {"problem": problem})


BENCH = Bench(
    "tiny_bench",
    "Variants of every ending.",
    {
        "done": lambda name: _product(name, 8),
        "wrong-shape": lambda name: _product(name, 7),
        "killed": _killed,
        "torch-slow": _slow,
    },
    {"only": "8 x 8"},
)

if __name__ == "__main__":
    main(BENCH)
