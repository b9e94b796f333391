"""Microbenchmarks of PyTorch's own choices: SDPA backends, precision, AdamW, torch.compile modes, and Liger where installed.

    python -m torch_ref.bench --json torch.json

One process, medians of several steps; a choice that this machine or build does not have is recorded with its reason.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from jax_grpo.bench.machine import line_of, machine
from torch_ref.model import GPT2, GPT2Config
from torch_ref.optimiser import ADAMW

Step = Callable[[], Any]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GPU = DEVICE == "cuda"
SIZES = GPT2Config(50257, 12, 12, 768, 1024) if GPU else GPT2Config(1024, 4, 6, 192, 256)
ROWS, TOKENS = (64, 192) if GPU else (8, 84)
SQUARE = 8192 if GPU else 1024
STEPS = 10


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


def liger() -> Step:
    """Liger's fused linear GRPO loss against the same hidden states that the model's head would get."""
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss  # pyright: ignore[reportMissingImports]

    head = LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False, loss_type="bnpo")
    hidden = torch.randn(ROWS, TOKENS, SIZES.hidden_size, device=DEVICE, requires_grad=True)
    weight = torch.randn(SIZES.vocab_size, SIZES.hidden_size, device=DEVICE, requires_grad=True)
    ids = torch.randint(SIZES.vocab_size, (ROWS, TOKENS), device=DEVICE)
    mask, advantages = torch.ones(ROWS, TOKENS, device=DEVICE), torch.randn(ROWS, device=DEVICE)

    def step() -> None:
        loss, _ = head(
            _input=hidden, lin_weight=weight, selected_token_ids=ids, attention_mask=mask, advantages=advantages
        )
        torch.autograd.grad(loss, (hidden, weight))

    return step


CASES: dict[str, Callable[[], Step]] = {
    "sdpa math": lambda: sdpa(SDPBackend.MATH),
    "sdpa flash": lambda: sdpa(SDPBackend.FLASH_ATTENTION),
    "sdpa efficient": lambda: sdpa(SDPBackend.EFFICIENT_ATTENTION),
    "sdpa cudnn": lambda: sdpa(SDPBackend.CUDNN_ATTENTION),
    "matmul float32": lambda: matmul(torch.float32, tf32=False),
    "matmul tf32": lambda: matmul(torch.float32, tf32=True),
    "matmul bfloat16": lambda: matmul(torch.bfloat16, tf32=False),
    "adamw definition": lambda: adamw("definition"),
    "adamw foreach": lambda: adamw("foreach"),
    "adamw fused": lambda: adamw("fused"),
    "blocks eager": lambda: blocks(None),
    "blocks compiled default": lambda: blocks("default"),
    "blocks compiled reduce-overhead": lambda: blocks("reduce-overhead"),
    "blocks compiled max-autotune": lambda: blocks("max-autotune"),
    "liger head": liger,
}


def measured(make: Callable[[], Step], steps: int) -> dict[str, Any]:
    """Milliseconds of the steps, each waited for; `error` where the choice is not to be had here."""
    synchronise = torch.cuda.synchronize if GPU else (lambda: None)
    try:
        step = make()
        for _ in range(2):  # the first one compiles
            step()
        milliseconds = []
        for _ in range(steps):
            synchronise()
            started = time.perf_counter()
            step()
            synchronise()
            milliseconds.append(1e3 * (time.perf_counter() - started))
    except (ImportError, RuntimeError) as error:
        return {"error": f"{type(error).__name__}: {str(error).splitlines()[0]}"[:200]}
    return {"median_ms": statistics.median(milliseconds), "min_ms": min(milliseconds), "max_ms": max(milliseconds)}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m torch_ref.bench", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="cases whose name begins so")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args(argv)
    if arguments.steps < 3:
        raise SystemExit(f"--steps {arguments.steps}: expected at least 3, of which the median is taken")
    chosen = [name for name in CASES if name.startswith(arguments.only)]
    if not chosen:
        raise SystemExit(f"--only {arguments.only!r}: expected the beginning of one of {', '.join(CASES)}")
    here = machine()
    where = torch.cuda.get_device_name() if GPU else here["processor"]
    record: dict[str, Any] = {"torch": torch.__version__, "device": where, "machine": here, "variants": {}}
    print(f"# {where}; {line_of(here)}" if GPU else f"# {line_of(here)}")
    for name in chosen:
        found = record["variants"][name] = measured(CASES[name], arguments.steps)
        print(f"{name:34}", found.get("error") or f"{found['median_ms']:10.2f} ms", flush=True)
        if arguments.json:
            Path(arguments.json).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
