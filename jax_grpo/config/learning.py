"""The sections of a config that say how weights move: advantages, objective, KL, optimiser steps, LM head. See `sections`."""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PlainValidator

from jax_grpo.config.sections import (
    Count,
    CountOrZero,
    Fraction,
    FractionBelowOne,
    NotNegative,
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


class OverlongPenalty(Section):
    """DAPO's soft penalty: 0 up to cap - length tokens, then linearly to -weight at the cap."""

    length: Count
    """Tokens before the cap where the penalty begins."""
    weight: Positive
    """Reward lost at the cap."""


# Objectives that know one level of the ratio, and why.
OWN_LEVEL = {
    "reinforce": "it has no importance ratio",
    "dppo_tv": "its divergence is a token's",
    "dppo_kl": "its divergence is a token's",
    "gmpo": "it takes the geometric mean of tokens' ratios itself",
    "vespo": "it takes the product of tokens' ratios itself",
    "clip_cov": "its covariance is a token's",
    "kl_cov": "its covariance is a token's",
}


class ObjectiveConfig(Section):
    """The policy loss (TRL's `loss_type` is split into `name` and `aggregation` here)."""

    name: Literal["clip", "cispo", "sapo", "reinforce", "dppo_tv", "dppo_kl", "gmpo", "vespo", "clip_cov", "kl_cov"] = (
        "clip"
    )
    """Loss of one token (TRL: loss_type; verl: loss_mode, where gmpo is geo_mean)."""
    epsilon_low: NotNegative = 0.2
    """`clip`, `clip_cov`: the ratio's lower bound is 1 - epsilon_low (TRL: epsilon). `gmpo`: the log ratio's is -epsilon_low,
    usually -0.4. `dppo_tv`, `dppo_kl`: most divergence of a token that becomes less likely (verl: clip_ratio_low)."""
    epsilon_high: NotNegative = 0.2
    """`clip`, `clip_cov`: the ratio's upper bound is 1 + epsilon_high. `cispo`: the weight's bound itself, usually 5. `gmpo`: the
    log ratio's, usually 0.4. `dppo_tv`, `dppo_kl`: most divergence of a token that becomes more likely (verl: clip_ratio_high)."""
    delta: Positive | None = None
    """`clip`, two-sided: bound of the unclipped ratio. `dppo_tv`, `dppo_kl`: bound of every ratio (verl: clip_ratio_c, 20)."""
    tau_pos: Positive = 1.0
    """`sapo`: gate temperature where the advantage is positive (TRL: sapo_temperature_pos)."""
    tau_neg: Positive = 1.05
    """`sapo`: gate temperature elsewhere (TRL: sapo_temperature_neg)."""
    vespo_k_pos: Positive = 2.0
    """`vespo`: power of the sequence's ratio where the advantage is not negative (TRL: the same name)."""
    vespo_lambda_pos: Positive = 3.0
    """`vespo`: decay with the ratio there (TRL: the same name)."""
    vespo_k_neg: Positive = 3.0
    """`vespo`: power where the advantage is negative (TRL: the same name)."""
    vespo_lambda_neg: Positive = 2.0
    """`vespo`: decay with the ratio there (TRL: the same name)."""
    cov_share: Share = 0.0002
    """`clip_cov`, `kl_cov`: share of the tokens that are held back, at least one token (verl: clip_cov_ratio, kl_cov_ratio)."""
    cov_low: float = 1.0
    """`clip_cov`: a token's covariance of advantage and log-probability above which it may be held back (verl: clip_cov_lb)."""
    cov_high: float = 5.0
    """`clip_cov`: and below which (verl: clip_cov_ub)."""
    cov_penalty: Positive = 1.0
    """`kl_cov`: weight of abs(log ratio) on the tokens held back (verl: ppo_kl_coef)."""
    importance_level: Literal["token", "sequence"] = "token"
    """TRL: importance_sampling_level; `sequence` is GSPO."""
    aggregation: Literal["grpo", "bnpo", "dapo", "dr_grpo", "luspo"] = "dapo"
    """How the losses of tokens become one number (TRL: loss_type)."""
    entropy_coefficient: float = 0.0
    """Weight of the bonus on the mean entropy (TRL: entropy_coef); with `entropy_target` where it begins."""
    entropy_target: Positive | None = None
    """Nats per token below which the policy's mean entropy is not to fall (TRL: use_adaptive_entropy, entropy_target): after each
    optimiser step the coefficient rises by entropy_step at or below it and falls by as much above, and the bonus is given in a step
    behind one at or below it; null: the coefficient is constant."""
    entropy_step: Positive = 0.005
    """`entropy_target`: how far the coefficient moves in a step (TRL: entropy_coef_delta)."""
    entropy_coefficient_min: NotNegative = 0.0
    """`entropy_target`: lower bound of the coefficient (TRL: entropy_coef_min)."""
    entropy_coefficient_max: Positive = 1.0
    """`entropy_target`: upper bound of the coefficient (TRL: entropy_coef_max)."""
    entropy_quantile: FractionBelowOne = 0.0
    """Train the policy term on tokens at or above this quantile of entropy (TRL: 1 - top_entropy_quantile); 0: all."""
    mask_truncated: bool = False
    """Leave out completions cut at the cap (TRL: mask_truncated_completions)."""
    overlong_penalty: OverlongPenalty | None = None
    mismatch_cap: Positive | None = None
    """Upper bound of the weight exp(old_logp - sampling_logp) (TRL: vllm_importance_sampling_clip_max); null: no correction."""
    mismatch_floor: Positive | None = None
    """Its lower bound (TRL: vllm_importance_sampling_clip_min); null: none."""
    mismatch_mode: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = "token_truncate"
    """The weight of each token or of a whole sequence, cut to its bounds or 0 beyond them (TRL: vllm_importance_sampling_mode;
    `token_mask` with both bounds is IcePop, for which 0.5 and 5 are usual)."""

    # The losses that read a setting; with another one it would do nothing, without a word.
    _OF: ClassVar[dict[str, tuple[str, ...]]] = {
        "epsilon_low": ("clip", "gmpo", "dppo_tv", "dppo_kl", "clip_cov"),
        "epsilon_high": ("clip", "cispo", "gmpo", "dppo_tv", "dppo_kl", "clip_cov"),
        "delta": ("clip", "dppo_tv", "dppo_kl"),
        "vespo_k_pos": ("vespo",),
        "vespo_lambda_pos": ("vespo",),
        "vespo_k_neg": ("vespo",),
        "vespo_lambda_neg": ("vespo",),
        # A sequence's loss has no tokens to leave out; a sequence's weight takes no second one (TRL multiplies it into w).
        "entropy_quantile": ("clip", "cispo", "sapo", "reinforce", "dppo_tv", "dppo_kl", "vespo", "clip_cov", "kl_cov"),
        "mismatch_cap": ("clip", "cispo", "sapo", "reinforce", "dppo_tv", "dppo_kl", "gmpo", "clip_cov", "kl_cov"),
        "cov_share": ("clip_cov", "kl_cov"),
        "cov_low": ("clip_cov",),
        "cov_high": ("clip_cov",),
        "cov_penalty": ("kl_cov",),
        "tau_pos": ("sapo",),
        "tau_neg": ("sapo",),
    }

    def _refusals(self) -> Iterator[str]:
        for key, value in self._not_default(*self._OF):
            if self.name not in (names := self._OF[key]):
                yield f"objective.{key} {value} is of objective.name {', '.join(names)}; {self.name} would ignore it"
        if self.name in ("clip", "clip_cov") and self.epsilon_low >= 1:
            yield f"objective.epsilon_low {self.epsilon_low} must be below 1: the ratio's bound is 1 - it"
        if self.name == "clip" and self.delta is not None and self.delta <= 1 + self.epsilon_high:
            yield f"objective.delta {self.delta} must exceed 1 + objective.epsilon_high = {1 + self.epsilon_high}"
        if self.cov_low >= self.cov_high:
            yield f"objective.cov_low {self.cov_low} must be below objective.cov_high {self.cov_high}"
        yield from self._refused_entropies()
        yield from self._refused_mismatch()

    def _refused_entropies(self) -> Iterator[str]:
        least, most, begin = self.entropy_coefficient_min, self.entropy_coefficient_max, self.entropy_coefficient
        for key, value in self._not_default("entropy_step", "entropy_coefficient_min", "entropy_coefficient_max"):
            if self.entropy_target is None:
                yield f"objective.{key} {value} needs objective.entropy_target: without one the coefficient is constant"
        if self.entropy_target is not None and not least <= begin <= most:
            yield (
                f"objective.entropy_coefficient {begin} must lie between objective.entropy_coefficient_min {least} and "
                f"objective.entropy_coefficient_max {most} with objective.entropy_target: it begins there"
            )

    def _refused_mismatch(self) -> Iterator[str]:
        for key, value in self._not_default("mismatch_floor", "mismatch_mode"):
            if self.mismatch_cap is None:
                yield f"objective.{key} {value} needs objective.mismatch_cap: without one nothing is corrected"
        floor, cap = self.mismatch_floor, self.mismatch_cap
        if floor is not None and cap is not None and floor >= cap:
            yield f"objective.mismatch_floor {floor} must be below objective.mismatch_cap {cap}"

    @property
    def holds_back(self) -> bool:
        """Whether some tokens are chosen from the whole optimiser batch by their covariance."""
        return self.name in ("clip_cov", "kl_cov")

    @property
    def has_bonus(self) -> bool:
        """Whether the loss has a bonus on entropy, or may come to have one."""
        return self.entropy_coefficient != 0 or self.entropy_target is not None

    @property
    def of_sequences(self) -> bool:
        """Whether a token's loss depends on its whole sequence, so that no token can be taken by itself."""
        corrected = self.mismatch_cap is not None and self.mismatch_mode.startswith("sequence")
        return self.importance_level == "sequence" or self.name in ("gmpo", "vespo") or corrected


class KLConfig(Section):
    """The penalty that holds the policy to the reference: its frozen start, or one that follows."""

    estimator: Literal["k1", "k2", "k3"] = "k3"
    """With d = ref_logp - logp: -d, d^2 / 2, or exp(d) - 1 - d (TRL's)."""
    beta: NotNegative = 0.04
    """Coefficient (TRL: the same name); 0: no reference model is loaded."""
    reference_dtype: Literal["parameters", "bfloat16"] = "parameters"
    """Of the reference's weights: the policy's `model.param_dtype`, or half of float32's memory (with
    model.compute_dtype bfloat16 only norms, biases and embeddings are rounded more than they would be anyway)."""
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
    beta_min: Positive = 1e-4
    """Lower bound of an adaptive beta."""
    beta_max: Positive = 1.0
    """Upper bound of an adaptive beta."""
    guardrail: Literal["log", "end_epoch"] = "log"
    """When an optimiser step sees a KL beyond twice the target: `log` counts it; `end_epoch` leaves out the iteration's steps
    behind it, in this epoch and in later ones (the step itself is taken: it measures before it moves)."""

    def _refusals(self) -> Iterator[str]:
        # What is measured against the reference, or acts on such a measurement.
        for key, value in self._not_default(
            "estimator", "importance_corrected", "adaptive", "guardrail", "reference_every"
        ):
            if self.beta == 0:
                yield f"kl.{key} {str(value).lower()} needs kl.beta > 0: with 0 there is no reference to measure KL to"
        if self.reference_mix != 1:
            yield from self._refused_mixtures()
        if self.beta_min > self.beta_max:
            yield f"kl.beta_min {self.beta_min} must not exceed kl.beta_max {self.beta_max}"
        if self.adaptive and not self.beta_min <= self.beta <= self.beta_max:
            yield f"kl.beta {self.beta} must lie between kl.beta_min {self.beta_min} and kl.beta_max {self.beta_max} when adaptive"

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
