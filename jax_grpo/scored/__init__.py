"""An iteration's completions with their rewards, the advantages that follow, and which groups are trained on (`refill`).

Owns what lies between completions and the batch. Knows nothing of log-probabilities or of how completions are made.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_grpo import advantages
from jax_grpo.config import Config
from jax_grpo.rollout.episodes import Played
from jax_grpo.rollout.generate import Rollout
from jax_grpo.tasks.base import Logged, Prompt, about_every_row, caps, not_negative
from jax_grpo.tasks.episodes import Episode


class Scored(NamedTuple):
    """An iteration's completions with everything the update needs but log-probabilities.

    `components` are raw reward components [B] by name, `rewards_B` their weighted sum with penalties. An episode's text is all
    that was said in it.
    """

    prompts: list[Prompt]
    completions: list[str]
    components: dict[str, np.ndarray]
    rewards_B: np.ndarray
    rollout: Rollout | Played
    logged: Logged = Logged({}, {})

    @property
    def episodes(self) -> list[Episode] | None:
        """What was said in each row's episode, turn by turn; None of a task that answers no completion."""
        return self.rollout.episodes if isinstance(self.rollout, Played) else None

    @property
    def lengths_B(self) -> np.ndarray:
        """Tokens of each completion; of an episode, those that the model wrote."""
        return np.asarray(self.rollout.completion_mask_PGC).sum(-1).reshape(-1)


def overlong(config: Config, prompts: list[Prompt], rollout: Rollout | Played) -> np.ndarray:
    """DAPO's soft penalty for long completions as a component [B]: 0 down to -1 at the cap; the config must have one."""
    assert config.objective.overlong_penalty is not None, "asked where there is one"
    lengths_B = np.asarray(rollout.completion_mask_PGC).sum(-1).reshape(-1)
    caps_B = jnp.asarray(caps(prompts, config.rollout.max_new_tokens))
    length = config.objective.overlong_penalty.length
    return np.asarray(advantages.overlong_penalty(jnp.asarray(lengths_B), caps_B, length, 1.0))


def advantages_of(config: Config, weights: Mapping[str, float], scored: Scored) -> tuple[jax.Array, np.ndarray]:
    """Advantages [B] and which rows are of a group without signal [B]; `weights` are the task's, by component.

    Raises:
        RewardError: the config's advantages are not defined for these rewards.
    """
    prompts, group = scored.rollout.completion_mask_PGC.shape[:2]
    group_ids_B = jnp.asarray(np.repeat(np.arange(prompts, dtype=np.int32), group))
    dtype = jnp.promote_types(config.model.param_dtype, jnp.float32)
    lengths_B, penalty = jnp.asarray(scored.lengths_B), config.objective.overlong_penalty
    if config.advantage.scale == "maxrl":
        not_negative(scored.rewards_B)
    if config.advantage.components == "sum_first":
        rewards_B = jnp.asarray(scored.rewards_B, dtype)
        found = advantages.group_advantages(rewards_B, group_ids_B, config.advantage, lengths_B)
    else:
        about_every_row(scored.components, weights)
        weighted = [(weights[name], x_B) for name, x_B in scored.components.items() if weights.get(name)]
        if penalty is not None:  # no component of the task, but of the reward
            weighted.append((penalty.weight, overlong(config, scored.prompts, scored.rollout)))
        components_KB = jnp.stack([jnp.asarray(x_B, dtype) for _, x_B in weighted])
        weights_K = jnp.array([weight for weight, _ in weighted], dtype)
        found = advantages.combined_advantages(components_KB, weights_K, group_ids_B, config.advantage, lengths_B)
    return found[0], np.asarray(found[1])
