"""A benchmark of `test_bench` with a variant for each way to end: done, failed inside JAX, killed, never done, and not here."""

import os
import signal
import time

import numpy as np

from jax_grpo.bench.runner import Bench, NotHere, Prepared, main


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


def _not_installed(problem: str) -> Prepared:
    import a_package_that_nobody_installs as peer  # pyright: ignore[reportMissingImports]

    return peer.prepared(problem)


def _not_here(problem: str) -> Prepared:
    raise NotHere(f"{problem} needs a quantum computer")


BENCH = Bench(
    "tiny_bench",
    "Variants of every ending.",
    {
        "done": _product,
        "wrong-shape": _wrong_shape,
        "killed": _killed,
        "torch-slow": _slow,
        "not-installed": _not_installed,
        "not-here": _not_here,
    },
    {"only": "only"},
)

if __name__ == "__main__":
    main(BENCH)
