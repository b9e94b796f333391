"""TensorBoard event files, written in the caller's own thread.

tensorboardX's `SummaryWriter` writes in a thread that dies when the disk is full, and then waits for it without end; here the
error reaches the run. Its message classes and bucket counts are used as they are. Knows no metric's meaning.
"""

import contextlib
import os
import socket
import struct
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

BUCKETS = 30


@contextlib.contextmanager
def _without_pytorch() -> Iterator[None]:
    """tensorboardX imports PyTorch where that is installed, which takes seconds, for tensors that it is never given here.

    An entry of None makes the import fail as if it were not installed, which tensorboardX allows for.
    """
    if "torch" in sys.modules:
        yield
        return
    sys.modules["torch"] = None  # pyright: ignore[reportArgumentType]
    try:
        yield
    finally:
        del sys.modules["torch"]


class EventFile:
    """A new event file in `folder`.

    Args:
        folder: made when it is not there.
        purge_step: records of this step and later ones in older files of the folder are hidden; None hides none.
    """

    def __init__(self, folder: Path, purge_step: int | None = None):
        with _without_pytorch():
            from tensorboardX import summary
            from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
            from tensorboardX.record_writer import masked_crc32c

        self._summary, self._event, self._checksum = summary, Event, masked_crc32c
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"events.out.tfevents.{time.time():.6f}.{os.getpid()}.{socket.gethostname()}"
        self._file = self.path.open("wb")
        self._write(file_version="brain.Event:2")
        if purge_step is not None:
            self._write(step=purge_step, session_log=SessionLog(status=SessionLog.START))
        self._file.flush()

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Numbers by name."""
        for name, value in values.items():
            self._write(step=step, summary=self._summary.scalar(name, value))
        self._file.flush()

    def histograms(self, values: Mapping[str, np.ndarray], step: int) -> None:
        """Distributions by name."""
        for name, array in values.items():
            self._write(step=step, summary=self._summary.histogram(name, array, BUCKETS))
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _write(self, **fields: Any) -> None:
        """One TFRecord: length, its checksum, the message, its checksum."""
        data = self._event(wall_time=time.time(), **fields).SerializeToString()
        length = struct.pack("<Q", len(data))
        checksums = (struct.pack("<I", self._checksum(part)) for part in (length, data))
        self._file.write(length + next(checksums) + data + next(checksums))
