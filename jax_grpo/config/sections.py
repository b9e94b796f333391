"""The sections of a config: one frozen model each; the text under a field gives its unit, and TRL's name where it differs.

`--help` lists them all. A section says itself which of its settings cannot stand together; what holds between sections is
checked in `config`. Nothing here touches JAX.
"""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, Self

import pydantic
from pydantic import Field

Dtype = Literal["float32", "bfloat16", "float64"]
Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, lt=2**31)]  # jitted programs take it as an int32
Text = Annotated[str, Field(min_length=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]
FractionBelowOne = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]


def _count_or_auto(value: Any) -> Any:
    if value != "auto" and (type(value) is not int or value < 1):
        raise ValueError(f"is {value!r}; expected a whole number of at least 1, or auto")
    return value


CountOrAuto = Annotated[int | Literal["auto"], pydantic.PlainValidator(_count_or_auto)]


class Section(pydantic.BaseModel):
    """A frozen group of settings; unknown keys, wrong types, non-finite numbers and contradictions are refused."""

    model_config = pydantic.ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    def _refusals(self) -> Iterator[str]:
        """Why these settings cannot stand together, one sentence a reason. The first is told, and none behind it computed."""
        return iter(())

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
    """`gpt2`, `chess`, or a folder with vocab.json and merges.txt."""
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


class MixturePart(Section):
    """One task of a mixture; what else it needs is in the task's own settings."""

    share: Positive = 1.0
    """Of the prompts, relative to the other parts' shares; met on average."""
    max_new_tokens: Count | None = None
    """Its own cap; null: rollout.max_new_tokens."""
    rewards: dict[str, float] | None = None
    """Weights by component, over the task's defaults."""


class Mixture(Section):
    """Several tasks in one batch: those that are not null."""

    policy: MixturePart | None = None
    environment: MixturePart | None = None
    length: MixturePart | None = None

    @property
    def parts(self) -> dict[str, MixturePart]:
        """The tasks that are asked, by name."""
        return {name: part for name in type(self).model_fields if (part := getattr(self, name)) is not None}

    def _refusals(self) -> Iterator[str]:
        if len(self.parts) < 2:
            yield f"task.mixture has {len(self.parts)} task; expected at least 2, or set task.name to it"

    def share(self, name: str) -> float:
        """Mean share of the prompts that are this task's."""
        return self.parts[name].share / sum(part.share for part in self.parts.values())


class TaskConfig(Section):
    """What is asked and how it is scored."""

    name: Literal["policy", "environment", "length", "mixed"] = "policy"
    """`policy` chooses moves, `environment` predicts the next state, `length` is the toy, `mixed` asks several in one batch."""
    mixture: Mixture | None = None
    """`mixed`: its tasks, such as {policy: {share: 3}, environment: {max_new_tokens: 100}}."""
    prompt_style: Literal["full", "best_move"] = "full"
    """Policy task: the whole RookWorld row after `M:`, or one move after `B:`."""
    rewards: dict[str, float] | None = None
    """Weights by component, over the task's defaults (TRL: reward_weights)."""
    best_for_black: Literal["first", "last"] = "first"
    """`last` reproduces the published labels, which teach Black the worst of the five moves."""
    length_cap: Count = 20
    """Length task: reward = min(characters of the first word, cap) / cap."""
    illegal_fraction: Fraction = 0.05
    """Environment task: share of prompts whose move is illegal."""
    engine: EngineConfig | None = None
    """null: the data set's labels and the rules of chess only."""

    def _refusals(self) -> Iterator[str]:
        if self.engine is not None and self.engine.multipv < 5:
            yield (
                f"task.engine.multipv is {self.engine.multipv}; expected at least 5: top_five and the five candidates are "
                "compared with the engine's first five moves"
            )
        if (self.name == "mixed") != (self.mixture is not None):
            yield (
                f"task.name is {self.name} and task.mixture is {'given' if self.mixture else 'null'}: mixed needs a mixture, "
                "and a mixture task.name: mixed"
            )
        if self.mixture is not None and self.rewards is not None:
            yield "task.rewards is of one task; in a mixture set task.mixture.<task>.rewards"


