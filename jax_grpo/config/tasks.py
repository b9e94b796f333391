"""The sections that say what is asked and how it is scored: the task, its engine, its turns, its mixture.

As in `sections`, the text under a field gives its unit, and a section says itself which of its settings cannot stand together.
"""

import difflib
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from jax_grpo.config.sections import Count, Fraction, Positive, Section, Text

OWN_SIDE = "own_side"  # the prompt style whose positions and moves are those of `positions.own_side`
MOST_LEGAL_MOVES = 218  # of any chess position (Petrovic 1964)


class EngineConfig(Section):
    """A pool of Stockfish processes, for rewards of moves without a label in the data."""

    path: str | None = None
    """Executable; null looks for `stockfish` on the PATH and in /usr/games."""
    nodes: Count = 2000
    """Search limit of one analysis, in nodes: deterministic, unlike a time limit."""
    processes: Count = 2
    """Engines working side by side, one thread each."""
    cache: str | None = None
    """SQLite file of analyses; null keeps them in memory."""
    multipv: Count = 5
    """Lines of an analysis; at least 5, which candidates are compared with. More give evaluations of more moves."""
    timeout_s: Positive = 30.0
    """Seconds after which a silent engine is restarted and the position analysed again."""


class Windows(NamedTuple):
    """Columns of what follows a prompt, `[c1 | o1 | c2 | o2 | ... | cK]`: a completion in each turn, an observation between two.

    A completion's window is padded on the right. An observation's is padded on the left: its last column is its last token,
    which predicts the next completion's first. Without episodes there is one completion.
    """

    turns: int
    completion: int  # columns of each, as many as `rollout.max_new_tokens`
    observation: int

    @property
    def columns(self) -> int:
        """Of all windows."""
        return self.begin(self.turns - 1) + self.completion

    @property
    def generated(self) -> int:
        """Most tokens that the model writes in an episode."""
        return self.turns * self.completion

    def begin(self, turn: int) -> int:
        """First column of a turn's completion; turns count from 0."""
        return turn * (self.completion + self.observation)


class EpisodeConfig(Section):
    """A task that answers completions: prompt, completion, observation, completion, and so on."""

    turns: Count
    """Most completions of an episode."""
    max_observation_tokens: Count = 16
    """A longer observation is an error, never cut."""


class MixturePart(Section):
    """One task of a mixture; what else it needs is in the task's own settings."""

    share: Positive = 1.0
    """Of the prompts, relative to the other parts' shares; met on average."""
    max_new_tokens: Count | None = None
    """Its own cap; null: rollout.max_new_tokens."""
    rewards: dict[str, float] | None = None
    """Weights by component, over the task's defaults."""

    @property
    def own_source(self) -> str | None:
        """What it reads, where that is not prompts.source."""
        return getattr(self, "source", None)


class PromptsPart(MixturePart):
    """Prompts of a file of yours, rewarded by task.rewards_from."""

    source: Text
    """The file, as prompts.source for task.name: prompts; prompts.split is of it too."""


class OwnPart(MixturePart):
    """A task of yours."""

    task: Text
    """`my_module:MyTask` or `my_file.py:MyTask`."""
    source: Text | None = None
    """What it reads, where that is not prompts.source."""


class Mixture(Section):
    """Several tasks in one batch: those that are not null."""

    policy: MixturePart | None = None
    environment: MixturePart | None = None
    length: MixturePart | None = None
    instructions: MixturePart | None = None
    prompts: PromptsPart | None = None
    own: OwnPart | None = None

    @property
    def sources(self) -> dict[str, str]:
        """Files of the parts that have one of their own, by the part's name."""
        return {name: part.own_source for name, part in self.parts.items() if part.own_source is not None}

    @property
    def parts(self) -> dict[str, MixturePart]:
        """The tasks that are asked, by name."""
        return {name: part for name in type(self).model_fields if (part := getattr(self, name)) is not None}

    def _refusals(self) -> Iterator[str]:
        if len(self.parts) < 2:
            yield f"task.mixture has {len(self.parts)} task; expected at least 2, or set task.name to it"
        for name, weights in (("prompts", "task.reward_weights"), ("own", "its component_weights")):
            if name in self.parts and self.parts[name].rewards is not None:
                yield f"task.mixture.{name}.rewards is of built-in tasks; the weights of this one are {weights}"

    def share(self, name: str) -> float:
        """Mean share of the prompts that are this task's."""
        return self.parts[name].share / sum(part.share for part in self.parts.values())


TASK_NAMES = ("policy", "environment", "length", "guess", "game", "instructions", "prompts", "mixed")
OPPONENTS = ("random", "capture", "two_ply", "self", "reference", *(f"stockfish:{level}" for level in range(21)))


