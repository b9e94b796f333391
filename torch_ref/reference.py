"""The reference that the KL is measured to, where it follows the policy instead of staying its start.

Knows two models and a number of steps.
"""

import torch

from jax_grpo.config.learning import KLConfig
from torch_ref.model import LanguageModel


def due(step: int, config: KLConfig) -> bool:
    """Whether the reference moves behind the optimiser step of this number, the first one's being 1."""
    return config.reference_every is not None and step % config.reference_every == 0


@torch.no_grad()
def move(reference: LanguageModel, policy: LanguageModel, share: float) -> None:
    """reference + share * (policy - reference), every parameter in place (TR-DPO, Gorbatovski et al. 2024)."""
    for ours, theirs in zip(reference.parameters(), policy.parameters(), strict=True):
        ours.lerp_(theirs, share)
