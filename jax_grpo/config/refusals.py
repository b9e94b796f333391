"""What cannot stand together in a config: sentences about settings of different sections, each with keys, values and a way out.

A section says itself which of its own settings cannot stand together. Nothing here touches JAX.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from jax_grpo.config import sections

if TYPE_CHECKING:
    from jax_grpo.config import Config


def refusals(config: "Config") -> Iterator[str]:
    """Why these settings cannot stand together, one sentence a reason."""
    yield from _batch_sizes(config)
    yield from _lengths(config)
    yield from _without_effect(config)
    yield from _sources(config)
    yield from _evaluation(config)
    yield from _ranking(config)
    if config.mesh.devices > 1:
        yield from _on_a_mesh(config)


def _batch_sizes(config: "Config") -> Iterator[str]:
    """Groups are compared and stay whole; an optimiser batch is cut evenly."""
    prompts, group, update = config.prompts.per_iteration, config.rollout.group_size, config.update
    if group < 2:
        yield f"rollout.group_size {group} gives every completion advantage 0: a group's baseline needs at least 2"
    if (subset := config.advantage.pass_at_k or 0) > group:
        yield f"advantage.pass_at_k {subset} exceeds rollout.group_size {group}: a group has no subset of {subset} samples"
    if prompts % update.minibatches:
        yield f"update.minibatches {update.minibatches} must divide prompts.per_iteration {prompts}: groups stay whole"
    if update.micro_batches not in ("auto", *config.possible_micro_batches()):
        per_step = prompts // update.minibatches
        yield (
            f"update.micro_batches {update.micro_batches} must cut {per_step} prompts x {group} completions into whole "
            f"groups or equal slices of a group; try a divisor of {per_step}, or {per_step} times a divisor of {group}"
        )


def _lengths(config: "Config") -> Iterator[str]:
    """What is part of a length must not exceed it: tokens of a sequence, optimiser steps of a schedule."""
    model, cap = config.model, config.rollout.max_new_tokens
    windows = config.windows()
    positions, prompt = model.max_position_embeddings, config.prompts.max_prompt_tokens
    tokens = (prompt or sections.PROMPT_MULTIPLE) + windows.columns
    if model.weights is None and positions is not None and tokens > positions:
        words = "prompts.max_prompt_tokens" if prompt else f"a prompt ({sections.PROMPT_MULTIPLE})"
        yield f"{words} + {config.after_prompt()} = {tokens} exceeds model.max_position_embeddings {positions}"
    penalty = config.objective.overlong_penalty
    if penalty is not None and windows.turns > 1:
        yield f"objective.overlong_penalty is of one completion, and task.episode.turns is {windows.turns}; leave it out"
    if penalty is not None and penalty.length > cap:
        yield f"objective.overlong_penalty.length {penalty.length} exceeds rollout.max_new_tokens {cap}"
    for name, part in (config.task.mixture or {}).items():
        if (own := part.max_new_tokens or cap) > cap:
            yield f"task.mixture.{name}.max_new_tokens {own} exceeds rollout.max_new_tokens {cap}"
        if penalty is not None and penalty.length > own:
            yield (
                f"objective.overlong_penalty.length {penalty.length} exceeds task.mixture.{name}.max_new_tokens {own}: its "
                "completions would lose reward from before their first token"
            )
    if (total := config.update.total_steps) is not None and config.update.warmup_steps >= total:
        yield f"update.warmup_steps {config.update.warmup_steps} must be below update.total_steps {total}"


def _without_effect(config: "Config") -> Iterator[str]:
    """A setting beside which another one would do nothing, without a word."""
    if config.kl.guardrail == "end_epoch" and config.update.epochs * config.update.minibatches == 1:
        yield (
            "kl.guardrail end_epoch needs more than one optimiser step an iteration: there is none to leave out with "
            "update.epochs 1 and update.minibatches 1"
        )
    processed = [f"rollout.{key} {value}" for key, value in config.rollout.beside_temperature()]
    if config.objective.mismatch_cap is not None and processed:
        yield (
            f"objective.mismatch_cap {config.objective.mismatch_cap} compares what is recorded, log-probabilities of the whole "
            f"softmax at rollout.temperature, and {processed[0]} draws from another distribution: it would correct nothing of "
            "that; leave one of them out"
        )
    least = config.prompts.per_iteration * config.rollout.group_size
    if (refill := config.rollout.refill) is not None and refill.ahead and config.task.episode is not None:
        yield (
            "rollout.refill.ahead true generates beside the rewards, and with task.episode each turn waits for the task's "
            "answers; set it to false"
        )
    if refill is not None and refill.tokens is not None and refill.tokens <= least:
        yield (
            f"rollout.refill.tokens {refill.tokens} lets no further draw begin: the first one's {least} completions have that "
            f"many tokens already; expected more than {least}"
        )
    if config.model.adapter is not None and config.kl.reference_mix != 1:
        yield (
            f"kl.reference_mix {config.kl.reference_mix} with model.adapter would mix the two matrices of each adapter one by "
            "one, whose product is then no mixture; expected 1, which copies them"
        )
    if config.model.adapter is not None:
        for key, value in config.kl.not_default("reference_dtype", "offload_reference"):
            yield (
                f"kl.{key} {str(value).lower()} with model.adapter: the reference reads the policy's own base, and has "
                "nothing but adapters to make smaller; leave it out"
            )
    asking = config.task.needs_reference
    if asking is not None and config.kl.beta == 0:
        yield f"{asking} needs kl.beta > 0: without a KL term no reference is kept"
    if asking is not None and config.kl.reference_every is not None:
        yield (
            f"{asking} plays with the run's frozen start, which kl.reference_every {config.kl.reference_every} "
            "moves: scores of one iteration and of another would be against different players; expected self, or null"
        )
    if asking is not None and config.kl.offload_reference:
        yield f"{asking} plays with the reference on the device, where kl.offload_reference true does not leave it"
    if config.lm_head.logits_dtype == "bfloat16" and config.model.compute_dtype != "bfloat16":
        yield f"lm_head.logits_dtype bfloat16 needs model.compute_dtype bfloat16; it is {config.model.compute_dtype}"


def _sources(config: "Config") -> Iterator[str]:
    """Prompts of one's own come from a file of one's own, and are held out of it."""
    made = [name for name, part in (config.task.mixture or {}).items() if part.task == "reasoning_gym"]
    if (own := [*config.task.sources, *made]) and config.evaluation.source is not None:
        yield (
            f"evaluation.source is {config.evaluation.source!r}, but {', '.join(own)} of task.mixture has a source of its own: an "
            "evaluation asks the held-out splits of all sources; leave it out"
        )
    read: dict[str, str | None] = {
        f"task.mixture.{name}.source": part.source
        for name, part in (config.task.mixture or {}).items()
        if part.task == "prompts"
    }
    if config.task.name == "prompts":
        read = {"prompts.source": config.prompts.source, "evaluation.source": config.evaluation.source}
    for key, source in read.items():
        if source is not None and sections.is_built_in(source):
            yield f"{key} is {source}, which has chess positions; a prompts task needs a .jsonl, .csv or .parquet file"


def _evaluation(config: "Config") -> Iterator[str]:
    """An evaluation asks positions that the run does not train on."""
    count, source = config.evaluation.positions, config.evaluation.source
    if count and source is None and config.prompts.split != "train":
        yield (
            f"prompts.split is {config.prompts.split}, so the run trains on the positions that evaluation.positions {count} "
            "would ask: give others as evaluation.source, or set evaluation.positions to 0"
        )
    if source is not None and not count:
        yield f"evaluation.source is {source!r}, but evaluation.positions is 0, which asks none of them; expected at least 1"


def _ranking(config: "Config") -> Iterator[str]:
    """A checkpoint is ranked by the evaluation of its own weights, so that each one that is saved must be evaluated."""
    best, evaluation, saves = config.best_metric(), config.evaluation, config.checkpoint.every
    if not (config.checkpoint.keep_best and best.startswith("eval/")):
        return
    for name in ("positions", "every"):
        if getattr(evaluation, name) == 0:
            yield f"checkpoint.best_metric {best!r} needs evaluation.{name} of at least 1; it is 0"
    if saves % evaluation.every:
        yield (
            f"checkpoint.every {saves} must be a multiple of evaluation.every {evaluation.every} when checkpoint.best_metric "
            f"is {best!r}: a checkpoint is ranked by the evaluation of its own weights"
        )


def _on_a_mesh(config: "Config") -> Iterator[str]:
    """What does not divide over the devices, and what several of them cannot do yet."""
    mesh, update, model, prompts = config.mesh, config.update, config.model, config.prompts.per_iteration
    axes = ", ".join(f"mesh.{axis} {size}" for axis, size in mesh.sizes.items() if size > 1)
    if update.micro_batches == "auto":
        yield f"update.micro_batches is 'auto', which sizes one device, and there is {axes}; give a number"
        return
    if prompts % (parts := mesh.prompt_parts * update.minibatches * update.micro_batches):
        yield (
            f"prompts.per_iteration {prompts} must be a multiple of {parts} (mesh.data {mesh.data} x mesh.fsdp {mesh.fsdp} x "
            f"update.minibatches {update.minibatches} x update.micro_batches {update.micro_batches}): every micro-batch is cut "
            "over the devices, and groups stay whole"
        )
    if update.offload_optimizer:
        yield f"update.offload_optimizer true needs one device, and there is {axes}; mesh.fsdp makes moments smaller too"
    if config.kl.offload_reference:
        yield f"kl.offload_reference true needs one device, and there is {axes}; mesh.fsdp makes the reference smaller too"
    if mesh.tensor > 1 and config.lm_head.implementation == "pallas" and config.lm_head.chunk_vocab is None:
        yield (
            f"lm_head.implementation pallas without lm_head.chunk_vocab has a kernel of whole rows of the vocabulary, which "
            f"mesh.tensor {mesh.tensor} cuts; give lm_head.chunk_vocab, or chunked or materialised"
        )
    for key, value, other in (
        ("attention", model.attention, "auto"),
        ("decode_attention", model.decode_attention, "einsum"),
    ):
        if mesh.tensor > 1 and value == "pallas":
            yield f"model.{key} pallas has kernels of all heads, which mesh.tensor {mesh.tensor} cuts; expected {other}"
    if model.weights is None and model.num_heads is not None and model.hidden_size is not None:
        yield from mesh.misfits(model.num_heads, model.hidden_size)
