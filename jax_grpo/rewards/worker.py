"""A process that scores texts one after the other, and is ended when one takes too long. Knows no reward.

A text that a library evaluates may never come to an end, print, or leave Python: here it can do so without the run.
"""

import contextlib
import json
import os
import selectors
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

START_S = 60.0  # for a process's imports


class NoReply(RuntimeError):
    """The process ended, or took too long."""


class TooSlow(NoReply):
    """The process took too long, and was ended."""


class Worker:
    """The process `python -m module`, which calls `serve`. It starts with the first request, and again after a `NoReply`."""

    def __init__(self, module: str, settings: Any = None):
        self._command, self._settings = [sys.executable, "-m", module], settings
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def ask(self, *request: Any, seconds: float) -> Any:
        """The reply to a request, both as JSON has them.

        Raises:
            NoReply: there is none; TooSlow: none within so many seconds.
            RuntimeError: the process cannot be started.
        """
        with self._lock:
            try:
                return self._exchanged(self._process or self._started(), request, seconds)
            except NoReply:
                self.close()
                raise

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _started(self) -> subprocess.Popen[str]:
        # In a session of its own: Ctrl-C asks a run to finish its iteration, which needs this process.
        # A fixed order of sets, on which libraries' random choices depend: every process makes the same of a request.
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        environment = os.environ | {"PYTHONHASHSEED": "0"}
        self._process = subprocess.Popen(self._command, **pipes, env=environment, start_new_session=True)
        try:
            self._exchanged(self._process, self._settings, START_S)
        except NoReply:
            self.close()
            raise RuntimeError(f"{' '.join(self._command)}: not ready within {START_S:g} s, or ended") from None
        return self._process

    @staticmethod
    def _exchanged(process: subprocess.Popen[str], request: Any, seconds: float) -> Any:
        assert process.stdin is not None and process.stdout is not None, "pipes"
        with contextlib.suppress(BrokenPipeError):  # it has ended: reading finds that out
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
        with selectors.DefaultSelector() as replies:  # not select.select, which ends at file descriptor 1,023
            replies.register(process.stdout, selectors.EVENT_READ)
            if not replies.select(seconds):
                raise TooSlow(f"no reply within {seconds:g} s")
        if not (line := process.stdout.readline()):
            raise NoReply(f"the process {process.args} ended; see its output above")
        return json.loads(line)


def serve(scorer_of: Callable[[Any], Callable[..., Any]]) -> None:
    """In the process: replies to each request with what the scorer, made once of the settings, returns for it."""
    requests, replies = sys.stdin, sys.stdout
    sys.stdin, sys.stdout = open(os.devnull), sys.stderr  # noqa: SIM115 (for texts that read or print)
    score = scorer_of(json.loads(requests.readline()))
    print("null", file=replies, flush=True)
    for line in requests:
        print(json.dumps(score(*json.loads(line))), file=replies, flush=True)
