"""What a checkpoint costs: time added to training by one save, and restoring against the disk's own speed.

    python docs/experiments/checkpoint_cost.py --config configs/bench_124m_cpu.yaml --out RESULTS.json

A window of iterations is timed with a save at its start and without one, in turns, until the write is on the disk: its work in
the background counts. Reads are cold: the files are dropped from the page cache first. The figures are docs/results/checkpoint's.
Not part of the package.
"""

import argparse
import contextlib
import hashlib
import os
import shlex
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import jax

from jax_grpo.bench.machine import machine
from jax_grpo.config import load_config
from jax_grpo.config.sections import CheckpointConfig
from jax_grpo.run import files
from jax_grpo.run.checkpoints import Checkpoints, abstract, load, restore
from jax_grpo.system.whole_files import write_record
from jax_grpo.trainer import Trainer

WARM_UP = 2  # iterations, the first of which compiles
ALONE = 3  # saves with nothing beside them, which hardly depend on the machine's load
CHUNK = 1 << 24  # bytes of one plain read


def cold(folder: Path) -> list[Path]:
    """A folder's files, whose next read comes from the disk."""
    os.sync()
    paths = sorted(filter(Path.is_file, folder.rglob("*")))
    for path in paths:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return paths


def read_all(paths: list[Path]) -> None:
    """Reads files one after another and throws them away: what the disk gives at best to one reader."""
    buffer = bytearray(CHUNK)
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def measure(trainer: Trainer, folder: Path, window: int, pairs: int) -> dict[str, Any]:
    """Seconds of `pairs` repetitions by what they were spent on: of the clock (`wall_s`), and of all threads (`cpu_s`)."""
    iteration, size = 0, 0
    wall, cpu = defaultdict(list), defaultdict(list)

    @contextlib.contextmanager
    def timed(what: str) -> Iterator[None]:
        started, spent = time.perf_counter(), time.process_time()
        yield
        wall[what].append(time.perf_counter() - started)
        cpu[what].append(time.process_time() - spent)  # in the kernel too

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
        files_to_read = cold(path)
        with timed("read"):
            read_all(files_to_read)
        size = sum(file.stat().st_size for file in cold(path))
        with timed("restore"):
            jax.block_until_ready(restore(load(path), abstract(trainer.state)))
    for _ in range(ALONE):
        with timed("alone"):
            train(0, saves=True)
        iteration += 1
    data = bytes(CHUNK)
    with timed("hash"):  # what verifying must cost
        for _ in range(-(-size // CHUNK)):
            hashlib.sha256(data)
    return {"checkpoint_bytes": size, "window_iterations": window, "wall_s": wall, "cpu_s": cpu}


def summary(figures: Mapping[str, Any]) -> str:
    """The medians in a few lines, and what a save adds to the iterations between two by default."""
    size, window, every = figures["checkpoint_bytes"], figures["window_iterations"], CheckpointConfig().every
    wall, cpu = ({what: median(times) for what, times in figures[key].items()} for key in ("wall_s", "cpu_s"))
    # The windows of a pair are neighbours in time, so that a slow stretch of the machine is in both.
    pairs = zip(figures["wall_s"]["saving"], figures["wall_s"]["plain"], strict=True)
    adds = median(saving - plain for saving, plain in pairs)
    plain, plain_cpu = wall["plain"] / window, cpu["plain"] / window
    return (
        f"{size / 1e6:.0f} MB; an iteration takes {plain:.2f} s ({plain_cpu:.2f} of the CPU)\n"
        f"a save holds training up for {wall['blocked']:.2f} s, takes {wall['alone']:.2f} s alone and adds {adds:.2f} s: "
        f"{adds / (every * plain):.1%} of {every} iterations ({cpu['alone'] / (every * plain_cpu):.1%} of their CPU seconds)\n"
        f"read cold at {size / wall['read'] / 1e6:.0f} MB/s, verified and restored at {size / wall['restore'] / 1e6:.0f} MB/s: "
        f"{cpu['restore']:.2f} s of the CPU, of which SHA-256 must be {cpu['hash']:.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--config", required=True)
    parser.add_argument("--out", required=True, help="JSON to write; checkpoints go beside it and are removed")
    parser.add_argument("--pairs", type=int, default=3, help="windows with a save, and as many without")
    parser.add_argument("--window", type=int, default=6, help="iterations of a window; longer than a write takes")
    arguments, overrides = parser.parse_known_args()
    folder = Path(arguments.out).with_suffix(".checkpoints")
    config = load_config(arguments.config, overrides)
    about = {"command": shlex.join(["python", *sys.argv]), "jax": jax.__version__, "machine": machine()}
    try:
        figures = measure(Trainer(config), folder, arguments.window, arguments.pairs)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    write_record(Path(arguments.out), about | {"config": config.model_dump()} | figures)
    print(summary(figures))


if __name__ == "__main__":
    main()
