"""From logits to a token: what each sampling setting does, written as its definition, one row at a time where that is clear.

Order as in Hugging Face's generation: repetition penalty, temperature, top-k, top-p, min-p. Knows no model.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """Settings of one rollout; the defaults change nothing but the temperature."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


PLAIN = Sampling()


def penalise(logits_BV: Tensor, seen_BV: Tensor, penalty: float) -> Tensor:
    """CTRL's penalty (Keskar et al. 2019): a seen token's logit is divided by it if positive, else multiplied."""
    return torch.where(seen_BV, torch.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty), logits_BV)


def keep_top_k(logits_BV: Tensor, k: int) -> Tensor:
    """Rules out what is below the k-th largest logit."""
    kth_B1 = logits_BV.topk(min(k, logits_BV.shape[-1]), dim=-1).values[:, -1:]
    return logits_BV.masked_fill(logits_BV < kth_B1, -torch.inf)


def keep_top_p(logits_BV: Tensor, p: float) -> Tensor:
    """Keeps the likeliest tokens until their probabilities sum to p (nucleus, Holtzman et al. 2020), at least one."""
    sorted_BV, order_BV = logits_BV.sort(dim=-1, descending=True)
    probability_BV = sorted_BV.softmax(dim=-1)
    outside_BV = probability_BV.cumsum(dim=-1) - probability_BV >= p  # the likelier ones already sum to p
    return logits_BV.masked_fill(outside_BV.scatter(1, order_BV, outside_BV), -torch.inf)


def keep_min_p(logits_BV: Tensor, share: float) -> Tensor:
    """Keeps tokens at least `share` times as likely as the likeliest (Nguyen et al. 2024)."""
    probability_BV = logits_BV.softmax(dim=-1)
    return logits_BV.masked_fill(probability_BV < share * probability_BV.amax(dim=-1, keepdim=True), -torch.inf)


def allowed_distribution(logits_BV: Tensor, sampling: Sampling, seen_BV: Tensor | None = None) -> Tensor:
    """Probabilities [B, V] that tokens are drawn from."""
    if seen_BV is not None:
        logits_BV = penalise(logits_BV, seen_BV, sampling.repetition_penalty)
    logits_BV = logits_BV / sampling.temperature
    if sampling.top_k > 0:
        logits_BV = keep_top_k(logits_BV, sampling.top_k)
    if sampling.top_p < 1.0:
        logits_BV = keep_top_p(logits_BV, sampling.top_p)
    if sampling.min_p > 0.0:
        logits_BV = keep_min_p(logits_BV, sampling.min_p)
    return logits_BV.softmax(dim=-1)
