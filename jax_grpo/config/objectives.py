"""The section `objective`: one class for each policy loss, which has the settings that this loss reads and no others.

`ObjectiveConfig` has those of every loss. A loss that reads one of them at a single value has that value as a constant of its
class, so that the code which reads it need not ask which loss it is.
"""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, get_args

import pydantic
from pydantic import BeforeValidator, Field

from jax_grpo.config.sections import Count, FractionBelowOne, NotNegative, Pair, Positive, Section, Share

NAME = Field(
    description="The loss of a token, one of those above (TRL: loss_type names it together with the aggregation)."
)


class OverlongPenalty(Section):
    """DAPO's soft penalty: 0 up to cap - length tokens, then linearly to -weight at the cap."""

    length: Count
    """Tokens before the cap where the penalty begins."""
    weight: Positive
    """Reward lost at the cap."""


class ObjectiveConfig(Section):
    """What every policy loss reads."""

    holds_back: ClassVar[bool] = False
    """Whether some tokens are chosen from the whole optimiser batch by their covariance."""
    name: str
    importance_level: Literal["token", "sequence"] = "token"
    """`clip`, `cispo`, `sapo`: what the importance ratio is of (TRL: importance_sampling_level); `sequence` is GSPO."""
    aggregation: Literal["grpo", "bnpo", "dapo", "dr_grpo", "luspo"] = "dapo"
    """How the losses of tokens become one number (TRL: loss_type). `dr_grpo` divides by rollout.max_new_tokens for every
    completion, in a mixture of caps too: a token weighs the same whatever its task."""
    entropy_coefficient: float = 0.0
    """Weight of the bonus on the mean entropy (TRL: entropy_coef); with `entropy_target` where it begins."""
    entropy_target: Positive | None = None
    """Nats per token below which the policy's mean entropy is not to fall (TRL: use_adaptive_entropy, entropy_target): after each
    optimiser step the coefficient rises by entropy_step at or below it and falls by as much above, and the bonus is given in a step
    behind one at or below it; null: the coefficient is constant."""
    entropy_step: Positive = 0.005
    """`entropy_target`: how far the coefficient moves in a step (TRL: entropy_coef_delta)."""
    entropy_bounds: Pair[NotNegative] = (0.0, 1.0)
    """`entropy_target`: lower and upper bound of the coefficient (TRL: entropy_coef_min, entropy_coef_max)."""
    entropy_quantile: FractionBelowOne = 0.0
    """All but `gmpo`: train the policy term on tokens at or above this quantile of entropy (TRL: 1 - top_entropy_quantile); 0: on
    all."""
    mask_truncated: bool = False
    """Leave out completions cut at the cap (TRL: mask_truncated_completions)."""
    overlong_penalty: OverlongPenalty | None = None
    mismatch_cap: Positive | None = None
    """All but `vespo`: upper bound of the weight exp(old_logp - sampling_logp) (TRL: vllm_importance_sampling_clip_max); null: no
    correction."""
    mismatch_floor: Positive | None = None
    """Its lower bound (TRL: vllm_importance_sampling_clip_min); null: none."""
    mismatch_mode: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = "token_truncate"
    """The weight of each token or of a whole sequence, cut to its bounds or 0 beyond them (TRL: vllm_importance_sampling_mode;
    `token_mask` with both bounds is IcePop, for which 0.5 and 5 are usual)."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _only_what_it_reads(cls, given: Any) -> Any:
        for key, value in given.items() if isinstance(given, dict) else ():
            if key not in cls.model_fields and (readers := readers_of(key)):
                shown = "null" if value is None else value
                name, own = given.get("name"), [key for key in cls.model_fields if key != "name"]
                raise ValueError(
                    f"objective.{key} {shown} is of objective.name {', '.join(readers)}; {name} would ignore it: "
                    f"it reads {', '.join(own)}"
                )
        return given

    def _refusals(self) -> Iterator[str]:
        (least, most), begin = self.entropy_bounds, self.entropy_coefficient
        if self.entropy_target is None:
            for key, value in self.not_default("entropy_step", "entropy_bounds"):
                yield f"objective.{key} {value} needs objective.entropy_target: without one the coefficient is constant"
        elif not least <= begin <= most:
            yield (
                f"objective.entropy_coefficient {begin} must lie within objective.entropy_bounds [{least}, {most}] with "
                "objective.entropy_target: it begins there"
            )
        floor, cap = self.mismatch_floor, self.mismatch_cap
        if cap is None:
            for key, value in self.not_default("mismatch_floor", "mismatch_mode"):
                yield f"objective.{key} {value} needs objective.mismatch_cap: without one nothing is corrected"
        elif floor is not None and floor >= cap:
            yield f"objective.mismatch_floor {floor} must be below objective.mismatch_cap {cap}"

    @property
    def has_bonus(self) -> bool:
        """Whether the loss has a bonus on entropy, or may come to have one."""
        return self.entropy_coefficient != 0 or self.entropy_target is not None

    @property
    def of_sequences(self) -> bool:
        """Whether a token's loss depends on its whole sequence, so that no token can be taken by itself."""
        corrected = self.mismatch_cap is not None and self.mismatch_mode.startswith("sequence")
        return self.importance_level == "sequence" or self.name in ("gmpo", "vespo") or corrected


