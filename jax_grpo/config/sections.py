"""The sections of a config: one frozen model each; the text under a field gives its unit, and TRL's name where it differs.

Here are those that say what is asked of which model and what a run shows and keeps; those by which it learns are in `learning`.
`--help` lists them all. A section says itself which of its settings cannot stand together; what holds between sections is
checked in `config`. Nothing here touches JAX.
"""

import difflib
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple, Self

import pydantic
from pydantic import Field

Dtype = Literal["float32", "bfloat16", "float64"]
MOST_LEGAL_MOVES = 218  # of any chess position (Petrovic 1964)
ENDINGS = ("endings:KRK", "endings:KQK", "endings:KRK,KQK")  # sources of won endings with exact tables
BUILT_IN_SOURCES = ("packaged", "packaged:tables", "selfplay", *ENDINGS)  # every other one is a file or a folder
Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, lt=2**31)]  # jitted programs take it as an int32
Text = Annotated[str, Field(min_length=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]
FractionBelowOne = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]


class Section(pydantic.BaseModel):
    """A frozen group of settings; unknown keys, wrong types, non-finite numbers and contradictions are refused."""

    model_config = pydantic.ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    def _refusals(self) -> Iterator[str]:
        """Why these settings cannot stand together, one sentence a reason. The first is told, and none behind it computed."""
        return iter(())

    def _not_default(self, *keys: str) -> Iterator[tuple[str, Any]]:
        """Those of these settings, with their values, that are not what they are when nothing is said."""
        fields = type(self).model_fields
        return ((key, value) for key in keys if (value := getattr(self, key)) != fields[key].default)

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> Self:
        for sentence in self._refusals():
            raise ValueError(sentence)
        return self


class ModelConfig(Section):
    """The policy's weights, tokenizer and precision."""

    weights: str | None = None
    """`packaged:rook-small`, a Hugging Face folder (safetensors), a run's folder, a checkpoint, or null: random weights of the
    sizes below."""
    tokenizer: str = "gpt2"
    """`gpt2`, `chess`, a tokenizer.json of any kind, a folder with one or with vocab.json and merges.txt, or `packaged:NAME`."""
    vocab_size: Count | None = None
    """With random weights; null: the tokenizer's."""
    num_layers: Count | None = None
    """L: transformer blocks; this and the three sizes below are for random weights, else config.json has them."""
    num_heads: Count | None = None
    """N: attention heads of a block; divides hidden_size."""
    hidden_size: Count | None = None
    """H: width of the residual stream."""
    max_position_embeddings: Count | None = None
    """Context in tokens, prompt and completion together."""
    compute_dtype: Dtype = "float32"
    """Activations and matmuls; softmax, log-probabilities and reductions use at least float32."""
    param_dtype: Dtype = "float32"
    """Master parameters, gradients and optimiser moments."""
    remat: bool = False
    """Recompute blocks in the backward pass (TRL: gradient_checkpointing)."""
    remat_keeps: Literal["nothing", "matmuls"] = "nothing"
    """`remat`: what is kept of a block besides its inputs; `matmuls` are the results of its products with weights."""

    def _refusals(self) -> Iterator[str]:
        if self.remat_keeps != "nothing" and not self.remat:
            yield f"model.remat_keeps {self.remat_keeps} needs model.remat true: without it everything is kept"
        if self.weights is None:
            sizes = ("num_layers", "num_heads", "hidden_size", "max_position_embeddings")
            if missing := [name for name in sizes if getattr(self, name) is None]:
                yield f"model.weights is null, so model.{', model.'.join(missing)} must be given"
            if (self.hidden_size or 0) % (self.num_heads or 1):
                yield f"model.hidden_size {self.hidden_size} must be a multiple of model.num_heads {self.num_heads}"

    @property
    def recomputed(self) -> Literal[False, "all", "dots"]:
        """What the backward pass recomputes of a block: nothing, everything, or all but its products with weights."""
        return ("dots" if self.remat_keeps == "matmuls" else "all") if self.remat else False


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
    prompt_style: Literal["full", "best_move"] = "full"
    """Policy and game tasks: the whole RookWorld row after `M:`, or one move after `B:`."""
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
    stop: list[Text] = []
    """`prompts`: texts before which a completion ends; end-of-text always ends it (TRL: generation_kwargs stop_strings)."""
    stop_tokens: list[Any] = []
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


