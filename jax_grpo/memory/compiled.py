"""One program compiled for a device: how many bytes it takes from arguments to results, and what fills them at the peak.

`cpu` and `local` compile for what is here; every other target is a file of `targets`, compiled for without the device.
"""

import dataclasses
import os
import tempfile
from pathlib import Path
from typing import Any

import jax

from jax_grpo import aot, targets
from jax_grpo.compilation import compiled_anew
from jax_grpo.memory.buffers import Live, at_peak
from jax_grpo.memory.shapes import Program

HERE = ("cpu", "local")
# The share of a GPU that JAX takes at its start, unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise (JAX's documentation).
POOL = 0.75
_NO_TILES = "output tile sizes"  # Triton's matmuls refuse some row counts when they cannot be tuned on the device


@dataclasses.dataclass(frozen=True)
class Device:
    """What is compiled for: `memory` in bytes, `kind` as JAX names it; a CPU's memory is the host's."""

    target: str
    kind: str
    memory: int
    shares_host_memory: bool = False


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled program's memory in bytes.

    Attributes:
        arguments: inputs, donated ones included.
        outputs: results, `aliased` of them in donated inputs.
        temporaries: everything else; one block whose size is that of its fullest moment.
        live: arrays at that moment, arguments included, largest first.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    live: tuple[Live, ...]

    @property
    def total(self) -> int:
        """All that the program needs at once. XLA's own `peak_memory_in_bytes` leaves temporaries out on a CPU."""
        return self.arguments + self.outputs - self.aliased + self.temporaries


def device(target: str) -> Device:
    """Facts of the target.

    Raises:
        UnknownTarget: the name is neither a file of `targets` nor `cpu` or `local`.
    """
    if target not in HERE:
        try:
            facts = targets.read(target)
        except targets.UnknownTarget as error:
            raise targets.UnknownTarget(f"{error}, {', '.join(HERE)}") from None
        return Device(target, facts.device_kind, facts.memory)
    first = _here(target)
    limit = (first.memory_stats() or {}).get("bytes_limit")  # absent on a CPU
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Device(target, first.device_kind, int(limit or whole), first.platform == "cpu")


def _here(target: str) -> Any:
    return jax.devices("cpu")[0] if target == "cpu" else jax.devices()[0]


def compile_program(target: str, program: Program) -> Compiled:
    """The program as jit compiles it for the target.

    Raises:
        CannotCompile: the target's compiler is not installed; says what is missing.
    """
    with tempfile.TemporaryDirectory() as dump, compiled_anew():
        memory = _memory(target, program, {"xla_dump_to": dump, "xla_dump_hlo_as_text": True})
        return Compiled(
            memory.argument_size_in_bytes,
            memory.output_size_in_bytes,
            memory.alias_size_in_bytes,
            memory.temp_size_in_bytes,
            at_peak(Path(dump)),
        )


def program_bytes(target: str, program: Program) -> int:
    """`compile_program(target, program).total`, without asking what fills it, which takes longer.

    Raises:
        CannotCompile: see `compile_program`.
    """
    memory = _memory(target, program, {})
    kept = memory.argument_size_in_bytes - memory.alias_size_in_bytes
    return kept + memory.output_size_in_bytes + memory.temp_size_in_bytes


def _memory(target: str, program: Program, options: dict[str, Any]) -> Any:
    """XLA's count of the program's bytes."""
    try:
        return _compile(target, program, options)
    except jax.errors.JaxRuntimeError as error:
        if target in HERE or _NO_TILES not in str(error):
            raise
        return _compile(target, program, options | {"xla_gpu_enable_triton_gemm": False})


def _compile(target: str, program: Program, options: dict[str, Any]) -> Any:
    where = _here(target) if target in HERE else aot.device(target)
    arguments = aot.on_device(program.arguments, where)
    if where.platform != "cpu":  # where a program's own options hold, which these would replace
        options = aot.AS_WRITTEN | options
    with jax.default_device(where):
        memory = program.function.lower(*arguments).compile(compiler_options=options).memory_analysis()
    assert memory is not None, "XLA reports its memory for CPUs and GPUs"
    return memory
