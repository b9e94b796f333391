"""The tokens that Clip-Cov and KL-Cov hold back (Cui et al. 2025), chosen among all of an optimiser batch.

Knows log-probabilities of the policy that sampled, advantages and a mask; no model.
"""

import torch
from torch import Tensor

from jax_grpo.config.objectives import ClipCov, KlCov
from torch_ref.objective import SAME

WORD = 0xFFFFFFFF  # arithmetic of 32 bits in integers of 64


def held_back(
    logp_BT: Tensor, advantages_B: Tensor, mask_BT: Tensor, config: ClipCov | KlCov, seed: int, step: int
) -> Tensor:
    """Bool [B, T]. KL-Cov: the largest covariances, and the earlier ones of those that are the `SAME`.

    Clip-Cov: of those between the bounds the first ones of `ticket`.
    """
    rows_K, columns_K = torch.nonzero(mask_BT, as_tuple=True)  # row by row
    chosen_BT = torch.zeros_like(mask_BT, dtype=torch.bool)
    tokens = len(rows_K)
    if tokens == 0:
        return chosen_BT
    advantage_K, logp_K = advantages_B[rows_K], logp_BT[rows_K, columns_K].detach()
    covariance_K = (advantage_K - advantage_K.mean()) * (logp_K - logp_K.mean())
    count = max(1, int(config.cov_share * tokens + 1e-4))  # 0.29 * 100 is 28.999... here
    if config.name == "kl_cov":
        first = torch.sort((covariance_K / SAME).round(), descending=True, stable=True).indices[:count]
    else:
        least, most = config.cov_bounds
        inside = torch.nonzero((covariance_K > least) & (covariance_K < most))[:, 0]
        number_BT = mask_BT.long().cumsum(1)
        tickets = [ticket(seed, step, int(rows_K[k]), int(number_BT[rows_K[k], columns_K[k]])) for k in inside]
        first = inside[sorted(range(len(tickets)), key=tickets.__getitem__)[:count]]
    chosen_BT[rows_K[first], columns_K[first]] = True
    return chosen_BT


def ticket(*numbers: int) -> int:
    """32 bits that look drawn: each number is added to what MurmurHash3's finaliser makes of those before it."""
    word = 0
    for number in numbers:
        word = (word + number) & WORD
        word = ((word ^ (word >> 16)) * 0x85EBCA6B) & WORD
        word = ((word ^ (word >> 13)) * 0xC2B2AE35) & WORD
        word ^= word >> 16
    return word
