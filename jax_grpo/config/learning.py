"""The sections of a config that say how weights move: advantages, objective, KL, optimiser steps, LM head. See `sections`."""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PlainValidator

from jax_grpo.config.sections import Count, CountOrZero, Fraction, FractionBelowOne, NotNegative, Positive, Section


def _count_or_auto(value: Any) -> Any:
    if value != "auto" and (type(value) is not int or value < 1):
        raise ValueError(f"is {value!r}; expected a whole number of at least 1, or auto")
    return value


class AdvantageConfig(Section):
    """Group-relative advantages."""

    baseline: Literal["mean", "leave_one_out"] = "mean"
    """Reward minus the group's mean, or minus the mean of the other samples (RLOO)."""
    scale: Literal["none", "group", "batch", "robust"] = "group"
    """Divisor: 1, the deviation of the group's rewards, that of the batch's (TRL: scale_rewards), or `robust`: sqrt(pi / 2) times
    the group's mean distance from its median, which one far reward moves less."""
    clip: Positive | None = None
    """Advantages beyond +-clip are cut to it, after all scaling; null: none is."""
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
        for key, value in self._not_default(*self._OF):
            if self.name not in (names := self._OF[key]):
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

    def _refusals(self) -> Iterator[str]:
        # What is measured against the reference, or acts on such a measurement.
        for key, value in self._not_default("estimator", "importance_corrected", "adaptive", "guardrail"):
            if self.beta == 0:
                yield f"kl.{key} {str(value).lower()} needs kl.beta > 0: with 0 there is no reference to measure KL to"
        if self.beta_min > self.beta_max:
            yield f"kl.beta_min {self.beta_min} must not exceed kl.beta_max {self.beta_max}"
        if self.adaptive and not self.beta_min <= self.beta <= self.beta_max:
            yield f"kl.beta {self.beta} must lie between kl.beta_min {self.beta_min} and kl.beta_max {self.beta_max} when adaptive"


class UpdateConfig(Section):
    """Optimiser steps on one iteration's completions."""

    epochs: Count = 1
    """mu (TRL: num_iterations)."""
    minibatches: Count = 1
    """Optimiser steps an epoch; groups stay whole."""
    micro_batches: Annotated[int | Literal["auto"], PlainValidator(_count_or_auto)] = 1
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
        """The number of micro-batches; a ValueError while it is `auto`, before `jax_grpo.train` or `jax_grpo.memory` chose one."""
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
