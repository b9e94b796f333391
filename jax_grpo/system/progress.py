"""Progress of long work for a person: a bar on a terminal, a line every few seconds elsewhere. Knows nothing of the work."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

EVERY_S = 10.0  # seconds between lines


class _Lines(Progress):
    """Progress where no terminal shows a bar: plain lines from a thread of its own, so that a long step does not silence it."""

    def start(self) -> None:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._print_lines, name="progress", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def _print_lines(self) -> None:
        while not self._over.wait(EVERY_S):
            for task in self.tasks:
                if task.visible and not task.finished and (task.elapsed or 0.0) >= EVERY_S:
                    done = f"{task.completed:.0f} of {task.total:.0f}, " if task.total else ""
                    self.console.print(f"{task.description}: {done}{task.elapsed:.0f} s", markup=False, soft_wrap=True)


def progress_bar(console: Console | None = None, *, shown: bool = True, transient: bool = False) -> Progress:
    """Tasks under way, their done share and times; nothing unless `shown`. A context manager.

    `console` prints beside the bar, which a `transient` one leaves when it ends.
    """
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    times, terminal = (TimeElapsedColumn(), TimeRemainingColumn()), sys.stdout.isatty()
    kind = _Lines if shown and not terminal else Progress
    return kind(
        *columns,
        *times,
        console=console or Console(highlight=False),
        transient=transient,
        disable=not (shown and terminal),
    )


@contextlib.contextmanager
def under_way(bars: Progress, what: str) -> Iterator[None]:
    """Shows `what` beside the other work of `bars` while the block runs, with its seconds and no known end."""
    bar = bars.add_task(what, total=None)
    try:
        yield
    finally:
        bars.remove_task(bar)


@contextlib.contextmanager
def timed_parts() -> Iterator[Callable[[str, int], Callable[[int], None]]]:
    """Yields `begin(what, total)`, which begins a part and returns its tick; a part that ended is a line with its seconds."""
    console, part = Console(highlight=False), None
    with progress_bar(console, transient=True) as bars:

        def end() -> None:
            if part is not None:
                what, started = part
                console.print(f"{what}: {time.perf_counter() - started:.1f} s")
            for bar in bars.task_ids:
                bars.remove_task(bar)

        def begin(what: str, total: int) -> Callable[[int], None]:
            nonlocal part
            end()
            part = what, time.perf_counter()
            bar = bars.add_task(what, total=total)
            return lambda done: bars.update(bar, completed=done)

        yield begin
        end()
