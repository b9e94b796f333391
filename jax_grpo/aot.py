"""Compiles a function for a named GPU that is not there, and reads its memory, kernels and matmuls off the result.

Needs `jax-cuda12-plugin`, `jax-cuda12-pjrt`, `nvidia-cuda-nvcc-cu12` (or their cuda13 kin) beside JAX, and JAX_PLATFORMS=cpu.
Sizes are those of XLA for that GPU; nothing here can tell speed, since a matmul's tiles are chosen by timing on the device.
"""

import dataclasses
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from jax_grpo import targets
from jax_grpo.compilation import compiled_anew

INSTALL = (
    "pip install 'jax_grpo[aot]' (jax-cuda12-plugin and jax-cuda12-pjrt of JAX's version, nvidia-cuda-nvcc-cu12), and set "
    "JAX_PLATFORMS=cpu"
)
# XLA's own rematerialisation would make a program that is too large seem to fit, by recomputing. A CPU's compiler does not.
# It also takes the place of a training program's own options for this machine (`compilation.training_options`).
AS_WRITTEN: dict[str, Any] = {"xla_disable_hlo_passes": "rematerialization"}


class CannotCompile(RuntimeError):
    """No compiler for the target here; says what to install."""


@dataclasses.dataclass(frozen=True)
class Buffer:
    """Values that share a place in memory: bytes, what they are to the program, and their shapes. Places alike count once."""

    size: int
    kind: str
    shapes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A compiled kernel: registers of a thread, bytes spilled from them, bytes of shared memory of a block."""

    name: str
    registers: int
    spilled: int
    shared: int


@dataclasses.dataclass(frozen=True)
class Report:
    """What a program needs, in bytes.

    Attributes:
        target: name of a file of `targets`.
        arguments: inputs; donated ones included.
        outputs: results, `aliased` of them in donated inputs.
        temporaries: everything else that lives at once.
        device: memory of the device.
        buffers: the largest ones, largest first.
        kernels: those whose name begins as asked for.
        wide_dots: matmuls with float32 operands, as HLO lines.
    """

    target: str
    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    device: int
    buffers: tuple[Buffer, ...]
    kernels: tuple[Kernel, ...]
    wide_dots: tuple[str, ...]

    @property
    def total(self) -> int:
        """Peak of the program: XLA:GPU holds all four at once."""
        return self.arguments + self.outputs - self.aliased + self.temporaries


@dataclasses.dataclass(frozen=True)
class Compiled:
    """The report and the optimised HLO it was read from."""

    report: Report
    hlo: str


def device(target: str) -> Any:
    """A device to compile for, which nothing can run on.

    Raises:
        UnknownTarget: no such target.
        CannotCompile: its compiler is not installed; says what is missing.
    """
    text = targets.read(target).text
    try:
        description = topologies.get_topology_desc(
            platform="cuda", topology_name="", target_config=text, topology="1x1x1"
        )
    except Exception as error:
        raise CannotCompile(f"no compiler for {target} here ({error}); {INSTALL}") from error
    return description.devices[0]


def on_device(tree: Any, target_device: Any) -> Any:
    """Shapes and dtypes of a tree's arrays, placed on the device, or in its host's memory if they were there."""

    def placed(x: Any) -> jax.ShapeDtypeStruct:
        kind = getattr(getattr(x, "sharding", None), "memory_kind", None)  # none where no device is meant yet
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=SingleDeviceSharding(target_device, memory_kind=kind))

    return jax.tree.map(placed, tree)


def compile_for(
    target: str, function: Callable, *arguments: Any, donate: tuple[int, ...] = (), kernels: str = "lm_head"
) -> Compiled:
    """`jax.jit(function)`, or the function itself if it is jitted (then `AS_WRITTEN`), compiled for the target.

    Args:
        target: name of a file of `targets`.
        function: traced, never run.
        arguments: trees of arrays or `jax.ShapeDtypeStruct`.
        donate: numbers of arguments whose memory the results may take; of one that is jitted, what it says itself.
        kernels: beginning of the names of the kernels to look into.

    Raises:
        CannotCompile: see `device`.
    """
    where = device(target)
    with tempfile.TemporaryDirectory() as dump, jax.default_device(where), compiled_anew():
        own = isinstance(function, jax.stages.Wrapped)  # a jit with options may not stand inside another
        jitted = function if own else jax.jit(function, donate_argnums=donate)
        lowered = jitted.lower(*on_device(arguments, where))
        # `xla_dump_emitter_re` makes JAX 0.12 write PTX again; 0.10 does not know it.
        options: dict[str, Any] = (AS_WRITTEN if own else {}) | {"xla_dump_to": dump, "xla_dump_hlo_as_text": True}
        if tuple(map(int, jax.__version__.split(".")[:2])) >= (0, 12):
            options["xla_dump_emitter_re"] = ".*"
        compiled = lowered.compile(compiler_options=options)
        hlo = compiled.as_text() or ""
        memory = compiled.memory_analysis()
        assert memory is not None, "XLA:GPU reports its memory"
        report = Report(
            target,
            memory.argument_size_in_bytes,
            memory.output_size_in_bytes,
            memory.alias_size_in_bytes,
            memory.temp_size_in_bytes,
            targets.read(target).memory,
            _buffers(Path(dump)),
            _kernels(Path(dump), kernels, target),
            wide_dots(hlo),
        )
    return Compiled(report, hlo)


def _only(dump: Path, ending: str) -> str:
    """Text of the main module's dump: the largest file of that kind (small helper programs may be dumped too)."""
    found = sorted(dump.glob(f"*{ending}"), key=lambda path: path.stat().st_size)
    return found[-1].read_text() if found else ""


