"""Signals that ask this process to stop, and why a child process failed. Knows nothing of what either does."""

import json
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)
TRACEBACK = "Traceback (most recent call last):"
LONGEST = 300  # characters of a failure


class StopSignals:
    """SIGTERM and SIGINT as a polite request: `requested` turns true, and the loop sees it between iterations.

    A second signal ends the process at once. A context manager; outside the main thread it does nothing.
    """

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._request) for number in SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        name = signal.Signals(number).name
        # os.write: a handler may interrupt a print, whose lock it would then wait for without end
        os.write(2, f"\n{name}: finishing this iteration, then saving; once more to quit at once\n".encode())


def child_record(
    command: Sequence[str], environment: Mapping[str, str], timeout: float | None = None
) -> dict[str, Any]:
    """The JSON object on the last line that a child process writes; `error` with its reason when it fails.

    Raises:
        subprocess.TimeoutExpired: it took longer than `timeout` seconds, and was ended, with its own children.
    """
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes, env=environment, start_new_session=True) as child:
        try:
            stdout, stderr = child.communicate(timeout=timeout)
        except BaseException:
            os.killpg(child.pid, signal.SIGKILL)
            raise
    if child.returncode:
        return {"error": failure(stderr, child.returncode)}
    return json.loads(stdout.splitlines()[-1])


def failure(stderr: str, returncode: int) -> str:
    """Why a process failed, in one line: its exception's own line, else the last line, else the signal that ended it.

    The exception is the first line that is not indented after the last traceback's head: libraries write more after it.
    """
    lines = stderr.strip().splitlines()
    if returncode < 0:
        return f"ended by {signal.Signals(-returncode).name}" + (f" after: {lines[-1][:200]}" if lines else "")
    heads = [number for number, line in enumerate(lines) if line == TRACEBACK]
    after = lines[heads[-1] + 1 :] if heads else []
    exceptions = (line for line in after if line.strip() and not line.startswith(" "))
    return next(exceptions, lines[-1] if lines else "no output")[:LONGEST]
