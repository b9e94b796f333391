"""The sections of a config: one frozen model each; the text under a field gives its unit, and TRL's name where it differs.

Here are those of the prompts and of what a run shows and keeps; those of the model are in `model`, those of the task in `tasks`,
those by which it learns in `learning` and `objectives`. `--help` lists them all. A section says itself which of its settings
cannot stand together; what holds between sections is checked in `refusals`. Nothing here touches JAX.
"""

import os
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self, TypeVar

import pydantic
from pydantic import AfterValidator, BeforeValidator, Field

PROMPT_MULTIPLE = 16  # prompts are padded to a multiple of this many tokens, which bounds recompilation
MOST_PROMPT_TOKENS = 1024  # where the config does not say: a report of memory counts so many
VOCAB_MULTIPLE = 128  # aligned rows of the [V, H] embedding; avoids a pad of the odd 50257 in every step
ENDINGS = ("endings:KRK", "endings:KQK", "endings:KRK,KQK")  # sources of won endings with exact tables
FILE_FORMATS = {
    ".parquet": "parquet",
    ".jsonl": "jsonl",
    ".csv": "csv",
    ".pgn": "pgn",
    ".txt": "rookworld",
}  # by suffix
BUILT_IN_SOURCES = ("packaged", "packaged:tables", "selfplay", *ENDINGS)  # and `selfplay:GAMES`
Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, lt=2**31)]  # jitted programs take it as an int32
Text = Annotated[str, Field(min_length=1)]
Home = AfterValidator(os.path.expanduser)  # of a path: a ~ before it is the user's home
Fraction = Annotated[float, Field(ge=0, le=1)]
Share = Annotated[float, Field(gt=0, le=1)]
FractionBelowOne = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Number = TypeVar("Number")
Pair = Annotated[
    tuple[Number, Number], BeforeValidator(lambda given: tuple(given) if isinstance(given, list) else given)
]


def is_built_in(source: str) -> bool:
    """Whether the positions come with the repository or are played, and no file or folder has them."""
    return source in BUILT_IN_SOURCES or re.fullmatch(r"selfplay:[1-9]\d*", source) is not None


class Section(pydantic.BaseModel):
    """A frozen group of settings; unknown keys, wrong types, non-finite numbers and contradictions are refused."""

    model_config = pydantic.ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    def _refusals(self) -> Iterator[str]:
        """Why these settings cannot stand together, one sentence a reason. The first is reported; none behind it is computed."""
        return iter(())

    def not_default(self, *keys: str) -> Iterator[tuple[str, Any]]:
        """Those of these settings that the section has and that are not at their default, with their values."""
        fields = type(self).model_fields
        return ((key, value) for key in keys if key in fields and (value := getattr(self, key)) != fields[key].default)

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> Self:
        for sentence in self._refusals():
            raise ValueError(sentence)
        return self


