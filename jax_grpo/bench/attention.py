"""Causal attention, forward and backward: the model's own ways, XLA's, cuDNN flash attention, and PyTorch's SDPA."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jax_grpo.bench.runner import Bench, NotHere, Prepared, main, torch_device
from jax_grpo.model.attention import BLOCKS, KV, Seen, attend

# Rows, tokens, heads, width of a head; bfloat16 where the device is not a CPU: cuDNN's needs it.
SHAPES = {"192": (8, 192, 12, 64), "512": (4, 512, 12, 64), "1024": (2, 1024, 12, 64), "tiny": (2, 16, 2, 16)}
LIBRARY = partial(jax.nn.dot_product_attention, is_causal=True)


def _facts(shape: tuple[int, ...], dtype: Any) -> dict[str, Any]:
    rows, tokens, heads, width = shape
    return {"flops": 3 * 4.0 * rows * heads * width * tokens * (tokens + 1) / 2, "dtype": str(dtype)}


def _model(q, k, v, name: str):
    at = jnp.broadcast_to(jnp.arange(q.shape[1]), q.shape[:2])
    return attend(q, "pe", at, [Seen(KV(k, v), at, heads_first=False)], math.sqrt(q.shape[-1]), blocks=BLOCKS[name])


def _jax(shape: tuple[int, ...], *, function, of_gpus: bool = False) -> Prepared:
    on_cpu = jax.devices()[0].platform == "cpu"
    if on_cpu and of_gpus:
        raise NotHere("its kernels need a GPU")
    dtype = "float32" if on_cpu else "bfloat16"
    q, k, v = (jax.random.normal(jax.random.key(i), shape, dtype) for i in range(3))
    step = jax.jit(jax.grad(lambda q, k, v: jnp.sum(function(q, k, v).astype(jnp.float32)), argnums=(0, 1, 2)))
    return Prepared(lambda: step(q, k, v), _facts(shape, dtype))


def _sdpa(shape: tuple[int, ...]) -> Prepared:
    import torch

    device = torch_device()
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    rows, tokens, heads, width = shape
    q, k, v = (torch.randn(rows, heads, tokens, width, device=device, dtype=dtype).requires_grad_() for _ in range(3))

    def step():
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return torch.autograd.grad(out.float().sum(), (q, k, v))

    return Prepared(step, _facts(shape, dtype))


VARIANTS = {
    "model": partial(_jax, function=partial(_model, name="auto")),
    "full": partial(_jax, function=partial(_model, name="full")),
    "blocks": partial(_jax, function=partial(_model, name="blocks")),
    "pallas": partial(_jax, function=partial(_model, name="pallas"), of_gpus=True),
    "xla": partial(_jax, function=partial(LIBRARY, implementation="xla")),
    "cudnn": partial(_jax, function=partial(LIBRARY, implementation="cudnn"), of_gpus=True),
    "torch-sdpa": _sdpa,
}
BENCH = Bench("jax_grpo.bench.attention", __doc__, VARIANTS, SHAPES, of_json=tuple)

if __name__ == "__main__":
    main(BENCH)
