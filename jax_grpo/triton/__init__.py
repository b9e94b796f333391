"""The one way to kernels: calls of those that are written in Pallas for its Triton backend, and which are there without it.

JAX 0.11 deprecates the backend. `plt` is its module, None where it cannot be imported; `kernels` has some kernels in Triton's own
language, too. Who needs a kernel asks `refusal` first. Knows nothing of models or losses.
"""

import importlib.util
import warnings
from collections.abc import Sequence
from typing import Any, Literal

import jax
from jax.experimental import pallas as pl

warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
try:
    from jax.experimental.pallas import triton as _backend
except ImportError:
    _backend = None
plt: Any = _backend


def backend() -> Literal["pallas", "jax_triton"] | None:
    """By what kernels are compiled: Pallas wherever it can, else jax_triton, where that is installed."""
    if plt is not None:
        return "pallas"
    return "jax_triton" if importlib.util.find_spec("jax_triton") and importlib.util.find_spec("triton") else None


def refusal(*, or_jax_triton: bool) -> str | None:
    """Why a kernel of Pallas, and of jax_triton if it is there too, cannot be called here; or None."""
    if backend() == "pallas" or (or_jax_triton and backend() == "jax_triton"):
        return None
    other = ", or jax_triton (pip install 'jax_grpo[jax-triton]')" if or_jax_triton else ""
    return f"needs Pallas' Triton backend, which JAX {jax.__version__} does not have{other}"


def call(kernel: Any, name: str, operands: Sequence[Any], *, warps: int, stages: int, **arguments: Any) -> Any:
    """Results of the kernel on the operands, by Triton; interpreted where the program is compiled for the CPU.

    `arguments` are those of `pl.pallas_call`.
    """

    def on(interpret: bool):
        parameters = plt.CompilerParams(num_warps=warps, num_stages=stages)  # also what chooses Triton in JAX 0.10
        return pl.pallas_call(kernel, name=name, interpret=interpret, compiler_params=parameters, **arguments)

    return jax.lax.platform_dependent(*operands, cpu=on(True), default=on(False))
