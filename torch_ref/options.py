"""How PyTorch computes, apart from what it computes: device, TF32, compilation, attention and optimiser kernels.

None of these changes the definition; each changes rounding, time or memory. bfloat16 autocast and gradient checkpointing
are the config's (`model.compute_dtype`; `model.remat`, any of which recomputes whole blocks here), because `jax_grpo` has
them too.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from torch_ref.model import LanguageModel
from torch_ref.optimiser import ADAMW

SDPA = {
    "auto": None,
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}


class OptionError(ValueError):
    """An option cannot be had here; the message names it and what it needs."""


@dataclass(frozen=True)
class Options:
    """See `add_arguments` for what each does."""

    device: str = "cpu"
    tf32: bool = False
    compile: bool = False
    sdpa: str = "auto"
    adamw: str = "definition"
    liger: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One command-line option for each field of `Options`."""
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tf32", action="store_true", help="float32 matmuls in TensorFloat-32 (GPU)")
    parser.add_argument("--compile", action="store_true", help="torch.compile the model")
    parser.add_argument("--sdpa", choices=SDPA, default="auto", help="backend of scaled_dot_product_attention")
    parser.add_argument("--adamw", choices=ADAMW, default="definition", help="definition, or torch's foreach or fused")
    parser.add_argument("--liger", action="store_true", help="Liger's LayerNorm kernel (GPU, pip install liger-kernel)")


def options(arguments: argparse.Namespace) -> Options:
    """The parsed options.

    Raises:
        OptionError: no such device, or Liger without a GPU or without its package.
    """
    names = Options.__dataclass_fields__
    chosen = Options(**{name: getattr(arguments, name) for name in names})
    try:
        kind = torch.device(chosen.device).type
        torch.empty(0, device=chosen.device)
    except (RuntimeError, AssertionError) as error:
        raise OptionError(f"--device {chosen.device}: {str(error).splitlines()[0]}") from error
    if chosen.liger and kind != "cuda":
        raise OptionError(f"--liger needs a GPU: its kernels are Triton; the device is {chosen.device}")
    return chosen


def prepare(model: LanguageModel, chosen: Options) -> LanguageModel:
    """The model on its device, with the chosen kernels, compiled if asked; the parameters stay the same objects."""
    model = model.to(chosen.device)
    if chosen.liger:
        use_liger(model)
    if chosen.compile:
        model.compile(dynamic=True)  # completions have a new length each iteration
    return model


@contextmanager
def computing(chosen: Options) -> Iterator[None]:
    """TF32 and the attention backend, for the duration of a block."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if chosen.tf32 else "highest")
    backend = SDPA[chosen.sdpa]
    try:
        if backend is None:
            yield
        else:
            with sdpa_kernel(backend):
                yield
    finally:
        torch.set_float32_matmul_precision(before)


def use_liger(model: nn.Module) -> None:
    """Exchanges the class of every LayerNorm for Liger's, which reads the same parameters; of any model's.

    Raises:
        OptionError: the model has none, or the package is not installed.
    """
    if not any(type(module) is nn.LayerNorm for module in model.modules()):
        raise OptionError("--liger: this model has no LayerNorm, which is all that it exchanges")
    try:
        from liger_kernel.ops.layer_norm import (  # pyright: ignore[reportMissingImports]
            LigerLayerNormFunction,
        )
    except ImportError as error:
        raise OptionError("--liger: the package is not installed; pip install liger-kernel") from error

    class LigerLayerNorm(nn.LayerNorm):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return LigerLayerNormFunction.apply(input, self.weight, self.bias, self.eps)

    for module in model.modules():
        if type(module) is nn.LayerNorm:
            module.__class__ = LigerLayerNorm
