"""What fits on a device: `update.micro_batches: auto`, the largest batches, and advice when a running program does not fit.

Every figure is that of a compiled program. A new run chooses its micro-batches once, before anything is allocated; one that
continues uses its checkpoint's number, since another division rounds differently. Knows no trainer.
"""

import bisect
import contextlib
import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from jax_grpo.config import Config
from jax_grpo.memory.compile import HERE, POOL, Device, device, jax_devices, program_bytes
from jax_grpo.memory.programs import Run, run_of
from jax_grpo.mesh import layout_of
from jax_grpo.rollout.texts import BATCH
from jax_grpo.system.memory import GB, available
from jax_grpo.system.phases import Phases
from jax_grpo.tasks.base import Task

MARGIN = 0.1  # of the limit: fragmentation, a GPU's workspaces, a CPU's thread stacks and packed operands
LINE_ERROR = 1 / 32  # of a count: programs' bytes are straight in their prompts to about this
SMALLER = {  # advice that makes a program that generates need less
    "rollout": "lower prompts.per_iteration, rollout.group_size, rollout.max_new_tokens or prompts.max_prompt_tokens",
    "partner": "lower rollout.max_new_tokens or prompts.max_prompt_tokens",
    "evaluation": "lower rollout.max_new_tokens or prompts.max_prompt_tokens, or set evaluation.positions 0",
}


class NothingFits(ValueError):
    """Even one completion at a time needs more than the limit, or a program that no micro-batch makes smaller does."""


def choose_micro_batches(
    config: Config,
    say: Callable[[str], None],
    *,
    target: str = "local",
    before: Mapping[str, Any] | None = None,
    task: Task | None = None,
) -> Config:
    """The config with a number for `auto`: the fewest micro-batches whose update fits. As it is when it has a number.

    The rollout and the evaluation, which micro-batches do not make smaller, must fit as well. `say` gets one line with the choice
    and the reason; `before` is the config of the checkpoint to continue from; `task` as for `run_of`.

    Raises:
        NothingFits: names the program, the limit and what to change.
    """
    if config.update.micro_batches != "auto":
        return config
    possible = config.possible_micro_batches()
    if before is not None and (earlier := before["update"]["micro_batches"]) in possible:
        say(f"update.micro_batches: auto is {earlier}, as the checkpoint's run chose")
        return config.with_micro_batches(earlier)

    needs = functools.cache(lambda count: bytes_of(config.with_micro_batches(count), "update", target, task))
    limit, source = limit_of(config.update.memory_limit_gb, target)
    usable = (1 - MARGIN) * limit
    allowance = f"{1 - MARGIN:.0%} of {limit / GB:.3f} GB may be used ({source})"
    if (count := fewest(possible, needs, usable)) is None:
        raise NothingFits(
            f"update.micro_batches auto: the update needs {needs(possible[-1]) / GB:.3f} GB with one completion at a time, and "
            f"{allowance}; set model.remat true or lm_head.implementation chunked, or lower rollout.max_new_tokens"
        )
    run = run_on(target, config.with_micro_batches(1), task)
    generating = (program for program in run.programs if program.generates)
    most, name = max((program_bytes(target, program) + run.beside(program), program.name) for program in generating)
    if most > usable:
        raise NothingFits(
            f"update.micro_batches auto: the {name} program needs {most / GB:.3f} GB however the update is cut, and "
            f"{allowance}; {SMALLER[name.split('/')[0]]}"
        )
    say(
        f"update.micro_batches: auto is {count}, of {config.step_completions() // count} completions: {needs(count) / GB:.3f} GB "
        f"of {limit / GB:.3f} ({source}), {needs.cache_info().misses} programs compiled"
    )
    return config.with_micro_batches(count)


def limit_of(limit_gb: float | None, target: str) -> tuple[float, str]:
    """Bytes that the run may use on the target, and the source of that limit.

    `limit_gb`, which is `update.memory_limit_gb`; else of a GPU what JAX's allocator has, or would take of one that is not here;
    else the CPU's memory that is available now, within that of the control group that the process is in.
    """
    if limit_gb is not None:
        return GB * limit_gb, "update.memory_limit_gb"
    where = device(target)
    if target not in HERE:
        return POOL * where.memory, f"{POOL:.0%} of {where.kind}"
    if where.shares_host_memory:
        return available(where.memory), "memory available"
    return where.memory, f"what JAX has of {where.kind}"


def run_on(target: str, config: Config, task: Task | None = None) -> Run:
    """The config's run as the target sees it."""
    layout = layout_of(config.mesh, jax_devices(target, config.mesh.devices))
    return run_of(config, device(target).shares_host_memory, layout, task)


def bytes_of(config: Config, name: str, target: str, task: Task | None = None) -> int:
    """Bytes of the device while the named program of the run is in it."""
    run = run_on(target, config, task)
    program = run.program(name)
    return program_bytes(target, program) + run.beside(program)


