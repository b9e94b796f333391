"""Where a run's numbers go: `metrics.jsonl` (one object per record, strict JSON), TensorBoard and, if asked, W&B.

Beside it `histograms.jsonl` (reward components over time) and `samples.jsonl` (completions), which the report draws.
"""

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TextIO

import numpy as np

from jax_grpo.config import Config, ConfigError
from jax_grpo.records import read_records
from jax_grpo.tensorboard import EventFile


class MetricsError(RuntimeError):
    """The metrics file cannot be written or continued; the message names it and what to do."""


HISTOGRAM_BINS = 10


def histogram(values_B: np.ndarray) -> dict:
    """`{"low", "high", "counts"}` of the finite values: equal bins over [0, 1], or wider where a value lies outside."""
    finite = np.asarray(values_B, np.float64)[np.isfinite(values_B)]
    low, high = float(min([0.0, *finite])), float(max([1.0, *finite]))
    counts, _ = np.histogram(finite, HISTOGRAM_BINS, (low, high))
    return {"low": low, "high": high, "counts": counts.tolist()}


class MetricsLog:
    """Writes records of numbers. Each line is flushed, so a killed run keeps what it logged.

    A number that is not finite is written as null and its name listed under `nonfinite_metrics`: strict JSON has no NaN, and a
    silent null would hide it.
    """

    def __init__(self, run_dir: Path, config: Config, keep_bytes: int = 0, first_iteration: int = 0):
        """Continues a file after its first `keep_bytes` bytes, whose records end before `first_iteration`.

        Raises:
            MetricsError: the file is shorter, so that lines of the run would be missing.
        """
        self.path = run_dir / "metrics.jsonl"
        self._file = self.path.open("a", encoding="utf-8")
        if (found := self.path.stat().st_size) < keep_bytes:
            raise MetricsError(
                f"{self.path} has {found} bytes, but the checkpoint was saved after {keep_bytes}: lines are missing; put the "
                f"file back, or choose another run_dir"
            )
        self._file.truncate(keep_bytes)
        # without a purge step TensorBoard shows the records after the checkpoint twice
        purge = first_iteration if keep_bytes else None
        self._tensorboard = EventFile(run_dir / "tensorboard", purge) if config.logging.tensorboard else None
        self._histograms = _continued(run_dir / "histograms.jsonl", first_iteration)
        self._samples = _continued(run_dir / "samples.jsonl", first_iteration)
        self._wandb = _start_wandb(run_dir, config) if config.logging.wandb != "off" else None

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for file in (self._file, self._histograms, self._samples, self._tensorboard):
            with contextlib.suppress(OSError):  # what a full disk did not take was reported when it was written
                if file is not None:
                    file.close()
        if self._wandb is not None:
            self._wandb.finish()

    def write(self, record: Mapping[str, float]) -> None:
        """Logs one record; `iteration` is its step."""
        nonfinite = [name for name, value in record.items() if not math.isfinite(value)]
        line = {name: None if name in nonfinite else value for name, value in record.items()}
        finite = {name: value for name, value in record.items() if name not in nonfinite}
        step = int(record["iteration"])
        with self._naming_a_full_disk():
            self._file.write(
                json.dumps(line | ({"nonfinite_metrics": nonfinite} if nonfinite else {}), allow_nan=False) + "\n"
            )
            self._file.flush()
            if self._tensorboard is not None:
                self._tensorboard.scalars(finite, step)
        if self._wandb is not None:
            self._wandb.log(finite, step=step)

    def position(self) -> int:
        """Bytes written so far, all of them on the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return os.fstat(self._file.fileno()).st_size  # tell() is stale until the first write after a truncation

    def histograms(self, iteration: int, values: Mapping[str, np.ndarray]) -> None:
        """Distributions by name, to a file and TensorBoard; a mean hides a component that is 0 or 1 and never between."""
        counted = {name: histogram(array) for name, array in values.items()}
        with self._naming_a_full_disk():
            _append(self._histograms, {"iteration": iteration, "histograms": counted})
            if self._tensorboard is not None:
                self._tensorboard.histograms(values, iteration)

    @contextlib.contextmanager
    def _naming_a_full_disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise MetricsError(
                f"{self.path.parent} takes no more metrics: {error.strerror}; make room and resume"
            ) from error

    def samples(self, iteration: int, rows: Sequence[Mapping]) -> None:
        """Completions to keep, see `samples.sample_rows`."""
        with self._naming_a_full_disk():
            _append(self._samples, {"iteration": iteration, "samples": list(rows)})


def _continued(path: Path, first_iteration: int) -> TextIO:
    """The file with its records before `first_iteration`, open for more; a line that a kill cut short is dropped."""
    kept = [record for record in read_records(path) if record["iteration"] < first_iteration] if path.exists() else []
    path.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
    return path.open("a", encoding="utf-8")


def _append(file: TextIO, record: Mapping) -> None:
    file.write(json.dumps(record, allow_nan=False) + "\n")
    file.flush()


def _start_wandb(run_dir: Path, config: Config):
    try:
        import wandb  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(
            f"logging.wandb is {config.logging.wandb!r} but wandb is not installed: `pip install wandb`, or set it to off"
        ) from error
    return wandb.init(
        project="jax_grpo", dir=str(run_dir), mode=config.logging.wandb, config=config.model_dump(), name=run_dir.name
    )
