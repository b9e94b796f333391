"""What a checkpoint costs: time added to training by one save, and restoring against the disk's own speed.

    python -m jax_grpo.bench.checkpoint --config C.yaml --out RESULTS.json

A window of iterations is timed with a save at its start and without one, in turns, until the write is on the disk: its work in
the background counts. Reads are cold: the files are dropped from the page cache first.
"""

import argparse
import hashlib
import json
import os
import resource
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from jax_grpo import checkpoint_files as files
from jax_grpo.checkpoint import Checkpoints, abstract, load, restore
from jax_grpo.config import load_config
from jax_grpo.config_sections import CheckpointConfig
from jax_grpo.run_folder import hardware
from jax_grpo.trainer import Trainer

WARM_UP = 2  # iterations, the first of which compiles
CHUNK = 1 << 24  # bytes of one plain read


def timed(work: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    """Wall-clock seconds of `work(*arguments)`, and its result."""
    started = time.perf_counter()
    result = jax.block_until_ready(work(*arguments))
    return time.perf_counter() - started, result


def drop_from_cache(folder: Path) -> None:
    """Makes the next read of every file come from the disk."""
    os.sync()
    for path in (path for path in folder.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_all(folder: Path) -> int:
    """Bytes of a folder's files, read one after another and thrown away: what the disk gives at best to one reader."""
    count, buffer = 0, bytearray(CHUNK)
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        with path.open("rb", buffering=0) as file:
            while read := file.readinto(buffer):
                count += read
    return count


def train_window(trainer: Trainer, folder: Path, first: int, count: int, save: bool) -> float:
    """Trains `count` iterations, with a save at their start if asked; returns the seconds for which the save held them up."""
    held_up = 0.0
    with Checkpoints(folder, CheckpointConfig(keep_last=1, keep_best=0)) as checkpoints:
        if save:
            held_up = timed(checkpoints.save, first, trainer.state, trainer.manifest(first, 0), {})[0]
        for iteration in range(first, first + count):
            trainer.iterate(iteration)
    return held_up


def save_alone(trainer: Trainer, folder: Path, first: int) -> tuple[float, float]:
    """Median seconds and CPU seconds of a save to its end with nothing beside it: hardly dependent on the machine's load."""
    elapsed, spent = [], []
    for number in range(first, first + 3):
        started = cpu_s()
        elapsed.append(timed(train_window, trainer, folder, number, 0, True)[0])
        spent.append(cpu_s() - started)
    return statistics.median(elapsed), statistics.median(spent)


def cpu_s() -> float:
    """CPU seconds of all of this process's threads, in the kernel too."""
    return sum(resource.getrusage(resource.RUSAGE_SELF)[:2])


def sha256_speed() -> float:
    """Bytes a CPU second that one core hashes: what verifying must cost."""
    data, started = bytes(CHUNK), cpu_s()
    for _ in range(16):
        hashlib.sha256(data)
    return 16 * CHUNK / (cpu_s() - started)


def measure(trainer: Trainer, folder: Path, window: int, pairs: int) -> dict:
    """Figures of `pairs` repetitions; see the module."""
    iteration, size = WARM_UP, 0
    for number in range(WARM_UP):
        trainer.iterate(number)
    plain, saving, blocked, restoring, restoring_cpu, reading = [], [], [], [], [], []
    plain_cpu, saving_cpu = [], []
    for number in range(pairs):
        for save in (False, True) if number % 2 == 0 else (True, False):
            os.sync()
            started = cpu_s()
            elapsed, held_up = timed(train_window, trainer, folder, iteration, window, save)
            iteration += window
            (saving if save else plain).append(elapsed)
            (saving_cpu if save else plain_cpu).append(cpu_s() - started)
            blocked += [held_up] if save else []
        path = files.complete(folder)[-1]
        drop_from_cache(path)
        elapsed, size = timed(read_all, path)
        reading.append(elapsed)
        drop_from_cache(path)
        started = cpu_s()
        load_s, origin = timed(load, path)
        restore_s, _ = timed(restore, origin, abstract(trainer.state))
        restoring.append(load_s + restore_s)
        restoring_cpu.append(cpu_s() - started)
    alone_s, alone_cpu_s = save_alone(trainer, folder, iteration)
    iteration_s = statistics.median(plain) / window
    # The windows of a pair are neighbours in time, so that a slow stretch of the machine is in both.
    added = [s - p for s, p in zip(saving, plain, strict=True)]
    every = CheckpointConfig().every
    return {
        "checkpoint_bytes": size,
        "iteration_s": iteration_s,
        "window_iterations": window,
        "windows_plain_s": plain,
        "windows_with_a_save_s": saving,
        "windows_plain_cpu_s": plain_cpu,
        "windows_with_a_save_cpu_s": saving_cpu,
        "save_blocks_s": statistics.median(blocked),
        "save_adds_s": statistics.median(added),
        "save_adds_each_s": added,
        "iteration_cpu_s": statistics.median(plain_cpu) / window,
        "save_alone_s": alone_s,
        "save_alone_cpu_s": alone_cpu_s,
        "default_every": every,
        "cpu_share_at_default_interval": alone_cpu_s * window / (every * statistics.median(plain_cpu)),
        "added_share_at_default_interval": statistics.median(added) / (every * iteration_s),
        "read_cold_s": reading,
        "verify_and_restore_cold_s": restoring,
        "verify_and_restore_cpu_s": statistics.median(restoring_cpu),
        "sha256_cpu_s": size / sha256_speed(),
        "disk_MB_per_s": size / statistics.median(reading) / 1e6,
        "restore_MB_per_s": size / statistics.median(restoring) / 1e6,
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m jax_grpo.bench.checkpoint", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--config", required=True)
    parser.add_argument("--out", required=True, help="JSON to write; checkpoints go beside it and are removed")
    parser.add_argument("--pairs", type=int, default=3, help="windows with a save, and as many without")
    parser.add_argument("--window", type=int, default=6, help="iterations of a window; longer than a write takes")
    args, overrides = parser.parse_known_args(argv)
    out = Path(args.out)
    folder = out.with_suffix(".checkpoints")
    config = load_config(args.config, overrides)
    try:
        figures = measure(Trainer(config), folder, args.window, args.pairs)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    arguments = sys.argv[1:] if argv is None else argv
    record = {"command": " ".join(["python -m jax_grpo.bench.checkpoint", *arguments]), "hardware": hardware()}
    record |= {"jax": jax.__version__, "load_average": os.getloadavg(), "config": config.model_dump()} | figures
    out.write_text(json.dumps(record, indent=1) + "\n")
    print(
        f"{figures['checkpoint_bytes'] / 1e6:.0f} MB; iteration {figures['iteration_s']:.2f} s; a save blocks "
        f"{figures['save_blocks_s']:.2f} s and adds {figures['save_adds_s']:.2f} s: "
        f"{figures['added_share_at_default_interval']:.1%} at the default interval of {figures['default_every']} "
        f"({figures['cpu_share_at_default_interval']:.1%} of the CPU seconds); "
        f"reading {figures['disk_MB_per_s']:.0f} MB/s, verifying and restoring {figures['restore_MB_per_s']:.0f} MB/s"
    )


if __name__ == "__main__":
    main()