class PromptsConfig(Section):
    """Where positions come from and how many prompts an iteration has."""

    source: str = "packaged"
    """`packaged`, `packaged:tables` (every legal move has its value), `selfplay`, `endings:KRK,KQK` or one of the two (won, every
    legal move exact), a file (.jsonl, .csv, .parquet, .pgn, RookWorld text rows .txt), or a folder of `jax_grpo.data`. For prompts
    of yours: a .jsonl, .csv or .parquet file, or a folder that `datasets` saved, with a `prompt` column."""
    format: Literal["auto", "jsonl", "csv", "parquet", "pgn", "rookworld"] = "auto"
    """`auto`: by the file's suffix."""
    split: Literal["train", "heldout", "all"] = "train"
    """No position or prompt is in both; a file's are split by a hash of each, a tenth held out. `all` trains on both: then an
    evaluation needs evaluation.source."""
    per_iteration: Count = 8
    """P: prompts of one iteration."""
    max_prompt_tokens: Count = 64
    """A longer prompt is an error, never cut."""
    selfplay_games: Count = 200
    """Random games that `selfplay` takes its positions from."""


class RolloutConfig(Section):
    """Generation; the same for every completion."""

    group_size: Count = 8
    """G: completions a prompt (TRL: num_generations)."""
    max_new_tokens: Count = 144
    """C: the cap (TRL: max_completion_length)."""
    temperature: Positive = 1.0
    """Divides the logits, here and wherever log-probabilities are taken."""
    top_k: CountOrZero = 0
    """0: off."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Keep the likeliest tokens of this total probability; 1: off."""
    min_p: Fraction = 0.0
    """Keep tokens of at least this share of the likeliest one's probability; 0: off."""
    repetition_penalty: Positive = 1.0
    """Divides positive logits of seen tokens and multiplies negative ones; 1: off."""
    compaction: bool = True
    """Decode only half of the prompts once the others' completions have all stopped; changes no token."""


class EvaluationConfig(Section):
    """Held-out scores, greedy and sampled."""

    positions: CountOrZero = 0
    """0: no evaluation."""
    source: Text | None = None
    """Where they come from, as prompts.source: a file is asked whole, of everything else the held-out split. Positions that the
    run trains on are left out. null: the held-out split of prompts.source."""
    every: CountOrZero = 0
    """Iterations between evaluations; 0: at the start and the end."""


class LoggingConfig(Section):
    """What the run shows and writes beside metrics.jsonl."""

    tensorboard: bool = True
    """Event files in the run folder."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Weights & Biases; `offline` needs no network."""
    samples_every: CountOrZero = 10
    """Iterations between printed completions; 0: never."""
    samples: Count = 3
    """Completions printed each time."""
    progress: bool = True
    """A live progress bar on a terminal."""


class CheckpointConfig(Section):
    """Saved states that a run continues from bit for bit: `--resume auto`."""

    every: CountOrZero = 100
    """Iterations between saves (TRL: save_steps); 0: only when the run is stopped and at its end."""
    keep_last: Count = 2
    """Newest checkpoints to keep (TRL: save_total_limit)."""
    keep_best: CountOrZero = 1
    """Best checkpoints to keep besides; 0: none."""
    best_metric: Text = "reward/mean"
    """Metric that says which are best (TRL: metric_for_best_model). `eval/...` is of the checkpoint's own weights and needs an
    evaluation at every save; all others are of the iteration before the save: its rollout came from the weights before its update.
    """
    best_is: Literal["largest", "smallest"] = "largest"
    """TRL: greater_is_better."""


class ProfileConfig(Section):
    """JAX's profiler, into the run folder's `profile/`."""

    memory: bool = False
    """Save what is alive in device memory, for pprof, after each iteration of trace_steps; without those, after the first."""
    trace_steps: Annotated[list[CountOrZero], Field(min_length=2, max_length=2)] | None = None
    """[a, b]: trace iterations a <= i < b; the first one compiles, so a = 2 or more shows training. null: none."""

    def _refusals(self) -> Iterator[str]:
        if self.trace_steps is not None and self.trace_steps[0] >= self.trace_steps[1]:
            yield f"profile.trace_steps {self.trace_steps} must be [first, last] with first below last"
