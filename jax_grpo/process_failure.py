"""Why a child process failed, in one line, from what it wrote and how it ended."""

import signal

TRACEBACK = "Traceback (most recent call last):"
LONGEST = 300  # characters


def failure(stderr: str, returncode: int) -> str:
    """Why a process failed: its exception's own line, else the last line, else the signal that ended it.

    The exception is the first line that is not indented after the last traceback's head: libraries write more after it.
    """
    lines = stderr.strip().splitlines()
    if returncode < 0:
        return f"ended by {signal.Signals(-returncode).name}" + (f" after: {lines[-1][:200]}" if lines else "")
    heads = [number for number, line in enumerate(lines) if line == TRACEBACK]
    after = lines[heads[-1] + 1 :] if heads else []
    found = next(
        (line for line in after if line.strip() and not line.startswith(" ")), lines[-1] if lines else "no output"
    )
    return found[:LONGEST]
