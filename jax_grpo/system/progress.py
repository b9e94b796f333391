"""What a person sees while long work runs: a bar on a terminal; elsewhere lines, or nothing. Knows nothing of the work."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


def progress_bar(console: Console | None = None, *, shown: bool = True, transient: bool = False) -> Progress:
    """What is under way, how much of it is done, and times; nothing where the output is no terminal, or unless `shown`.

    `console` prints beside the bar, which a `transient` one leaves when it ends.
    """
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    times, disable = (TimeElapsedColumn(), TimeRemainingColumn()), not (shown and sys.stdout.isatty())
    return Progress(*columns, *times, console=console, transient=transient, disable=disable)


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
