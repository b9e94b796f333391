"""What a person sees while training: a progress bar, a compact table row per iteration, completions with their rewards.

Every line of numbers fits in `WIDTH` columns. Texts of prompts and completions are shown with their control characters escaped.
"""

import contextlib
import sys
import time
from collections.abc import Mapping, Sequence

from rich.console import Console as RichConsole
from rich.text import Text

from jax_grpo.config import Config
from jax_grpo.report.records import yardsticks_of
from jax_grpo.system.progress import progress_bar, under_way
from jax_grpo.system.terminal import printable
from jax_grpo.tasks.base import Task

WIDTH = 80  # columns
# heading, metric, width and format of a number; a metric that the run does not have has no column
COLUMNS = (
    ("it", "iteration", 5, ".0f"),
    ("reward", "reward/mean", 7, ".3f"),
    ("KL", "kl/mean", 6, ".4f"),
    ("beta", "beta", 6, ".4f"),
    ("entropy", "entropy", 7, ".3f"),
    ("clip", "clip_fraction/high", 5, ".1%"),
    ("|grad|", "grad_norm", 6, ".3f"),
    ("no sig", "groups_without_signal", 6, ".0f"),
    ("drawn", "refill/drawn", 5, ".0f"),
    ("tok/s", "tokens_per_second", 6, ".0f"),
    ("s/it", "time/iteration", 5, ".2f"),
)
HEADER_EVERY = 20


class Console:
    """Use as a context manager around the loop. On a terminal the bar stays at the bottom; elsewhere only lines appear."""

    def __init__(self, config: Config, task: Task, first_iteration: int = 0):
        self._rich = RichConsole(highlight=False)
        self._progress = progress_bar(self._rich, shown=config.logging.progress)
        # Elsewhere than on a terminal the rows of the table say how far it is.
        begins = {"completed": first_iteration, "visible": sys.stdout.isatty()}
        self._bar = self._progress.add_task("training", total=config.iterations, **begins)
        # A coefficient that stays needs no column, nor a count of groups where none is replaced.
        left_out = {"beta": not config.kl.adaptive, "refill/drawn": not config.rollout.refill}
        own = [(each.heading, each.metric, 5, ".1%") for each in task.headlines]  # beside the reward
        self._columns = [column for column in (*COLUMNS[:2], *own, *COLUMNS[2:]) if not left_out.get(column[1])]
        self._evaluated = task.shown
        self._shown: list[tuple[str, str, int, str]] = []
        self._rows, self._started, self._compared = 0, time.time(), False

    def __enter__(self) -> "Console":
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def note(self, text: str, style: str = "") -> None:
        """One line, however long: a wrapped command cannot be copied."""
        self._rich.print(Text(text, style=style), soft_wrap=True)

    def warning(self, text: str) -> None:
        self.note(text, "bold yellow")

    def under_way(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Shows what takes long inside the block."""
        return under_way(self._progress, what)

    def iteration(self, metrics: Mapping[str, float]) -> None:
        """One table row; the heading comes again every `HEADER_EVERY` rows."""
        if self._rows % HEADER_EVERY == 0:
            self._shown = [column for column in self._columns if column[1] in metrics]
            self.note(" ".join(heading.rjust(width) for heading, _, width, _ in self._shown), "bold")
        cells = [
            (_fitted(metrics[metric], width, form) if metric in metrics else "-").rjust(width)
            for _, metric, width, form in self._shown
        ]
        self._rows += 1
        self.note(" ".join(cells))
        self._progress.advance(self._bar)

    def evaluation(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Held-out scores, a line a mode; the first time what plain players would get, on another."""
        self.note(f"held-out, iteration {iteration} ({time.time() - self._started:.0f} s)", "cyan")
        for mode in ("greedy", "sampled"):
            prefix = f"eval/{mode}/"
            scores = {name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)}
            known = [name for component in self._evaluated for name in scores if name.rpartition("/")[2] == component]
            total = {"reward"} & scores.keys()
            shown = [*total, *known] if known else scores  # of a task that names none: all
            for line in _folded([f"{printable(name)} {scores[name]:.3f}" for name in shown], WIDTH - 13):
                self.note(f"    {mode:<9}{line}", "cyan")
        plain = [f"{player} {component} {value:.3f}" for player, component, value in yardsticks_of(metrics)]
        if plain and not self._compared:
            self.note(f"    beside plain players: {', '.join(plain)}", "cyan")
        self._compared = True

    def samples(self, rows: Sequence[Mapping]) -> None:
        """Prompt, completion (of an episode: its turns) and `reward` of each row (see `records.sample_rows`)."""
        for row in rows:
            parts = [("prompt", row["prompt"].strip(), "dim")]
            for completion, answer in row.get("turns", [(row["completion"], "")]):
                parts += [("completion", completion, "green"), *([("answer", answer, "cyan")] if answer else [])]
            lines = [Text(f"    {label:<12}").append(printable(text), style=style) for label, text, style in parts]
            if row.get("truncated"):
                lines[-1].append(f" [{row['truncated']}]", style="yellow")
            reward = "not a number" if row["reward"] is None else f"{row['reward']:.3f}"
            lines[-1].append(f"   reward {reward}", style="yellow")
            for line in lines:
                self._rich.print(line, soft_wrap=True)


def _fitted(value: float, width: int, form: str) -> str:
    """The number in the format, with fewer digits where it would be too wide."""
    forms = [f".{digits}{form[-1]}" for digits in range(int(form[1]), -1, -1)]
    return next((text for one in [*forms, ".0e"] if len(text := format(value, one)) <= width), "..."[:width])


def _folded(items: Sequence[str], width: int) -> list[str]:
    """The items in lines of that width at most, where none is wider itself."""
    lines = [""]
    for item in items:
        if lines[-1] and len(lines[-1]) + 2 + len(item) > width:
            lines.append("")
        lines[-1] += f"  {item}" if lines[-1] else item
    return lines
