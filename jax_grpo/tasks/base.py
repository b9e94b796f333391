"""What a task is: prompts from positions, a stop rule, and reward components from decoded text.

A component is a pure function of (prompt, completion), vectorised over a batch; the reward is their weighted sum. A task
knows nothing of tokens, models or training.
"""

import dataclasses
import difflib
import sys
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from jax_grpo.tasks.stop import StopRule


@dataclasses.dataclass(frozen=True, slots=True)
class Position:
    """A chess position and what is known about it.

    Attributes:
        fen: Forsyth-Edwards notation, six fields.
        history: up to 10 UCI moves that led here, oldest first.
        moves: the engine's best moves, best first; empty where unlabelled.
        evaluations: in pawns from the side to move, aligned with `moves`; a mate in n is +-(100 - n/100).
        best: the move a published row calls best, where it differs from `moves[0]` on purpose.
        move: the move whose outcome the environment task asks for; None: one is drawn.
        next_state: the answer to that, `<new FEN>+<reward>+<terminated>+<truncated>`; given exactly with `move`.
    """

    fen: str
    history: tuple[str, ...] = ()
    moves: tuple[str, ...] = ()
    evaluations: tuple[float, ...] = ()
    best: str | None = None
    move: str | None = None
    next_state: str | None = None

    def __post_init__(self) -> None:
        # Some 1,900 moves can be written: one string for each, not fifteen for every position of a data set.
        object.__setattr__(self, "history", tuple(map(sys.intern, self.history)))
        object.__setattr__(self, "moves", tuple(map(sys.intern, self.moves)))


@dataclasses.dataclass(frozen=True)
class Prompt:
    """What is asked.

    Attributes:
        text: what the model reads.
        start_state: where its stop automaton begins.
        position: the position asked about, if any.
        answer: task-private.
        task: in a mixture, the name of the task that asks; else empty.
        max_new_tokens: its own cap, where it is below the run's.
    """

    text: str
    start_state: int
    position: Position | None = None
    answer: str | None = None
    task: str = ""
    max_new_tokens: int | None = None


class Task(Protocol):
    """A verifiable task. `component_weights` lists every component, diagnostics with weight 0 included."""

    name: str
    stop_rule: StopRule
    component_weights: Mapping[str, float]

    def prompt(self, position: Position, seed: int) -> Prompt:
        """The prompt for a position; a function of its arguments alone."""
        ...

    def score(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> dict[str, np.ndarray]:
        """Raw components [B] float32 of stop-truncated completions, by name, in the order of `component_weights`."""
        ...

    def prepare(self, prompts: Sequence[Prompt]) -> None:
        """Called while completions of the prompts are generated: work for `score` that does not need them. May do nothing."""
        ...

    def close(self) -> None:
        """Ends whatever the task started (engine processes)."""
        ...


def total_reward(components: Mapping[str, np.ndarray], weights: Mapping[str, float]) -> np.ndarray:
    """Weighted sum of the components, float32 [B]."""
    terms = [np.float32(weights[name]) * values for name, values in components.items()]
    return np.asarray(np.sum(terms, axis=0), np.float32)


def applicable(components: Mapping[str, np.ndarray], prompts: Sequence[Prompt]) -> dict[str, np.ndarray]:
    """Each component's values at the prompts it is about, without components that are about none of them.

    Outside mixtures that is all of [B]; in one, `policy/legal` is about the prompts of `policy`.
    """
    tasks_B = np.array([prompt.task for prompt in prompts])
    kept = {name: values[tasks_B == name.rpartition("/")[0]] for name, values in components.items()}
    return {name: values for name, values in kept.items() if len(values)}


def caps(prompts: Sequence[Prompt], cap: int) -> np.ndarray:
    """Most tokens of each prompt's completion, int32 [P]."""
    return np.array([prompt.max_new_tokens or cap for prompt in prompts], np.int32)


class UnknownComponent(ValueError):
    """`task.rewards` names a component that the task does not have."""


def with_overrides(task: str, defaults: Mapping[str, float], overrides: Mapping[str, float] | None) -> dict[str, float]:
    """Default weights with the config's `task.rewards` on top.

    Raises:
        UnknownComponent: names the component, the nearest one and all that exist.
    """
    for name in overrides or {}:
        if name not in defaults:
            close = difflib.get_close_matches(name, defaults, n=1)
            hint = f" Did you mean {close[0]}?" if close else ""
            raise UnknownComponent(
                f"task.rewards.{name}: the {task} task has no such component.{hint} It has {', '.join(defaults)}"
            )
    return dict(defaults) | dict(overrides or {})


def stack(rows: Sequence[Mapping[str, float]], names: Sequence[str]) -> dict[str, np.ndarray]:
    """Per-row components to arrays; a component that a row lacks is 0."""
    return {name: np.array([row.get(name, 0.0) for row in rows], np.float32) for name in names}