def _buffers(dump: Path, count: int = 12) -> tuple[Buffer, ...]:
    shared: dict[tuple[str, int, int], set[str]] = {}
    kind, number = "", ""
    for line in _only(dump, "gpu_after_optimizations-buffer-assignment.txt").splitlines():
        if header := re.match(r"allocation (\d+): size \d+, (.*?):?$", line):
            number = header.group(1)
            words = {"parameter": "argument", "maybe-live-out": "output", "constant": "constant"}
            kind = next((mine for word, mine in words.items() if word in header.group(2)), "temporary")
        elif value := re.match(r" value: .*\(size=(\d+),offset=(\d+)\): (\S+)", line):
            size, offset, shape = int(value.group(1)), int(value.group(2)), value.group(3)
            shared.setdefault((f"{kind} {number}", offset, size), set()).add(shape.split("{")[0])
    buffers = {Buffer(size, kind.split()[0], tuple(sorted(shapes))) for (kind, _, size), shapes in shared.items()}
    return tuple(sorted(buffers, key=lambda buffer: (-buffer.size, buffer.kind, buffer.shapes))[:count])


def _ptxas() -> str | None:
    """The assembler of an installed nvcc wheel, or one on the PATH."""
    wheels = (str(found) for folder in sys.path for found in Path(folder).glob("nvidia/*/bin/ptxas"))
    return next(wheels, None) or shutil.which("ptxas")


def _kernels(dump: Path, beginning: str, target: str) -> tuple[Kernel, ...]:
    """What the assembler says of each kernel; nothing without one."""
    assembler = _ptxas()
    sequence = _only(dump, "thunk_sequence.txt")
    architecture = targets.read(target).architecture
    found = {}
    for path in sorted(dump.glob("*.ptx")) if assembler else []:
        names = re.findall(r"\.entry (\w+)\(", path.read_text())
        wanted = [name for name in names if name.startswith(beginning)]
        if not wanted:
            continue
        command = [str(assembler), "-v", f"-arch={architecture}", str(path), "-o", os.devnull]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CannotCompile(f"{assembler} cannot assemble {wanted[0]} (too old?): {done.stderr.strip()}; {INSTALL}")
        said = done.stderr
        for name in wanted:
            part = said.split(f"'{name}'", 1)[1]
            registers, spilled = re.search(r"Used (\d+) registers", part), re.search(r"(\d+) bytes spill stores", part)
            shared = re.search(rf"\b{name} grid: .*shared_memory: (\d+) bytes", sequence)
            numbers = [int(match.group(1)) if match else 0 for match in (registers, spilled, shared)]
            found[name] = Kernel(name, *numbers)
    return tuple(found.values())


_DEFINED = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = (\w+)\[")
_DOT = re.compile(r"(?: dot|__cublas.*?|custom-call)\(%?([\w.-]+), %?([\w.-]+)[,)]")


def wide_dots(hlo: str) -> tuple[str, ...]:
    """Lines of matmuls whose two operands are float32 or wider (on a GPU: half the speed of bfloat16, or less)."""
    dtype, wide = {}, []
    for line in hlo.splitlines():
        if defined := _DEFINED.match(line):
            dtype[defined.group(1)] = defined.group(2)
        if (" dot(" in line or "__cublas" in line) and (operands := _DOT.search(line)):
            kinds = [dtype.get(name, "") for name in operands.groups()]
            if all(kind in ("f32", "f64") for kind in kinds):
                wide.append(line.strip().split(", metadata")[0])
    return tuple(wide)