class PromptsConfig(Section):
    """Where positions come from and how many prompts an iteration has."""

    source: str = "packaged"
    """`packaged`, `selfplay`, a file (.jsonl, .csv, .parquet, .pgn, RookWorld text rows .txt), or a folder of `jax_grpo.data`."""
    format: Literal["auto", "jsonl", "csv", "parquet", "pgn", "rookworld"] = "auto"
    """`auto`: by the file's suffix."""
    split: Literal["train", "heldout", "all"] = "train"
    """No position is in both; a file's are split by a hash of the position, a tenth held out. `all` trains on both: then an
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


class AdvantageConfig(Section):
    """Group-relative advantages."""

    baseline: Literal["mean", "leave_one_out"] = "mean"
    """Reward minus the group's mean, or minus the mean of the other samples (RLOO)."""
    scale: Literal["none", "group", "batch"] = "group"
    """TRL: scale_rewards."""
    components: Literal["sum_first", "normalise_each", "gdpo"] = "sum_first"
    """Of several reward components: `sum_first` takes the weighted sum as the reward; `normalise_each` scales each by its own
    deviation in the group and then takes the weighted sum; `gdpo` divides that by its deviation over the batch (TRL:
    multi_objective_aggregation, sum_then_normalize is sum_first and normalize_then_sum is gdpo)."""

    def _refusals(self) -> Iterator[str]:
        if self.components != "sum_first" and self.scale != "group":
            yield (
                f"advantage.scale {self.scale} is of advantage.components sum_first; {self.components} scales each component "
                "by its group: expected group"
            )
        if self.components == "gdpo" and self.baseline != "mean":
            yield (
                f"advantage.baseline {self.baseline} does nothing with advantage.components gdpo: it makes all advantages larger "
                "by one factor, which the division by the batch's deviation takes out again; expected mean"
            )


class OverlongPenalty(Section):
    """DAPO's soft penalty: 0 up to cap - length tokens, then linearly to -weight at the cap."""

    length: Count
    """Tokens before the cap where the penalty begins."""
    weight: Positive
    """Reward lost at the cap."""


class ObjectiveConfig(Section):
    """The policy loss (TRL's `loss_type` is split into `name` and `aggregation` here)."""

    name: Literal["clip", "cispo", "sapo", "reinforce"] = "clip"
    """Loss of one token (TRL: loss_type)."""
    epsilon_low: NotNegative = 0.2
    """`clip`: the ratio's lower bound is 1 - epsilon_low (TRL: epsilon)."""
    epsilon_high: NotNegative = 0.2
    """`clip`: the ratio's upper bound is 1 + epsilon_high. `cispo`: the weight's bound itself, usually 5."""
    delta: Positive | None = None
    """`clip`, two-sided: bound of the unclipped ratio."""
    tau_pos: Positive = 1.0
    """`sapo`: gate temperature where the advantage is positive (TRL: sapo_temperature_pos)."""
    tau_neg: Positive = 1.05
    """`sapo`: gate temperature elsewhere (TRL: sapo_temperature_neg)."""
    importance_level: Literal["token", "sequence"] = "token"
    """TRL: importance_sampling_level; `sequence` is GSPO."""
    aggregation: Literal["grpo", "bnpo", "dapo", "dr_grpo", "luspo"] = "dapo"
    """How the losses of tokens become one number (TRL: loss_type)."""
    entropy_coefficient: float = 0.0
    """Bonus on the mean entropy, nats."""
    entropy_quantile: FractionBelowOne = 0.0
    """Train the policy term on tokens at or above this quantile of entropy (TRL: 1 - top_entropy_quantile); 0: all."""
    mask_truncated: bool = False
    """Leave out completions cut at the cap (TRL: mask_truncated_completions)."""
    overlong_penalty: OverlongPenalty | None = None
    mismatch_cap: Positive | None = None
    """Cap of the weight exp(old_logp - sampling_logp); null: no correction."""

    # The losses that read a setting; with another one it would do nothing, without a word.
    _OF: ClassVar[dict[str, tuple[str, ...]]] = {
        "epsilon_low": ("clip",),
        "epsilon_high": ("clip", "cispo"),
        "delta": ("clip",),
        "tau_pos": ("sapo",),
        "tau_neg": ("sapo",),
    }

    def _refusals(self) -> Iterator[str]:
        for key, names in self._OF.items():
            if self.name not in names and (value := getattr(self, key)) != type(self).model_fields[key].default:
                yield f"objective.{key} {value} is of objective.name {' and '.join(names)}; {self.name} would ignore it"
        if self.name == "clip" and self.epsilon_low >= 1:
            yield f"objective.epsilon_low {self.epsilon_low} must be below 1: the ratio's bound is 1 - it"
        if self.delta is not None and self.delta <= 1 + self.epsilon_high:
            yield f"objective.delta {self.delta} must exceed 1 + objective.epsilon_high = {1 + self.epsilon_high}"


