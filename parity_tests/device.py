"""The device of the `gpu` tests: the default one, the precisions it computes in, and shapes of a size that it is for.

Each of these tests also runs on a CPU where it can, with shapes small enough there, so that it is known to work; what a CPU has
not is skipped with what is missing.
"""

import dataclasses
from typing import NamedTuple

import jax
import pytest
from conftest import TINY

from jax_grpo.model.architecture import Architecture
from torch_ref.compare import TOLERANCES, Tolerances


class Precision(NamedTuple):
    """How a step is computed: the model's dtype, the matmuls that JAX is asked for, and how far from float64 it may end."""

    dtype: str
    matmuls: str
    allowed: Tolerances
    floors: str  # the dtype whose floors scalars have


def _of_tf32() -> Tolerances:
    """A quarter of bfloat16's.

    TF32 keeps 10 bits of a matmul's operands where bfloat16 keeps 7, an eighth of the rounding, and rounds nothing else; the other
    half is for kernels that cut the bits off instead of rounding them, as Triton's do.
    """
    rounded = TOLERANCES["bfloat16"]
    names = ("logits", "logp", "scalars", "gradients")
    return rounded._replace(**{name: getattr(rounded, name) / 4 for name in names})


# Float32's and bfloat16's tolerances are those of `torch_ref.compare`, of two implementations that both round; here one does.
PRECISIONS = {
    "float32": Precision("float32", "highest", TOLERANCES["float32"], "float32"),
    "TF32": Precision("float32", "tensorfloat32", _of_tf32(), "bfloat16"),
    "bfloat16": Precision("bfloat16", "default", TOLERANCES["bfloat16"], "bfloat16"),
}


def on_gpu() -> bool:
    """Whether the default device is one."""
    return jax.default_backend() == "gpu"


def needs_gpu(why: str) -> None:
    """Skips the test on any other device, and says what is missing there."""
    if not on_gpu():
        pytest.skip(f"needs a GPU, and the default device is a {jax.devices()[0].device_kind}: {why}")


def precision(name: str) -> Precision:
    """One of `PRECISIONS`; skips the test where the device has none such."""
    if name == "TF32":
        needs_gpu("TF32 is a mode of NVIDIA's tensor cores")
    return PRECISIONS[name]


def wide_model(layers: int) -> tuple[Architecture, float]:
    """A model to compare, and by how much its weights are larger than GPT-2's initial ones.

    GPT-2 small's width and vocabulary in so many layers on a GPU; elsewhere the tests' tiny one, whose logits would hardly differ.
    """
    if on_gpu():
        return Architecture(50257, layers, 12, 768, 1024), 1.0
    return dataclasses.replace(TINY, num_layers=min(layers, TINY.num_layers)), 4.0
