"""The compiled programs of a run: generate, score, update. The trainer runs these very ones, the memory report compiles them.

What is static, donated and shared stands in `rollout.generate.make_generate`, `update.make_score` and `update.make_update`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_grpo.batch import Batch, GroupedTokens
from jax_grpo.config import Config, ConfigError
from jax_grpo.loss import mean_kl, update_work
from jax_grpo.mesh import ONE_DEVICE, Layout
from jax_grpo.model import flops
from jax_grpo.model.gpt2 import GPT2Config
from jax_grpo.model.tokenizer import Tokenizer
from jax_grpo.rollout.episodes import Partner, Played
from jax_grpo.rollout.generate import Rollout, padded_length
from jax_grpo.rollout.sampling import Sampling
from jax_grpo.rollout.texts import BATCH, Texts
from jax_grpo.tasks.base import Task
from jax_grpo.tasks.episodes import EpisodicTask
from jax_grpo.update import TrainState, make_score, make_update

KL = dict[str, jax.Array]  # nats per token, by name


class Programs(NamedTuple):
    """Jitted functions; see where each is made for its arguments."""

    generate: Callable[..., Any]
    score: Callable[..., Any]
    update: Callable[..., Any]
    next_turn: Callable[..., Any] | None = None  # of an episode; None where there is one turn
    partner: Partner | None = None  # whom a task asks between turns; its frozen parameters are the trainer's


def make_programs(
    config: Config, graphdef: Any, tokenizer: Tokenizer, task: Task, layout: Layout = ONE_DEVICE
) -> Programs:
    """The programs of a run with this config and the `GPT2` of `graphdef`; nothing is compiled yet.

    The tokenizer's vocabulary bounds what is sampled, the task's stop rule ends it.

    Raises:
        ConfigError: the config has episodes, and the task answers no completion; or it asks a policy, `BATCH` prompts at a time,
            which do not divide over the mesh.
    """
    how, windows = config.rollout, config.windows()
    if config.task.episode is not None and not isinstance(task, EpisodicTask):
        raise ConfigError(
            f"task.episode.turns is {windows.turns}, but the task {task.name!r} answers no completion: leave task.episode out, ask "
            f"task.name guess, or give a task that is an EpisodicTask"
        )
    sampling = Sampling(how.temperature, how.top_k, how.top_p, how.min_p, how.repetition_penalty)
    texts = Texts(tokenizer, task.stop_rule, how.max_new_tokens)
    generate, next_turn = texts.episode_programs(
        graphdef, windows, sampling, group_size=how.group_size, compacts=how.compaction, layout=layout
    )
    score = make_score(graphdef, config, layout)
    update = make_update(graphdef, config, config.optimizer_steps(), layout)
    partner = None
    if isinstance(task, EpisodicTask) and task.asks is not None:
        if BATCH % (parts := config.mesh.prompt_parts):
            raise ConfigError(
                f"task {task.name!r} asks a policy {BATCH} prompts at a time, which mesh.data {config.mesh.data} x mesh.fsdp "
                f"{config.mesh.fsdp} = {parts} devices must divide"
            )
        partner = Partner(texts, texts.program(graphdef, sampling, layout=layout), config.prompts.max_prompt_tokens)
    return Programs(generate, score, update, next_turn, partner)


def context(config: Config) -> int:
    """Tokens of the longest sequence a run can have: the widest bucket of prompts, and the caps of all that follows."""
    return padded_prompt(config) + config.windows().columns


def padded_prompt(config: Config) -> int:
    """Tokens of the widest bucket of prompts."""
    return padded_length(config.prompts.max_prompt_tokens)


def unscored(ids_PT: jax.Array, mask_PT: jax.Array, rollout: Rollout | Played) -> Batch:
    """The batch of prompts and their completions before anything is known of them: no cached values, advantages 0.

    What is read is what is trained on, but for an episode's observations.
    """
    rows = (-1, rollout.completion_mask_PGC.shape[-1])
    read_PGC = rollout.read_mask_PGC if isinstance(rollout, Played) else rollout.completion_mask_PGC
    return Batch(
        tokens=GroupedTokens(ids_PT, mask_PT, rollout.completion_ids_PGC, read_PGC),
        mask_BS=rollout.completion_mask_PGC.reshape(rows),
        advantages_B=jnp.zeros(rollout.stopped_PG.size, jnp.float32),
        stopped_B=rollout.stopped_PG.reshape(-1),
        sampling_logp_BS=rollout.sampling_logp_PGC.reshape(rows),
    )


def needs_old_logp(config: Config) -> bool:
    """One step on each rollout means the updated policy is the old one: its own value serves (ratio exactly 1)."""
    several = config.update.epochs * config.update.minibatches > 1
    return several or config.objective.holds_back or config.objective.entropy_quantile > 0 or config.record_batches > 0


def with_logps(config: Config, score: Callable[..., Any], params: Any, reference: Any, batch: Batch) -> Batch:
    """The batch with the log-probabilities and entropies that updates read from it; the reference is None without a KL term."""
    cached = {}
    if needs_old_logp(config):
        cached["old_logp_BS"], entropy_BS = score(params, batch)
        if config.objective.entropy_quantile > 0:
            cached["entropy_BS"] = entropy_BS
    if reference is not None:
        cached["ref_logp_BS"], _ = score(reference, batch)
    return dataclasses.replace(batch, **cached)


def kl_across_a_move(config: Config, score: Callable[..., Any], state: TrainState, before: Batch) -> KL:
    """Mean KL per token of the policy as it is, on the completions, to the reference that scored `before` and to where it is now.

    Scores twice, as the program is compiled: a batch without cached values.
    """
    nothing = jnp.zeros(before.advantages_B.shape, jnp.float32)
    bare = dataclasses.replace(before, advantages_B=nothing, old_logp_BS=None, ref_logp_BS=None, entropy_BS=None)
    (logp_BS, _), (ref_logp_BS, _) = score(state.params, bare), score(state.reference, bare)
    assert before.ref_logp_BS is not None, "kl.reference_every needs kl.beta"
    return {
        "kl/before_move": mean_kl(before, logp_BS, before.ref_logp_BS, config),
        "kl/after_move": mean_kl(before, logp_BS, ref_logp_BS, config),
    }


def phase_flops(
    config: Config, architecture: GPT2Config, batch: Batch, steps: int, drawn: Sequence[Batch] = ()
) -> dict[str, float]:
    """Model FLOPs of an iteration's rollout, scoring and so many optimiser steps on its batch; see `model.flops`.

    `drawn` are the batches that were generated, where they are others than the one that is trained on.
    """
    works = (_read(batch), *update_work(batch, config))
    all_tokens, forward, backward = (flops.forward(architecture, work) for work in works)
    return {
        "rollout": sum(flops.forward(architecture, _read(one)) for one in drawn or [batch]),
        "score": (needs_old_logp(config) + (config.kl.beta > 0)) * all_tokens,
        "update": (forward + flops.BACKWARD * backward) * steps / config.update.minibatches,
    }


def _read(batch: Batch) -> flops.Work:
    """What a pass over all of a batch's tokens needs."""
    assert isinstance(batch.tokens, GroupedTokens), "the trainer's own layout"
    work = flops.completions_work(batch.tokens.prompt_mask_PT, batch.tokens.completion_mask_PGC)
    return work._replace(predicted=int(batch.mask_BS.sum()))
