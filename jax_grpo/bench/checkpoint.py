"""What a checkpoint costs: time added to training by one save, and restoring against the disk's own speed.

    python -m jax_grpo.bench.checkpoint --config C.yaml --out RESULTS.json

A window of iterations is timed with a save at its start and without one, in turns, until the write is on the disk: its work in
the background counts. Reads are cold: the files are dropped from the page cache first.
"""

import contextlib
import hashlib
import os
import shutil
import time
from collections import defaultdict
from collections.abc import Iterator
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
ALONE = 3  # saves with nothing beside them, which hardly depend on the machine's load
CHUNK, HASHED = 1 << 24, 16  # bytes of one plain read, and how many of them are hashed


def cold(folder: Path) -> list[Path]:
    """A folder's files, whose next read comes from the disk."""
    os.sync()
    paths = sorted(filter(Path.is_file, folder.rglob("*")))
    for path in paths:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return paths


def read_all(paths: list[Path]) -> int:
    """Bytes of files that are read one after another and thrown away: what the disk gives at best to one reader."""
    count, buffer = 0, bytearray(CHUNK)
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while read := file.readinto(buffer):
                count += read
    return count


def measure(trainer: Trainer, folder: Path, window: int, pairs: int) -> dict[str, Any]:
    """Figures of `pairs` repetitions; see the module."""
    iteration, size = 0, 0
    wall: dict[str, list[float]] = defaultdict(list)
    cpu: dict[str, list[float]] = defaultdict(list)

    @contextlib.contextmanager
    def timed(what: str) -> Iterator[None]:
        """Notes wall-clock seconds, and CPU seconds of all threads meanwhile, in the kernel too."""
        started, spent = time.perf_counter(), time.process_time()
        yield
        wall[what].append(time.perf_counter() - started)
        cpu[what].append(time.process_time() - spent)

    def train(iterations: int, *, saves: bool) -> None:
        """Trains some iterations, with a save at their start if asked; returns when it is on the disk."""
        nonlocal iteration
        with Checkpoints(folder, CheckpointConfig(keep_last=1, keep_best=0)) as checkpoints:
            if saves:
                with timed("blocked"):
                    checkpoints.save(iteration, trainer.state, trainer.manifest(iteration, 0), {})
            for _ in range(iterations):
                trainer.iterate(iteration)
                iteration += 1

    train(WARM_UP, saves=False)
    for number in range(pairs):
        for saves in (False, True) if number % 2 == 0 else (True, False):
            os.sync()
            with timed("saving" if saves else "plain"):
                train(window, saves=saves)
        path = files.complete(folder)[-1]
        paths = cold(path)
        with timed("read"):
            size = read_all(paths)
        cold(path)
        with timed("restore"):
            jax.block_until_ready(restore(load(path), abstract(trainer.state)))
    save_blocks_s = median(wall["blocked"])
    for _ in range(ALONE):
        with timed("alone"):
            train(0, saves=True)
        iteration += 1
    data = bytes(CHUNK)
    with timed("hash"):  # what verifying must cost
        for _ in range(HASHED):
            hashlib.sha256(data)
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
        "save_blocks_s": save_blocks_s,
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
        "sha256_cpu_s": size * cpu["hash"][0] / (HASHED * CHUNK),
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
