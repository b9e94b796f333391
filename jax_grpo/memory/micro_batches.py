"""`update.micro_batches: auto`: the fewest micro-batches whose update fits, by the bytes of the compiled program.

What no micro-batch makes smaller, the rollout and the evaluation, must fit as well.
A new run chooses once, before anything is allocated; one that continues keeps its checkpoint's number, since another cut rounds
otherwise. Knows no trainer: `train` and the memory report's command line ask.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from jax_grpo.config import Config
from jax_grpo.memory.compiled import HERE, POOL, device, program_bytes
from jax_grpo.memory.largest import bytes_of
from jax_grpo.memory.parts import generates, outside
from jax_grpo.memory.shapes import run_of

MARGIN = 0.1  # of the limit: fragmentation, a GPU's workspaces, a CPU's thread stacks and packed operands
GB = 1e9
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


ROLLOUT = "rollout"
FEWER = {  # by whether the program is the rollout
    True: "lower prompts.per_iteration, rollout.group_size, rollout.max_new_tokens or prompts.max_prompt_tokens",
    False: "lower rollout.max_new_tokens or prompts.max_prompt_tokens, or set evaluation.positions 0",
}


class NothingFits(ValueError):
    """Even one completion at a time needs more than the limit, or a program that no micro-batch makes smaller does."""


def chosen(
    config: Config, say: Callable[[str], None], *, target: str = "local", before: Mapping[str, Any] | None = None
) -> Config:
    """The config with a number for `auto`; as it is when it has one.

    Args:
        config: of the run.
        say: told in one line what was chosen and why.
        target: see `compiled.device`.
        before: the config of the checkpoint to continue from.

    Raises:
        NothingFits: names the program, the limit and what to change.
    """
    if config.update.micro_batches != "auto":
        return config
    possible = config.possible_micro_batches()
    kept = None if before is None else before["update"]["micro_batches"]
    if kept in possible:
        say(f"update.micro_batches: auto is {kept}, as the checkpoint's run chose")
        return config.with_micro_batches(kept)
    limit, what = limit_of(config, target)
    known: dict[int, int] = {}

    def needs(parts: int) -> int:
        if parts not in known:
            known[parts] = bytes_of(config.with_micro_batches(parts), "update", target)
        return known[parts]

    found = fewest(possible, needs, (1 - MARGIN) * limit)
    if found is None:
        raise NothingFits(
            f"update.micro_batches auto: the update needs {needs(possible[-1]) / GB:.3f} GB with one completion at a time, and "
            f"{1 - MARGIN:.0%} of {limit / GB:.3f} GB may be used ({what}); set model.remat true or lm_head.implementation "
            f"chunked, or lower rollout.max_new_tokens"
        )
    name, most = largest_generation(config, target)
    if most > (1 - MARGIN) * limit:
        raise NothingFits(
            f"update.micro_batches auto: the {name} program needs {most / GB:.3f} GB however the update is cut, and "
            f"{1 - MARGIN:.0%} of {limit / GB:.3f} GB may be used ({what}); {FEWER[name == ROLLOUT]}"
        )
    rows = config.prompts.per_iteration * config.rollout.group_size // config.update.minibatches
    say(
        f"update.micro_batches: auto is {found}, of {rows // found} completions: {needs(found) / GB:.3f} GB of "
        f"{limit / GB:.3f} ({what}), {len(known)} programs compiled"
    )
    return config.with_micro_batches(found)


def largest_generation(config: Config, target: str) -> tuple[str, int]:
    """Of the run's programs that generate, the one that needs the most, and the device's bytes then."""
    run = run_of(config.with_micro_batches(1)).seen_from(device(target).shares_host_memory)
    needed = {
        program.name: program_bytes(target, program) + outside(run, program)
        for program in run.programs
        if generates(program.name)
    }
    return max(needed.items(), key=lambda item: item[1])


def fewest(possible: list[int], needs: Callable[[int], int], bytes_: float) -> int | None:
    """The first of the ascending counts whose need is at most `bytes_`, found by halving: needs fall as the count grows."""
    if needs(possible[0]) <= bytes_:
        return possible[0]
    low, high = 0, len(possible)  # possible[low] does not fit; possible[high] does, or is past the end
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if needs(possible[middle]) <= bytes_ else (middle, high)
    return possible[high] if high < len(possible) else None


def limit_of(config: Config, target: str) -> tuple[float, str]:
    """Bytes that the run may use on the target, and what says so.

    The config's own limit; else of a GPU what JAX's allocator has, or would take of one that is not here; else the CPU's
    memory that is available now, within that of the control group that the process is in.
    """
    if config.update.memory_limit_gb is not None:
        return GB * config.update.memory_limit_gb, "update.memory_limit_gb"
    where = device(target)
    if target not in HERE:
        return POOL * where.memory, f"{POOL:.0%} of {where.kind}"
    if target == "local" and (jax.devices()[0].memory_stats() or {}).get("bytes_limit"):
        return where.memory, f"what JAX has of {where.kind}"
    return available(where.memory), "memory available"


def available(whole: int) -> int:
    """Bytes that processes here can still take; `whole` where the system does not say."""
    found = whole
    if _MEMINFO.exists():
        lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        found = min(found, 1024 * int(lines["MemAvailable"].split()[0]))
    limit, used = _CGROUP / "memory.max", _CGROUP / "memory.current"
    if limit.exists() and used.exists() and (most := limit.read_text().strip()) != "max":
        found = min(found, int(most) - int(used.read_text()))
    return found
