"""SIGTERM and SIGINT as a polite request: the loop sees it between iterations. A second one ends the process at once.

Knows nothing of what the loop does.
"""

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """`requested` turns true at the first signal. A context manager; outside the main thread it does nothing."""

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._request) for number in SIGNALS}
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        name = signal.Signals(number).name
        # os.write: a handler may interrupt a print, whose lock it would then wait for without end
        os.write(2, f"\n{name}: finishing this iteration, then saving; once more to quit at once\n".encode())
