"""Whether work takes time in proportion to its input, on a machine of any speed and with anything beside it.

Compared are sizes, not seconds: CPU time of this thread, in which other processes' turns do not count, at each size against the
first. A quadratic step takes 256 times the work a character at the last size; a busy core's shared caches cost less than `ROOM`.
"""

import time
from collections.abc import Callable

SIZES = tuple(400 * 4**k for k in range(5))  # to 102,400, by steps that stop at once what is cubic
ROOM = 8
TRIES = 3


def require_linear(prepare: Callable[[int], Callable[[], object]], sizes: tuple[int, ...] = SIZES) -> None:
    """Fails when the work that `prepare(size)` returns takes over `ROOM` times its proportion at one of the sizes, in every try."""
    first = min(_cost(prepare(sizes[0])) for _ in range(TRIES))
    for size in sizes[1:]:
        work, allowed, tries = prepare(size), ROOM * size / sizes[0] * first, []
        while len(tries) < TRIES and min(tries, default=allowed + 1) > allowed:
            tries.append(_cost(work))
        times = min(tries) / first
        print(f"{size // sizes[0]} times the size: {times:.1f} times the work (at most {ROOM * size // sizes[0]})")
        assert min(tries) <= allowed, f"{size // sizes[0]} times the size took {times:.0f} times the work: not linear"


def _cost(work: Callable[[], object]) -> int:
    """Nanoseconds of CPU that this thread takes."""
    started = time.thread_time_ns()
    work()
    return max(1, time.thread_time_ns() - started)
