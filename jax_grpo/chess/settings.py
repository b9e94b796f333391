"""What can be set of the tasks of chess, beside what can be set of every task. Knows no positions, moves or engines."""

from collections.abc import Iterator
from typing import Annotated, Literal

from jax_grpo.config.sections import Count, Fraction, Home, Positive, Section, Text
from jax_grpo.config.tasks import EpisodicSettings, Settings

OWN_SIDE = "own_side"  # the prompt style whose positions and moves are those of its mover: see `positions.position`
MOST_LEGAL_MOVES = 218  # of any position (Petrovic 1964)
OPPONENTS = ("random", "capture", "two_ply", "self", "reference", *(f"stockfish:{level}" for level in range(21)))


class EngineConfig(Section):
    """A pool of Stockfish processes, for rewards of moves without a label in the data."""

    path: Annotated[str, Home] | None = None
    """Executable; null looks for `stockfish` on the PATH and in /usr/games."""
    nodes: Count = 2000
    """Search limit of one analysis, in nodes: deterministic, unlike a time limit."""
    processes: Count = 2
    """Engines working side by side, one thread each."""
    cache: Annotated[str, Home] | None = None
    """SQLite file of analyses; null keeps them in memory."""
    multipv: Count = 5
    """Lines of an analysis; at least 5, which candidates are compared with. More give evaluations of more moves."""
    timeout_s: Positive = 30.0
    """Seconds after which a silent engine is restarted and the position analysed again."""


class MoveSettings(Settings):
    """Those of a task that asks for moves."""

    prompt_style: Literal["full", "best_move", "own_side"] = "full"
    """Policy and game tasks: the whole RookWorld row after `M:`, or one move after `B:`; `own_side`: one move, and whoever is to
    move is shown as White, Black's positions upside down with colours changed (the move it writes is turned back)."""
    engine: EngineConfig | None = None
    """Policy and game tasks; null: the data set's labels and the rules of chess only."""

    def _refusals(self) -> Iterator[str]:
        if self.engine is not None and self.engine.multipv < 5:
            yield (
                f"task.engine.multipv is {self.engine.multipv}; expected at least 5: top_five and the five candidates are "
                "compared with the engine's first five moves"
            )
        yield from super()._refusals()


class PolicySettings(MoveSettings):
    """`policy`: choosing moves."""

    best_for_black: Literal["first", "last"] = "first"
    """Policy task: `last` reproduces the published labels, which teach Black the worst of the five moves."""

    def _refusals(self) -> Iterator[str]:
        if self.engine is not None and 5 <= self.engine.multipv < MOST_LEGAL_MOVES and "value" in (self.rewards or {}):
            yield (
                f"task.engine.multipv is {self.engine.multipv} and the rewards have `value`, of every legal move; expected at "
                f"least {MOST_LEGAL_MOVES}, the most that a position can have"
            )
        yield from super()._refusals()


class EnvironmentSettings(Settings):
    """`environment`: predicting the next state."""

    illegal_fraction: Fraction = 0.05
    """Environment task: share of prompts whose move is illegal."""


class GameSettings(MoveSettings, EpisodicSettings):
    """`game`: playing one side of a game."""

    opponent: Text = "random"
    """Game task: who answers the model's moves. `random` plays any legal move, `capture` takes the most it can, `two_ply` looks at
    the reply too; `stockfish:SKILL`, 0 to 20, needs task.engine; `reference` is the run's frozen start and needs kl.beta, `self`
    the policy as it is."""
    judge: Literal["material", "engine"] = "material"
    """Game task: who says the win probability of a game that is not over: the pieces, or task.engine."""

    @property
    def needs_reference(self) -> str | None:
        return "task.opponent reference" if self.opponent == "reference" else None

    def _refusals(self) -> Iterator[str]:
        if self.opponent not in OPPONENTS:
            yield f"task.opponent is {self.opponent!r}; expected {', '.join(OPPONENTS[:5])}, or stockfish:0 to stockfish:20"
        needing = [
            f"task.{key} {value}"
            for key, value in (("opponent", self.opponent), ("judge", self.judge))
            if value.startswith(("stockfish", "engine"))
        ]
        if needing and self.engine is None:
            yield f"{needing[0]} needs task.engine, such as {{nodes: 2000}}; it is null"
        if self.engine is not None and not needing:
            yield f"task.engine does nothing with task.opponent {self.opponent} and task.judge {self.judge}; leave it out"
        yield from super()._refusals()
