"""A run that is stopped and continued on the default device is the run that was not, with what docs/gpu.md says to set."""

import os
import re
import signal
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from short_runs import finish, lines, require_same_run, signal_after, start

pytestmark = pytest.mark.gpu
DOCUMENT = Path(__file__).parents[2] / "docs" / "gpu.md"


def asked_for() -> dict[str, str]:
    """The variables that the document says to set, by name."""
    variables = dict(re.findall(r"^export (\w+)=(\S+)$", DOCUMENT.read_text(), re.M))
    assert {"XLA_FLAGS", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"} <= set(variables), DOCUMENT
    return variables


@pytest.fixture
def reproducible(monkeypatch):
    """The document's variables, beside flags that are set already."""
    for name, value in asked_for().items():
        monkeypatch.setenv(name, f"{os.environ.get(name, '')} {value}".strip() if name == "XLA_FLAGS" else value)


def test_a_stopped_run_is_continued_bit_for_bit(tmp_path, reproducible):
    """Each in a process of its own; the second to compile takes the first one's programs, and so its choice of kernels."""
    iterations = 8
    few = ("--iterations", str(iterations))
    finish(start(tmp_path, "whole", *few))
    process = start(tmp_path, "cut", *few)
    signal_after(process, tmp_path / "cut", 2, signal.SIGTERM)
    finish(process)
    assert lines(tmp_path / "cut") < iterations, "stopped before its end"
    assert "continuing after iteration" in finish(start(tmp_path, "cut", *few, "--resume", "auto"))
    print(require_same_run(tmp_path / "cut", tmp_path / "whole", batches=iterations, iterations=iterations))


OPTIONS = {"xla_gpu_exclude_nondeterministic_ops": True}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_deterministic_scatter_writes_what_it_should_and_the_same_each_time(dtype):
    """As an embedding's gradient adds rows of many tokens to one. XLA's deterministic scatter has lost writes (jax issue 27796)."""
    rng = np.random.default_rng(0)
    rows, tokens, width = 97, 2048, 64
    index = rng.integers(0, rows, tokens)
    # Small whole numbers, whose sums are exact in any order.
    values = rng.integers(-4, 5, (tokens, width))
    add = jax.jit(lambda i, x: jnp.zeros((rows, width), jnp.float32).at[i].add(x), compiler_options=OPTIONS)
    wanted = np.zeros((rows, width))
    np.add.at(wanted, index, values)
    np.testing.assert_array_equal(add(index, jnp.asarray(values, dtype).astype(jnp.float32)), wanted)
    places = rng.permutation(tokens)
    put = jax.jit(lambda i, x: jnp.zeros((tokens, width), dtype).at[i].set(x), compiler_options=OPTIONS)
    np.testing.assert_array_equal(np.asarray(put(places, jnp.asarray(values, dtype)), float)[places], values)
    inexact = jnp.asarray(rng.normal(size=(tokens, width)), jnp.float32)
    first = np.asarray(add(index, inexact))
    for _ in range(8):
        np.testing.assert_array_equal(add(index, inexact), first)
