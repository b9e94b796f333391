"""Group-relative advantages from rewards: a baseline, a scale, and the sum over reward components.

A group is the set of samples of one prompt; no baseline ever reaches over the batch. Knows nothing of tokens or models.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from jax_grpo.config.learning import AdvantageConfig

SCALE_EPSILON = 1e-4  # added to a standard deviation before dividing by it, in the reward's unit
CANCELLED = 1e-6  # what is left of components that cancel, as a share of them: rounding


def settings_of(config: AdvantageConfig) -> dict[str, Any]:
    """The settings that are of each reward by itself, as keywords."""
    names = ("baseline", "pass_at_k", "scale", "clip")
    return {name: getattr(config, name) for name in names}


def group_advantages(
    rewards_B: Tensor,
    group_ids_B: Tensor,
    *,
    baseline: str = "mean",
    pass_at_k: int | None = None,
    scale: str = "group",
    clip: float | None = None,
    lengths_B: Tensor | None = None,
    silent_B: Tensor | None = None,
) -> Tensor:
    """Advantages [B] of one reward.

    baseline `mean`: A = r - mean_g(r) (GRPO, Shao et al. 2024); `leave_one_out`: A_i = r_i - mean of the others of the
    group (RLOO, Ahmadian et al. 2024); `opo`: A = r - sum_g(l r) / sum_g(l), l the completions' tokens (OPO, Hao et al. 2025).
    `pass_at_k`: `pass_at_k_credits` in the place of these. Then divided by: `none` 1; `group` std_g(r) + 1e-4; `batch` std(r) over
    the batch + 1e-4, both deviations with ddof 1; `robust` sqrt(pi / 2) times the mean distance of the group's rewards from
    their median, + 1e-4; `maxrl` mean_g(r) (MaxRL, Tajwar et al. 2026). A group of equal rewards has A = 0 exactly, whatever
    rounding says, and so has a group of one sample, which has neither baseline nor deviation, and a group that is `silent` [B].
    Last, A is cut to [-clip, clip].
    """
    advantages_B = torch.zeros_like(rewards_B)
    for group in group_ids_B.unique():
        member = group_ids_B == group
        reward_G = rewards_B[member]
        if bool((reward_G == reward_G[0]).all()) or (silent_B is not None and bool(silent_B[member].all())):
            continue
        if pass_at_k is not None:
            unscaled_G = pass_at_k_credits(reward_G, pass_at_k)
        elif baseline == "opo":
            assert lengths_B is not None, "opo weighs by length"
            unscaled_G = reward_G - (lengths_B[member] * reward_G).sum() / lengths_B[member].sum()
        else:
            unscaled_G = BASELINES[baseline](reward_G)
        advantages_B[member] = unscaled_G / SCALES[scale](reward_G, rewards_B)
    return cut(advantages_B, clip)


def pass_at_k_credits(reward_G: Tensor, k: int) -> Tensor:
    """n s_i of one group of n, s_i as in PKPO (Walder and Karkhanis 2025), eq. 33, with exact binomial coefficients.

    Its two sums one by one: that of max_I r over the subsets I of k with i is eq. 19, sum_j m_ij r_(j) with the m of eqs. 20
    and 21 over the rewards in ascending order; that of max_{I without i} r is over all subsets of k - 1 of the others, eq. 12.
    """
    n = reward_G.numel()
    order = reward_G.argsort().tolist()
    ascending = [float(reward_G[row]) for row in order]
    # Shares of all subsets: ratios of whole numbers, each of which may be too large for a float.
    with_largest = [math.comb(i, k - 1) / math.comb(n, k) for i in range(n)]
    with_two = [math.comb(i, k - 2) / math.comb(n, k) for i in range(n)]
    credits_G = torch.empty_like(reward_G)
    for i, row in enumerate(order):
        best = with_largest[i] * ascending[i] + sum(with_two[j - 1] * ascending[j] for j in range(i + 1, n))
        others = ascending[:i] + ascending[i + 1 :]
        best_of_others = sum(with_two[j] * reward for j, reward in enumerate(others))
        credits_G[row] = n * (best - best_of_others)
    return credits_G


def cut(advantages_B: Tensor, clip: float | None) -> Tensor:
    """Advantages within +-clip; None: as they are."""
    return advantages_B if clip is None else advantages_B.clamp(-clip, clip)


def component_advantages(
    rewards_BK: Tensor,
    weights_K: Tensor | Sequence[float],
    group_ids_B: Tensor,
    *,
    components: str = "sum_first",
    baseline: str = "mean",
    pass_at_k: int | None = None,
    scale: str = "group",
    clip: float | None = None,
    lengths_B: Tensor | None = None,
    silent_B: Tensor | None = None,
) -> Tensor:
    """Advantages [B] of K reward components; one of weight 0 takes no part.

    `sum_first`: of the reward sum_k w_k r_k. `normalise_each`: sum_k w_k A_k, each A_k scaled by its own deviation in the
    group; only `scale` `group` says so. `gdpo` (Liu et al. 2026, GDPO): the same, and then the batch's mean is taken off and
    its deviation (ddof 1, + 1e-4) divided by. A group in which no counted component varies, or all cancel, is at 0 in both, and
    so is one that is `silent` [B]. `clip` is of the result.
    """
    counted = [(weight, reward_B) for weight, reward_B in zip(weights_K, rewards_BK.T, strict=True) if weight != 0]
    if components == "sum_first":
        total_B = torch.stack([weight * reward_B for weight, reward_B in counted]).sum(0)
        how = {"baseline": baseline, "pass_at_k": pass_at_k, "scale": scale, "clip": clip}
        return group_advantages(total_B, group_ids_B, lengths_B=lengths_B, silent_B=silent_B, **how)
    how = {"baseline": baseline, "scale": "group", "lengths_B": lengths_B, "silent_B": silent_B}
    each = [weight * group_advantages(reward_B, group_ids_B, **how) for weight, reward_B in counted]
    sum_B, size_B = torch.stack(each).sum(0), torch.stack(each).abs().sum(0)
    varies_B = torch.zeros_like(group_ids_B, dtype=torch.bool)
    for group in group_ids_B.unique():
        member = group_ids_B == group
        varies_B[member] = bool((sum_B[member].abs() > CANCELLED * size_B[member]).any())
    sum_B = torch.where(varies_B, sum_B, 0.0)
    if components == "normalise_each":
        return cut(sum_B, clip)
    over_batch_B = (sum_B - sum_B.mean()) / (sum_B.std(correction=1) + SCALE_EPSILON)
    return cut(torch.where(varies_B, over_batch_B, 0.0), clip)


def groups_with_signal(
    rewards_BK: Tensor, advantages_B: Tensor, group_ids_B: Tensor, pass_at_k: int | None = None
) -> list[bool]:
    """Of each group, whether some advantage is not 0.

    None is where all rewards [B], or all rows of counted components [B, K], are equal, or components cancel; and of `pass_at_k`
    where fewer than k - 1 samples are below the group's best: each subset of k has two of the best then, and loses nothing with
    one of them. (Sums of credits round to something beside 0 there, which is why they are not asked.)
    """
    has_signal = []
    for group in group_ids_B.unique():
        reward_GK = rewards_BK[group_ids_B == group]
        has = not bool((reward_GK == reward_GK[0]).all()) and bool((advantages_B[group_ids_B == group] != 0).any())
        if pass_at_k is not None:
            has = has and int((reward_GK < reward_GK.max()).sum()) >= pass_at_k - 1
        has_signal.append(has)
    return has_signal


def overlong_penalty(length_B: Tensor, cap: int | Tensor, zone: int, weight: float) -> Tensor:
    """Reward [B] to add for long completions: 0 up to cap - zone tokens, then linearly to -weight at the cap.

    DAPO's soft overlong punishment (Yu et al. 2025, eq. 13).
    """
    return -weight * ((length_B - (cap - zone)) / zone).clamp(0.0, 1.0)


BASELINES = {
    "mean": lambda reward_G: reward_G - reward_G.mean(),
    "leave_one_out": lambda reward_G: reward_G - (reward_G.sum() - reward_G) / (reward_G.numel() - 1),
}
SCALES = {
    "none": lambda reward_G, rewards_B: 1.0,
    "group": lambda reward_G, rewards_B: reward_G.std(correction=1) + SCALE_EPSILON,
    "batch": lambda reward_G, rewards_B: rewards_B.std(correction=1) + SCALE_EPSILON,
    # Not `Tensor.median`, which is the lower of the two middle values of an even number.
    "robust": lambda reward_G, rewards_B: (
        math.sqrt(math.pi / 2) * (reward_G - reward_G.quantile(0.5)).abs().mean() + SCALE_EPSILON
    ),
    "maxrl": lambda reward_G, rewards_B: reward_G.mean(),
}
