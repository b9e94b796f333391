"""The reward of mathematics: a completion's last expression beside the row's answer, by the library math-verify.

Expressions are compared in a process of their own: the library ends what takes too long, such as 9^(9^9), by a signal, which only
a main thread gets, and rewards run in another one. A process that does not answer all the same is ended, and the next text has
a new one.
"""

import atexit
import importlib.util
from collections.abc import Sequence
from typing import Any

from jax_grpo.rewards.texts import MARK, Completion, content
from jax_grpo.rewards.worker import TooSlow, Worker

LIMIT_S = 10.0  # for one completion: more than `math_worker` takes


def math_answer(completions: Sequence[Completion], answer: Sequence[Any], **columns: Any) -> list[float | None]:
    r"""1 where a completion's answer equals the row's as an expression, 0 elsewhere; None where the row's own cannot be read.

    Of a completion the last `\boxed{...}` counts, else its last expression in LaTeX or plain figures. The row's answer is LaTeX
    with or without dollar signs, a number, or GSM8K's solution, of which what stands behind `####` counts. What takes longer than
    two seconds to read, or to compare, is wrong.

    >>> math_answer([r"so it is \boxed{\frac{1}{2}}", "It is $x+1$", "7"], ["0.5", "1 + x", 8])
    [1.0, 1.0, 0.0]
    """
    return [_score(str(right), content(c)) for c, right in zip(completions, answer, strict=True)]


def _score(answer: str, text: str) -> float | None:
    try:
        return _WORKER.ask(answer.rpartition(MARK)[2].strip(), text, seconds=LIMIT_S)
    except TooSlow:
        return 0.0


def _require() -> None:
    if importlib.util.find_spec("math_verify") is None:
        raise ImportError("it needs the library math-verify: pip install 'jax_grpo[math]'")


math_answer.require = _require  # pyright: ignore[reportFunctionMemberAccess] (called before a run begins)


_WORKER = Worker("jax_grpo.rewards.math_worker")
atexit.register(_WORKER.close)
