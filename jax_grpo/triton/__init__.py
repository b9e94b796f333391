"""The one way to Pallas' Triton backend, which every kernel here is written for: calls, and what to say where JAX has it no longer.

JAX 0.11 deprecates the backend. `plt` is its module, None where it cannot be imported: what needs it asks `refusal` first.
Knows nothing of models or losses.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import pallas as pl

warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
try:
    from jax.experimental.pallas import triton as _backend
except ImportError:
    _backend = None
plt: Any = _backend


def refusal() -> str | None:
    """Why no kernel can be called with this JAX, or None."""
    return None if plt else f"needs Pallas' Triton backend, which JAX {jax.__version__} does not have"


def call(kernel: Any, name: str, operands: Sequence[Any], *, warps: int, stages: int, **arguments: Any) -> Any:
    """Results of the kernel on the operands, by Triton; interpreted where the program is compiled for the CPU.

    `arguments` are those of `pl.pallas_call`.
    """

    def on(interpret: bool):
        parameters = plt.CompilerParams(num_warps=warps, num_stages=stages)  # also what chooses Triton in JAX 0.10
        return pl.pallas_call(kernel, name=name, interpret=interpret, compiler_params=parameters, **arguments)

    return jax.lax.platform_dependent(*operands, cpu=on(True), default=on(False))
