"""Rewards of a draw's completions by the run's task."""

import jax
import numpy as np

from jax_grpo.config import Config
from jax_grpo.mesh import processes
from jax_grpo.model.tokenizer import Tokenizer
from jax_grpo.rollout.episodes import Played
from jax_grpo.rollout.generate import completion_ids, decode_completions
from jax_grpo.scored import Scored, overlong
from jax_grpo.scored.refill import Drawn
from jax_grpo.tasks.base import Task, TrainerState, total_reward
from jax_grpo.tasks.shared import shared_score


def rewarded(config: Config, task: Task, tokenizer: Tokenizer, drawn: Drawn, iteration: int) -> Scored:
    """Stop-truncated texts, their raw components [B], and the weighted sum with penalties.

    Each process reads and scores the completions of its own share of the prompts.

    Raises:
        RewardError: as `tasks.base.checked_score` does, in the process whose completion it is.
    """
    prompts, rollout = drawn.prompts, drawn.rollout
    own, group = processes.own(config.prompts.per_iteration), config.rollout.group_size
    own_B = slice(own.start * group, own.stop * group)
    asked = prompts[own_B]
    ids = completion_ids(rollout.completion_ids_PGC, rollout.completion_mask_PGC)[own_B]
    if isinstance(rollout, Played):
        judged = rollout.episodes[own_B]
    else:
        states_B = [prompt.start_state for prompt in asked]
        mine = rollout if processes.count() == 1 else jax.tree.map(lambda x: x[own], rollout)
        judged = decode_completions(mine, tokenizer, task.stop_rule, states_B)
    state = TrainerState(iteration, config.iterations)
    completions, components, logged = shared_score(task, asked, judged, ids, state)
    rewards_B = total_reward(components, task.component_weights)
    if (penalty := config.objective.overlong_penalty) is not None:
        rewards_B = rewards_B + overlong(config, prompts, rollout) * np.float32(penalty.weight)
    return Scored(prompts, completions, components, rewards_B, rollout, logged)
