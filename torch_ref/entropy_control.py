"""The coefficient of the entropy bonus where a target moves it: more while the policy is too sure of itself, less while it is not.

Knows two numbers, not where they come from.
"""

import math

from jax_grpo.config.objectives import ObjectiveConfig

NOTHING_SEEN = math.inf  # the entropy "before" the first step


def in_force(coefficient: float, entropy_before: float, config: ObjectiveConfig) -> float:
    """What a step multiplies its entropy by: the coefficient, if the step before was at or below the target (He et al. 2025)."""
    if config.entropy_target is None:
        return config.entropy_coefficient
    return coefficient if entropy_before <= config.entropy_target else 0.0


def behind(coefficient: float, entropy: float, config: ObjectiveConfig) -> float:
    """The coefficient behind a step that saw this entropy."""
    if config.entropy_target is None:
        return coefficient
    least, most = config.entropy_bounds
    if entropy <= config.entropy_target:
        return min(coefficient + config.entropy_step, most)
    return max(coefficient - config.entropy_step, least)
