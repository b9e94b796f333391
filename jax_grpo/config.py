"""Typed, frozen configuration of a training run: YAML plus dotted overrides, every check before any compile.

Its sections are in `config_sections`; what holds between them is checked here. Reading YAML and wording errors is
`config_loading`'s, looking for files `config_files`'s. Nothing here touches JAX.
"""

import argparse
from collections.abc import Sequence

import pydantic

from jax_grpo.config_files import require_run_dir, require_source, require_weights
from jax_grpo.config_loading import ConfigError, dump_yaml, load_yaml, parse_arguments
from jax_grpo.config_sections import (
    AdvantageConfig,
    CheckpointConfig,
    EvaluationConfig,
    KLConfig,
    LMHeadConfig,
    LoggingConfig,
    ModelConfig,
    ObjectiveConfig,
    ProfileConfig,
    PromptsConfig,
    RolloutConfig,
    TaskConfig,
    UpdateConfig,
)
from jax_grpo.config_types import Count, CountOrZero, Section, Seed, Text

__all__ = ["Config", "ConfigError", "check_files", "load_config", "load_yaml", "parse_cli"]


class Config(Section):
    """A training run."""

    iterations: Count
    """Update blocks: one rollout each."""
    run_dir: Text
    """Folder of everything the run writes (TRL: output_dir)."""
    seed: Seed = 0
    """Of the order of prompts, of sampling, and of random weights."""
    model: ModelConfig
    task: TaskConfig = TaskConfig()
    prompts: PromptsConfig = PromptsConfig()
    rollout: RolloutConfig = RolloutConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    kl: KLConfig = KLConfig()
    update: UpdateConfig = UpdateConfig()
    lm_head: LMHeadConfig = LMHeadConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    logging: LoggingConfig = LoggingConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    profile: ProfileConfig = ProfileConfig()
    record_batches: CountOrZero = 0
    """Iterations whose batch is written for `jax_grpo.replay`."""
    compilation_cache: Text | None = "~/.cache/jax_grpo"
    """Folder of compiled programs and of position files' checked rows, which the next run takes from there; null: none. For
    programs JAX_COMPILATION_CACHE_DIR goes before it."""

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> "Config":
        prompts, group = self.prompts.per_iteration, self.rollout.group_size
        if group < 2:
            raise ValueError(
                f"rollout.group_size {group} gives every completion advantage 0: a group's baseline needs at least 2"
            )
        if self.objective.name == "reinforce" and self.objective.importance_level != "token":
            raise ValueError(
                "objective.importance_level must be token when objective.name is reinforce: it has no importance ratio"
            )
        if self.kl.guardrail == "end_epoch" and self.update.epochs * self.update.minibatches == 1:
            raise ValueError(
                "kl.guardrail end_epoch needs more than one optimiser step an iteration: there is none to leave out with "
                "update.epochs 1 and update.minibatches 1"
            )
        if prompts % self.update.minibatches:
            raise ValueError(
                f"update.minibatches {self.update.minibatches} must divide prompts.per_iteration {prompts}: groups stay whole"
            )
        per_step = prompts // self.update.minibatches
        parts = 1 if self.update.micro_batches == "auto" else self.update.micro_batches
        if per_step % parts and (parts % per_step or group % (parts // per_step)):
            raise ValueError(
                f"update.micro_batches {parts} must cut {per_step} prompts x {group} completions into whole groups or equal "
                f"slices of a group; try a divisor of {per_step}, or {per_step} times a divisor of {group}"
            )
        if self.lm_head.logits_dtype == "bfloat16" and self.model.compute_dtype != "bfloat16":
            raise ValueError(
                f"lm_head.logits_dtype bfloat16 needs model.compute_dtype bfloat16; it is {self.model.compute_dtype}"
            )
        context, needed = (
            self.model.max_position_embeddings,
            self.prompts.max_prompt_tokens + self.rollout.max_new_tokens,
        )
        if self.model.weights is None and context is not None and needed > context:
            raise ValueError(
                f"prompts.max_prompt_tokens + rollout.max_new_tokens = {needed} exceeds model.max_position_embeddings {context}"
            )
        self._require_positions_to_ask()
        steps = self.optimizer_steps()
        if self.update.warmup_steps >= steps:
            raise ValueError(
                f"update.warmup_steps {self.update.warmup_steps} must be below the schedule's {steps} optimiser steps "
                f"(update.total_steps, or iterations * update.epochs * update.minibatches)"
            )
        for name, part in (self.task.mixture.parts if self.task.mixture else {}).items():
            if (part.max_new_tokens or 0) > self.rollout.max_new_tokens:
                raise ValueError(
                    f"task.mixture.{name}.max_new_tokens {part.max_new_tokens} exceeds rollout.max_new_tokens "
                    f"{self.rollout.max_new_tokens}"
                )
        self._require_rankable()
        penalty = self.objective.overlong_penalty
        if penalty is not None and penalty.length > self.rollout.max_new_tokens:
            raise ValueError(
                f"objective.overlong_penalty.length {penalty.length} exceeds rollout.max_new_tokens {self.rollout.max_new_tokens}"
            )
        return self

    def _require_positions_to_ask(self) -> None:
        """An evaluation asks positions that the run does not train on."""
        asked, source = self.evaluation.positions, self.evaluation.source
        if asked and source is None and self.prompts.split != "train":
            raise ValueError(
                f"prompts.split is {self.prompts.split}, so the run trains on the positions that evaluation.positions {asked} "
                "would ask: give others as evaluation.source, or set evaluation.positions to 0"
            )
        if source is not None and not asked:
            raise ValueError(
                f"evaluation.source is {source!r}, but evaluation.positions is 0, which asks none of them; expected at least 1"
            )

    def _require_rankable(self) -> None:
        """A checkpoint is ranked by the evaluation of its own weights, so that each one that is saved must be evaluated."""
        best, held_out, saves = self.checkpoint.best_metric, self.evaluation, self.checkpoint.every
        if not (self.checkpoint.keep_best and best.startswith("eval/")):
            return
        for name, value in (("positions", held_out.positions), ("every", held_out.every)):
            if not value:
                raise ValueError(
                    f"checkpoint.best_metric {best!r} needs evaluation.{name} of at least 1; it is {value}"
                )
        if saves % held_out.every:
            raise ValueError(
                f"checkpoint.every {saves} must be a multiple of evaluation.every {held_out.every} when checkpoint.best_metric "
                f"is {best!r}: a checkpoint is ranked by the evaluation of its own weights"
            )

    def with_micro_batches(self, parts: int) -> "Config":
        """The config with this `update.micro_batches`.

        Raises:
            ValueError: it does not cut the optimiser batch evenly.
        """
        values = self.model_dump()
        return Config.model_validate(values | {"update": values["update"] | {"micro_batches": parts}})

    def possible_micro_batches(self) -> list[int]:
        """Every `update.micro_batches` that cuts the optimiser batch evenly, fewest first."""
        prompts, group = self.prompts.per_iteration // self.update.minibatches, self.rollout.group_size
        whole = [parts for parts in range(1, prompts + 1) if prompts % parts == 0]
        return whole + [prompts * slices for slices in range(2, group + 1) if group % slices == 0]

    def optimizer_steps(self) -> int:
        """N of the schedule: `update.total_steps`, or what the iterations make."""
        return self.update.total_steps or self.iterations * self.update.epochs * self.update.minibatches

    def cautions(self) -> list[str]:
        """What the settings do that is allowed and rarely meant, one sentence each; a run says them when it starts."""
        bound, found = self.objective.epsilon_high, []
        if self.objective.name == "cispo" and bound < 1:
            found.append(
                f"objective.epsilon_high {bound:g} is the bound of cispo's weight itself, which is 1 on fresh completions: nearly "
                f"every weight is cut to {bound:g}; the usual bound is 5"
            )
        return found

    def resolved_yaml(self) -> str:
        """Every setting, defaults included; loading it gives an equal config."""
        return dump_yaml(self.model_dump())


def load_config(path: str, overrides: list[str] | tuple[str, ...] = ()) -> Config:
    """Config from a YAML file and overrides such as `--update.learning_rate 3e-5`.

    Raises:
        ConfigError: names the file and line (or the override), the key, the value and what was expected.
    """
    return load_yaml(Config, path, overrides)


def check_files(config: Config) -> None:
    """Refuses a config whose weights, prompts or run folder cannot be used; opens none of them.

    Raises:
        ConfigError: names the key, the path, and what to put there.
    """
    require_weights(config.model.weights)
    require_source(config.prompts.source)
    if config.evaluation.source is not None:
        require_source(config.evaluation.source, "evaluation.source")
    require_run_dir(config.run_dir)


def parse_cli(argv: list[str], prog: str, options: Sequence[argparse.ArgumentParser] = ()) -> Config:
    """Config from `--config FILE [--section.key value ...]`, its files checked; `options` are arguments of the caller's own.

    `--print-config` shows the resolved config, whether its files are there or not, and exits; `--help` lists every setting.

    Raises:
        ConfigError: see `load_config` and `check_files`.
    """
    arguments, overrides = parse_arguments(argv, prog, Config, options)
    config = load_config(arguments.config, overrides)
    if arguments.print_config:
        print(config.resolved_yaml(), end="")
        raise SystemExit(0)
    check_files(config)
    return config
