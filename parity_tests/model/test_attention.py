"""Attention in blocks of queries, and in kernels: the numbers of one array of scores, in any dtype, and no such array compiled.

Every family, layout, window and padding is `test_families`' and `test_parity_families`'.
"""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled_reports import needs_plugin
from conftest import relative_error
from flax import nnx

from jax_grpo.memory.compile import compile_program
from jax_grpo.memory.programs import Program
from jax_grpo.model.architecture import Architecture
from jax_grpo.model.attention import BLOCKS, KV, Blocks, Seen, attend
from jax_grpo.model.decoder import Decoder
from jax_grpo.system.compilation import training_options

P, G, T, C, N, K, D = 2, 2, 40, 300, 4, 2, 16


def arrays(dtype) -> list[jax.Array]:
    """Queries of completions, keys and values of theirs and of their prompts."""
    rng = np.random.default_rng(0)
    shapes = [(P, G, C, N, D), *[(P, G, C, K, D)] * 2, *[(P, T, K, D)] * 2]
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def weighted(
    q_PGCND, k_PGCKD, v_PGCKD, k_PTKD, v_PTKD, *, blocks: Blocks | None, window: int | None = None, padded: bool = False
) -> jax.Array:
    """A sum of what attention gives; padded: seven columns of a prompt, and of completions one's end and some of another's."""
    real_PT, real_PGC = np.ones((P, T), bool), np.ones((P, G, C), bool)
    if padded:
        real_PT[0, :7] = real_PGC[0, 1, 90:] = real_PGC[1, 0, 40:45] = False
    at_PT = jnp.maximum(jnp.cumsum(real_PT, axis=-1) - 1, 0)
    at_PGC = at_PT[:, None, -1:] + jnp.cumsum(real_PGC, axis=-1)
    sets = [
        Seen(KV(k_PTKD, v_PTKD), at_PT, jnp.asarray(real_PT), past=True, heads_first=False),
        Seen(KV(k_PGCKD, v_PGCKD), at_PGC, jnp.asarray(real_PGC), heads_first=False),
    ]
    out = attend(q_PGCND, "pge", at_PGC, sets, D**0.5, window, blocks)
    weights = np.random.default_rng(1).normal(size=out.shape) * real_PGC[..., None, None]
    return jnp.sum(out * jnp.asarray(weights, out.dtype))


@pytest.mark.parametrize("window", [None, 50])
def test_kernels_give_the_gradients_of_one_array_of_scores(window, x64):
    """Over several blocks of queries and of keys, none of which divide them; a head of keys serves two of queries."""
    gradients = [
        jax.jit(
            jax.value_and_grad(partial(weighted, blocks=BLOCKS[name], window=window, padded=True), argnums=range(5))
        )
        for name in ("full", "pallas")
    ]
    (value, exact), (of_kernels, actual) = (gradient(*arrays("float64")) for gradient in gradients)
    assert abs(value - of_kernels) < 1e-12 * abs(value)
    assert max(relative_error(a, b) for a, b in zip(actual, exact, strict=True)) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("name", ["auto", "blocks", "pallas"])
def test_blocks_round_no_worse_than_one_array_of_scores(name, x64):
    """In bfloat16, against float64. Gradients of keys are sums of at most five blocks', of which each is rounded: a quarter."""
    gradients = {
        (dtype, blocks): jax.jit(jax.grad(partial(weighted, blocks=blocks), argnums=range(5)))(*arrays(dtype))
        for dtype, blocks in [
            ("float64", None),
            ("float64", BLOCKS[name]),
            ("bfloat16", None),
            ("bfloat16", BLOCKS[name]),
        ]
    }
    exact, *others = gradients.values()
    in_float64, one_array, in_blocks = ([relative_error(a, b) for a, b in zip(x, exact, strict=True)] for x in others)
    print(f"float64 {max(in_float64):.1e}; bfloat16: one array {one_array}, blocks {in_blocks}")
    assert max(in_float64) < 1e-12
    assert all(b < 1.25 * a for a, b in zip(one_array, in_blocks, strict=True))


@pytest.mark.gpu
def test_kernels_on_a_card_round_no_worse_than_one_array_of_scores(x64):
    """In bfloat16, against float64; interpreted where there is no card."""
    exact, one_array, of_kernels = (
        jax.jit(jax.grad(partial(weighted, blocks=BLOCKS[name], window=90, padded=True), argnums=range(5)))(
            *arrays(dtype)
        )
        for dtype, name in [("float64", "full"), ("bfloat16", "full"), ("bfloat16", "pallas")]
    )
    for expected, one, other in zip(exact, one_array, of_kernels, strict=True):
        assert relative_error(other, expected) < 1.25 * relative_error(one, expected)


@pytest.mark.parametrize("kv_heads", [K, N])
@pytest.mark.parametrize("axes", ["pg", "pge"])
def test_caches_in_bfloat16_are_read_on_a_cpu(axes, kv_heads):
    """A decode step's and a later turn's: heads before tokens."""
    rng = np.random.default_rng(0)
    queries = (P, G) if axes == "pg" else (P, G, 3)
    shapes = [(*queries, N, D), *[(P, G, kv_heads, 5, D)] * 2, *[(P, kv_heads, T, D)] * 2]
    numbers = [rng.normal(size=shape) for shape in shapes]
    at, at_PGS = jnp.full(queries, T + 5), jnp.full((P, G, 5), T)

    @jax.jit
    def out(q, k_PGKSD, v_PGKSD, k_PKTD, v_PKTD):
        sets = [Seen(KV(k_PKTD, v_PKTD), jnp.zeros((P, T), jnp.int32), past=True), Seen(KV(k_PGKSD, v_PGKSD), at_PGS)]
        return attend(q, axes, at, sets, D**0.5)

    wide, narrow = (out(*(jnp.asarray(x, dtype) for x in numbers)) for dtype in (jnp.float32, jnp.bfloat16))
    assert jnp.abs(narrow - wide).max() < 2**-7 * jnp.abs(wide).max()  # queries, keys, values and shares have 8 bits


@pytest.mark.default_cases("blocks-False-cpu")
@pytest.mark.parametrize("target", ["cpu", pytest.param("rtx4090", marks=needs_plugin)])
@pytest.mark.parametrize(
    ("attention", "arrays_of_scores"), [("auto", False), ("blocks", False), ("pallas", False), ("full", True)]
)
def test_an_update_of_long_completions_has_no_array_of_scores(attention, arrays_of_scores, target):
    if attention == "pallas" and target == "cpu":
        pytest.skip("interpreted there")
    sizes = Architecture(vocab_size=131, num_layers=2, num_heads=2, hidden_size=32, max_position_embeddings=1024)
    model = Decoder(sizes, rngs=nnx.Rngs(0), attention=attention, remat="all")
    graphdef, params = nnx.split(model, nnx.Param)
    tokens = [jnp.ones(shape, jnp.int32) for shape in [(2, 300), (2, 300), (2, 2, 320), (2, 2, 320)]]
    update = jax.jit(
        jax.grad(lambda params, tokens: jnp.sum(nnx.merge(graphdef, params).grouped(*tokens) ** 2)),
        compiler_options=training_options() if target == "cpu" else None,
    )
    text = compile_program(target, Program("update", update, (params, tokens))).hlo
    shapes = [[int(size) for size in shape.split(",")] for shape in re.findall(r"\w\d+\[([\d,]+)\]", text)]
    assert any(sum(size >= 300 for size in shape) > 1 for shape in shapes) == arrays_of_scores
