"""What a checkpoint costs: time added to training by one save, and restoring against the disk's own speed.

    python -m jax_grpo.bench.checkpoint --config C.yaml --out RESULTS.json

A window of iterations is timed with a save at its start and without one, in turns, until the write is on the disk: its work in
the background counts. Reads are cold: the files are dropped from the page cache first.
"""

import hashlib
import os
import resource
import shutil
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import jax

from jax_grpo.bench.harness import command_of, command_parser, save
from jax_grpo.config import load_config
from jax_grpo.config.sections import CheckpointConfig
from jax_grpo.run import files
from jax_grpo.run.checkpoints import Checkpoints, abstract, load, restore
from jax_grpo.run.folder import hardware
from jax_grpo.trainer import Trainer

WARM_UP = 2  # iterations, the first of which compiles
CHUNK = 1 << 24  # bytes of one plain read


def timed(work: Callable[..., Any], *arguments: Any) -> tuple[float, float, Any]:
    """Wall-clock seconds of `work(*arguments)`, CPU seconds of all threads meanwhile, in the kernel too, and its result."""
    started, spent = time.perf_counter(), sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    result = jax.block_until_ready(work(*arguments))
    return time.perf_counter() - started, sum(resource.getrusage(resource.RUSAGE_SELF)[:2]) - spent, result


def drop_from_cache(folder: Path) -> None:
    """Makes the next read of every file come from the disk."""
    os.sync()
    for path in filter(Path.is_file, folder.rglob("*")):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_all(folder: Path) -> int:
    """Bytes of a folder's files, read one after another and thrown away: what the disk gives at best to one reader."""
    count, buffer = 0, bytearray(CHUNK)
    for path in sorted(filter(Path.is_file, folder.rglob("*"))):
        with path.open("rb", buffering=0) as file:
            while read := file.readinto(buffer):
                count += read
    return count


def train_window(trainer: Trainer, folder: Path, first: int, count: int, saves: bool) -> float:
    """Trains `count` iterations, with a save at their start if asked; returns the seconds for which the save held them up."""
    held_up_s = 0.0
    with Checkpoints(folder, CheckpointConfig(keep_last=1, keep_best=0)) as checkpoints:
        if saves:
            held_up_s, *_ = timed(checkpoints.save, first, trainer.state, trainer.manifest(first, 0), {})
        for iteration in range(first, first + count):
            trainer.iterate(iteration)
    return held_up_s


def measure(trainer: Trainer, folder: Path, window: int, pairs: int) -> dict[str, Any]:
    """Figures of `pairs` repetitions; see the module."""
    for number in range(WARM_UP):
        trainer.iterate(number)
    iteration, size = WARM_UP, 0
    wall: dict[str, list[float]] = defaultdict(list)
    cpu: dict[str, list[float]] = defaultdict(list)

    def note(what: str, work: Callable[..., Any], *arguments: Any) -> Any:
        elapsed, spent, result = timed(work, *arguments)
        wall[what].append(elapsed)
        cpu[what].append(spent)
        return result

    def load_and_restore(path: Path) -> Any:
        return restore(load(path), abstract(trainer.state))

    for number in range(pairs):
        for saves in (False, True) if number % 2 == 0 else (True, False):
            os.sync()
            what = "saving" if saves else "plain"
            held_up_s = note(what, train_window, trainer, folder, iteration, window, saves)
            iteration += window
            wall["blocked"] += [held_up_s] if saves else []
        path = files.complete(folder)[-1]
        drop_from_cache(path)
        size = note("read", read_all, path)
        drop_from_cache(path)
        note("restore", load_and_restore, path)
    for number in range(iteration, iteration + 3):  # with nothing beside it: hardly dependent on the machine's load
        note("alone", train_window, trainer, folder, number, 0, True)
    data = bytes(CHUNK)
    note("hash", lambda: [hashlib.sha256(data) for _ in range(16)])  # what verifying must cost
    # The windows of a pair are neighbours in time, so that a slow stretch of the machine is in both.
    added = [saving - plain for saving, plain in zip(wall["saving"], wall["plain"], strict=True)]
    iteration_s, iteration_cpu_s = median(wall["plain"]) / window, median(cpu["plain"]) / window
    every = CheckpointConfig().every
    return {
        "checkpoint_bytes": size,
        "iteration_s": iteration_s,
        "window_iterations": window,
        "windows_plain_s": wall["plain"],
        "windows_with_a_save_s": wall["saving"],
        "windows_plain_cpu_s": cpu["plain"],
        "windows_with_a_save_cpu_s": cpu["saving"],
        "save_blocks_s": median(wall["blocked"]),
        "save_adds_s": median(added),
        "save_adds_each_s": added,
        "iteration_cpu_s": iteration_cpu_s,
        "save_alone_s": median(wall["alone"]),
        "save_alone_cpu_s": median(cpu["alone"]),
        "default_every": every,
        "cpu_share_at_default_interval": median(cpu["alone"]) / (every * iteration_cpu_s),
        "added_share_at_default_interval": median(added) / (every * iteration_s),
        "read_cold_s": wall["read"],
        "verify_and_restore_cold_s": wall["restore"],
        "verify_and_restore_cpu_s": median(cpu["restore"]),
        "sha256_cpu_s": size * cpu["hash"][0] / (16 * CHUNK),
        "disk_MB_per_s": size / median(wall["read"]) / 1e6,
        "restore_MB_per_s": size / median(wall["restore"]) / 1e6,
    }


def main(argv: list[str] | None = None) -> None:
    module = "jax_grpo.bench.checkpoint"
    parser = command_parser(module, __doc__)
    parser.add_argument("--config", required=True)
    parser.add_argument("--out", required=True, help="JSON to write; checkpoints go beside it and are removed")
    parser.add_argument("--pairs", type=int, default=3, help="windows with a save, and as many without")
    parser.add_argument("--window", type=int, default=6, help="iterations of a window; longer than a write takes")
    arguments, overrides = parser.parse_known_args(argv)
    folder = Path(arguments.out).with_suffix(".checkpoints")
    config = load_config(arguments.config, overrides)
    try:
        figures = measure(Trainer(config), folder, arguments.window, arguments.pairs)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    record = {"command": command_of(module, argv), "hardware": hardware(), "jax": jax.__version__}
    save(arguments.out, record | {"load_average": os.getloadavg(), "config": config.model_dump()} | figures)
    print(
        f"{figures['checkpoint_bytes'] / 1e6:.0f} MB; iteration {figures['iteration_s']:.2f} s; a save blocks "
        f"{figures['save_blocks_s']:.2f} s and adds {figures['save_adds_s']:.2f} s: "
        f"{figures['added_share_at_default_interval']:.1%} at the default interval of {figures['default_every']} "
        f"({figures['cpu_share_at_default_interval']:.1%} of the CPU seconds); "
        f"reading {figures['disk_MB_per_s']:.0f} MB/s, verifying and restoring {figures['restore_MB_per_s']:.0f} MB/s"
    )


if __name__ == "__main__":
    main()
