"""Where a run's numbers go: `metrics.jsonl` (one object per record, strict JSON), TensorBoard and, if asked, W&B.

Beside it `histograms.jsonl` (reward components over time) and `samples.jsonl` (completions), which the report draws.
"""

import contextlib
import json
import math
import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from jax_grpo.config import Config, ConfigError
from jax_grpo.report.records import read_records

HISTOGRAM_BINS = 10
TENSORBOARD_BUCKETS = 30


class MetricsError(RuntimeError):
    """The metrics file cannot be written or continued; the message names it and what to do."""


def histogram(values_B: np.ndarray) -> dict:
    """`{"low", "high", "counts"}` of the finite values: equal bins over [0, 1], or wider where a value lies outside."""
    finite = np.asarray(values_B, np.float64)[np.isfinite(values_B)]
    low, high = float(min([0.0, *finite])), float(max([1.0, *finite]))
    counts, _ = np.histogram(finite, HISTOGRAM_BINS, (low, high))
    return {"low": low, "high": high, "counts": counts.tolist()}


class MetricsLog(contextlib.AbstractContextManager["MetricsLog"]):
    """Writes records of numbers. Each line is flushed, so a killed run keeps what it logged.

    A number that is not finite is written as null and its name listed under `nonfinite_metrics`: strict JSON has no NaN, and a
    silent null would hide it.
    """

    def __init__(self, run_dir: Path, config: Config, keep_bytes: int = 0, first_iteration: int = 0):
        """Continues a file after its first `keep_bytes` bytes, whose records end before `first_iteration`, or begins one.

        Raises MetricsError: the file is shorter, so that lines of the run would be missing.
        """
        self.path = run_dir / "metrics.jsonl"
        self._file = self.path.open("a", encoding="utf-8")
        if (size := self.path.stat().st_size) < keep_bytes:
            raise MetricsError(
                f"{self.path} has {size} bytes, but the checkpoint was saved after {keep_bytes}: lines are missing; put the "
                f"file back, or choose another run_dir"
            )
        self._file.truncate(keep_bytes)
        purge = first_iteration if keep_bytes else None  # else TensorBoard shows the records after the checkpoint twice
        self._events = EventFile(run_dir / "tensorboard", purge) if config.logging.tensorboard else None
        self._histograms = _continued(run_dir / "histograms.jsonl", first_iteration)
        self._samples = _continued(run_dir / "samples.jsonl", first_iteration)
        self._wandb = _start_wandb(run_dir, config) if config.logging.wandb != "off" else None

    def __exit__(self, *exception: object) -> None:
        for file in (self._file, self._histograms, self._samples, self._events):
            with contextlib.suppress(OSError):  # what a full disk did not take was reported when it was written
                if file is not None:
                    file.close()
        if self._wandb is not None:
            self._wandb.finish()

    def write(self, record: Mapping[str, float]) -> None:
        """Logs one record; `iteration` is its step."""
        step = int(record["iteration"])
        finite = {name: value for name, value in record.items() if math.isfinite(value)}
        line: dict[str, Any] = {name: finite.get(name) for name in record}
        if nonfinite := [name for name in record if name not in finite]:
            line["nonfinite_metrics"] = nonfinite
        self._append(self._file, line, lambda events: events.scalars(finite, step))
        if self._wandb is not None:
            self._wandb.log(finite, step=step)

    def histograms(self, iteration: int, values: Mapping[str, np.ndarray]) -> None:
        """Distributions by name, to a file and TensorBoard; a mean hides a component that is 0 or 1 and never between."""
        histograms = {name: histogram(array) for name, array in values.items()}
        record = {"iteration": iteration, "histograms": histograms}
        self._append(self._histograms, record, lambda events: events.histograms(values, iteration))

    def samples(self, iteration: int, rows: Sequence[Mapping]) -> None:
        """Completions to keep, see `records.sample_rows`."""
        self._append(self._samples, {"iteration": iteration, "samples": list(rows)})

    def position(self) -> int:
        """Bytes written so far, all of them on the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return os.fstat(self._file.fileno()).st_size  # tell() is stale until the first write after a truncation

    def _append(
        self, file: TextIO, record: Mapping, add_events: Callable[["EventFile"], None] = lambda events: None
    ) -> None:
        """Writes a line, and what belongs to it in TensorBoard; a full disk is named."""
        try:
            file.write(json.dumps(record, allow_nan=False) + "\n")
            file.flush()
            if self._events is not None:
                add_events(self._events)
        except OSError as error:
            folder = self.path.parent
            raise MetricsError(f"{folder} takes no more metrics: {error.strerror}; make room and resume") from error


def _continued(path: Path, first_iteration: int) -> TextIO:
    """The file with its records before `first_iteration`, open for more; a line that a kill cut short is dropped."""
    earlier = read_records(path, missing_ok=True)
    lines = [json.dumps(record) + "\n" for record in earlier if record["iteration"] < first_iteration]
    path.write_text("".join(lines), encoding="utf-8")
    return path.open("a", encoding="utf-8")


def _start_wandb(run_dir: Path, config: Config):
    mode = config.logging.wandb
    try:
        import wandb  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(
            f"logging.wandb is {mode!r} but wandb is not installed: `pip install wandb`, or set it to off"
        ) from error
    return wandb.init(project="jax_grpo", dir=str(run_dir), mode=mode, config=config.model_dump(), name=run_dir.name)


class Silent(contextlib.AbstractContextManager["Silent"]):
    """What a process that writes nothing has in the place of a log, a console or a health check: it takes every call."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *arguments: object, **options: object) -> None:
        return None

    def under_way(self, what: str) -> contextlib.AbstractContextManager[None]:
        """As the console's."""
        return contextlib.nullcontext()

    def __exit__(self, *exception: object) -> None:
        return None


