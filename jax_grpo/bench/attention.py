"""Causal attention, forward and backward: the model's own, XLA's, cuDNN flash attention, and PyTorch's SDPA."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jax_grpo.bench.harness import Bench, NotHere, Prepared, main, torch_device

# rows, tokens, heads, width of a head; bfloat16 where the device is not a CPU: cuDNN's needs it
SHAPES = {"192": (8, 192, 12, 64), "512": (4, 512, 12, 64), "1024": (2, 1024, 12, 64), "tiny": (2, 16, 2, 16)}


def _facts(name: str, dtype: Any) -> dict[str, Any]:
    rows, tokens, heads, width = SHAPES[name]
    return {"flops": 3 * 4.0 * rows * heads * width * tokens * (tokens + 1) / 2, "dtype": str(dtype)}


def _written_out(q, k, v):
    """As `attention.Attention` does it: scores and softmax in float32."""
    causal = jnp.tril(jnp.ones((q.shape[1], q.shape[1]), bool))
    scores = jnp.einsum("btnd,bsnd->bnts", q, k, preferred_element_type=jnp.float32) / math.sqrt(q.shape[-1])
    weights = jax.nn.softmax(jnp.where(causal, scores, jnp.finfo(jnp.float32).min), axis=-1).astype(q.dtype)
    return jnp.einsum("bnts,bsnd->btnd", weights, v)


def _jax(name: str, *, function) -> Prepared:
    dtype = "float32" if jax.devices()[0].platform == "cpu" else "bfloat16"
    q, k, v = (jax.random.normal(jax.random.key(i), SHAPES[name], dtype) for i in range(3))
    step = jax.jit(jax.grad(lambda q, k, v: jnp.sum(function(q, k, v).astype(jnp.float32)), argnums=(0, 1, 2)))
    return Prepared(lambda: step(q, k, v), _facts(name, dtype))


def _cudnn(name: str) -> Prepared:
    if jax.devices()[0].platform == "cpu":
        raise NotHere("cuDNN needs a GPU")
    return _jax(name, function=partial(LIBRARY, implementation="cudnn"))


def _sdpa(name: str) -> Prepared:
    import torch

    rows, tokens, heads, width = SHAPES[name]
    device = torch_device()
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    q, k, v = (torch.randn(rows, heads, tokens, width, device=device, dtype=dtype).requires_grad_() for _ in range(3))

    def step():
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return torch.autograd.grad(out.float().sum(), (q, k, v))

    return Prepared(step, _facts(name, dtype))


LIBRARY = partial(jax.nn.dot_product_attention, is_causal=True)
BENCH = Bench(
    "jax_grpo.bench.attention",
    __doc__,
    {
        "model": partial(_jax, function=_written_out),
        "xla": partial(_jax, function=partial(LIBRARY, implementation="xla")),
        "cudnn": _cudnn,
        "torch-sdpa": _sdpa,
    },
    {name: f"{b} rows x {t} tokens, {n} heads of {d}" for name, (b, t, n, d) in SHAPES.items()},
)

if __name__ == "__main__":
    main(BENCH)
