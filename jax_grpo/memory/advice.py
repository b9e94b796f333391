"""Device out-of-memory in the project's words: which program asked for how much, and the setting that makes it smaller."""

import contextlib
import re
from collections.abc import Iterator

import jax

from jax_grpo.config import Config
from jax_grpo.memory.fit import step_completions
from jax_grpo.rollout.texts import BATCH
from jax_grpo.system.memory import GB
from jax_grpo.system.phases import Phases


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
        raise DeviceOutOfMemory(
            f"the {program} program does not fit on {jax.devices()[0].device_kind}{_asked(str(error))}. {_advice(program, config)}"
        ) from error


def _asked(message: str) -> str:
    """What the runtime says about sizes; the wording differs by backend and version."""
    asked = re.search(r"allocat\w* (?:of )?(\d+)(?: bytes)?|allocat\w* ([\d.]+ ?[KMGT]i?B)", message)
    return f" (it asked for {f'{int(asked[1]) / GB:.2f} GB' if asked[1] else asked[2]} more)" if asked else ""


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
            f"side: lower rollout.max_new_tokens or prompts.max_prompt_tokens, or set evaluation.positions 0"
        )
    now, more, completions = config.update.parts, next_micro_batches(config), step_completions(config)
    if more is None:
        return "Its micro-batch is one completion already: lower rollout.max_new_tokens, or set model.remat true"
    return (
        f"Its micro-batch has {completions // now} completions: set update.micro_batches {more} (now {now}) "
        f"for {completions // more}, which trains the same; model.remat true also saves memory"
    )


def next_micro_batches(config: Config) -> int | None:
    """The smallest larger `update.micro_batches` that the config allows; None when there is none."""
    return next((count for count in config.possible_micro_batches() if count > config.update.parts), None)
