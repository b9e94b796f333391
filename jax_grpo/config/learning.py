"""The sections of a config that say how weights move: advantages, objective, KL, optimiser steps, LM head. See `sections`."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, PlainValidator

from jax_grpo.config.objectives import ObjectiveConfig
from jax_grpo.config.sections import (
    Count,
    CountOrZero,
    Fraction,
    FractionBelowOne,
    NotNegative,
    Pair,
    Positive,
    Section,
    Share,
)


def _count_or_auto(value: Any) -> Any:
    if value != "auto" and (type(value) is not int or value < 1):
        raise ValueError(f"is {value!r}; expected a whole number of at least 1, or auto")
    return value


class AdvantageConfig(Section):
    """Group-relative advantages."""

    baseline: Literal["mean", "leave_one_out", "opo"] = "mean"
    """Reward minus the group's mean; `leave_one_out` (verl: rloo): minus the mean of the other samples; `opo` (verl's name): minus
    the mean weighted by completion lengths."""
    pass_at_k: Annotated[int, Field(ge=2)] | None = None
    """In the place of reward minus baseline: what a sample adds to the best of k, on average over the group's subsets of k that
    hold it (PKPO; at k = rollout.group_size verl's grpo_passk, times k); null: off."""
    scale: Literal["none", "group", "batch", "robust", "maxrl"] = "group"
    """Divisor: 1, the deviation of the group's rewards, that of the batch's (TRL: scale_rewards), `robust`: sqrt(pi / 2) times
    the group's mean distance from its median, which one far reward moves less, or `maxrl`: the group's mean reward, for rewards of
    at least 0 (MaxRL)."""
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
        if self.components == "gdpo" and self.baseline == "leave_one_out":
            yield (
                f"advantage.baseline {self.baseline} does nothing with advantage.components gdpo: it makes all advantages larger "
                "by one factor, which the division by the batch's deviation takes out again; expected mean"
            )
        if self.components == "gdpo" and self.baseline == "opo":
            yield "advantage.baseline opo: GDPO, advantage.components gdpo, normalises by the mean; expected mean"
        if self.pass_at_k is not None:
            yield from self._refused_beside_pass_at_k()

    def _refused_beside_pass_at_k(self) -> Iterator[str]:
        """Its baseline is its own, and it is of the one reward whose best counts."""
        if self.baseline != "mean":
            yield (
                f"advantage.baseline {self.baseline} does nothing with advantage.pass_at_k {self.pass_at_k}: a sample is compared "
                "with the other samples of each subset; expected mean"
            )
        if self.components != "sum_first":
            yield (
                f"advantage.components {self.components}: advantage.pass_at_k {self.pass_at_k} is of one reward, the best of "
                "several samples'; expected sum_first"
            )
        if self.scale == "maxrl":
            yield (
                f"advantage.scale maxrl is itself a mixture of all pass@k; beside advantage.pass_at_k {self.pass_at_k} expected "
                "none, group, batch or robust"
            )


class KLConfig(Section):
    """The penalty that holds the policy to the reference: its frozen start, or one that follows."""

    estimator: Literal["k1", "k2", "k3"] = "k3"
    """With d = ref_logp - logp: -d, d^2 / 2, or exp(d) - 1 - d (TRL's)."""
    beta: NotNegative = 0.04
    """Coefficient (TRL: the same name); 0: no reference model is loaded."""
    reference_dtype: Literal["parameters", "bfloat16"] = "parameters"
    """Of the reference's weights: the policy's `model.param_dtype`, or half of float32's memory (with
    model.compute_dtype bfloat16 only norms, biases and embeddings are rounded more than they would be anyway)."""
    offload_reference: bool = False
    """Holds the reference's weights in the host's memory and copies them to the GPU each iteration, to score its completions."""
    reference_every: Count | None = None
    """Optimiser steps after which the reference moves towards the policy, which the next completions' KL is measured to (TRL:
    sync_ref_model and ref_model_sync_steps, 512); null: it stays the start."""
    reference_mix: Share = 1.0
    """Where it moves: reference_mix * policy + (1 - reference_mix) * reference (TRL: ref_model_mixup_alpha, 0.6); 1: a copy of the
    policy."""
    importance_corrected: bool = False
    """Multiply by the importance ratio (TRL: use_bias_correction_kl)."""
    adaptive: bool = False
    """Move beta after each optimiser step so that the KL stays at the target."""
    target: Positive = 0.05
    """Nats per token."""
    beta_bounds: Pair[Positive] = (1e-4, 1.0)
    """Lower and upper bound of an adaptive beta."""
    guardrail: Literal["log", "end_epoch"] = "log"
    """When an optimiser step sees a KL beyond twice the target: `log` counts it; `end_epoch` leaves out the iteration's steps
    behind it, in this epoch and in later ones (the step itself is taken: it measures before it moves)."""

    def _refusals(self) -> Iterator[str]:
        # What is measured against the reference, or acts on such a measurement.
        for key, value in self.not_default(
            "estimator",
            "importance_corrected",
            "adaptive",
            "guardrail",
            "reference_every",
            "reference_dtype",
            "offload_reference",
        ):
            if self.beta == 0:
                yield f"kl.{key} {str(value).lower()} needs kl.beta > 0: with 0 there is no reference to measure KL to"
        if self.reference_mix != 1:
            yield from self._refused_mixtures()
        if self.offload_reference and self.reference_every is not None:
            yield (
                f"kl.offload_reference true with kl.reference_every {self.reference_every}: each update reads one that moves; "
                "expected false, or null"
            )
        least, most = self.beta_bounds
        if least > most:
            yield f"kl.beta_bounds [{least}, {most}]: the lower bound must not exceed the upper one"
        if self.adaptive and not least <= self.beta <= most:
            yield f"kl.beta {self.beta} must lie within kl.beta_bounds [{least}, {most}] when adaptive"

    def _refused_mixtures(self) -> Iterator[str]:
        if self.reference_every is None:
            yield f"kl.reference_mix {self.reference_mix} needs kl.reference_every: without it the reference does not move"
        if self.reference_dtype == "bfloat16":
            yield (
                f"kl.reference_mix {self.reference_mix} with kl.reference_dtype bfloat16: a share of a small difference is rounded "
                "away, and the reference would stay behind; expected 1, which copies, or parameters"
            )


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
    """Optimiser steps of linear warm-up, fewer in a run that is shorter; the first one already learns."""
    total_steps: Count | None = None
    """Optimiser steps of the schedule; null: iterations * epochs * minibatches. Skipped ones and those that kl.guardrail leaves
    out do not count: with them the schedule does not reach its end."""
    final_learning_rate_fraction: Fraction = 0.0
    """`cosine`: where it ends, as a share of learning_rate."""
    weight_decay: NotNegative = 0.0
    """Not on biases and norms."""
    betas: Pair[FractionBelowOne] = (0.9, 0.95)
    """Decay of AdamW's first and second moment (TRL: adam_beta1, adam_beta2)."""
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


class Learning(NamedTuple):
    """What turns rewards into new weights: the part of a config that is read between a rollout and the next one.

    `Config.learning()` makes it.
    """

    advantage: AdvantageConfig
    objective: ObjectiveConfig
    kl: KLConfig
    update: UpdateConfig
    lm_head: LMHeadConfig
    temperature: float
    param_dtype: str
    compute_dtype: str
    most_tokens: int  # of a completion; of an episode, in all of its turns
    total_steps: int  # of the learning rate's schedule
    seed: int
    records_batches: bool
    adapters: bool = False  # they are what is trained

    @property
    def needs_old_logp(self) -> bool:
        """Whether the old policy's log-probabilities are computed before the update and kept.

        One step on each rollout means the updated policy is the old one: its own value serves (ratio exactly 1).
        """
        several = self.update.epochs * self.update.minibatches > 1
        return several or self.objective.holds_back or self.objective.entropy_quantile > 0 or self.records_batches
