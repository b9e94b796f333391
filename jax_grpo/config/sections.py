"""The sections of a config: one frozen model each; the text under a field gives its unit, and TRL's name where it differs.

Here are those of the model, the prompts and what a run shows and keeps; those of the task are in `tasks`, those by which it
learns in `learning`. `--help` lists them all. A section says itself which of its settings cannot stand together; what holds
between sections is checked in `config`. Nothing here touches JAX.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

import pydantic
from pydantic import Field

Dtype = Literal["float32", "bfloat16", "float64"]
VOCAB_MULTIPLE = 128  # aligned rows of the [V, H] embedding; avoids a pad of the odd 50257 in every step
ENDINGS = ("endings:KRK", "endings:KQK", "endings:KRK,KQK")  # sources of won endings with exact tables
BUILT_IN_SOURCES = ("packaged", "packaged:tables", "selfplay", *ENDINGS)  # every other one is a file or a folder
Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, lt=2**31)]  # jitted programs take it as an int32
Text = Annotated[str, Field(min_length=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Share = Annotated[float, Field(gt=0, le=1)]
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

    decode_attention: Literal["einsum", "pallas"] = "einsum"
    """Of a new token a completion: `einsum` anywhere; `pallas` is one kernel for NVIDIA cards (a CPU interprets it, for tests)."""

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


class CurriculumConfig(Section):
    """Prompts by difficulty: of each its running pass rate is kept, and those near a target rate are drawn again."""

    passed: float
    """A completion has passed with at least this reward (the total with its penalties, to a millionth); a group's pass rate is
    the share of its completions that have."""
    target: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Earlier prompts are drawn by a Gaussian of their rate around this one,"""
    width: Positive = 0.25
    """of this standard deviation."""
    again: Share = 0.5
    """Share of a draw that is for earlier prompts; what is neither this nor `revisit` follows the usual order."""
    solved: Share = 1.0
    """A prompt of at least this rate is retired: drawn by `revisit` alone."""
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
    curriculum: CurriculumConfig | None = None
    """Draw prompts again by how often they were passed; null: all in their order, epoch after epoch."""


class RefillConfig(Section):
    """DAPO's dynamic sampling: groups without signal are replaced by groups of further prompts (verl: algorithm.filter_groups)."""

    rounds: Count
    """Further draws of prompts.per_iteration prompts an iteration, at most (verl: max_num_gen_batches counts the first one too)."""
    tokens: Count | None = None
    """No further draw when the iteration's completions have so many tokens already; null: `rounds` alone ends it."""
    ahead: bool = False
    """Generate the next draw while rewards of this one are found, and throw it away where it is not needed; changes no number but
    what that cost. For rewards that take long while the device idles, and batches that mostly need further draws."""


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
    refill: RefillConfig | None = None
    """Draw further prompts in the place of groups without signal; null: an iteration trains on what it drew first."""


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
    processes: Count | None = None
    """How many there are, which have the mesh's devices between them; null: as JAX finds out."""
    process: CountOrZero | None = None
    """The number of this one, from 0; null: as JAX finds out."""

    def _refusals(self) -> Iterator[str]:
        if self.coordinator is None:
            for key, value in self._not_default("processes", "process"):
                yield f"mesh.{key} {value} needs mesh.coordinator: HOST:PORT of process 0, or auto"
            return
        port = self.coordinator.rpartition(":")[2]
        if self.coordinator != "auto" and (":" not in self.coordinator or not port.isdigit()):
            yield f"mesh.coordinator {self.coordinator!r} must be HOST:PORT of process 0, such as 10.0.0.1:1234, or auto"
        if self.processes is not None and self.process is not None and self.process >= self.processes:
            yield f"mesh.process {self.process} must be below mesh.processes {self.processes}: they are counted from 0"
        if self.processes is not None and self.devices % self.processes:
            yield f"mesh.processes {self.processes} must divide the mesh's {self.devices} devices: each has as many"

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

    def misfits(self, num_heads: int, hidden_size: int) -> Iterator[str]:
        """Why a model of these sizes cannot be cut so, one sentence a reason."""
        if num_heads % self.tensor:
            yield f"mesh.tensor {self.tensor} must divide the model's num_heads {num_heads}: heads stay whole"
        if hidden_size % (self.fsdp * self.tensor):
            yield (
                f"mesh.fsdp {self.fsdp} x mesh.tensor {self.tensor} must divide the model's hidden_size {hidden_size}: every "
                "parameter is cut over both"
            )
        if VOCAB_MULTIPLE % self.tensor:
            yield f"mesh.tensor {self.tensor} must divide {VOCAB_MULTIPLE}: the vocabulary is padded to a multiple of that"
