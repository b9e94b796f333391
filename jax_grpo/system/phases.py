"""Which phase of an iteration is running, how long each took, and a line while one takes unusually long.

The watchdog is a thread of its own, so that it can write during a hang. Knows nothing of the phases' work.
"""

import contextlib
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import jax

FACTOR = 5.0  # times the median iteration
LEAST_S = 2.0  # seconds; below it an ordinary hiccup of the machine is many medians of a tiny model
LEAST_ITERATIONS = 3  # before there is a median; the first ones compile
WINDOW = 50  # latest iterations that the median is of
CHECK_S = 0.25  # seconds between looks


class Phases:
    """Seconds spent in each named phase of an iteration, and the one that runs now, by the clock `now`."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self.seconds: dict[str, float] = {}
        self.running: tuple[str, float] | None = None  # its name and start; left in place when it raises

    def run(self, name: str, work: Callable[[], Any], *, wait: bool = True) -> Any:
        """Result of `work()`, blocked until its arrays are ready unless the device is to go on beside the next phase."""
        started = self._now()
        self.running = (name, started)
        result = work()
        if wait:
            jax.block_until_ready(result)
        self.seconds[name] = self.seconds.get(name, 0.0) + self._now() - started
        self.running = None
        return result


class Watchdog:
    """Writes one line per iteration that takes over `FACTOR` medians, from its own thread, with the phase. A context manager."""

    def __init__(self, say: Callable[[str], None], now: Callable[[], float] = time.perf_counter):
        self._say, self._now = say, now
        self._seconds: deque[float] = deque(maxlen=WINDOW)
        self._current: tuple[int, Phases, float] | None = None
        self._warned_of = -1
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    @contextlib.contextmanager
    def iteration(self, number: int) -> Iterator[Phases]:
        """Around one iteration: the phases to run it in."""
        phases, started = Phases(self._now), self._now()
        self._current = number, phases, started
        yield phases
        self._seconds.append(self._now() - started)
        self._current = None

    def _watch(self) -> None:
        while not self._over.wait(CHECK_S):
            self._look()

    def _look(self) -> None:
        current = self._current
        if current is None or current[0] == self._warned_of or len(self._seconds) < LEAST_ITERATIONS:
            return
        iteration, phases, started = current
        median, now = statistics.median(self._seconds), self._now()
        if now - started > max(FACTOR * median, LEAST_S):
            self._warned_of = iteration
            name, since = phases.running or ("between phases", started)
            self._say(
                f"watchdog: iteration {iteration} has taken {now - started:.1f} s so far, {(now - started) / median:.0f} "
                f"times the median {median:.2f} s; it is in phase {name!r} since {now - since:.1f} s"
            )