class Clip(ObjectiveConfig):
    """`clip`: PPO's clipped ratio (Schulman et al. 2017), GRPO's and DAPO's."""

    name: Annotated[Literal["clip"], NAME] = "clip"
    epsilon_low: NotNegative = 0.2
    """`clip`, `clip_cov`: the ratio's lower bound is 1 - epsilon_low (TRL: epsilon)."""
    epsilon_high: NotNegative = 0.2
    """`clip`, `clip_cov`: the ratio's upper bound is 1 + epsilon_high."""
    delta: Positive | None = None
    """`clip`: bound of the ratio before it is clipped, two-sided clipping (INTELLECT-2); null: none."""

    def _refusals(self) -> Iterator[str]:
        if self.epsilon_low >= 1:
            yield f"objective.epsilon_low {self.epsilon_low} must be below 1: the ratio's bound is 1 - it"
        if self.delta is not None and self.delta <= 1 + self.epsilon_high:
            yield f"objective.delta {self.delta} must exceed 1 + objective.epsilon_high = {1 + self.epsilon_high}"
        yield from super()._refusals()


class Cispo(ObjectiveConfig):
    """`cispo`: the policy gradient with a capped ratio as its weight (MiniMax-M1 2025)."""

    name: Annotated[Literal["cispo"], NAME] = "cispo"
    epsilon_high: NotNegative = 0.2
    """`cispo`: the weight's bound itself, usually 5."""


class Sapo(ObjectiveConfig):
    """`sapo`: a soft clip (SAPO, Gao et al. 2025)."""

    name: Annotated[Literal["sapo"], NAME] = "sapo"
    tau: Pair[Positive] = (1.0, 1.05)
    """`sapo`: gate temperature where the advantage is positive, and elsewhere (TRL: sapo_temperature_pos, sapo_temperature_neg)."""


class Reinforce(ObjectiveConfig):
    """`reinforce`: the policy gradient without an importance ratio (Williams 1992), for ablation."""

    name: Annotated[Literal["reinforce"], NAME] = "reinforce"
    importance_level: ClassVar[Literal["token"]] = "token"  # it has no ratio


class Dppo(ObjectiveConfig):
    """`dppo_tv`, `dppo_kl`: tokens bounded by how far their probability moves, by total variation or KL (DPPO, Qi et al. 2026)."""

    name: Annotated[Literal["dppo_tv", "dppo_kl"], NAME] = "dppo_tv"
    importance_level: ClassVar[Literal["token"]] = "token"  # its divergence is a token's
    epsilon_low: NotNegative = 0.2
    """`dppo_tv`, `dppo_kl`: most divergence of a token that becomes less likely (verl: clip_ratio_low)."""
    epsilon_high: NotNegative = 0.2
    """`dppo_tv`, `dppo_kl`: most divergence of a token that becomes more likely (verl: clip_ratio_high)."""
    delta: Positive | None = None
    """`dppo_tv`, `dppo_kl`: bound of every ratio (verl: clip_ratio_c, 20); null: none."""


