"""Compiled programs of a run: stored on the disk for the next run, counted by function, and traced by JAX's profiler.

Each of a run's programs is compiled once for every width that prompts are padded to, so at most `max_prompt_tokens / 16` times;
a count that goes on growing is a fault. Knows nothing of tasks and models.
"""

import collections
import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import jax
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from jax_grpo.config.sections import ProfileConfig

COMPILED = "/jax/core/compile/backend_compile_duration"
CACHE_VARIABLE = "JAX_COMPILATION_CACHE_DIR"
PROGRAMS = ("generate", "next_turn", "score", "update")  # names of the functions in `programs.Programs`
NOTED_S = 1.0  # seconds; less is no line on the console
LEAST_S = 0.5  # seconds; what compiles faster is not worth a file
PROFILE = "profile"  # of a run's folder; docs/memory.md says how to open what is in it


def keep_programs(folder: str | None) -> None:
    """Stores compiled programs in a folder and reads them from there; None, and JAX's own variable if set, change nothing."""
    if folder is not None and CACHE_VARIABLE not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(Path(folder).expanduser()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", LEAST_S)


@contextlib.contextmanager
def compiled_anew() -> Iterator[None]:
    """Within it no program comes from the disk or goes there: XLA dumps nothing of one that it does not compile."""
    before = jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_enable_compilation_cache", False)
    reset_cache()  # JAX looks at the setting once
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        reset_cache()


def training_options() -> dict[str, str] | None:
    """`jax.jit`'s compiler options for programs with a backward pass, where JAX computes now.

    XLA:CPU drops optimisation barriers before it fuses what they keep apart, and its scheduler for concurrency keeps more alive
    at once, which a program of large matmuls is not faster by. jaxlib 0.10.0, 0.10.1, 0.10.2, 0.11.0 and 0.12.0 know both names.
    """
    if jax.default_backend() != "cpu":
        return None
    return {
        "xla_disable_hlo_passes": "cse_barrier_expander",  # a barrier that is left costs nothing: a later pass drops it
        "xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",
    }


def compilations() -> Callable[[], dict[str, float]]:
    """Begins to count programs that are compiled or read from the disk; returns a function that gives the metrics so far.

    `compile/<program>` is the number of a run's programs, by the jitted function's name, `time/compile` the seconds of all.
    """
    before, names = _counts().copy(), (*(f"compile/{program}" for program in PROGRAMS), "time/compile")
    return lambda: {name: _counts()[name] - before[name] for name in names}


@functools.cache
def _counts() -> collections.defaultdict[str, float]:
    """Of the whole process, growing from the first call on: JAX lets a listener be added but not removed."""
    counts = collections.defaultdict[str, float](int, {"time/compile": 0.0})

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == COMPILED:
            program = str(kwargs.get("fun_name", "")).removeprefix("jit(").removesuffix(")")
            counts[f"compile/{program}"] += 1
            counts["time/compile"] += duration_secs

    jax.monitoring.register_event_duration_secs_listener(listen)
    return counts


def takes_time(metrics: Mapping[str, float]) -> bool:
    """Whether an iteration with these metrics compiled something large, or read it from the cache."""
    return metrics["time/compile"] >= NOTED_S


def line(metrics: Mapping[str, float]) -> str | None:
    """A sentence on the programs that an iteration compiled; None when that took little time."""
    if not takes_time(metrics):
        return None
    names = [f"{name} x{count:.0f}" for name in PROGRAMS if (count := metrics[f"compile/{name}"])]
    return f"compiled or read from the cache: {', '.join(names) or 'small programs'} in {metrics['time/compile']:.1f} s"


@contextlib.contextmanager
def profiled(config: ProfileConfig, run_dir: Path, iteration: int) -> Iterator[None]:
    """Around an iteration: traces it if first <= iteration < last of `profile.trace_steps`; saves the memory after it if set.

    Without steps, the memory is that after the first iteration. A failure leaves its trace written.
    """
    folder, steps, memory = run_dir / PROFILE, config.trace_steps, config.memory
    first, last = steps or (0, 1)
    if not first <= iteration < last or not (steps or memory):
        yield
        return
    folder.mkdir(exist_ok=True)
    trace = jax.profiler.trace(str(folder)) if steps else contextlib.nullcontext()
    with trace, jax.profiler.StepTraceAnnotation("iteration", step_num=iteration):
        yield
    if memory:
        jax.profiler.save_device_memory_profile(str(folder / f"memory_{iteration:06d}.prof"))
