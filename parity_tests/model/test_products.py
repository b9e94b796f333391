"""Products in bfloat16: within a rounding of the exact ones, forwards and backwards, in the form that each platform is fast at."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TINY, tiny_model
from flax import nnx

from jax_grpo.arrays import products
from jax_grpo.arrays.products import contract, matmul

ROUNDING = {jnp.bfloat16: 2.0**-8, jnp.float32: 2.0**-16}  # of the result; the latter's sums are float32
SHAPES = {(1, 0): ((24, 40), (40, 56)), (1, 1): ((24, 40), (56, 40)), (0, 0): ((40, 24), (40, 56))}


def numbers(seed: int, shape: tuple[int, ...]) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.bfloat16)


def exact(*arrays: jax.Array) -> list[np.ndarray]:
    return [np.asarray(x.astype(jnp.float32)).astype(np.float64) for x in arrays]


def within_a_rounding(actual: jax.Array, expected: np.ndarray, rounding: float) -> None:
    error = np.abs(exact(actual)[0] - expected)
    assert np.all(error <= rounding * np.abs(expected) + 2.0**-18), error.max()


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("axes", SHAPES)
def test_a_product_is_summed_in_float32_and_rounded_once(axes, dtype):
    a, b = (numbers(seed, shape) for seed, shape in enumerate(SHAPES[axes]))
    actual = jax.jit(contract, static_argnums=(2, 3))(a, b, axes, dtype)
    assert actual.dtype == dtype
    within_a_rounding(actual, np.tensordot(*exact(a, b), axes=([axes[0]], [axes[1]])), ROUNDING[dtype])


def test_its_gradients_are_products_of_the_cotangent(x64):
    x, w, to_y = numbers(0, (2, 12, 40)), numbers(1, (40, 56)), numbers(2, (2, 12, 56))
    y, back = jax.vjp(matmul, x, w)
    to_x, to_w = back(to_y)
    wide_x, wide_w, wide_y = exact(x, w, to_y)
    within_a_rounding(y, wide_x @ wide_w, 2.0**-8)
    within_a_rounding(to_x, wide_y @ wide_w.T, 2.0**-8)
    within_a_rounding(to_w, np.einsum("bti,bto->io", wide_x, wide_y), 2.0**-8)
    for dtype in (jnp.float32, jnp.float64):
        x, w = numbers(0, (2, 12, 40)).astype(dtype), numbers(1, (40, 56)).astype(dtype)
        np.testing.assert_array_equal(matmul(x, w), x @ w)


@pytest.mark.parametrize(
    ("platform", "flags", "returns"),
    [("cpu", "fma avx512_bf16", "f32"), ("cpu", "fma avx512f", "bf16"), ("cuda", "avx512_bf16", "bf16")],
)
def test_a_cpu_with_instructions_has_products_that_return_float32(platform, flags, returns, tmp_path, monkeypatch):
    """XLA has fast kernels of these alone, and of these where the left matrix is summed over its columns."""
    (tmp_path / "cpuinfo").write_text(f"flags : {flags}\n")
    monkeypatch.setattr(products, "CPU_FACTS", tmp_path / "cpuinfo")
    monkeypatch.setattr(products, "has_instructions", products.has_instructions.__wrapped__)
    arrays = numbers(0, (24, 40)), numbers(1, (40, 56)), numbers(2, (24, 56))
    step = jax.jit(lambda x, w, to_y: jax.vjp(matmul, x, w)[1](to_y))
    text = step.trace(*arrays).lower(lowering_platforms=(platform,)).as_text()
    dots = re.findall(r"dot_general .*contracting_dims = \[(\d)\] x \[\d\].* -> tensor<\d+x\d+x(\w+)>", text)
    assert {dtype for _, dtype in dots} == {returns}
    assert sorted(axis for axis, _ in dots) == (["1", "1"] if returns == "f32" else ["0", "1"])


@pytest.mark.slow_cases("bfloat16")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_block_that_retains_products_computes_none_of_them_again(dtype):
    """Four linear maps a block: one product forwards and two backwards of each, and of recomputed ones another forwards."""

    def count(remat) -> int:
        graphdef, params = tiny_model(dtype, remat=remat)
        ids, mask = jnp.ones((2, 8), jnp.int32), jnp.ones((2, 8), jnp.int32)

        def loss(params):
            return jnp.sum(nnx.merge(graphdef, params)(ids, mask).astype(jnp.float32))

        text = jax.jit(jax.grad(loss)).trace(params).lower(lowering_platforms=("cuda",)).as_text()
        return sum("dot_general" in line and "batching_dims" not in line for line in text.splitlines())

    plain, blocks = count(False), TINY.num_layers
    assert plain == 12 * blocks and count("dots") == plain and count("all") >= plain + 3 * blocks
