"""What a person sees while training: a progress bar, a compact table row per iteration, completions with their rewards."""

import sys
import time
from collections.abc import Mapping, Sequence

from rich.console import Console as RichConsole
from rich.text import Text

from jax_grpo.config import Config
from jax_grpo.report.records import yardsticks_of
from jax_grpo.system.progress import progress_bar

EVALUATED = ("legal", "value", "technique", "best_move", "exact_fen", "reward")  # components shown of an evaluation
# heading, metric, width and format of a number; a missing metric shows as a dash
COLUMNS = (
    ("it", "iteration", 5, ".0f"),
    ("reward", "reward/mean", 7, ".3f"),
    ("legal", "legal_move_rate", 6, ".1%"),
    ("KL", "kl/mean", 7, ".4f"),
    ("beta", "beta", 7, ".4f"),
    ("entropy", "entropy", 7, ".3f"),
    ("clip", "clip_fraction/high", 6, ".1%"),
    ("|grad|", "grad_norm", 7, ".3f"),
    ("no sig.", "groups_without_signal", 7, ".0f"),
    ("tok/s", "tokens_per_second", 7, ".0f"),
    ("s/it", "time/iteration", 6, ".2f"),
)
# Beside "no sig.", of the batch that is trained on, where groups without signal are replaced: groups drawn for it.
DRAWN = ("drawn", "refill/drawn", 6, ".0f")
HEADER_EVERY = 20


class Console:
    """Use as a context manager around the loop. On a terminal the bar stays at the bottom; elsewhere only lines appear."""

    def __init__(self, config: Config, first_iteration: int = 0):
        width = None if sys.stdout.isatty() else 140  # a pipe's or a file's 80 columns would wrap the table
        self._rich = RichConsole(highlight=False, width=width)
        self._progress = progress_bar(self._rich, shown=config.logging.progress)
        self._bar = self._progress.add_task("training", total=config.iterations, completed=first_iteration)
        self._columns = (*COLUMNS[:-2], *([DRAWN] if config.rollout.refill else []), *COLUMNS[-2:])
        self._rows, self._started, self._compared = 0, time.time(), False

    def __enter__(self) -> "Console":
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def note(self, text: str) -> None:
        self._rich.print(Text(text), soft_wrap=True)  # a wrapped command cannot be copied

    def warning(self, text: str) -> None:
        self._rich.print(Text(text, style="bold yellow"))

    def iteration(self, metrics: Mapping[str, float]) -> None:
        """One table row; the heading comes again every `HEADER_EVERY` rows."""
        cells = [
            (format(metrics[metric], form) if metric in metrics else "-").rjust(width)
            for _, metric, width, form in self._columns
        ]
        if self._rows % HEADER_EVERY == 0:
            self._rich.print(
                Text(" ".join(heading.rjust(width) for heading, _, width, _ in self._columns), style="bold")
            )
        self._rows += 1
        self._rich.print(Text(" ".join(cells)))
        self._progress.advance(self._bar)

    def evaluation(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Held-out scores of both modes on one line; the first time what plain players would get, on another."""
        modes = []
        for mode in ("greedy", "sampled"):
            prefix = f"eval/{mode}/"
            scores = {name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)}
            shown = [name for component in EVALUATED for name in scores if name.rpartition("/")[2] == component]
            modes.append(f"{mode}: " + ", ".join(f"{name} {scores[name]:.3f}" for name in shown))
        elapsed = f"({time.time() - self._started:.0f} s)"
        self._rich.print(
            Text(f"held-out, iteration {iteration} {elapsed}  {'   '.join(modes)}", style="cyan"), soft_wrap=True
        )
        plain = [f"{player} {component} {value:.3f}" for player, component, value in yardsticks_of(metrics)]
        if plain and not self._compared:
            self._rich.print(Text(f"    beside plain players: {', '.join(plain)}", style="cyan"), soft_wrap=True)
        self._compared = True

    def samples(self, rows: Sequence[Mapping]) -> None:
        """Lines of `prompt`, `completion` (of an episode: its turns) and `reward` (see `records.sample_rows`)."""
        for row in rows:
            prompt, completion = row["prompt"].strip(), row["completion"].replace("\n", "⏎")
            line = Text("    ").append(prompt, style="dim")
            for said, answer in row.get("turns", [(completion, "")]):
                line.append(said.replace("\n", "⏎"), style="green").append(answer.replace("\n", "⏎"), style="cyan")
            if row.get("truncated"):
                line.append(f" [{row['truncated']}]", style="yellow")
            self._rich.print(line.append(f"   reward {row['reward']:.3f}", style="yellow"))
