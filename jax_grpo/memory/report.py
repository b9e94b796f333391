"""A config's memory report for a device, as data and as a table."""

import dataclasses
from typing import Any

import jax

from jax_grpo.config import Config
from jax_grpo.memory.compile import POOL, Compiled, Device, compile_program, device
from jax_grpo.memory.dumps import Live
from jax_grpo.memory.fit import largest_completions, run_on
from jax_grpo.memory.parts import bytes_by_part, part_of
from jax_grpo.memory.programs import Program, Run
from jax_grpo.system.memory import GB

TOP = 8  # kinds of buffer listed for a program


@dataclasses.dataclass(frozen=True)
class Buffers:
    """Arrays alike at a program's peak; see `dumps.Live`."""

    count: int
    size: int  # bytes of all
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
    """A run's memory on a device, in bytes."""

    device: Device
    jax: str  # its version
    assumed: str | None  # because it is not on this machine
    parameters: int  # how many the model has
    resident: dict[str, int]  # what stays on the device from program to program, by name
    in_host: dict[str, int]  # what is kept in the host's memory instead
    programs: tuple[ProgramReport, ...]
    largest_micro_batch: tuple[int, int] | None  # completions and bytes; None when not looked for
    largest_batch: tuple[int, int] | None

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
    """Compiles every program of the config's run for the target; with `search`, some ten more for the largest batches.

    Raises:
        UnknownTarget, CannotCompile: see `compile.jax_device`.
    """
    where, run = device(target), run_on(target, config)
    programs = tuple(_program(run, program, compile_program(target, program)) for program in run.programs)
    return Report(
        where,
        jax.__version__,
        run.assumed,
        sum(leaf.size for leaf in jax.tree.leaves(run.programs[0].arguments[0])),
        run.resident,
        run.in_host,
        programs,
        largest_completions(config, "update", where) if search else None,
        largest_completions(config, "rollout", where) if search else None,
    )


def _program(run: Run, program: Program, compiled: Compiled) -> ProgramReport:
    parts = bytes_by_part(run, program, compiled)
    return ProgramReport(
        program.name,
        compiled.arguments,
        compiled.outputs,
        compiled.aliased,
        compiled.temporaries,
        compiled.total,
        sum(parts.values()),
        parts,
        _alike([live for live in compiled.live if live.place == "temporary"], run, program),
    )


def _alike(temporaries: list[Live], run: Run, program: Program) -> tuple[Buffers, ...]:
    """Twelve layers make twelve arrays of each kind: one line with their number and sum."""
    groups: dict[tuple[str, str, str], list[Live]] = {}
    for live in temporaries:
        groups.setdefault((live.shape, live.operation, live.source), []).append(live)
    buffers = [
        Buffers(len(alike), sum(x.size for x in alike), shape, part_of(alike[0], run, program), operation, source)
        for (shape, operation, source), alike in groups.items()
    ]
    return tuple(sorted(buffers, key=lambda buffers: -buffers.size)[:TOP])


def text(report: Report) -> str:
    """The report as Markdown."""
    device, programs = report.device, report.programs
    lines = [f"Note: {report.assumed}.", ""] if report.assumed else []
    verdict, remainder = ("fits", "to spare") if report.spare >= 0 else ("DOES NOT FIT", "missing")
    lines += [
        f"**{verdict} on {device.kind} ({device.memory / GB:.2f} GB) with {abs(report.spare) / GB:.2f} GB {remainder}**: the run "
        f"needs {report.total / GB:.2f} GB at its fullest. {report.parameters:,} parameters, JAX {report.jax}.",
        "",
    ]
    if device.target != "cpu":
        pool = POOL * device.memory
        enough = report.total <= pool
        lines += [
            f"JAX takes {POOL:.0%} of a GPU unless told otherwise, {pool / GB:.2f} GB: "
            + ("enough." if enough else "too little; set XLA_PYTHON_CLIENT_MEM_FRACTION=0.95."),
            "",
        ]
    lines += [f"In the host's memory: {name}, {bytes_ / GB:.2f} GB.\n" for name, bytes_ in report.in_host.items()]
    rows = {
        f"program: {name}": [getattr(program, name) for program in programs]
        for name in ("arguments", "outputs", "aliased", "temporaries", "peak")
    }
    parts = dict.fromkeys(part for program in programs for part in program.parts)
    rows |= {part: [program.parts.get(part, 0) for program in programs] for part in parts}
    rows["**device, total**"] = [program.total for program in programs]
    lines += [_row("MB", [program.name for program in programs]), "|---|" + "---|" * len(programs)]
    lines += [_row(name, [f"{bytes_ / 1e6:,.1f}" for bytes_ in sizes]) for name, sizes in rows.items()]
    for program in programs:
        lines += ["", f"Largest temporaries of `{program.name}`:", "", "| MB | arrays | what | made by | at |"]
        lines.append("|---|---|---|---|---|")
        for alike in program.buffers:
            arrays = f"{alike.count} x `{alike.shape}`"
            lines.append(
                _row(f"{alike.size / 1e6:.1f}", [arrays, alike.part, alike.operation or "-", alike.source or "-"])
            )
    for label, largest in (("micro-batch", report.largest_micro_batch), ("batch", report.largest_batch)):
        if largest:
            lines += ["", f"Largest {label} that fits: {largest[0]} completions ({largest[1] / GB:.2f} GB)."]
    return "\n".join(lines) + "\n"


def _row(name: str, cells: list[str]) -> str:
    return f"| {name} | {' | '.join(cells)} |"