class CurriculumConfig(Section):
    """Prompts by difficulty: each has a running pass rate, and those near a target rate come again."""

    passed: float
    """A completion has passed with at least this reward (the total with its penalties, to a millionth); a group's pass rate is
    the share of its completions that have."""
    target: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Earlier prompts are chosen by a Gaussian of their rate around this one,"""
    width: Positive = 0.25
    """of this standard deviation."""
    again: Share = 0.5
    """Share of a draw that is for earlier prompts; what is neither this nor `revisit` follows the usual order."""
    solved: Share = 0.98
    """A prompt of at least this rate (to a millionth) is retired: it comes by `revisit` alone. After one failure a running rate
    comes back to 1 only by rounding."""
    revisit: Fraction = 0.05
    """Share of a draw that is for retired prompts, all of them alike: one that fails again comes back."""
    newest: Share = 0.5
    """Weight of a prompt's newest group in its rate; the first one's is 1."""

    def _refusals(self) -> Iterator[str]:
        if self.again + self.revisit > 1:
            yield (
                f"prompts.curriculum.again {self.again} and prompts.curriculum.revisit {self.revisit} are more than a whole draw; "
                "their sum must be at most 1"
            )


class PromptsConfig(Section):
    """Where positions come from and how many prompts an iteration has."""

    source: Annotated[str, Home] = "packaged"
    """`packaged`, `packaged:tables` (every legal move has its value), `selfplay:GAMES` (random games, 200 of them where no number
    is given), `endings:KRK,KQK` or one of the two (won, every
    legal move exact), a file (.jsonl, .csv, .parquet, .pgn, RookWorld text rows .txt), or a folder of `jax_grpo.data`. For prompts
    of yours: a .jsonl, .csv or .parquet file, or a folder that `datasets` saved, with a `prompt` column."""
    split: Literal["train", "heldout", "all"] = "train"
    """No position or prompt is in both; a file's are split by a hash of each, a tenth held out. `all` trains on both: then an
    evaluation needs evaluation.source."""
    per_iteration: Count = 8
    """P: prompts of one iteration."""
    max_prompt_tokens: Count | None = None
    """A longer prompt is an error, never cut; null: as many as the model's positions leave beside the completion, 1,024 at most."""
    template: Text | list[dict[str, Text]] | None = None
    """A Jinja text that makes a row's prompt of its columns, such as "{{ question }} Think step by step.", or messages of such
    texts, such as [{role: user, content: "{{ question }}"}]; null: a row of a file has a `prompt`, or `messages`."""
    chat_template_kwargs: dict[str, Any] = {}
    """What the chat template of rows of messages is given besides, such as {enable_thinking: false}; a row's own column of this
    name goes before it."""
    curriculum: CurriculumConfig | None = None
    """Draw prompts again by how often they were passed; null: all in their order, epoch after epoch."""


class RefillConfig(Section):
    """DAPO's dynamic sampling: groups without signal are replaced by groups of further prompts (verl: algorithm.filter_groups)."""

    rounds: Count
    """Further draws of prompts.per_iteration prompts an iteration, at most (verl: max_num_gen_batches counts the first one too)."""
    tokens: Count | None = None
    """No further draw when the iteration's completions have so many tokens already; null: `rounds` alone ends it."""
    by: Text | None = None
    """The component of the reward that says what a group teaches, such as `right`: one whose completions all have the same value of
    it is without signal, whatever else is paid or taken off (verl: filter_groups.metric); null: the reward alone says it."""
    ahead: bool = False
    """Generate the next draw while rewards of this one are computed, and throw it away where it is not needed; changes no number
    but what that cost. For rewards that take long while the device idles, and batches that mostly need further draws."""


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
    refill: RefillConfig | None = None
    """Draw further prompts in the place of groups without signal; null: an iteration trains on what it drew first."""

    def beside_temperature(self) -> Iterator[tuple[str, Any]]:
        """The settings, with their values, that draw from something else than the softmax at the temperature."""
        return self.not_default("top_k", "top_p", "min_p", "repetition_penalty")


class EvaluationConfig(Section):
    """Held-out scores, greedy and sampled: of the policy itself, at rollout.temperature alone, without top_k, top_p, min_p and
    repetition_penalty."""

    positions: CountOrZero = 0
    """0: no evaluation."""
    source: Annotated[Text, Home] | None = None
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
    """Completions printed each time, each of another group; samples.jsonl has up to seven more of each group."""
    progress: bool = True
    """A live progress bar on a terminal; elsewhere a line every ten seconds of what takes long without printing anything."""


class CheckpointConfig(Section):
    """Saved states that a run continues from bit for bit: `--resume auto`."""

    every: CountOrZero = 100
    """Iterations between saves (TRL: save_steps); 0: only when the run is stopped and at its end."""
    keep_last: Count = 2
    """Newest checkpoints to keep (TRL: save_total_limit)."""
    keep_best: CountOrZero = 1
    """Best checkpoints to keep besides; 0: none."""
    best_metric: Text | None = None
    """Metric that says which are best (TRL: metric_for_best_model). `eval/...` is of the checkpoint's own weights and needs an
    evaluation at every save; all others are of the iteration before the save: its rollout came from the weights before its update.
    null: `reward/mean`, or with rollout.refill or prompts.curriculum, which pick the prompts that it is of, `reward/unselected`.
    The largest value is the best one, with a `-` before the name the smallest (TRL: greater_is_better)."""

    @property
    def ranking(self) -> tuple[str, bool]:
        """The metric that ranks checkpoints, empty where none is set, and whether its smallest value is the best one."""
        name = self.best_metric or ""
        return name.removeprefix("-"), name.startswith("-")


