"""Typed, frozen configuration of a training run: YAML plus dotted overrides, every check before any compile.

Its sections are in `sections`, `model`, `objectives`, `tasks` and `learning`; `refusals` checks what holds between them, `loading`
reads YAML and words errors, `files` looks for files. Nothing here knows the rest of the package, or touches JAX.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from jax_grpo.config import earlier, learning, objectives, refusals, sections, tasks, trl_names
from jax_grpo.config.files import adapter_directory, positions_of, require_run_dir, require_source, require_weights
from jax_grpo.config.loading import ConfigError, checked, dump_yaml, load_yaml, read_yaml, reference
from jax_grpo.config.model import ModelConfig

__all__ = ["Config", "ConfigError", "check_files", "load_config", "load_yaml", "parse_cli", "require_all_trained"]

# Share of a bfloat16 number that is at most half of the way to the next one: a smaller change is lost.
BFLOAT16_STEP = 2**-9


class Config(sections.Section):
    """A training run."""

    iterations: sections.Count
    """Update blocks: one rollout each."""
    run_dir: Annotated[sections.Text, sections.Home]
    """Folder of everything the run writes (TRL: output_dir)."""
    seed: sections.Seed = 0
    """Of the order of prompts, of sampling, and of random weights."""
    model: ModelConfig
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
        return refusals.refusals(self)

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
