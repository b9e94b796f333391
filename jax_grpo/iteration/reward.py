"""Rewards of completions, and what each is worth within its group: all that lies between a draw and a batch.

Knows nothing of log-probabilities or of how completions are made.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_grpo import advantages
from jax_grpo.config.learning import Learning
from jax_grpo.config.objectives import OverlongPenalty
from jax_grpo.iteration.draw import Draw
from jax_grpo.mesh import processes
from jax_grpo.model.tokenizer import Tokenizer
from jax_grpo.rollout.generate import PromptTokens, Rollout, completion_ids, decode_completions
from jax_grpo.tasks.base import Component, Logged, Prompt, Task, TrainerState, total_reward
from jax_grpo.tasks.checked import about_every_row, caps, not_negative
from jax_grpo.tasks.episodes import Episode
from jax_grpo.tasks.shared import shared_score


class Samples(NamedTuple):
    """P prompts and their P * G completions with everything the update needs but log-probabilities.

    `components` are raw reward components by name, `rewards_B` their weighted sum with penalties. An episode's text is all
    of its turns.
    """

    prompts: list[Prompt]  # of each completion
    tokens: PromptTokens  # of each prompt
    rollout: Rollout
    completions: list[str]
    components: dict[str, Component]
    rewards_B: np.ndarray
    advantages_PG: jax.Array | np.ndarray  # within groups: see `advantages.within_groups`
    flat_P: jax.Array | np.ndarray  # whether the group is without signal
    logged: Logged

    @property
    def episodes(self) -> list[Episode] | None:
        """Each row's episode, turn by turn; None of a task that answers no completion."""
        return self.rollout.episodes

    @property
    def lengths_B(self) -> np.ndarray:
        """Tokens of each completion; of an episode, those that the model wrote."""
        return written(self.rollout).reshape(-1)


def written(rollout: Rollout) -> np.ndarray:
    """How many tokens the model wrote, [P, G]."""
    return np.asarray(rollout.completion_mask_PGC).sum(-1)


def rewarded(learning: Learning, task: Task, tokenizer: Tokenizer, draw: Draw, state: TrainerState) -> Samples:
    """The draw's stop-truncated texts, their rewards, and their advantages within groups.

    Each process reads and scores the completions of its own share of the prompts.

    Raises:
        RewardError: as `tasks.base.checked_score` does, in the process whose completion it is; or the config's advantages are not
            defined for these rewards.
    """
    rollout, group = draw.rollout, draw.rollout.stopped_PG.shape[1]
    prompts = [prompt for prompt in draw.prompts for _ in range(group)]
    own = processes.own(len(draw.prompts))
    own_B = slice(own.start * group, own.stop * group)
    if rollout.episodes is not None:
        outputs = rollout.episodes[own_B]
    else:
        states_B = [prompt.start_state for prompt in prompts[own_B]]
        mine = rollout if processes.count() == 1 else jax.tree.map(lambda x: x[own], rollout)
        outputs = decode_completions(mine, tokenizer, task.stop_rule, states_B)
    ids = completion_ids(rollout)[own_B]
    completions, components, logged = shared_score(task, prompts[own_B], outputs, ids, state)
    worth = weighed(learning, task.component_weights, prompts, components, rollout)
    return Samples(prompts, draw.tokens, rollout, completions, components, *worth, logged)


def weighed(
    learning: Learning,
    weights: Mapping[str, float],
    prompts: Sequence[Prompt],
    components: Mapping[str, Component],
    rollout: Rollout,
) -> tuple[np.ndarray, jax.Array, jax.Array]:
    """Rewards [B], advantages within groups [P, G], and which groups are without signal [P]; `weights` are the task's.

    Raises:
        RewardError: the config's advantages are not defined for these rewards.
    """
    lengths_PG, rewards_B = written(rollout), total_reward(components, weights)
    parts = [(weights[name], component.values_B) for name, component in components.items()]
    if (penalty := learning.objective.overlong_penalty) is not None:  # no component of the task, but of the reward
        overlong_B = overlong(lengths_PG, caps(prompts, learning.most_tokens), penalty)
        rewards_B, parts = rewards_B + overlong_B * np.float32(penalty.weight), [*parts, (penalty.weight, overlong_B)]
    if learning.advantage.scale == "maxrl":
        not_negative(rewards_B)
    if learning.advantage.components == "sum_first":
        parts = [(1.0, rewards_B)]
    else:
        about_every_row(components, weights)
    parts = [(weight, x_B) for weight, x_B in parts if weight]
    dtype = jnp.promote_types(learning.param_dtype, jnp.float32)
    components_KPG = jnp.stack([jnp.asarray(x_B, dtype).reshape(lengths_PG.shape) for _, x_B in parts])
    weights_K = jnp.array([weight for weight, _ in parts], dtype)
    return rewards_B, *advantages.within_groups(components_KPG, weights_K, learning.advantage, jnp.asarray(lengths_PG))


def overlong(lengths_PG: np.ndarray, caps_B: np.ndarray, penalty: OverlongPenalty) -> np.ndarray:
    """DAPO's soft penalty for long completions as a component [B]: 0 down to -1 at each completion's cap."""
    lengths_B = jnp.asarray(lengths_PG.reshape(-1))
    return np.asarray(advantages.overlong_penalty(lengths_B, jnp.asarray(caps_B), penalty.length, 1.0))
