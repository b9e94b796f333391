"""One program compiled for a device: its bytes from arguments to results, what fills them at the peak, and its kernels.

`cpu` and `local` compile for this machine. Every other target is a GPU of `system.devices` that need not be there: `INSTALL` names
its compiler. Speed cannot be known so, since a matmul's tiles are chosen by timing on the device.
"""

import dataclasses
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from jax_grpo.memory import dumps
from jax_grpo.memory.programs import Program
from jax_grpo.system import devices
from jax_grpo.system.compilation import compiled_anew

INSTALL = (
    "pip install -e '.[aot]' here (jax-cuda12-plugin and jax-cuda12-pjrt of JAX's version, nvidia-cuda-nvcc-cu12), and set "
    "JAX_PLATFORMS=cpu"
)
HERE = ("cpu", "local")
# The share of a GPU that JAX takes at its start, unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise (JAX's documentation).
POOL = 0.75
# XLA's own rematerialisation would make a program that is too large seem to fit, by recomputing. A CPU's compiler does not.
# It also takes the place of a training program's own options for this machine (`compilation.training_options`).
AS_WRITTEN: dict[str, Any] = {"xla_disable_hlo_passes": "rematerialization"}
_NO_TILES = "output tile sizes"  # Triton's matmuls refuse some row counts when they cannot be tuned on the device


class CannotCompile(RuntimeError):
    """No compiler for the target is installed; the message names the packages."""


class Device(NamedTuple):
    """The device of a target: `memory` in bytes, `kind` as JAX names it; a CPU's memory is the host's."""

    target: str
    kind: str
    memory: int
    shares_host_memory: bool = False


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A compiled kernel of a GPU."""

    name: str
    registers: int  # of a thread
    spilled: int  # bytes of them
    shared: int  # bytes of shared memory of a block


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled program's memory in bytes; from `compile_program` also the arrays that fill it."""

    arguments: int  # inputs, donated ones included
    outputs: int  # results
    aliased: int  # of the results, in donated inputs
    temporaries: int  # everything else; one block whose size is that of its fullest moment
    live: tuple[dumps.Live, ...] = ()  # arrays at that moment, arguments included, largest first
    hlo: str = dataclasses.field(default="", compare=False)  # optimised; its numbers differ each time
    kernels: tuple[Kernel, ...] = ()  # of a GPU; see `compile_program`
    thunks: tuple[str, str] = dataclasses.field(default=("", ""), compare=False)  # see `dumps.thunks`

    @property
    def total(self) -> int:
        """All that the program needs at once. XLA's own `peak_memory_in_bytes` leaves temporaries out on a CPU."""
        return self.arguments + self.outputs - self.aliased + self.temporaries


def memory_of(executable: jax.stages.Compiled) -> Compiled:
    """XLA's count of the bytes of what JAX has compiled."""
    count: Any = executable.memory_analysis()
    assert count is not None, "XLA reports its memory for CPUs and GPUs"
    return Compiled(*(getattr(count, f"{what}_size_in_bytes") for what in ("argument", "output", "alias", "temp")))


def device(target: str) -> Device:
    """Facts of the target. Raises UnknownTarget, see `jax_devices`."""
    if target not in HERE:
        facts = devices.read(target, HERE)
        return Device(target, facts.device_kind, facts.memory)
    here = jax_devices(target)[0]
    limit = (here.memory_stats() or {}).get("bytes_limit")  # absent on a CPU
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Device(target, here.device_kind, int(limit or whole), here.platform == "cpu")


def jax_devices(target: str, count: int = 1) -> Sequence[Any]:
    """JAX's devices of the target, of one host: all that are here, or `count` of a GPU that is not, on which nothing can run.

    Raises:
        UnknownTarget: the name is neither a file of `system.devices` nor `cpu` or `local`.
        CannotCompile: its compiler is not installed.
    """
    if target in HERE:
        return jax.devices("cpu" if target == "cpu" else None)
    text = devices.read(target, HERE).text
    try:
        return topologies.get_topology_desc("", platform="cuda", target_config=text, topology=f"1x1x{count}").devices
    except Exception as error:
        raise CannotCompile(f"no compiler for {target} here ({error}); {INSTALL}") from error


