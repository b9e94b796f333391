"""What a person sees while an evaluation runs: a bar for what is under way on a terminal, one line for each part elsewhere."""

import sys
import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class Steps:
    """`steps(what, total)` begins a part and returns its tick; use as a context manager around all parts."""

    def __init__(self) -> None:
        self._console = Console(highlight=False)
        columns = (
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
        )  # fmt: skip
        self._progress = Progress(*columns, console=self._console, transient=True, disable=not sys.stdout.isatty())
        self._part: tuple[str, float] | None = None

    def __enter__(self) -> "Steps":
        self._progress.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._finish(complete=error is None)
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