class ProfileConfig(Section):
    """JAX's profiler, into the run folder's `profile/`."""

    memory: bool = False
    """Save what is alive in device memory, for pprof, after each iteration of trace_steps; without those, after the first."""
    trace_steps: Annotated[list[CountOrZero], Field(min_length=2, max_length=2)] | None = None
    """[a, b]: trace iterations a <= i < b; the first one compiles, so a = 2 or more shows training. null: none."""

    def _refusals(self) -> Iterator[str]:
        if self.trace_steps is not None and self.trace_steps[0] >= self.trace_steps[1]:
            yield f"profile.trace_steps {self.trace_steps} must be [first, last] with first below last"


class MeshConfig(Section):
    """The devices of a run, data * fsdp * tensor of them; see docs/scaling.md. All 1: one device."""

    data: Count = 1
    """Prompts are cut over it; each of its parts has the whole state."""
    fsdp: Count = 1
    """Prompts are cut over it, and every parameter and moment besides (fully sharded data parallel)."""
    tensor: Count = 1
    """Heads, the MLP's inner width and the vocabulary are cut over it, and all that is stored of them."""
    coordinator: Text | None = None
    """Several processes: `auto`, where JAX finds out itself (Slurm, Kubernetes, Open MPI), or HOST:PORT of process 0, which
    listens there; null: one process."""
    process: Annotated[str, Field(pattern=r"^\d+/\d+$")] | None = None
    """NUMBER/COUNT, such as 0/2: which process this one is, from 0, of how many, which share the mesh's devices; null: as JAX finds
    out."""

    def _refusals(self) -> Iterator[str]:
        if self.coordinator is None:
            if self.process is not None:
                yield f"mesh.process {self.process} needs mesh.coordinator: HOST:PORT of process 0, or auto"
            return
        port = self.coordinator.rpartition(":")[2]
        if self.coordinator != "auto" and (":" not in self.coordinator or not port.isdigit()):
            yield f"mesh.coordinator {self.coordinator!r} must be HOST:PORT of process 0, such as 10.0.0.1:1234, or auto"
        number, count = self.place or (0, 1)
        if number >= count:
            yield f"mesh.process {self.process}: the number must be below the count, as processes are counted from 0"
        elif self.devices % count:
            yield f"mesh.process {self.process}: the count must divide the mesh's {self.devices} devices: each has as many"

    @property
    def place(self) -> tuple[int, int] | None:
        """The number of this process and how many there are; None: as JAX finds out."""
        if self.process is None:
            return None
        number, count = map(int, self.process.split("/"))
        return number, count

    @property
    def sizes(self) -> dict[str, int]:
        """Devices along each axis."""
        return {"data": self.data, "fsdp": self.fsdp, "tensor": self.tensor}

    @property
    def devices(self) -> int:
        return self.data * self.fsdp * self.tensor

    @property
    def prompt_parts(self) -> int:
        """Parts that prompts are cut into."""
        return self.data * self.fsdp

    def misfits(self, num_heads: int, hidden_size: int, num_kv_heads: int | None = None) -> Iterator[str]:
        """Why a model of these sizes cannot be cut so, one sentence a reason."""
        if num_heads % self.tensor:
            yield f"mesh.tensor {self.tensor} must divide the model's num_heads {num_heads}: heads stay whole"
        elif num_kv_heads is not None and num_kv_heads % self.tensor:
            yield f"mesh.tensor {self.tensor} must divide the model's num_kv_heads {num_kv_heads}: heads of keys stay whole"
        if hidden_size % (self.fsdp * self.tensor):
            yield (
                f"mesh.fsdp {self.fsdp} x mesh.tensor {self.tensor} must divide the model's hidden_size {hidden_size}: every "
                "parameter is cut over both"
            )
        if VOCAB_MULTIPLE % self.tensor:
            yield f"mesh.tensor {self.tensor} must divide {VOCAB_MULTIPLE}: the vocabulary is padded to a multiple of that"
