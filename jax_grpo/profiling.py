"""JAX's profiler around chosen iterations of a run: a trace of host and device, and what is alive in device memory.

Everything goes into the run folder's `profile/`; docs/memory.md says how to open it. Knows nothing of what is trained.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import jax

from jax_grpo.config_sections import ProfileConfig

FOLDER = "profile"


class Profiler:
    """Traces iterations first <= i < last of `profile.trace_steps`, and saves the memory after each of them if asked.

    Args:
        config: the config's `profile` section.
        run_dir: of the run.
    """

    def __init__(self, config: ProfileConfig, run_dir: Path):
        self._memory, self._folder = config.memory, run_dir / FOLDER
        self._trace = config.trace_steps is not None
        self._first, self._last = config.trace_steps or (0, 1)

    @contextlib.contextmanager
    def iteration(self, number: int) -> Iterator[None]:
        """Around one iteration, which a failure leaves with its trace written."""
        chosen = self._first <= number < self._last
        if not chosen or not (self._trace or self._memory):
            yield
            return
        self._folder.mkdir(exist_ok=True)
        traced = jax.profiler.trace(str(self._folder)) if self._trace else contextlib.nullcontext()
        with traced, jax.profiler.StepTraceAnnotation("iteration", step_num=number):
            yield
        if self._memory:
            jax.profiler.save_device_memory_profile(str(self._folder / f"memory_{number:06d}.prof"))