def compile_program(target: str, program: Program, *, kernels: str | None = None) -> Compiled:
    """The program as jit compiles it for the target, and of its GPU kernels those whose name begins with `kernels`.

    Raises as `jax_devices` does, and CannotCompile when the assembler refuses a kernel.
    """
    options: dict[str, Any] = {"xla_dump_hlo_as_text": True}
    if kernels is not None and jax.__version_info__ >= (0, 12):
        options["xla_dump_emitter_re"] = ".*"  # has it write PTX, which 0.10 does without knowing the option
    with tempfile.TemporaryDirectory() as name, compiled_anew():
        memory, folder = memory_of(_executable(target, program, options | {"xla_dump_to": name})), Path(name)
        return dataclasses.replace(
            memory,
            live=dumps.at_peak(folder),
            hlo=dumps.text(folder, dumps.OPTIMISED),
            thunks=dumps.thunks(folder),
            kernels=() if kernels is None else assembled(folder, kernels, target),
        )


def program_bytes(target: str, program: Program) -> int:
    """`compile_program(target, program).total`, without dumps, which take longer."""
    return memory_of(_executable(target, program, {})).total


def _executable(target: str, program: Program, options: dict[str, Any]) -> jax.stages.Compiled:
    shardings = [getattr(x, "sharding", None) for x in jax.tree.leaves(program.arguments)]
    mesh = next((x.mesh for x in shardings if isinstance(x, NamedSharding)), None)
    where = jax_devices(target)[0] if mesh is None else np.asarray(mesh.devices).flat[0]
    if where.platform != "cpu":  # where a program's own options hold, which these would replace
        options = AS_WRITTEN | options

    def placed(x: Any) -> jax.ShapeDtypeStruct:
        """On the device, or in its host's memory if it was there; on a mesh where it says, or whole everywhere."""
        sharding = getattr(x, "sharding", None)  # none where no device is meant yet
        if mesh is None:
            sharding = SingleDeviceSharding(where, memory_kind=getattr(sharding, "memory_kind", None))
        elif not isinstance(sharding, NamedSharding):
            sharding = NamedSharding(mesh, PartitionSpec())
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    with jax.default_device(where):
        lowered = program.function.lower(*jax.tree.map(placed, program.arguments))
        try:
            return lowered.compile(compiler_options=options)
        except jax.errors.JaxRuntimeError as error:
            if target in HERE or _NO_TILES not in str(error):
                raise
            return lowered.compile(compiler_options=options | {"xla_gpu_enable_triton_gemm": False})


def assembled(folder: Path, beginning: str, target: str) -> tuple[Kernel, ...]:
    """The figures of an assembler, of an installed nvcc wheel or on the PATH, for each kernel dumped as PTX; none without one.

    Shared memory is what XLA's list of launches says, 0 where there is none. Raises CannotCompile: the assembler refuses a kernel.
    """
    wheels = (str(path) for place in sys.path for path in Path(place).glob("nvidia/*/bin/ptxas"))
    assembler, kernels = next(wheels, None) or shutil.which("ptxas"), {}
    launches = "".join(path.read_text() for path in folder.glob("*thunk_sequence.txt"))
    figures = rf"entry function '({beginning}\w*)'.*?(\d+) bytes spill stores.*?Used (\d+) registers"
    for path in sorted(folder.glob("*.ptx")) if assembler else []:
        first = re.search(rf"\.entry ({beginning}\w*)\(", path.read_text())
        if first is None:
            continue
        command = [str(assembler), "-v", f"-arch={devices.read(target).architecture}", str(path), "-o", os.devnull]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            reason = done.stderr.strip()
            raise CannotCompile(f"{assembler} cannot assemble {first[1]} (too old?): {reason}; {INSTALL}")
        for name, spilled, registers in re.findall(figures, done.stderr, re.DOTALL):
            shared = re.search(rf"\b{name} grid: .*shared_memory: (\d+) bytes", launches)
            kernels[name] = Kernel(name, int(registers), int(spilled), int(shared[1]) if shared else 0)
    return tuple(kernels.values())
