"""Group-relative advantages from rewards: a baseline, a scale, and the sum over reward components.

A group is the set of samples of one prompt; no baseline ever reaches over the batch. Knows nothing of tokens or models.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

SCALE_EPSILON = 1e-4  # added to a standard deviation before dividing by it, in the reward's unit


def group_advantages(
    rewards_B: Tensor, group_ids_B: Tensor, *, baseline: str = "mean", scale: str = "group", clip: float | None = None
) -> Tensor:
    """Advantages [B] of one reward.

    baseline `mean`: A = r - mean_g(r) (GRPO, Shao et al. 2024); `leave_one_out`: A_i = r_i - mean of the others of the
    group (RLOO, Ahmadian et al. 2024). Then divided by: `none` 1; `group` std_g(r) + 1e-4; `batch` std(r) over
    the batch + 1e-4, both deviations with ddof 1; `robust` sqrt(pi / 2) times the mean distance of the group's rewards from
    their median, + 1e-4. A group of equal rewards has A = 0 exactly, whatever rounding says, and so has a group of one sample,
    which has neither baseline nor deviation. Last, A is cut to [-clip, clip].
    """
    advantages_B = torch.zeros_like(rewards_B)
    for group in group_ids_B.unique():
        member = group_ids_B == group
        reward_G = rewards_B[member]
        if bool((reward_G == reward_G[0]).all()):
            continue
        centred_G = BASELINES[baseline](reward_G)
        advantages_B[member] = centred_G / SCALES[scale](reward_G, rewards_B)
    return cut(advantages_B, clip)


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
    scale: str = "group",
    clip: float | None = None,
) -> Tensor:
    """Advantages [B] of K reward components; one of weight 0 takes no part.

    `sum_first`: of the reward sum_k w_k r_k. `normalise_each`: sum_k w_k A_k, each A_k scaled by its own deviation in the
    group; only `scale` `group` says so. `gdpo` (Liu et al. 2026, GDPO): the same, and then the batch's mean is taken off and
    its deviation (ddof 1, + 1e-4) divided by; a group in which no counted component varies stays at 0. `clip` is of the result.
    """
    counted = [(weight, reward_B) for weight, reward_B in zip(weights_K, rewards_BK.T, strict=True) if weight != 0]
    if components == "sum_first":
        total_B = torch.stack([weight * reward_B for weight, reward_B in counted]).sum(0)
        return group_advantages(total_B, group_ids_B, baseline=baseline, scale=scale, clip=clip)
    each = [
        weight * group_advantages(reward_B, group_ids_B, baseline=baseline, scale="group")
        for weight, reward_B in counted
    ]
    sum_B = torch.stack(each).sum(0)
    if components == "normalise_each":
        return cut(sum_B, clip)
    varies_B = torch.zeros_like(group_ids_B, dtype=torch.bool)
    for group in group_ids_B.unique():
        member = group_ids_B == group
        varies_B[member] = any(bool((reward_B[member] != reward_B[member][0]).any()) for _, reward_B in counted)
    over_batch_B = (sum_B - sum_B.mean()) / (sum_B.std(correction=1) + SCALE_EPSILON)
    return cut(torch.where(varies_B, over_batch_B, 0.0), clip)


def groups_without_signal(rewards_BK: Tensor, group_ids_B: Tensor) -> int:
    """How many groups have only equal rewards [B], or only equal rows of counted components [B, K]."""
    groups = (rewards_BK[group_ids_B == group] for group in group_ids_B.unique())
    return sum(bool((reward_GK == reward_GK[0]).all()) for reward_GK in groups)


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
}
