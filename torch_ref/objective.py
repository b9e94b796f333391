"""The loss of one token, the KL to the reference, and the weight with which a token enters the loss of a whole batch.

Every aggregation is written as a weight per token that depends on totals of the whole optimiser batch, so that summing
over any cut into micro-batches gives the same number. Pure functions of tensors; knows no model and no optimiser.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from jax_grpo.config.objectives import Cispo, Clip, ClipCov, Dppo, Gmpo, KlCov, ObjectiveConfig, Sapo, Vespo

MOST_LOG_RATIO = 80.0  # whose ratio float32 still has: infinity times an advantage of 0 is NaN
SAME = 1e-5  # nats: less between two programs' numbers of one token is rounding

# importance level ------------------------------------------------------------------------------------------------


def token_log_ratio(log_ratio_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """log rho of each token: logp - old_logp."""
    return log_ratio_BT


def sequence_log_ratio(log_ratio_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """GSPO (Zheng et al. 2025, eq. 7): the mean log ratio of the sequence's tokens, given to each of them.

    The gradient runs through the mean.
    """
    mean_B1 = (log_ratio_BT * mask_BT).sum(1, keepdim=True) / mask_BT.sum(1, keepdim=True).clamp(min=1)
    return mean_B1.expand_as(log_ratio_BT)


LOG_RATIOS = {"token": token_log_ratio, "sequence": sequence_log_ratio}

# policy loss of a token ------------------------------------------------------------------------------------------


def clip(rho_BT: Tensor, logp_BT: Tensor, advantage_B1: Tensor, config: Clip) -> Tensor:
    """-min(rho A, clip(rho, 1 - eps_low, 1 + eps_high) A); with delta, the first rho is at most delta.

    PPO (Schulman et al. 2017, eq. 7), asymmetric as in DAPO (Yu et al. 2025), two-sided as in INTELLECT-2 (2025).
    """
    inside_BT = rho_BT.clamp(1 - config.epsilon_low, 1 + config.epsilon_high)
    free_BT = rho_BT if config.delta is None else rho_BT.clamp(max=config.delta)
    return -torch.min(free_BT * advantage_B1, inside_BT * advantage_B1)


def cispo(rho_BT: Tensor, logp_BT: Tensor, advantage_B1: Tensor, config: Cispo) -> Tensor:
    """-stop_gradient(min(rho, eps_high)) A logp (MiniMax-M1 2025); eps_high is the bound itself, not 1 + it."""
    return -rho_BT.clamp(max=config.epsilon_high).detach() * advantage_B1 * logp_BT


def sapo(rho_BT: Tensor, logp_BT: Tensor, advantage_B1: Tensor, config: Sapo) -> Tensor:
    """-(4 / tau) sigmoid(tau (rho - 1)) A, tau by the sign of A (SAPO 2025)."""
    positive, otherwise = config.tau
    # torch.where of two Python numbers would round them to float32
    tau_B1 = torch.full_like(advantage_B1, otherwise).masked_fill(advantage_B1 > 0, positive)
    return -(4 / tau_B1) * torch.sigmoid(tau_B1 * (rho_BT - 1)) * advantage_B1


def reinforce(rho_BT: Tensor, logp_BT: Tensor, advantage_B1: Tensor, config: ObjectiveConfig) -> Tensor:
    """-A logp (Williams 1992)."""
    return -advantage_B1 * logp_BT


def _stays(p_BT: Tensor, q_BT: Tensor, advantage_B1: Tensor, config: Dppo) -> Tensor:
    """1 on tokens that DPPO trains: their divergence is within its bound, or the advantage leads back."""
    if config.name == "dppo_tv":
        divergence_BT = (p_BT - q_BT).abs()
    else:
        rest_BT = (1 - q_BT) * ((1 - q_BT + 1e-8) / (1 - p_BT + 1e-8)).log()
        divergence_BT = q_BT * (q_BT / p_BT).log() + rest_BT
    further_up = (advantage_B1 > 0) & (p_BT > q_BT) & (divergence_BT > config.epsilon_high)
    further_down = (advantage_B1 < 0) & (p_BT < q_BT) & (divergence_BT > config.epsilon_low)
    return (~further_up & ~further_down).to(p_BT.dtype)


def dppo(rho_BT: Tensor, logp_BT: Tensor, advantage_B1: Tensor, config: Dppo) -> Tensor:
    """-stop_gradient(M rho) A logp, whose gradient is that of -M rho A (DPPO, Qi et al. 2026); with delta, rho is at most delta.

    M is 0 where the advantage leads a token on whose binary divergence (this token or another) is beyond its bound.
    """
    p_BT = logp_BT.detach().exp()
    weight_BT = rho_BT.detach() if config.delta is None else rho_BT.detach().clamp(max=config.delta)
    return -weight_BT * _stays(p_BT, p_BT / rho_BT.detach(), advantage_B1, config) * advantage_B1 * logp_BT


def unclipped(rho_BT: Tensor, logp_BT: Tensor, advantage_B1: Tensor, config: ObjectiveConfig) -> Tensor:
    """-rho A."""
    return -(rho_BT * advantage_B1)


OBJECTIVES: dict[str, Callable[..., Tensor]] = {
    "clip_cov": clip, "kl_cov": unclipped,
    "clip": clip, "cispo": cispo, "sapo": sapo, "reinforce": reinforce, "dppo_tv": dppo, "dppo_kl": dppo,
}  # fmt: skip

# policy loss of a sequence ---------------------------------------------------------------------------------------


def gmpo(rho_BT: Tensor, logp_BT: Tensor, mask_BT: Tensor, advantage_B1: Tensor, config: Gmpo) -> Tensor:
    """-A times the geometric mean of the sequence's ratios, each cut where A pushes (GMPO, Zhao et al. 2025), for every token.

    Cut at exp(epsilon_high) from above where A > 0, at exp(-epsilon_low) from below elsewhere.
    """
    upper, lower = math.exp(config.epsilon_high), math.exp(-config.epsilon_low)
    cut_BT = torch.where(advantage_B1 > 0, rho_BT.clamp(max=upper), rho_BT.clamp(min=lower))
    share_BT = mask_BT / mask_BT.sum(1, keepdim=True).clamp(min=1)
    return -(cut_BT**share_BT).prod(1, keepdim=True).expand_as(rho_BT) * advantage_B1


def vespo(rho_BT: Tensor, logp_BT: Tensor, mask_BT: Tensor, advantage_B1: Tensor, config: Vespo) -> Tensor:
    """-stop_gradient(w^k exp(lambda (1 - w))) A logp, w the product of the sequence's ratios (VESPO, Shen et al. 2026).

    k and lambda by the sign of A. As in TRL a ratio is at most exp(20) and at least exp(-20), and w at least 1e-8.
    """
    token_BT = rho_BT.detach().clamp(math.exp(-20), math.exp(20))
    w_B1 = (token_BT**mask_BT).prod(1, keepdim=True).clamp(1e-8, math.exp(20))
    # Not torch.where of two numbers, which would round them to float32.
    negative = advantage_B1 < 0
    k_B1 = torch.full_like(advantage_B1, config.power[0]).masked_fill(negative, config.power[1])
    decay_B1 = torch.full_like(advantage_B1, config.decay[0]).masked_fill(negative, config.decay[1])
    return -(w_B1**k_B1 * (decay_B1 * (1 - w_B1)).exp()) * advantage_B1 * logp_BT


SEQUENCE_OBJECTIVES: dict[str, Callable[..., Tensor]] = {"gmpo": gmpo, "vespo": vespo}

# KL to the reference (Schulman 2020, "Approximating KL divergence"), d = ref_logp - logp ---------------------------

KL_ESTIMATORS = {
    "k1": lambda d: -d,
    "k2": lambda d: d.square() / 2,
    "k3": lambda d: d.exp() - 1 - d,
}

# aggregation -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Totals:
    """Of the whole optimiser batch, all micro-batches together."""

    sequences: int
    """B, sequences without any trained token included."""
    tokens: float
    """Sum of the mask, at least 1."""
    max_completion: int
    """The cap on a completion, in tokens."""


def _over_own_tokens(mask_BT: Tensor, totals: Totals) -> Tensor:
    return mask_BT / mask_BT.sum(1, keepdim=True).clamp(min=1) / totals.sequences


def _over_all_tokens(mask_BT: Tensor, totals: Totals) -> Tensor:
    return mask_BT / totals.tokens


def _over_caps(mask_BT: Tensor, totals: Totals) -> Tensor:
    return mask_BT / (totals.sequences * totals.max_completion)


def _over_sequences(mask_BT: Tensor, totals: Totals) -> Tensor:
    return mask_BT / totals.sequences


TOKEN_WEIGHTS = {
    "grpo": _over_own_tokens,  # mean over a sequence's tokens, then over sequences (Shao et al. 2024)
    "bnpo": _over_all_tokens,  # (sum / tokens of the micro-batch), micro-batches weighted by their share of the tokens
    "dapo": _over_all_tokens,  # sum / tokens of the batch (Yu et al. 2025)
    "dr_grpo": _over_caps,  # sum / (B * cap): no bias by length (Liu et al. 2025)
    "luspo": _over_sequences,  # sum over a sequence, mean over sequences (LUSPO)
}

# together --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TokenTerms:
    """What each token contributes, [B, T], 0 where mask is 0."""

    policy_BT: Tensor
    """Policy loss, with the mismatch weight and the entropy mask on it."""
    kl_BT: Tensor | None
    """The KL term of the loss: times rho if importance corrected; None without a reference."""
    observed_kl_BT: Tensor | None
    """The estimator alone, for logs and for the control of beta."""
    rho_BT: Tensor
    """Importance ratio at the configured level."""
    clipped_low_BT: Tensor
    """1 where the surrogate is flat because rho < 1 - eps_low and A < 0."""
    clipped_high_BT: Tensor
    """1 where it is flat because rho > 1 + eps_high and A > 0; `cispo`: where A > 0 and the weight is cut."""


def token_terms(
    config: ObjectiveConfig,
    *,
    logp_BT: Tensor,
    mask_BT: Tensor,
    advantages_B: Tensor,
    old_logp_BT: Tensor | None = None,
    ref_logp_BT: Tensor | None = None,
    sampling_logp_BT: Tensor | None = None,
    entropy_mask_BT: Tensor | None = None,
    held_back_BT: Tensor | None = None,
    kl_estimator: str = "k3",
    importance_corrected_kl: bool = False,
) -> TokenTerms:
    """The terms of every token where mask is 1.

    old_logp None: the batch is on policy, so old_logp = stop_gradient(logp). ref_logp None: no KL. sampling_logp with
    `mismatch_cap`: the policy loss is weighted by the `mismatch_weight` of exp(old_logp - sampling_logp). entropy_mask: the
    policy loss alone is multiplied by it (Wang et al. 2025); neither the KL nor any denominator is. held_back: the tokens whose
    policy loss Clip-Cov leaves out, or KL-Cov adds cov_penalty * abs(log rho) to, from beyond `SAME` (Cui et al. 2025).
    """
    there = mask_BT.bool()
    old_logp_BT = logp_BT.detach() if old_logp_BT is None else old_logp_BT
    # Padding may hold anything, NaN included, and 0 * inf is NaN: select before exp, never multiply after it.
    log_ratio_BT = torch.where(there, (logp_BT - old_logp_BT).clamp(max=MOST_LOG_RATIO), 0.0)
    rho_BT = LOG_RATIOS[config.importance_level](log_ratio_BT, mask_BT).exp()
    advantage_B1 = advantages_B[:, None]
    real_logp_BT = torch.where(there, logp_BT, 0.0)

    if config.name in SEQUENCE_OBJECTIVES:
        policy_BT = SEQUENCE_OBJECTIVES[config.name](rho_BT, real_logp_BT, mask_BT, advantage_B1, config)
    else:
        policy_BT = OBJECTIVES[config.name](rho_BT, real_logp_BT, advantage_B1, config)
    if held_back_BT is not None and isinstance(config, ClipCov):
        policy_BT = policy_BT * (held_back_BT == 0)
    elif held_back_BT is not None and isinstance(config, KlCov):
        distance_BT = torch.where(log_ratio_BT.abs() <= SAME, 0.0, log_ratio_BT.abs())
        policy_BT = torch.where(held_back_BT != 0, policy_BT + config.cov_penalty * distance_BT, policy_BT)
    if config.mismatch_cap is not None and sampling_logp_BT is not None:
        ratio_BT = torch.where(there, old_logp_BT - sampling_logp_BT, 0.0).detach().exp()
        policy_BT = policy_BT * mismatch_weight(ratio_BT, config)
    if entropy_mask_BT is not None:
        policy_BT = policy_BT * entropy_mask_BT

    kl_BT = observed_kl_BT = None
    if ref_logp_BT is not None:
        observed_kl_BT = KL_ESTIMATORS[kl_estimator](torch.where(there, ref_logp_BT - logp_BT, 0.0))
        kl_BT = observed_kl_BT * rho_BT if importance_corrected_kl else observed_kl_BT

    low_BT, high_BT = CLIPPED[config.name](rho_BT.detach(), real_logp_BT.detach(), advantage_B1, config)
    return TokenTerms(
        policy_BT=policy_BT * mask_BT,
        kl_BT=None if kl_BT is None else kl_BT * mask_BT,
        observed_kl_BT=None if observed_kl_BT is None else (observed_kl_BT * mask_BT).detach(),
        rho_BT=(rho_BT * mask_BT).detach(),
        clipped_low_BT=low_BT * mask_BT,
        clipped_high_BT=high_BT * mask_BT,
    )


def mismatch_weight(ratio_BT: Tensor, config: ObjectiveConfig) -> Tensor:
    """The weight of each token from its ratio exp(old_logp - sampling_logp), 1 on padding, by `config.mismatch_mode`.

    Of a token or of a sequence, the product of its tokens'; beyond the bounds cut to them (Yao et al. 2025: truncated importance
    sampling) or 0 (IcePop, where it is of tokens and has both bounds).
    """
    if config.mismatch_mode in ("sequence_truncate", "sequence_mask"):
        ratio_BT = ratio_BT.prod(1, keepdim=True).expand_as(ratio_BT)
    floor, cap = config.mismatch_floor or 0.0, config.mismatch_cap
    assert cap is not None, "asked for where there is a cap"
    if config.mismatch_mode in ("token_truncate", "sequence_truncate"):
        return ratio_BT.clamp(floor, cap)
    return ratio_BT * ((ratio_BT >= floor) & (ratio_BT <= cap))


def top_entropy_mask(entropy_BT: Tensor, mask_BT: Tensor, quantile: float) -> Tensor:
    """1 on tokens whose entropy is at or above the quantile (linear interpolation) of the masked tokens' entropies, or `SAME`.

    Wang et al. 2025, "Beyond the 80/20 rule". Call it with the whole optimiser batch: a quantile of each micro-batch
    would make the loss depend on how the batch is cut.
    """
    entropies_K = entropy_BT[mask_BT.bool()]
    if entropies_K.numel() == 0:
        return mask_BT
    return (entropy_BT >= torch.quantile(entropies_K, quantile) - SAME).to(mask_BT.dtype) * mask_BT


def _clip_clipped(rho_BT: Tensor, logp_BT: Tensor, advantage_B1: Tensor, config: Clip) -> tuple[Tensor, Tensor]:
    low = (rho_BT < 1 - config.epsilon_low) & (advantage_B1 < 0)
    high = (rho_BT > 1 + config.epsilon_high) & (advantage_B1 > 0)
    return low.to(rho_BT.dtype), high.to(rho_BT.dtype)


def _gmpo_clipped(rho_BT: Tensor, logp_BT: Tensor, advantage_B1: Tensor, config: Gmpo) -> tuple[Tensor, Tensor]:
    low = (rho_BT < math.exp(-config.epsilon_low)) & (advantage_B1 < 0)
    high = (rho_BT > math.exp(config.epsilon_high)) & (advantage_B1 > 0)
    return low.to(rho_BT.dtype), high.to(rho_BT.dtype)


def _dppo_clipped(rho_BT: Tensor, logp_BT: Tensor, advantage_B1: Tensor, config: Dppo) -> tuple[Tensor, Tensor]:
    p_BT = logp_BT.exp()
    out_BT = 1 - _stays(p_BT, p_BT / rho_BT, advantage_B1, config)
    return out_BT * (advantage_B1 < 0), out_BT * (advantage_B1 > 0)


def _cispo_clipped(rho_BT: Tensor, logp_BT: Tensor, advantage_B1: Tensor, config: Cispo) -> tuple[Tensor, Tensor]:
    high = (rho_BT > config.epsilon_high) & (advantage_B1 > 0)
    return torch.zeros_like(rho_BT), high.to(rho_BT.dtype)


def _never_clipped(
    rho_BT: Tensor, logp_BT: Tensor, advantage_B1: Tensor, config: ObjectiveConfig
) -> tuple[Tensor, Tensor]:
    return torch.zeros_like(rho_BT), torch.zeros_like(rho_BT)


CLIPPED: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "clip_cov": _clip_clipped, "kl_cov": _never_clipped,
    "clip": _clip_clipped, "cispo": _cispo_clipped, "sapo": _never_clipped, "reinforce": _never_clipped,
    "dppo_tv": _dppo_clipped, "dppo_kl": _dppo_clipped, "gmpo": _gmpo_clipped, "vespo": _never_clipped,
}  # fmt: skip
