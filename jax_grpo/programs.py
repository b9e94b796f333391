"""The compiled programs of a run: generate, score, update. The trainer runs these very ones, the memory report compiles them.

What is static, donated and shared stands in `rollout.generate.make_generate`, `update.make_score` and `update.make_update`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_grpo.batch import Batch, GroupedTokens
from jax_grpo.config import Config, ConfigError
from jax_grpo.config.learning import Learning
from jax_grpo.loss import mean_kl, update_work
from jax_grpo.mesh import ONE_DEVICE, Layout
from jax_grpo.model import flops
from jax_grpo.model.architecture import Architecture
from jax_grpo.model.tokenizer import Tokenizer
from jax_grpo.rollout.episodes import TaskPolicy
from jax_grpo.rollout.generate import PromptTokens, Rollout, decoding_settings, make_generate
from jax_grpo.rollout.sampling import Sampling
from jax_grpo.rollout.texts import BATCH, text_program
from jax_grpo.rollout.turns import make_next_turn, past_columns
from jax_grpo.tasks.base import Task
from jax_grpo.tasks.episodes import EpisodicTask
from jax_grpo.update import make_score, make_update

KL = dict[str, jax.Array]  # nats per token, by name


class Programs(NamedTuple):
    """Jitted functions; see where each is made for its arguments."""

    generate: Callable[..., Any]
    score: Callable[..., Any]
    update: Callable[..., Any]
    next_turn: Callable[..., Any] | None = None  # of an episode; None where there is one turn
    task_policy: TaskPolicy | None = None  # that a task queries between turns; its frozen parameters are the trainer's


def make_programs(
    config: Config, graphdef: Any, tokenizer: Tokenizer, task: Task, layout: Layout = ONE_DEVICE
) -> Programs:
    """The programs of a run with this config and the `GPT2` of `graphdef`; nothing is compiled yet.

    The tokenizer's vocabulary bounds what is sampled, the task's stop rule ends it.

    Raises:
        ConfigError: the config has episodes, and the task answers no completion; or it asks a policy, `BATCH` prompts at a time,
            which do not divide over the mesh; or top_k leaves no token out.
    """
    how, windows = config.rollout, config.windows()
    if how.top_k >= tokenizer.vocab_size:
        raise ConfigError(
            f"rollout.top_k {how.top_k} leaves none of the vocabulary's {tokenizer.vocab_size} tokens out; expected fewer, or 0"
        )
    if config.task.episode is not None and not isinstance(task, EpisodicTask):
        raise ConfigError(
            f"task.episode.turns is {windows.turns}, but the task {task.name!r} answers no completion: leave task.episode out, ask "
            f"task.name guess, or give a task that is an EpisodicTask"
        )
    sampling = Sampling(how.temperature, how.top_k, how.top_p, how.min_p, how.repetition_penalty)
    settings = decoding_settings(tokenizer, task.stop_rule, sampling)
    sizes = {"group_size": how.group_size, "layout": layout}
    generate = make_generate(
        graphdef, settings, max_new_tokens=how.max_new_tokens, past_columns=past_columns(windows), **sizes
    )
    next_turn = make_next_turn(graphdef, settings, windows=windows, **sizes) if windows.turns > 1 else None
    score = make_score(graphdef, config.learning(), layout)
    update = make_update(graphdef, config.learning(), layout)
    task_policy = None
    if isinstance(task, EpisodicTask) and task.asks is not None:
        if BATCH % (parts := config.mesh.prompt_parts):
            raise ConfigError(
                f"task {task.name!r} asks a policy {BATCH} prompts at a time, which mesh.data {config.mesh.data} x mesh.fsdp "
                f"{config.mesh.fsdp} = {parts} devices must divide"
            )
        texts = text_program(graphdef, tokenizer, task.stop_rule, how.max_new_tokens, sampling, layout=layout)
        task_policy = TaskPolicy(texts, config.prompt_limit())
    return Programs(generate, score, update, next_turn, task_policy)


def unscored(ids_PT: jax.typing.ArrayLike, mask_PT: jax.typing.ArrayLike, rollout: Rollout) -> Batch:
    """The batch of prompts and their completions before anything is known of them: no cached values, advantages 0.

    What is read is what is trained on, but for an episode's observations.
    """
    rows = (-1, rollout.completion_mask_PGC.shape[-1])
    return Batch(
        tokens=GroupedTokens(jnp.asarray(ids_PT), jnp.asarray(mask_PT), rollout.completion_ids_PGC, rollout.read_PGC),
        mask_BS=rollout.completion_mask_PGC.reshape(rows),
        advantages_B=jnp.zeros(rollout.stopped_PG.size, jnp.float32),
        stopped_B=rollout.stopped_PG.reshape(-1),
        sampling_logp_BS=rollout.sampling_logp_PGC.reshape(rows),
    )


def with_logps(learning: Learning, score: Callable[..., Any], params: Any, reference: Any, batch: Batch) -> Batch:
    """The batch with the log-probabilities and entropies that updates read from it; the reference is None without a KL term."""
    cached = {}
    if learning.needs_old_logp:
        cached["old_logp_BS"], entropy_BS = score(params, batch)
        if learning.objective.entropy_quantile > 0:
            cached["entropy_BS"] = entropy_BS
    if reference is not None:
        cached["ref_logp_BS"], _ = score(reference, batch)
    return dataclasses.replace(batch, **cached)


def kl_across_a_move(learning: Learning, score: Callable[..., Any], params: Any, reference: Any, before: Batch) -> KL:
    """Mean KL per token of the policy as it is, on the completions, to the reference that scored `before` and to where it is now.

    Scores twice, as the program is compiled: a batch without cached values.
    """
    nothing = jnp.zeros(before.advantages_B.shape, jnp.float32)
    batch = dataclasses.replace(before, advantages_B=nothing, old_logp_BS=None, ref_logp_BS=None, entropy_BS=None)
    (logp_BS, _), (ref_logp_BS, _) = score(params, batch), score(reference, batch)
    assert before.ref_logp_BS is not None, "kl.reference_every needs kl.beta"
    return {
        "kl/before_move": mean_kl(before, logp_BS, before.ref_logp_BS, learning.objective, learning.kl.estimator),
        "kl/after_move": mean_kl(before, logp_BS, ref_logp_BS, learning.objective, learning.kl.estimator),
    }


def phase_flops(
    learning: Learning, architecture: Architecture, batch: Batch, steps: int, generated: Sequence[flops.Work] = ()
) -> dict[str, float]:
    """Model FLOPs of an iteration's rollout, scoring and so many optimiser steps on its batch; see `model.flops`.

    `generated` is what was generated, where that is more than the batch.
    """
    assert isinstance(batch.tokens, GroupedTokens), "the trainer's own layout"
    masks = batch.tokens.prompt_mask_PT, batch.tokens.completion_mask_PGC
    read = _work(*masks, batch.mask_BS, architecture)
    works = (read, *update_work(batch, learning, architecture.window))
    all_tokens, forward, backward = (flops.forward(architecture, work) for work in works)
    times = flops.BACKWARD_UNDER_ADAPTERS if learning.adapters else flops.BACKWARD
    return {
        "rollout": sum(flops.forward(architecture, work) for work in generated or [read]),
        "score": (learning.needs_old_logp + (learning.kl.beta > 0)) * all_tokens,
        "update": (forward + times * backward) * steps / learning.update.minibatches,
    }


def generated_work(tokens: PromptTokens, rollout: Rollout, architecture: Architecture) -> flops.Work:
    """What generating a rollout needs."""
    return _work(tokens.mask_PT, rollout.read_PGC, rollout.completion_mask_PGC, architecture)


def _work(prompt_mask_PT: Any, read_PGC: Any, written_mask: Any, architecture: Architecture) -> flops.Work:
    """Of a pass over all of these tokens; only those that the model wrote are predicted."""
    work = flops.completions_work(prompt_mask_PT, read_PGC, architecture.window)
    return work._replace(predicted=int(np.asarray(written_mask).sum()))
