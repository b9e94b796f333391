"""Typed, frozen configuration of a training run: YAML plus dotted overrides, every check before any compile.

Its sections are in `config.sections`, `config.tasks` and `config.learning`; what holds between them is checked here.
`config.loading` reads YAML and words errors, `config.files` looks for files. Knows nothing of the rest of the house, and never
touches JAX.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from jax_grpo.config import earlier, learning, objectives, sections, tasks, trl_names
from jax_grpo.config.files import adapter_directory, positions_of, require_run_dir, require_source, require_weights
from jax_grpo.config.loading import ConfigError, checked, dump_yaml, load_yaml, read_yaml, reference

__all__ = ["Config", "ConfigError", "check_files", "load_config", "load_yaml", "parse_cli", "require_all_trained"]

# Share of a bfloat16 number that is at most half of the way to the next one: a smaller change is lost.
BFLOAT16_STEP = 2**-9


class Config(sections.Section):
    """A training run."""

    iterations: sections.Count
    """Update blocks: one rollout each."""
    run_dir: sections.Text
    """Folder of everything the run writes (TRL: output_dir)."""
    seed: sections.Seed = 0
    """Of the order of prompts, of sampling, and of random weights."""
    model: sections.ModelConfig
    task: tasks.Task = Field(default_factory=tasks.task_of)
    prompts: sections.PromptsConfig = sections.PromptsConfig()
    rollout: sections.RolloutConfig = sections.RolloutConfig()
    advantage: learning.AdvantageConfig = learning.AdvantageConfig()
    objective: objectives.Objective = objectives.Clip()
    kl: learning.KLConfig = learning.KLConfig()
    update: learning.UpdateConfig = learning.UpdateConfig()
    lm_head: learning.LMHeadConfig = learning.LMHeadConfig()
    mesh: sections.MeshConfig = sections.MeshConfig()
    evaluation: sections.EvaluationConfig = sections.EvaluationConfig()
    logging: sections.LoggingConfig = sections.LoggingConfig()
    checkpoint: sections.CheckpointConfig = sections.CheckpointConfig()
    profile: sections.ProfileConfig = sections.ProfileConfig()
    record_batches: sections.CountOrZero = 0
    """Iterations whose batch is written for `jax_grpo.replay`."""
    compilation_cache: sections.Text | None = "~/.cache/jax_grpo"
    """Folder of compiled programs and of position files' checked rows, which the next run takes from there; null: none. For
    programs JAX_COMPILATION_CACHE_DIR goes before it."""

    def _refusals(self) -> Iterator[str]:
        yield from self._refused_batch_sizes()
        yield from self._refused_lengths()
        yield from self._refused_without_effect()
        yield from self._refused_sources()
        yield from self._refused_evaluation()
        yield from self._refused_ranking()
        if self.mesh.devices > 1:
            yield from self._refused_on_a_mesh()

    def _refused_batch_sizes(self) -> Iterator[str]:
        """Groups are compared and stay whole; an optimiser batch is cut evenly."""
        prompts, group, update = self.prompts.per_iteration, self.rollout.group_size, self.update
        if group < 2:
            yield f"rollout.group_size {group} gives every completion advantage 0: a group's baseline needs at least 2"
        if (subset := self.advantage.pass_at_k or 0) > group:
            yield f"advantage.pass_at_k {subset} exceeds rollout.group_size {group}: a group has no subset of {subset} samples"
        if prompts % update.minibatches:
            yield f"update.minibatches {update.minibatches} must divide prompts.per_iteration {prompts}: groups stay whole"
        if update.micro_batches not in ("auto", *self.possible_micro_batches()):
            per_step = prompts // update.minibatches
            yield (
                f"update.micro_batches {update.micro_batches} must cut {per_step} prompts x {group} completions into whole "
                f"groups or equal slices of a group; try a divisor of {per_step}, or {per_step} times a divisor of {group}"
            )

    def _refused_lengths(self) -> Iterator[str]:
        """What is part of a length must not exceed it: tokens of a sequence, optimiser steps of a schedule."""
        model, cap = self.model, self.rollout.max_new_tokens
        windows = self.windows()
        positions, prompt = model.max_position_embeddings, self.prompts.max_prompt_tokens
        tokens = (prompt or sections.PROMPT_MULTIPLE) + windows.columns
        if model.weights is None and positions is not None and tokens > positions:
            words = "prompts.max_prompt_tokens" if prompt else f"a prompt ({sections.PROMPT_MULTIPLE})"
            yield f"{words} + {self.after_prompt()} = {tokens} exceeds model.max_position_embeddings {positions}"
        penalty = self.objective.overlong_penalty
        if penalty is not None and windows.turns > 1:
            yield f"objective.overlong_penalty is of one completion, and task.episode.turns is {windows.turns}; leave it out"
        if penalty is not None and penalty.length > cap:
            yield f"objective.overlong_penalty.length {penalty.length} exceeds rollout.max_new_tokens {cap}"
        for name, part in (self.task.mixture or {}).items():
            if (own := part.max_new_tokens or cap) > cap:
                yield f"task.mixture.{name}.max_new_tokens {own} exceeds rollout.max_new_tokens {cap}"
            if penalty is not None and penalty.length > own:
                yield (
                    f"objective.overlong_penalty.length {penalty.length} exceeds task.mixture.{name}.max_new_tokens {own}: its "
                    "completions would lose reward from before their first token"
                )
        if (total := self.update.total_steps) is not None and self.update.warmup_steps >= total:
            yield f"update.warmup_steps {self.update.warmup_steps} must be below update.total_steps {total}"

    def _refused_without_effect(self) -> Iterator[str]:
        """A setting beside which another one would do nothing, without a word."""
        if self.kl.guardrail == "end_epoch" and self.update.epochs * self.update.minibatches == 1:
            yield (
                "kl.guardrail end_epoch needs more than one optimiser step an iteration: there is none to leave out with "
                "update.epochs 1 and update.minibatches 1"
            )
        processed = [f"rollout.{key} {value}" for key, value in self.rollout.beside_temperature()]
        if self.objective.mismatch_cap is not None and processed:
            yield (
                f"objective.mismatch_cap {self.objective.mismatch_cap} compares what is recorded, log-probabilities of the whole "
                f"softmax at rollout.temperature, and {processed[0]} draws from another distribution: it would correct nothing of "
                "that; leave one of them out"
            )
        least = self.prompts.per_iteration * self.rollout.group_size
        if (refill := self.rollout.refill) is not None and refill.ahead and self.task.episode is not None:
            yield (
                "rollout.refill.ahead true generates beside the rewards, and with task.episode each turn waits for the task's "
                "answers; set it to false"
            )
        if refill is not None and refill.tokens is not None and refill.tokens <= least:
            yield (
                f"rollout.refill.tokens {refill.tokens} lets no further draw begin: the first one's {least} completions have that "
                f"many tokens already; expected more than {least}"
            )
        if self.model.adapter is not None and self.kl.reference_mix != 1:
            yield (
                f"kl.reference_mix {self.kl.reference_mix} with model.adapter would mix the two matrices of each adapter one by "
                "one, whose product is then no mixture; expected 1, which copies them"
            )
        if self.model.adapter is not None:
            for key, value in self.kl.not_default("reference_dtype", "offload_reference"):
                yield (
                    f"kl.{key} {str(value).lower()} with model.adapter: the reference reads the policy's own base, and has "
                    "nothing but adapters to make smaller; leave it out"
                )
        asking = self.task.needs_reference
        if asking is not None and self.kl.beta == 0:
            yield f"{asking} needs kl.beta > 0: without a KL term no reference is kept"
        if asking is not None and self.kl.reference_every is not None:
            yield (
                f"{asking} plays with the run's frozen start, which kl.reference_every {self.kl.reference_every} "
                "moves: scores of one iteration and of another would be against different players; expected self, or null"
            )
        if asking is not None and self.kl.offload_reference:
            yield f"{asking} plays with the reference on the device, where kl.offload_reference true does not leave it"
        if self.lm_head.logits_dtype == "bfloat16" and self.model.compute_dtype != "bfloat16":
            yield f"lm_head.logits_dtype bfloat16 needs model.compute_dtype bfloat16; it is {self.model.compute_dtype}"

    def _refused_sources(self) -> Iterator[str]:
        """Prompts of one's own come from a file of one's own, and are held out of it."""
        if self.task.sources and self.evaluation.source is not None:
            names = ", ".join(self.task.sources)
            yield (
                f"evaluation.source is {self.evaluation.source!r}, but {names} of task.mixture has a source of its own: an "
                "evaluation asks the held-out splits of all sources; leave it out"
            )
        read: dict[str, str | None] = {
            f"task.mixture.{name}.source": part.source
            for name, part in (self.task.mixture or {}).items()
            if part.task == "prompts"
        }
        if self.task.name == "prompts":
            read = {"prompts.source": self.prompts.source, "evaluation.source": self.evaluation.source}
        for key, source in read.items():
            if source is not None and sections.is_built_in(source):
                yield f"{key} is {source}, which has chess positions; a prompts task needs a .jsonl, .csv or .parquet file"

    def _refused_evaluation(self) -> Iterator[str]:
        """An evaluation asks positions that the run does not train on."""
        count, source = self.evaluation.positions, self.evaluation.source
        if count and source is None and self.prompts.split != "train":
            yield (
                f"prompts.split is {self.prompts.split}, so the run trains on the positions that evaluation.positions {count} "
                "would ask: give others as evaluation.source, or set evaluation.positions to 0"
            )
        if source is not None and not count:
            yield f"evaluation.source is {source!r}, but evaluation.positions is 0, which asks none of them; expected at least 1"

    def _refused_ranking(self) -> Iterator[str]:
        """A checkpoint is ranked by the evaluation of its own weights, so that each one that is saved must be evaluated."""
        best, evaluation, saves = self.best_metric(), self.evaluation, self.checkpoint.every
        if not (self.checkpoint.keep_best and best.startswith("eval/")):
            return
        for name in ("positions", "every"):
            if getattr(evaluation, name) == 0:
                yield f"checkpoint.best_metric {best!r} needs evaluation.{name} of at least 1; it is 0"
        if saves % evaluation.every:
            yield (
                f"checkpoint.every {saves} must be a multiple of evaluation.every {evaluation.every} when checkpoint.best_metric "
                f"is {best!r}: a checkpoint is ranked by the evaluation of its own weights"
            )

    def _refused_on_a_mesh(self) -> Iterator[str]:
        """What does not divide over the devices, and what several of them cannot do yet."""
        mesh, update, model, prompts = self.mesh, self.update, self.model, self.prompts.per_iteration
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
        if self.kl.offload_reference:
            yield f"kl.offload_reference true needs one device, and there is {axes}; mesh.fsdp makes the reference smaller too"
        if mesh.tensor > 1 and self.lm_head.implementation == "pallas" and self.lm_head.chunk_vocab is None:
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

    def with_micro_batches(self, count: int) -> "Config":
        """The config with this `update.micro_batches`. Raises ValueError: it does not cut the optimiser batch evenly."""
        values = self.model_dump()
        return Config.model_validate(values | {"update": values["update"] | {"micro_batches": count}})

    def possible_micro_batches(self) -> list[int]:
        """Every `update.micro_batches` that cuts the optimiser batch evenly, fewest first."""
        prompts, group = self.prompts.per_iteration // self.update.minibatches, self.rollout.group_size
        whole = [count for count in range(1, prompts + 1) if prompts % count == 0]
        return whole + [prompts * slices for slices in range(2, group + 1) if group % slices == 0]

    def prompt_limit(self) -> int:
        """Most tokens of a prompt: `prompts.max_prompt_tokens`, or what the model's positions leave, in whole buckets.

        Raises ConfigError: they leave nothing.
        """
        if self.prompts.max_prompt_tokens is not None:
            return self.prompts.max_prompt_tokens
        weights, after = self.model.weights, self.windows().columns
        positions = self.model.max_position_embeddings if weights is None else positions_of(weights)
        room = (positions or sections.MOST_PROMPT_TOKENS) - after
        if room < sections.PROMPT_MULTIPLE:
            raise ConfigError(
                f"{self.after_prompt()} = {after} tokens leaves no room for a prompt: {weights} has {positions} positions; lower "
                "rollout.max_new_tokens"
            )
        return min(room, sections.MOST_PROMPT_TOKENS) // sections.PROMPT_MULTIPLE * sections.PROMPT_MULTIPLE

    def windows(self) -> tasks.Windows:
        """The columns of what follows a prompt."""
        episode, cap = self.task.episode, self.rollout.max_new_tokens
        if episode is None:
            return tasks.Windows(1, cap, 0)
        return tasks.Windows(episode.turns, cap, episode.max_observation_tokens)

    def padded_prompt(self) -> int:
        """Tokens of the widest bucket of prompts."""
        return -(-self.prompt_limit() // sections.PROMPT_MULTIPLE) * sections.PROMPT_MULTIPLE

    def context(self) -> int:
        """Tokens of the longest sequence a run can have: the widest bucket of prompts, and the caps of all that follows."""
        return self.padded_prompt() + self.windows().columns

    def step_completions(self) -> int:
        """Completions of one optimiser step."""
        return self.prompts.per_iteration * self.rollout.group_size // self.update.minibatches

    def learning(self) -> learning.Learning:
        """What turns rewards into new weights."""
        return learning.Learning(
            advantage=self.advantage,
            objective=self.objective,
            kl=self.kl,
            update=self.update,
            lm_head=self.lm_head,
            temperature=self.rollout.temperature,
            param_dtype=self.model.param_dtype,
            compute_dtype=self.model.compute_dtype,
            most_tokens=self.windows().generated,
            total_steps=self.optimizer_steps(),
            seed=self.seed,
            records_batches=self.record_batches > 0,
            adapters=self.model.adapter is not None,
        )

    def after_prompt(self) -> str:
        """What `windows().columns` is made of, in the words of an error."""
        turns = self.windows().turns
        words = (
            f"task.episode.turns {turns} x rollout.max_new_tokens + {turns - 1} x task.episode.max_observation_tokens"
        )
        return words if turns > 1 else "rollout.max_new_tokens"

    def picks_prompts(self) -> bool:
        """Whether the prompts of a batch are there because of their rewards, so that its mean reward is not the policy's."""
        return self.rollout.refill is not None or self.prompts.curriculum is not None

    def best_metric(self) -> str:
        """The metric that ranks checkpoints."""
        ranking = self.checkpoint.best_metric or ("reward/unselected" if self.picks_prompts() else "reward/mean")
        return ranking.removeprefix("-")

    def optimizer_steps(self) -> int:
        """N of the schedule: `update.total_steps`, or what the iterations make."""
        return self.update.total_steps or self.iterations * self.update.epochs * self.update.minibatches

    def cautions(self) -> list[str]:
        """What the settings do that is allowed and rarely meant, one sentence each; a run says them when it starts."""
        cautions, objective, kl, steps = [], self.objective, self.kl, self.optimizer_steps()
        if self.update.warmup_steps >= steps:
            cautions.append(
                f"update.warmup_steps {self.update.warmup_steps} is {steps - 1} in a run of {steps} optimiser steps"
            )
        if objective.name == "cispo" and (bound := objective.epsilon_high) < 1:
            cautions.append(
                f"objective.epsilon_high {bound:g} is the bound of cispo's weight itself, which is 1 on fresh completions: nearly "
                f"every weight is cut to {bound:g}; the usual bound is 5"
            )
        if objective.name == "kl_cov" and self.update.epochs * self.update.minibatches == 1:
            cautions.append(
                "objective.name kl_cov with update.epochs 1 and update.minibatches 1: the policy is compared with itself, so that "
                "nothing is held back, and no clip acts either"
            )
        if kl.adaptive and kl.reference_every is not None and kl.reference_mix == 1:
            cautions.append(
                f"kl.adaptive lowers beta by up to a fifth a step while the KL is below kl.target {kl.target:g}, as it is after "
                f"each copy that kl.reference_every {kl.reference_every} makes; with a small kl.reference_mix it moves less"
            )
        rate = self.update.learning_rate
        if self.model.param_dtype == "bfloat16" and rate < BFLOAT16_STEP:
            cautions.append(
                f"model.param_dtype bfloat16 with update.learning_rate {rate:g}: AdamW moves a weight by about the rate a step; "
                f"what is under 1/512 of the weight is rounded away, so that weights beyond {rate / BFLOAT16_STEP:.2g}, and norms' "
                "scales of 1, do not move; with param_dtype float32 and model.compute_dtype bfloat16 all do"
            )
        return cautions

    def __reduce__(self) -> tuple[Any, ...]:
        return Config.model_validate, (
            self.model_dump(),
        )  # the class of `task` is made for its settings, and is no module's

    def resolved_yaml(self) -> str:
        """Every setting, defaults included; loading it gives an equal config."""
        return dump_yaml(self.model_dump())


