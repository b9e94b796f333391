"""The reward of mathematics: a completion's last expression beside the row's answer, by the library math-verify.

Expressions are compared in a process of their own: the library ends what takes too long, such as 9^(9^9), by a signal, which only
a main thread gets, and rewards run in another one. A process that does not answer all the same is ended, and the next text has
a new one.
"""

import atexit
import importlib.util
import json
import select
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

from jax_grpo.rewards.texts import MARK, Completion, content

LIMIT_S = 10.0  # for one completion: more than `math_worker` takes
START_S = 60.0  # for a process's imports


def math_answer(completions: Sequence[Completion], answer: Sequence[Any], **columns: Any) -> list[float | None]:
    r"""1 where a completion's answer equals the row's as an expression, 0 elsewhere; None where the row's own cannot be read.

    Of a completion the last `\boxed{...}` counts, else its last expression in LaTeX or plain figures. The row's answer is LaTeX
    with or without dollar signs, a number, or GSM8K's solution, of which what stands behind `####` counts. What takes longer than
    two seconds to read, or to compare, is wrong.

    >>> math_answer([r"so it is \boxed{\frac{1}{2}}", "It is $x+1$", "7"], ["0.5", "1 + x", 8])
    [1.0, 1.0, 0.0]
    """
    with _LOCK:
        return [_WORKER.score(str(right), content(c)) for c, right in zip(completions, answer, strict=True)]


def _require() -> None:
    if importlib.util.find_spec("math_verify") is None:
        raise ImportError("it needs the library math-verify: pip install 'jax_grpo[math]'")


math_answer.require = _require  # pyright: ignore[reportFunctionMemberAccess] (called before a run begins)


class _Worker:
    """A process of `math_worker`, started when it is first needed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def score(self, answer: str, text: str) -> float | None:
        process = self._process or self._started()
        assert process.stdin is not None, "a pipe"
        process.stdin.write(json.dumps([answer.rpartition(MARK)[2].strip(), text]) + "\n")
        process.stdin.flush()
        if (line := _next_line(process, LIMIT_S)) is None:
            self.close()
            return 0.0
        return json.loads(line)

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _started(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "jax_grpo.rewards.math_worker"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        if _next_line(self._process, START_S) is None:
            self.close()
            raise TimeoutError(f"{' '.join(command)} was not ready within {START_S:g} s")
        return self._process


def _next_line(process: subprocess.Popen[str], seconds: float) -> str | None:
    """What a process writes next; None: nothing in this time."""
    assert process.stdout is not None, "a pipe"
    if not select.select([process.stdout], [], [], seconds)[0]:
        return None
    if not (line := process.stdout.readline()):
        raise RuntimeError(
            f"the process that compares expressions ended with status {process.wait()}; see its output above"
        )
    return line


_WORKER, _LOCK = _Worker(), threading.Lock()
atexit.register(_WORKER.close)
