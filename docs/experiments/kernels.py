"""What the installed JAX makes of the Pallas kernels: a row a kernel and card of the table in docs/launches.md.

    JAX_PLATFORMS=cpu python docs/experiments/kernels.py

Not part of the package. Compiles for cards that need not be there (the extra `aot`) and compares the interpreted kernels with XLA's
own way on this CPU. Exit status 1 if a kernel does not compile, spills registers, or differs.
"""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_grpo.bench import lm_head
from jax_grpo.memory.compile import CannotCompile, compile_program
from jax_grpo.memory.programs import Program
from jax_grpo.model.architecture import Architecture, Rope
from jax_grpo.model.attention import BLOCKS, KV, Seen, attend
from jax_grpo.model.decoder import Decoder

CARDS = ("rtx4090", "h200")
P, G, T, C = 8, 8, 80, 144  # configs/rookworld_4090.yaml
SHARED = {"num_kv_heads": 6, "rope": Rope(), "window": 128}  # a head of keys for two of queries
SIZES = Architecture(
    vocab_size=131, num_layers=1, num_heads=12, hidden_size=768, max_position_embeddings=1024, **SHARED
)
CLOSE = 0.02  # of bfloat16's 8 bits: two roundings more, relative to the largest


def head(name: str) -> Any:
    """The LM head's loss and gradients of the tiny problem."""
    shape = lm_head.SHAPES["tiny"]
    arrays = {key: jnp.asarray(x) for key, x in lm_head.arrays(shape, masked=0.25).items()}
    hidden_TH, embedding_VH = arrays.pop("hidden").astype(jnp.bfloat16), arrays.pop("embedding")
    return jax.jit(lm_head.step_of(name, shape))(hidden_TH, embedding_VH, arrays)


def decoding(kernel: bool) -> tuple[Any, tuple[Any, ...]]:
    """A decode step's attention in a model of one layer, and its arguments."""
    how = {"compute_dtype": jnp.bfloat16, "decode_kernel": kernel}
    graphdef, params = nnx.split(Decoder(SIZES, rngs=nnx.Rngs(0), **how), nnx.Param)
    rng = np.random.default_rng(0)
    shapes = [(P, 6, T, 64)] * 2 + [(P, G, 6, C - 1, 64)] * 2
    caches = [jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in shapes]
    token_PG = jnp.asarray(rng.integers(0, 131, (P, G)), jnp.int32)

    def step(params, token_PG, prompt_k, prompt_v, own_k, own_v):
        model, mask_PT = nnx.merge(graphdef, params), jnp.ones((P, T), jnp.int32)
        at_PG, done = jnp.full((P, G), T + 100), jnp.int32(100)
        return model.decode(token_PG, at_PG, [KV(prompt_k, prompt_v)], mask_PT, [[KV(own_k, own_v)]], done)[0]

    return jax.jit(step), (params, token_PG, *caches)


def attention(name: str) -> tuple[Any, tuple[Any, ...]]:
    """A layer's attention and its gradients in a group's layout, a head of keys for two of queries, and its arguments."""
    rng, heads = np.random.default_rng(0), 12
    shapes = [(P, G, C, heads, 64), *[(P, G, C, heads // 2, 64)] * 2, *[(P, T, heads // 2, 64)] * 2]
    at_PT, at_PGC = jnp.broadcast_to(jnp.arange(T), (P, T)), jnp.broadcast_to(T + jnp.arange(C), (P, G, C))

    def out(q, k, v, prompt_k, prompt_v):
        sets = [
            Seen(KV(prompt_k, prompt_v), at_PT, past=True, heads_first=False),
            Seen(KV(k, v), at_PGC, heads_first=False),
        ]
        return attend(q, "pge", at_PGC, sets, 8.0, blocks=BLOCKS[name])

    def both(*arrays):
        result, backwards = jax.vjp(out, *arrays)
        return result, backwards(result)

    return jax.jit(both), tuple(jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in shapes)


def difference(a: Any, b: Any) -> float:
    """The largest, relative to the largest number of each array."""
    pairs = [[np.asarray(x, np.float64) for x in pair] for pair in zip(*map(jax.tree.leaves, (a, b)), strict=True)]
    return max(float(np.abs(x - y).max() / np.abs(y).max()) for x, y in pairs)


def main() -> None:
    (step, arguments), (layer, queries) = decoding(True), attention("pallas")
    s2 = lm_head.SHAPES["s2"]
    kernels = {
        "lm_head": (
            difference(head("pallas-bf16"), head("materialised")),
            Program("head", jax.jit(lm_head.step_of("pallas-bf16", s2)), lm_head.abstract(s2)),
        ),
        "decode_attention": (
            difference(step(*arguments), decoding(False)[0](*arguments)),
            Program("decode", step, jax.eval_shape(lambda *x: x, *arguments)),
        ),
        "attention_": (
            difference(layer(*queries), attention("full")[0](*queries)),
            Program("attention", layer, jax.eval_shape(lambda *x: x, *queries)),
        ),
    }
    fine = True
    for name, (error, program) in kernels.items():
        for card in CARDS:
            try:
                compiled = compile_program(card, program, kernels=name).kernels
                made = "; ".join(
                    f"{one.registers} registers, {one.shared} bytes shared, {one.spilled} spilled" for one in compiled
                )
                fine &= bool(compiled) and not any(one.spilled for one in compiled)
            except (CannotCompile, jax.errors.JaxRuntimeError, NotImplementedError) as failure:
                made, fine = str(failure).splitlines()[0], False
            print(f"| {jax.__version__} | {card} | {name} | {made or 'no such kernel'} | {error:.1e} |", flush=True)
        fine &= error < CLOSE
    sys.exit(not fine)


if __name__ == "__main__":
    main()