class TaskConfig(Section):
    """What is asked and how it is scored."""

    name: str = "policy"
    """`policy` chooses moves, `environment` predicts the next state, `game` plays one side of a game of chess, `length` is the toy,
    `guess` the toy of several turns, `instructions` has some to follow, `mixed` asks several in one batch; `prompts` asks those of
    a file of yours and has functions of yours reward them; `my_module:MyTask` or `my_file.py:MyTask` is a task of your own."""
    mixture: Mixture | None = None
    """`mixed`: its tasks, such as {policy: {share: 3}, environment: {max_new_tokens: 100}}."""
    prompt_style: Literal["full", "best_move", "own_side"] = "full"
    """Policy and game tasks: the whole RookWorld row after `M:`, or one move after `B:`; `own_side`: one move, and whoever is to
    move is shown as White, Black's positions upside down with colours changed (the move it writes is turned back)."""
    rewards: dict[str, float] | None = None
    """Weights by component, over the task's defaults (TRL: reward_weights)."""
    best_for_black: Literal["first", "last"] = "first"
    """`last` reproduces the published labels, which teach Black the worst of the five moves."""
    length_cap: Count = 20
    """Length task: reward = min(characters of the first word, cap) / cap."""
    guess_numbers: Annotated[int, Field(ge=2, le=9)] = 7
    """Guess task: the hidden number is one of 1 to this."""
    episode: EpisodeConfig | None = None
    """Several turns, for a task that answers completions (`guess`, `game`), such as {turns: 3}; null: one completion a prompt.
    A game has so many moves of the model's."""
    opponent: Text = "random"
    """Game task: who answers the model's moves. `random` plays any legal move, `capture` takes the most it can, `two_ply` looks at
    the reply too; `stockfish:SKILL`, 0 to 20, needs task.engine; `reference` is the run's frozen start and needs kl.beta, `self`
    the policy as it is."""
    judge: Literal["material", "engine"] = "material"
    """Game task: who says the win probability of a game that is not over: the pieces, or task.engine."""
    illegal_fraction: Fraction = 0.05
    """Environment task: share of prompts whose move is illegal."""
    engine: EngineConfig | None = None
    """null: the data set's labels and the rules of chess only."""
    rewards_from: list[Text] | None = None
    """`prompts`: reward functions with TRL's signature, `my_module:reward` or `my_file.py:reward` (TRL: reward_funcs); see
    docs/extending.md."""
    reward_weights: list[float] | None = None
    """`prompts`: one for each function; null: 1 for each (TRL: reward_weights)."""
    stop: list[Text] = Field(default=[])
    """`prompts`: texts before which a completion ends; end-of-text always ends it (TRL: generation_kwargs stop_strings)."""
    stop_tokens: list[Any] = Field(default=[])
    """`prompts`: tokens that end a completion too, by their text or id, such as ["<|im_end|>", 198] (TRL: generation_kwargs
    eos_token_id); they are trained on, and no part of the text."""
    timeout_s: Positive = 60.0
    """`prompts`: seconds after which a reward function counts as hanging, and the run ends."""

    def asks_prompts(self) -> bool:
        """Whether functions of the user's reward some of the prompts."""
        return self.name == "prompts" or (self.mixture is not None and self.mixture.prompts is not None)

    def _refusals(self) -> Iterator[str]:
        if self.name not in TASK_NAMES and ":" not in self.name:
            close = difflib.get_close_matches(self.name, TASK_NAMES, n=1)
            hint = f" Did you mean {close[0]}?" if close else ""
            yield f"task.name is {self.name!r}; expected {', '.join(TASK_NAMES)}, or my_module:MyTask.{hint}"
        if not self.asks_prompts():
            for key, value in self._not_default("rewards_from", "reward_weights", "stop", "stop_tokens", "timeout_s"):
                yield f"task.{key} is {value!r}, which does nothing unless task.name is prompts; it is {self.name}"
        for token in self.stop_tokens:
            if isinstance(token, bool) or not isinstance(token, str | int) or token == "":
                yield f"task.stop_tokens has {token!r}; expected texts of single tokens, or ids"
        if self.rewards is not None and (self.name == "prompts" or ":" in self.name):
            yield f"task.rewards is of built-in tasks; task.name {self.name} has weights of its own"
        if self.engine is not None and self.engine.multipv < 5:
            yield (
                f"task.engine.multipv is {self.engine.multipv}; expected at least 5: top_five and the five candidates are "
                "compared with the engine's first five moves"
            )
        if self.engine is not None and self.engine.multipv < MOST_LEGAL_MOVES and self._asks_for_values():
            yield (
                f"task.engine.multipv is {self.engine.multipv} and the rewards have `value`, of every legal move; expected at "
                f"least {MOST_LEGAL_MOVES}, the most that a position can have"
            )
        yield from self._refused_games()
        if (self.name == "mixed") != (self.mixture is not None):
            yield (
                f"task.name is {self.name} and task.mixture is {'given' if self.mixture else 'null'}: mixed needs a mixture, "
                "and a mixture task.name: mixed"
            )
        if self.mixture is not None and self.rewards is not None:
            yield "task.rewards is of one task; in a mixture set task.mixture.<task>.rewards"

    def _refused_games(self) -> Iterator[str]:
        """What does not make a game, or is of a game and there is none."""
        if self.name != "game":
            for key, value in self._not_default("opponent", "judge"):
                yield f"task.{key} is {value!r}, which does nothing unless task.name is game; it is {self.name}"
            return
        if self.opponent not in OPPONENTS:
            yield f"task.opponent is {self.opponent!r}; expected {', '.join(OPPONENTS[:5])}, or stockfish:0 to stockfish:20"
        asking = [
            f"task.{key} {value}"
            for key, value in (("opponent", self.opponent), ("judge", self.judge))
            if value.startswith(("stockfish", "engine"))
        ]
        if asking and self.engine is None:
            yield f"{asking[0]} needs task.engine, such as {{nodes: 2000}}; it is null"
        if self.engine is not None and not asking:
            yield f"task.engine does nothing with task.opponent {self.opponent} and task.judge {self.judge}; leave it out"

    def _asks_for_values(self) -> bool:
        """Whether moves are rewarded by a table of the position's legal moves."""
        policy = self.mixture.policy if self.mixture else self if self.name == "policy" else None
        return policy is not None and "value" in (policy.rewards or {})