class EventFile:
    """A new TensorBoard event file, written in the caller's own thread.

    tensorboardX's `SummaryWriter` writes in a thread that dies when the disk is full, and then waits for it without end; here the
    error reaches the run. Its message classes and bucket counts are used as they are.
    """

    def __init__(self, folder: Path, purge_step: int | None = None):
        """Hides records of `purge_step` and later ones in older files of the folder, if it is given."""
        # tensorboardX imports PyTorch where that is installed, which takes seconds, for tensors that it is never given here. An
        # entry of None makes the import fail as if it were not installed, which tensorboardX allows for.
        hides_pytorch = "torch" not in sys.modules
        if hides_pytorch:
            sys.modules["torch"] = None  # pyright: ignore[reportArgumentType]
        try:
            from tensorboardX import summary
            from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
            from tensorboardX.record_writer import masked_crc32c
        finally:
            if hides_pytorch:
                del sys.modules["torch"]
        self._summary, self._event, self._checksum = summary, Event, masked_crc32c
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"events.out.tfevents.{time.time():.6f}.{os.getpid()}.{socket.gethostname()}"
        self._file = self.path.open("wb")
        first = [] if purge_step is None else [{"step": purge_step, "session_log": SessionLog(status=SessionLog.START)}]
        self._write({"file_version": "brain.Event:2"}, *first)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Numbers by name."""
        self._write(*({"step": step, "summary": self._summary.scalar(*named)} for named in values.items()))

    def histograms(self, values: Mapping[str, np.ndarray], step: int) -> None:
        """Distributions by name."""
        summaries = (self._summary.histogram(*named, TENSORBOARD_BUCKETS) for named in values.items())
        self._write(*({"step": step, "summary": summary} for summary in summaries))

    def close(self) -> None:
        self._file.close()

    def _write(self, *events: Mapping[str, Any]) -> None:
        """Each event as a TFRecord: length, its checksum, the message, its checksum."""
        for fields in events:
            data = self._event(wall_time=time.time(), **fields).SerializeToString()
            for field in (struct.pack("<Q", len(data)), data):
                self._file.write(field + struct.pack("<I", self._checksum(field)))
        self._file.flush()