class KLConfig(Section):
    """The penalty that holds the policy to the frozen reference."""

    estimator: Literal["k1", "k2", "k3"] = "k3"
    """With d = ref_logp - logp: -d, d^2 / 2, or exp(d) - 1 - d (TRL's)."""
    beta: NotNegative = 0.04
    """Coefficient (TRL: the same name); 0: no reference model is loaded."""
    reference_dtype: Literal["parameters", "bfloat16"] = "parameters"
    """Of the frozen reference's weights: the policy's `model.param_dtype`, or half of float32's memory (with
    model.compute_dtype bfloat16 only norms, biases and embeddings are rounded more than they would be anyway)."""
    importance_corrected: bool = False
    """Multiply by the importance ratio (TRL: use_bias_correction_kl)."""
    adaptive: bool = False
    """Move beta after each optimiser step so that the KL stays at the target."""
    target: Positive = 0.05
    """Nats per token."""
    beta_min: Positive = 1e-4
    """Lower bound of an adaptive beta."""
    beta_max: Positive = 1.0
    """Upper bound of an adaptive beta."""
    guardrail: Literal["log", "end_epoch"] = "log"
    """When an optimiser step sees a KL beyond twice the target: `log` counts it; `end_epoch` leaves out the iteration's steps
    behind it, in this epoch and in later ones (the step itself is taken: it measures before it moves)."""

    # What is measured against the reference, or acts on such a measurement.
    _OF_THE_REFERENCE: ClassVar[tuple[str, ...]] = ("estimator", "importance_corrected", "adaptive", "guardrail")

    def _refusals(self) -> Iterator[str]:
        for key in self._OF_THE_REFERENCE if self.beta == 0 else ():
            if (value := getattr(self, key)) != type(self).model_fields[key].default:
                shown = str(value).lower()
                yield f"kl.{key} {shown} needs kl.beta > 0: with 0 there is no reference to measure KL to"
        if self.beta_min > self.beta_max:
            yield f"kl.beta_min {self.beta_min} must not exceed kl.beta_max {self.beta_max}"
        if self.adaptive and not self.beta_min <= self.beta <= self.beta_max:
            yield (
                f"kl.beta {self.beta} must lie between kl.beta_min {self.beta_min} and kl.beta_max {self.beta_max} when adaptive"
            )


class UpdateConfig(Section):
    """Optimiser steps on one iteration's completions."""

    epochs: Count = 1
    """mu (TRL: num_iterations)."""
    minibatches: Count = 1
    """Optimiser steps an epoch; groups stay whole."""
    micro_batches: CountOrAuto = 1
    """Parts of one optimiser step, one after another (TRL: gradient_accumulation_steps); `auto`: the fewest whose compiled
    program fits into memory. A run that continues keeps the number that was chosen."""
    memory_limit_gb: Positive | None = None
    """micro_batches `auto`: 10^9 bytes that may be used; null: of a GPU what JAX reserves, of a CPU the memory available."""
    learning_rate: Positive = 1e-5
    """Peak of the schedule."""
    schedule: Literal["constant", "cosine"] = "constant"
    """After the warm-up (TRL: lr_scheduler_type)."""
    warmup_steps: CountOrZero = 0
    """Optimiser steps of linear warm-up; the first one already learns."""
    total_steps: Count | None = None
    """Optimiser steps of the schedule; null: iterations * epochs * minibatches. Skipped ones and those that kl.guardrail leaves
    out do not count: with them the schedule does not reach its end."""
    final_learning_rate_fraction: Fraction = 0.0
    """`cosine`: where it ends, as a share of learning_rate."""
    weight_decay: NotNegative = 0.0
    """Not on biases and norms."""
    beta1: FractionBelowOne = 0.9
    """Decay of AdamW's first moment (TRL: adam_beta1)."""
    beta2: FractionBelowOne = 0.95
    """Decay of AdamW's second moment (TRL: adam_beta2)."""
    first_moment_dtype: Literal["parameters", "bfloat16"] = "parameters"
    """Of AdamW's first moment, an average of gradients: `model.param_dtype`, or half of float32's memory."""
    offload_optimizer: bool = False
    """Keeps AdamW's moments in the host's memory and brings each tensor over when the step needs it: two parameters' sizes less on
    a GPU, moved both ways over its bus in every step (DeepSpeed's name)."""
    epsilon: Positive = 1e-8
    """AdamW's, under the fraction (TRL: adam_epsilon)."""
    max_grad_norm: Positive = 1.0
    """Global L2 norm that gradients are clipped to."""
    max_consecutive_nonfinite: Count = 3
    """Skipped steps in a row that end the run."""

    @property
    def parts(self) -> int:
        """The number of micro-batches.

        Raises:
            ValueError: it is `auto` and nothing has chosen yet; `jax_grpo.train` and `jax_grpo.memory` do.
        """
        if self.micro_batches == "auto":
            raise ValueError(
                "update.micro_batches is auto, which only jax_grpo.train and jax_grpo.memory resolve: give a number"
            )
        return self.micro_batches


class LMHeadConfig(Section):
    """How log-probabilities are computed from hidden states."""

    implementation: Literal["materialised", "chunked", "pallas"] = "materialised"
    """`materialised` holds the logits of one micro-batch; `chunked` a tile of them, and finds token-level losses' gradients in
    the forward pass; `pallas` is `chunked` with Triton kernels."""
    chunk_tokens: Annotated[int, Field(ge=64, multiple_of=64)] = 1024
    """`chunked`, `pallas`: most tokens of a tile."""
    chunk_vocab: Annotated[int, Field(ge=128, multiple_of=128)] | None = None
    """`chunked`, `pallas`: columns of a tile, which saves memory for a fourth matmul; null: the whole vocabulary."""
    logits_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of logits in memory, at least; bfloat16 halves them and rounds those of size 100 by up to 0.25 nats."""


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
