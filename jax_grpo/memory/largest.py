"""The largest micro-batch and the largest batch that fit on a device, by compiling the programs that grow with them.

A program's bytes are nearly straight in the number of prompts, so a line through two compiled points says where to look, and
what it says is compiled too: every figure is that of a real program.
"""

import math
from collections.abc import Callable

from jax_grpo.config import Config
from jax_grpo.memory.compiled import Device, device, program_bytes
from jax_grpo.memory.parts import outside
from jax_grpo.memory.shapes import run_of

TRIES = 6  # programs compiled for one figure, at most


def with_sizes(config: Config, prompts: int, micro_batches: int) -> Config:
    """The config with another number of prompts, all of them one optimiser batch of so many micro-batches."""
    values = config.model_dump()
    values["prompts"]["per_iteration"] = prompts
    values["update"] |= {"minibatches": 1, "micro_batches": micro_batches}
    values["kl"] |= {"guardrail": "log"}  # which compiles to the same, and may stand beside one step an iteration
    return Config.model_validate(values)


def bytes_of(config: Config, name: str, target: str) -> int:
    """Bytes of the device while the named program of the run is in it."""
    run = run_of(config).seen_from(device(target).shares_host_memory)
    program = next(program for program in run.programs if program.name == name)
    return program_bytes(target, program) + outside(run, program)


def largest(total_of: Callable[[int], int], start: int, capacity: int) -> tuple[int, int]:
    """The largest count whose bytes are at most `capacity`, and those bytes; (0, bytes of 1) when not even 1 fits.

    Args:
        total_of: bytes by count; grows with the count, nearly on a line.
        start: a count to begin with.
        capacity: bytes of the device.
    """
    known: dict[int, int] = {}

    def total(count: int) -> int:
        known.setdefault(count, total_of(count)) if count not in known else None
        return known[count]

    low, high = max(1, start), max(2, 2 * start)
    for _ in range(TRIES):
        slope = max((total(high) - total(low)) / (high - low), 1.0)
        guess = max(1, math.floor(low + (capacity - total(low)) / slope))
        if guess in known:
            break
        total(guess)
        near = sorted(known, key=lambda count: abs(known[count] - capacity))[:2]  # the line nearest to the limit
        low, high = sorted(near)
    fitting = [count for count, bytes_ in known.items() if bytes_ <= capacity]
    while not fitting and min(known) > 1:
        total(min(known) // 2)
        fitting = [count for count, bytes_ in known.items() if bytes_ <= capacity]
    best = max(fitting, default=0)
    return best, total(best or 1)


def largest_micro_batch(config: Config, device: Device) -> tuple[int, int]:
    """Completions (whole groups) of the largest optimiser step in one micro-batch, and the device's bytes then."""
    prompts, needed = largest(
        lambda prompts: bytes_of(with_sizes(config, prompts, 1), "update", device.target),
        max(1, config.prompts.per_iteration // config.update.minibatches // config.update.parts),
        device.memory,
    )
    return prompts * config.rollout.group_size, needed


def largest_batch(config: Config, device: Device) -> tuple[int, int]:
    """Completions an iteration can have at most, and the device's bytes then.

    With micro-batches of one prompt the rollout is the program that grows fastest: it holds every completion's cache. (The
    evaluation's batch is the same whatever an iteration's is.)
    """
    prompts, needed = largest(
        lambda prompts: bytes_of(with_sizes(config, prompts, prompts), "rollout", device.target),
        config.prompts.per_iteration,
        device.memory,
    )
    return prompts * config.rollout.group_size, needed
