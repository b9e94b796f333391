"""Microbenchmarks of PyTorch's own choices: SDPA backends, precision, AdamW, torch.compile modes.

    python -m torch_ref.bench --json torch.json

A choice that this machine or build does not have is recorded with its reason.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from jax_grpo.bench.runner import Bench, Prepared, main
from torch_ref.model import GPT2, GPT2Config
from torch_ref.optimiser import ADAMW

Step = Callable[[], Any]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GPU = DEVICE == "cuda"
SIZES = GPT2Config(50257, 12, 12, 768, 1024) if GPU else GPT2Config(1024, 4, 6, 192, 256)
ROWS, TOKENS = (64, 192) if GPU else (8, 84)
SQUARE = 8192 if GPU else 1024


def sdpa(backend: SDPBackend) -> Step:
    """Causal attention forward and backward."""
    dtype = torch.bfloat16 if GPU else torch.float32
    shape = (ROWS, SIZES.num_heads, TOKENS, SIZES.hidden_size // SIZES.num_heads)
    q, k, v = (torch.randn(shape, device=DEVICE, dtype=dtype).requires_grad_() for _ in range(3))

    def step() -> None:
        with sdpa_kernel(backend):
            torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=True).sum(), (q, k, v))

    return step


def matmul(dtype: torch.dtype, tf32: bool) -> Step:
    """A square product; TF32 is float32 rounded to 10 bits of mantissa inside the product, on GPUs that have it."""
    square = torch.randn(SQUARE, SQUARE, device=DEVICE, dtype=dtype)

    def step() -> None:
        torch.backends.cuda.matmul.allow_tf32 = tf32
        torch.mm(square, square)

    return step


def adamw(implementation: str) -> Step:
    """One step over a model's parameters."""
    model = GPT2(SIZES).to(DEVICE)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimiser = ADAMW[implementation](model.parameters(), lr=1e-6, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    return optimiser.step


def blocks(mode: str | None) -> Step:
    """Forward and backward of the model without its head; `mode` is torch.compile's, None eager."""
    model = GPT2(SIZES).initialise(torch.Generator().manual_seed(0)).to(DEVICE)
    if mode is not None:
        model.compile(mode=mode)
    ids = torch.randint(SIZES.vocab_size, (ROWS, TOKENS), device=DEVICE)
    mask = torch.ones_like(ids)

    def step() -> None:
        model.zero_grad()
        with torch.autocast(DEVICE, torch.bfloat16, enabled=GPU):
            model(ids, mask).float().sum().backward()

    return step


CASES: dict[str, Callable[[], Step]] = {
    "sdpa math": partial(sdpa, SDPBackend.MATH),
    "sdpa flash": partial(sdpa, SDPBackend.FLASH_ATTENTION),
    "sdpa efficient": partial(sdpa, SDPBackend.EFFICIENT_ATTENTION),
    "sdpa cudnn": partial(sdpa, SDPBackend.CUDNN_ATTENTION),
    "matmul float32": partial(matmul, torch.float32, tf32=False),
    "matmul tf32": partial(matmul, torch.float32, tf32=True),
    "matmul bfloat16": partial(matmul, torch.bfloat16, tf32=False),
    "adamw definition": partial(adamw, "definition"),
    "adamw foreach": partial(adamw, "foreach"),
    "adamw fused": partial(adamw, "fused"),
    "blocks eager": partial(blocks, None),
    "blocks compiled default": partial(blocks, "default"),
    "blocks compiled reduce-overhead": partial(blocks, "reduce-overhead"),
    "blocks compiled max-autotune": partial(blocks, "max-autotune"),
}


def _prepared(name: str, sizes: str) -> Prepared:
    return Prepared(CASES[name](), {"flops": 2.0 * SQUARE**3} if name.startswith("matmul") else {})


VARIANTS = {name: partial(_prepared, name) for name in CASES}
BENCH = Bench("torch_ref.bench", __doc__, VARIANTS, {"gpu" if GPU else "cpu": f"{ROWS} x {TOKENS} tokens of {SIZES}"})

if __name__ == "__main__":
    main(BENCH)