def fewest(counts: Sequence[int], needs: Callable[[int], int], limit: float) -> int | None:
    """The first of the counts whose need is at most the limit, found by halving: needs fall from one count to the next.

    The first count itself is tried before: where it fits, as it mostly does, no other program is compiled.
    """
    if counts and needs(counts[0]) <= limit:
        return counts[0]
    place = bisect.bisect_left(counts, True, lo=1, key=lambda count: needs(count) <= limit)
    return counts[place] if place < len(counts) else None


def largest(needs: Callable[[int], int], start: int, limit: int) -> tuple[int, int]:
    """The largest count whose need is at most the limit, and that need; (0, need of 1) when not even 1 fits.

    Needs grow with the count, nearly on a line. The line through those of `start` and its double says where to look, steps that
    double from there find counts on both sides of the limit, and `fewest` halves between them.
    """
    needs = functools.cache(needs)
    slope = max((needs(2 * start) - needs(start)) / start, 1.0)
    fitting = too_many = max(1, start + math.floor((limit - needs(start)) / slope))
    step = math.ceil(LINE_ERROR * fitting)
    while needs(too_many) <= limit:
        fitting, too_many, step = too_many, too_many + step, 2 * step
    while fitting and needs(fitting) > limit:
        too_many, fitting, step = fitting, max(0, fitting - step), 2 * step
    best = fewest(range(too_many - 1, fitting, -1), needs, limit) or fitting
    return best, needs(best or 1)


def largest_completions(config: Config, name: str, where: Device) -> tuple[int, int]:
    """Completions (whole groups) with which the program still fits, and the device's bytes then.

    Of the `update` they are one optimiser step in one micro-batch. Of the `rollout` they are an iteration's, with micro-batches
    of one prompt: then it is the program that grows fastest, since it holds every completion's cache. (The evaluation's batch is
    the same whatever an iteration's is.)
    """
    one_step, values = name == "update", config.model_dump()
    start = config.prompts.per_iteration // (config.update.minibatches * config.update.parts if one_step else 1)

    def needs(prompts: int) -> int:
        """With so many prompts, all of them one optimiser batch."""
        values["prompts"]["per_iteration"] = prompts
        values["update"] |= {"minibatches": 1, "micro_batches": 1 if one_step else prompts}
        values["kl"] |= {"guardrail": "log"}  # which compiles to the same, and may stand beside one step an iteration
        return bytes_of(Config.model_validate(values), name, where.target)

    prompts, bytes_ = largest(needs, max(1, start), where.memory)
    return prompts * config.rollout.group_size, bytes_


class DeviceOutOfMemory(RuntimeError):
    """A program does not fit on the device; the message names it, the bytes it asked for, and what to change."""


@contextlib.contextmanager
def explain_out_of_memory(phases: Phases, config: Config) -> Iterator[None]:
    """Turns the runtime's RESOURCE_EXHAUSTED inside into one `DeviceOutOfMemory`, which names the program of the running phase."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        program = phases.running[0] if phases.running else "between programs"
        # The runtime's words differ by backend and version.
        size = re.search(r"allocat\w*(?: of| request for)? (\d+(?:\.\d+)?) ?([KMGT]i?B)?", str(error))
        asked = size and (f"{size[1]} {size[2]}" if size[2] else f"{int(size[1]) / GB:.2f} GB")
        raise DeviceOutOfMemory(
            f"the {program} program does not fit on {jax.devices()[0].device_kind}"
            f"{f' (it asked for {asked} more)' if asked else ''}. {_advice(program, config)}"
        ) from error


def _advice(program: str, config: Config) -> str:
    prompts, group, cap = config.prompts.per_iteration, config.rollout.group_size, config.rollout.max_new_tokens
    if program == "rollout":
        return (
            f"It generates prompts.per_iteration {prompts} x rollout.group_size {group} = {prompts * group} completions of "
            f"up to {cap} tokens side by side: lower one of the three"
        )
    if program == "evaluation":
        return (
            f"It generates completions of up to {cap} tokens for {BATCH} held-out prompts side by "
            f"side: {SMALLER['evaluation']}"
        )
    now, more, completions = config.update.parts, next_micro_batches(config), config.step_completions()
    if more is None:
        return "Its micro-batch is one completion already: lower rollout.max_new_tokens, or set model.remat true"
    return (
        f"Its micro-batch has {completions // now} completions: set update.micro_batches {more} (now {now}) "
        f"for {completions // more}, which trains the same; model.remat true also saves memory"
    )


def next_micro_batches(config: Config) -> int | None:
    """The smallest larger `update.micro_batches` that the config allows; None when there is none."""
    return next((count for count in config.possible_micro_batches() if count > config.update.parts), None)