def load_config(source: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> Config:
    """Config from a YAML file, or nested values, and overrides such as `--update.learning_rate 3e-5`.

    Names of TRL's stand for settings that mean the same (`trl_names`). A ConfigError names line, key and value.
    """
    values, places = (source, {}) if isinstance(source, Mapping) else read_yaml(str(source))
    name = "config" if isinstance(source, Mapping) else str(source)
    return checked(Config, earlier.current(values), places, name, overrides, trl_names.NAMES, earlier.RETIRED)


def check_files(config: Config) -> None:
    """Refuses, with a ConfigError, weights, prompts or a run folder that cannot be used; opens none of them."""
    require_weights(config.model.weights)
    if config.model.adapter is not None and config.model.adapter.weights is not None:
        adapter_directory(config.model.adapter.weights)
    require_source(config.prompts.source)
    if config.evaluation.source is not None:
        require_source(config.evaluation.source, "evaluation.source")
    for name, source in config.task.sources.items():
        require_source(source, f"task.mixture.{name}.source")
    require_run_dir(config.run_dir)


def require_all_trained(config: Config, what: str) -> None:
    """Refuses, with a ConfigError, a config of adapters where all parameters are looked at."""
    if config.model.adapter is not None:
        raise ConfigError(f"{what} is of all parameters, and the config has model.adapter; leave it out")


def parse_cli(argv: list[str], prog: str, options: Sequence[argparse.ArgumentParser] = ()) -> Config:
    """Config from `--config FILE [--section.key value ...]`, its files checked; `options` are arguments of the caller's own.

    `--print-config` shows the resolved config, whether its files are there or not, and exits; `--help` lists every setting. Raises
    what `load_config` and `check_files` raise.
    """
    parser = argparse.ArgumentParser(
        prog=prog,
        parents=list(options),
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"Any setting can be overridden: --update.learning_rate 3e-5. TRL's names are taken where they mean the same: "
        f"{', '.join(sorted(trl_names.TAKEN))}.\n\nThe settings:\n\n{reference(Config)}",
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="YAML settings, see configs/")
    parser.add_argument("--print-config", action="store_true", help="show the resolved settings and exit")
    arguments, overrides = parser.parse_known_args(argv)
    config = load_config(arguments.config, overrides)
    if arguments.print_config:
        print(config.resolved_yaml(), end="")
        raise SystemExit(0)
    check_files(config)
    return config