class Gmpo(ObjectiveConfig):
    """`gmpo`: the geometric mean of a sequence's ratios (GMPO, Zhao et al. 2025)."""

    name: Annotated[Literal["gmpo"], NAME] = "gmpo"
    importance_level: ClassVar[Literal["token"]] = "token"  # it takes the mean of tokens' ratios itself
    entropy_quantile: ClassVar[float] = 0.0  # a sequence's loss has no tokens to leave out
    epsilon_low: NotNegative = 0.2
    """`gmpo`: the log ratio's lower bound is -epsilon_low, usually -0.4."""
    epsilon_high: NotNegative = 0.2
    """`gmpo`: the log ratio's upper bound, usually 0.4."""


class Vespo(ObjectiveConfig):
    """`vespo`: the policy gradient weighted by a smooth function of the sequence's ratio (VESPO, Shen et al. 2026)."""

    name: Annotated[Literal["vespo"], NAME] = "vespo"
    importance_level: ClassVar[Literal["token"]] = "token"  # it takes the product of tokens' ratios itself
    # A sequence's weight takes no second one (TRL multiplies it into w).
    mismatch_cap: ClassVar[None] = None
    mismatch_floor: ClassVar[None] = None
    mismatch_mode: ClassVar[Literal["token_truncate"]] = "token_truncate"
    power: Pair[Positive] = (2.0, 3.0)
    """`vespo`: power of the sequence's ratio where the advantage is not negative, and where it is (TRL: vespo_k_pos,
    vespo_k_neg)."""
    decay: Pair[Positive] = (3.0, 2.0)
    """`vespo`: decay with the ratio there (TRL: vespo_lambda_pos, vespo_lambda_neg)."""


class Covariance(ObjectiveConfig):
    """What `clip_cov` and `kl_cov` share: tokens whose advantage and log-probability rise together are treated apart."""

    importance_level: ClassVar[Literal["token"]] = "token"  # the covariance is a token's
    holds_back: ClassVar[bool] = True
    cov_share: Share = 0.0002
    """`clip_cov`, `kl_cov`: share of the tokens that are held back, at least one token (verl: clip_cov_ratio, kl_cov_ratio)."""


class ClipCov(Covariance, Clip):
    """`clip_cov`: `clip` without some of the tokens whose advantage and log-probability rise together (Cui et al. 2025)."""

    name: Annotated[Literal["clip_cov"], NAME] = "clip_cov"
    delta: ClassVar[None] = None
    cov_bounds: Pair[float] = (1.0, 5.0)
    """`clip_cov`: a token may be held back whose covariance of advantage and log-probability is between these (verl: clip_cov_lb,
    clip_cov_ub)."""

    def _refusals(self) -> Iterator[str]:
        least, most = self.cov_bounds
        if least >= most:
            yield f"objective.cov_bounds [{least}, {most}]: the lower bound must be below the upper one"
        yield from super()._refusals()


class KlCov(Covariance):
    """`kl_cov`: the ratio without a clip, and a penalty on the tokens with the largest such covariance (Cui et al. 2025)."""

    name: Annotated[Literal["kl_cov"], NAME] = "kl_cov"
    cov_penalty: Positive = 1.0
    """`kl_cov`: weight of abs(log ratio) on the tokens held back (verl: ppo_kl_coef)."""


def _named(given: Any) -> Any:
    return {"name": "clip"} | given if isinstance(given, dict) else given


AnyObjective = Clip | Cispo | Sapo | Reinforce | Dppo | Gmpo | Vespo | ClipCov | KlCov
Objective = Annotated[AnyObjective, Field(discriminator="name"), BeforeValidator(_named)]
OBJECTIVES = {name: kind for kind in get_args(AnyObjective) for name in get_args(kind.model_fields["name"].annotation)}
_CHECKED = pydantic.TypeAdapter(Objective)


def readers_of(key: str) -> list[str]:
    """The losses that have this setting."""
    return [name for name, kind in OBJECTIVES.items() if key in kind.model_fields]


def objective_of(**settings: Any) -> AnyObjective:
    """The section with these settings, of the class that `name` says; `clip` where it is not given."""
    return _CHECKED.validate_python(settings)
