"""What a person sees while long work runs: a bar on a terminal; elsewhere lines, or nothing. Knows nothing of the work."""

import sys
import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


def progress_bar(console: Console | None = None, *, shown: bool = True, transient: bool = False) -> Progress:
    """What is under way, how much of it is done, and times; nothing where the output is no terminal, or unless `shown`.

    `console` prints beside the bar, which a `transient` one leaves when it ends.
    """
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    times, disable = (TimeElapsedColumn(), TimeRemainingColumn()), not (shown and sys.stdout.isatty())
    return Progress(*columns, *times, console=console, transient=transient, disable=disable)


class Steps:
    """`steps(what, total)` begins a part and returns its tick; ended parts are a line each. Use as a context manager."""

    def __init__(self) -> None:
        self._console = Console(highlight=False)
        self._progress = progress_bar(self._console, transient=True)
        self._part: tuple[str, float] | None = None

    def __enter__(self) -> "Steps":
        self._progress.start()
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        self._finish(complete=kind is None)
        self._progress.stop()

    def __call__(self, what: str, total: int) -> Callable[[int], None]:
        self._finish(complete=True)
        self._part = (what, time.perf_counter())
        bar = self._progress.add_task(what, total=total)
        return lambda done: self._progress.update(bar, completed=done)

    def _finish(self, *, complete: bool) -> None:
        if self._part is not None and complete:
            what, started = self._part
            self._console.print(f"{what}: {time.perf_counter() - started:.1f} s")
        for bar in self._progress.task_ids:
            self._progress.remove_task(bar)
        self._part = None
