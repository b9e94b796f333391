"""A config's memory report for a device, as data and as a table."""

import dataclasses
from typing import Any

import jax

from jax_grpo.config import Config
from jax_grpo.memory.buffers import Live
from jax_grpo.memory.compiled import POOL, Compiled, Device, compile_program, device
from jax_grpo.memory.largest import largest_batch, largest_micro_batch
from jax_grpo.memory.parts import part_of, parts
from jax_grpo.memory.shapes import Program, Run, run_of

TOP = 8  # kinds of buffer listed for a program
GB = 1e9


@dataclasses.dataclass(frozen=True)
class Buffers:
    """Arrays alike at a program's peak: how many, bytes of all, and what made them."""

    count: int
    size: int
    shape: str
    part: str
    operation: str
    source: str


@dataclasses.dataclass(frozen=True)
class ProgramReport:
    """A program's memory in bytes; `total` is that of the device while it runs, `parts` sum to it."""

    name: str
    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    peak: int
    total: int
    parts: dict[str, int]
    buffers: tuple[Buffers, ...]


@dataclasses.dataclass(frozen=True)
class Report:
    """A run's memory on a device.

    Attributes:
        device: what it was compiled for.
        jax: version.
        assumed: what was assumed because it is not on this machine; None when nothing was.
        parameters: how many the model has.
        resident: bytes that stay on the device from program to program, by name.
        in_host: bytes kept in the host's memory instead.
        programs: one each.
        largest_micro_batch, largest_batch: completions and bytes; None when not looked for.
    """

    device: Device
    jax: str
    assumed: str | None
    parameters: int
    resident: dict[str, int]
    in_host: dict[str, int]
    programs: tuple[ProgramReport, ...]
    largest_micro_batch: tuple[int, int] | None = None
    largest_batch: tuple[int, int] | None = None

    @property
    def total(self) -> int:
        """Bytes of the program that needs the most, with all that is resident."""
        return max(program.total for program in self.programs)

    @property
    def spare(self) -> int:
        """Bytes of the device that are never used; negative when the run does not fit."""
        return self.device.memory - self.total

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self) | {"total": self.total, "spare": self.spare, "fits": self.spare >= 0}


def report(config: Config, target: str, *, search: bool = False) -> Report:
    """Compiles every program of the config's run for the target.

    Args:
        config: of the run.
        target: a file of `targets`, `cpu` or `local`.
        search: also look for the largest micro-batch and batch, which compiles some ten programs more.

    Raises:
        UnknownTarget: see `compiled.device`.
        CannotCompile: see `compiled.compile_program`.
    """
    where = device(target)
    run = run_of(config).seen_from(where.shares_host_memory)
    made = tuple(_program(run, program, compile_program(target, program)) for program in run.programs)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(run.programs[0].arguments[0]))
    found = Report(where, jax.__version__, run.assumed, parameters, run.resident, run.in_host, made)
    if not search:
        return found
    return dataclasses.replace(
        found,
        largest_micro_batch=largest_micro_batch(config, where),
        largest_batch=largest_batch(config, where),
    )


def _program(run: Run, program: Program, compiled: Compiled) -> ProgramReport:
    by_part = parts(run, program, compiled)
    return ProgramReport(
        program.name,
        compiled.arguments,
        compiled.outputs,
        compiled.aliased,
        compiled.temporaries,
        compiled.total,
        sum(by_part.values()),
        by_part,
        _alike([live for live in compiled.live if live.place == "temporary"], run, program),
    )


def _alike(temporaries: list[Live], run: Run, program: Program) -> tuple[Buffers, ...]:
    """Twelve layers make twelve arrays of each kind: one line with their number and sum."""
    groups: dict[tuple[str, str, str], list[Live]] = {}
    for live in temporaries:
        groups.setdefault((live.shape, live.operation, live.source), []).append(live)
    made = [
        Buffers(len(alike), sum(x.size for x in alike), shape, part_of(alike[0], run, program), operation, source)
        for (shape, operation, source), alike in groups.items()
    ]
    return tuple(sorted(made, key=lambda buffers: -buffers.size)[:TOP])


def text(found: Report) -> str:
    """The report as Markdown."""
    device, lines = found.device, []
    if found.assumed:
        lines += [f"Note: {found.assumed}.", ""]
    fits = "fits" if found.spare >= 0 else "DOES NOT FIT"
    words = "to spare" if found.spare >= 0 else "missing"
    lines += [
        f"**{fits} on {device.kind} ({device.memory / GB:.2f} GB) with {abs(found.spare) / GB:.2f} GB {words}**: the run "
        f"needs {found.total / GB:.2f} GB at its fullest. {found.parameters:,} parameters, JAX {found.jax}.",
        "",
    ]
    if device.target not in ("cpu",):
        pool = POOL * device.memory
        lines += [
            f"JAX takes {POOL:.0%} of a GPU unless told otherwise, {pool / GB:.2f} GB: "
            + ("enough." if found.total <= pool else "too little; set XLA_PYTHON_CLIENT_MEM_FRACTION=0.95."),
            "",
        ]
    lines += [f"In the host's memory: {name}, {bytes_ / GB:.2f} GB.\n" for name, bytes_ in found.in_host.items()]
    names = [name for name in dict.fromkeys(name for p in found.programs for name in p.parts)]
    lines += [
        "| MB | " + " | ".join(program.name for program in found.programs) + " |",
        "|---|" + "---|" * len(found.programs),
    ]
    for name in ("arguments", "outputs", "aliased", "temporaries", "peak"):
        lines.append(_line(f"program: {name}", [getattr(program, name) for program in found.programs]))
    for name in names:
        lines.append(_line(name, [program.parts.get(name, 0) for program in found.programs]))
    lines.append(_line("**device, total**", [program.total for program in found.programs]))
    for program in found.programs:
        lines += ["", f"Largest temporaries of `{program.name}`:", "", "| MB | arrays | what | made by | at |"]
        lines.append("|---|---|---|---|---|")
        for made in program.buffers:
            what = f"{made.count} x `{made.shape}`"
            lines.append(
                f"| {made.size / 1e6:.1f} | {what} | {made.part} | {made.operation or '-'} | {made.source or '-'} |"
            )
    for label, pair in (("micro-batch", found.largest_micro_batch), ("batch", found.largest_batch)):
        if pair:
            lines += ["", f"Largest {label} that fits: {pair[0]} completions ({pair[1] / GB:.2f} GB)."]
    return "\n".join(lines) + "\n"


def _line(name: str, sizes: list[int]) -> str:
    return f"| {name} | " + " | ".join(f"{bytes_ / 1e6:,.1f}" for bytes_ in sizes) + " |"
