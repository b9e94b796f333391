"""GRPO training: `python -m jax_grpo.train --config configs/quickstart.yaml`.

One iteration: prompts -> rollout -> rewards -> group advantages -> old and reference log-probabilities, once -> mu epochs of
minibatch updates -> metrics and samples; then the rollouts are discarded. This file owns all input and output of a run and
reads top to bottom as its story; the numbers are computed elsewhere.
"""

import dataclasses
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_grpo import advantages, pictures
from jax_grpo.batch import Batch, GroupedTokens, cut, record, take
from jax_grpo.config import Config, parse_cli
from jax_grpo.console import Console
from jax_grpo.evaluate import Evaluation, Evaluator
from jax_grpo.health import HealthLog
from jax_grpo.kl_control import beyond_guardrail
from jax_grpo.loading import Policy, load_policy
from jax_grpo.metrics import MetricsLog, distinct_share, peak_memory
from jax_grpo.prompts import PromptDataset, load_positions
from jax_grpo.rollout import PROMPT_MULTIPLE, Rollout, decode_completions, encode_prompts, make_generate
from jax_grpo.samples import sample_rows
from jax_grpo.sampling import Sampling
from jax_grpo.tasks import TASKS
from jax_grpo.tasks.base import Prompt, Task, total_reward
from jax_grpo.tasks.engine import EngineError
from jax_grpo.update import TrainState, init_state, make_score, make_update
from jax_grpo.weights import save_hf


class NonFiniteUpdates(RuntimeError):
    """Too many optimiser steps in a row had a non-finite loss or gradient; the weights saved are the last good ones."""


class Scored(NamedTuple):
    """An iteration's completions with everything the update needs but log-probabilities.

    `components` are raw reward components [B] by name, `rewards_B` their weighted sum with penalties.
    """

    prompts: list[Prompt]
    completions: list[str]
    components: dict[str, np.ndarray]
    rewards_B: np.ndarray
    rollout: Rollout
    tokens: GroupedTokens


class Phases:
    """Seconds spent in each named phase of an iteration."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def run(self, name: str, work: Any) -> Any:
        """Result of `work()`, blocked until its arrays are ready."""
        started = time.perf_counter()
        result = jax.block_until_ready(work())
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started
        return result


class Trainer:
    """The programs and data of one run. `iterate` does one iteration; `state` is what training has changed so far."""

    def __init__(self, config: Config):
        self.config = config
        context = (
            -(-config.prompts.max_prompt_tokens // PROMPT_MULTIPLE) * PROMPT_MULTIPLE + config.rollout.max_new_tokens
        )
        self.policy: Policy = load_policy(config.model, config.seed, context)
        self.tokenizer = self.policy.tokenizer
        self.task: Task = TASKS[config.task.name](config.task)
        self.dataset = PromptDataset(load_positions(config.prompts, config.seed), config.seed)
        self.steps_an_iteration = config.update.epochs * config.update.minibatches
        total_steps = config.update.total_steps or config.iterations * self.steps_an_iteration
        self.generate = make_generate(
            self.policy.graphdef,
            vocab_size=self.tokenizer.vocab_size,
            pad_id=self.tokenizer.pad_id,
            group_size=config.rollout.group_size,
            max_new_tokens=config.rollout.max_new_tokens,
            sampling=Sampling(
                config.rollout.temperature,
                config.rollout.top_k,
                config.rollout.top_p,
                config.rollout.min_p,
                config.rollout.repetition_penalty,
            ),
            stop_table_SV=self.task.stop_rule.token_table(self.tokenizer),
            accept_state=self.task.stop_rule.accept,
        )
        self.score = make_score(self.policy.graphdef, config)
        self.update = make_update(self.policy.graphdef, config, total_steps)
        # The update donates its parameters, so the frozen reference needs a copy; without a KL term there is none.
        self.reference = jax.tree.map(jnp.copy, self.policy.params) if config.kl.beta > 0 else None
        self.state: TrainState = init_state(jax.tree.map(jnp.copy, self.policy.params), config)
        self.policy = self.policy._replace(params=None)

    def iterate(self, iteration: int) -> tuple[dict[str, float], Scored, Batch]:
        """One iteration; returns its metrics, the scored completions and the batch it trained on."""
        phases = Phases()
        started = time.perf_counter()
        scored = self._rollout_and_score(iteration, phases)
        batch, flat_B = phases.run("score", lambda: self._make_batch(scored))
        steps = phases.run("update", lambda: self._optimise(batch, iteration))
        seconds = time.perf_counter() - started
        return self._metrics(iteration, scored, flat_B, steps, phases.seconds, seconds), scored, batch

    def _rollout_and_score(self, iteration: int, phases: Phases) -> Scored:
        config, group = self.config, self.config.rollout.group_size
        drawn = self.dataset.batch(iteration, config.prompts.per_iteration)
        prompts = [self.task.prompt(position, config.seed * 1_000_003 + index) for index, position in drawn]
        ids_PT, mask_PT = encode_prompts([p.text for p in prompts], self.tokenizer, config.prompts.max_prompt_tokens)
        states_P = np.array([p.start_state for p in prompts], np.int32)
        numbers_P = np.array([index for index, _ in drawn], np.int32)
        rollout = phases.run(
            "rollout",
            lambda: self.generate(
                self.state.params, ids_PT, mask_PT, states_P, numbers_P, config.seed, jnp.int32(iteration)
            ),
        )
        reward_started = time.perf_counter()
        repeated = [prompt for prompt in prompts for _ in range(group)]
        completions = [
            self.task.stop_rule.truncate(text, prompt.start_state)[0]
            for prompt, text in zip(repeated, decode_completions(rollout, self.tokenizer), strict=True)
        ]
        components = self.task.score(repeated, completions)
        rewards_B = total_reward(components, self.task.component_weights)
        if config.objective.overlong_penalty is not None:
            penalty = config.objective.overlong_penalty
            lengths_B = np.asarray(rollout.completion_mask_PGC).sum(-1).reshape(-1)
            rewards_B = rewards_B + np.asarray(
                advantages.overlong_penalty(lengths_B, config.rollout.max_new_tokens, penalty.length, penalty.weight)
            )
        phases.seconds["reward"] = time.perf_counter() - reward_started
        tokens = GroupedTokens(
            jnp.asarray(ids_PT), jnp.asarray(mask_PT), rollout.completion_ids_PGC, rollout.completion_mask_PGC
        )
        return Scored(repeated, completions, components, rewards_B, rollout, tokens)

    def _make_batch(self, scored: Scored) -> tuple[Batch, np.ndarray]:
        """The iteration's batch with advantages and cached log-probabilities, and which rows have no signal."""
        config, rollout = self.config, scored.rollout
        group_ids_B = self.group_ids()
        if config.advantage.components == "sum_first":
            advantages_B, flat_B = advantages.group_advantages(
                jnp.asarray(scored.rewards_B), jnp.asarray(group_ids_B), config.advantage
            )
        else:
            weights = self.task.component_weights
            names = [name for name in scored.components if weights.get(name)]
            advantages_B, flat_B = advantages.combined_advantages(
                jnp.stack([jnp.asarray(scored.components[name]) for name in names]),
                jnp.array([weights[name] for name in names]),
                jnp.asarray(group_ids_B),
                config.advantage,
            )
        rows = (-1, config.rollout.max_new_tokens)
        batch = Batch(
            tokens=scored.tokens,
            mask_BS=rollout.completion_mask_PGC.reshape(rows),
            advantages_B=advantages_B,
            stopped_B=rollout.stopped_PG.reshape(-1),
            sampling_logp_BS=rollout.sampling_logp_PGC.reshape(rows),
        )
        if self._needs_old_logp():
            old_logp_BS, entropy_BS = self.score(self.state.params, batch)
            batch = dataclasses.replace(
                batch, old_logp_BS=old_logp_BS, entropy_BS=entropy_BS if config.objective.entropy_quantile > 0 else None
            )
        if self.reference is not None:
            ref_logp_BS, _ = self.score(self.reference, batch)
            batch = dataclasses.replace(batch, ref_logp_BS=ref_logp_BS)
        return batch, np.asarray(flat_B)

    def _needs_old_logp(self) -> bool:
        """One step on each rollout means the updated policy is the old one: its own value serves (ratio exactly 1)."""
        return (
            self.steps_an_iteration > 1 or self.config.objective.entropy_quantile > 0 or self.config.record_batches > 0
        )

    def group_ids(self) -> np.ndarray:
        """The group of each completion, int32 [B]."""
        return np.repeat(np.arange(self.config.prompts.per_iteration, dtype=np.int32), self.config.rollout.group_size)

    def _optimise(self, batch: Batch, iteration: int) -> list[dict[str, jax.Array]]:
        """mu epochs of minibatch steps; metrics of each step, still on the device."""
        config, steps = self.config, []
        for epoch in range(config.update.epochs):
            pieces = cut(self._shuffled(batch, iteration, epoch), config.update.minibatches)
            for number in range(config.update.minibatches):
                self.state, metrics = self.update(self.state, take(pieces, number))
                steps.append(metrics)
            ends = config.kl.guardrail == "end_epoch" and self.reference is not None
            if ends and bool(beyond_guardrail(steps[-1]["kl/mean"], config.kl)):
                break
        if int(self.state.nonfinite_in_a_row) >= config.update.max_consecutive_nonfinite:
            raise NonFiniteUpdates(
                f"{int(self.state.nonfinite_in_a_row)} optimiser steps in a row had a non-finite loss or gradient "
                f"(update.max_consecutive_nonfinite = {config.update.max_consecutive_nonfinite}); the parameters are "
                f"those of optimiser step {int(self.state.optimizer_step)}. Try a lower update.learning_rate."
            )
        return steps

    def _shuffled(self, batch: Batch, iteration: int, epoch: int) -> Batch:
        """Groups in a new order, a function of (seed, iteration, epoch), when there are minibatches to mix."""
        if self.config.update.minibatches == 1:
            return batch
        prompts, group = self.config.prompts.per_iteration, self.config.rollout.group_size
        order_P = np.random.default_rng((self.config.seed, iteration, epoch)).permutation(prompts)
        order_B = (order_P[:, None] * group + np.arange(group)).reshape(-1)
        tokens = jax.tree.map(lambda x: x[order_P], batch.tokens)
        rows = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch) if field.name != "tokens"}
        return dataclasses.replace(batch, tokens=tokens, **jax.tree.map(lambda x: x[order_B], rows))

    def _metrics(
        self, iteration, scored: Scored, flat_B, steps, seconds: dict[str, float], total: float
    ) -> dict[str, float]:
        lengths_B = np.asarray(scored.rollout.completion_mask_PGC).sum(-1).reshape(-1)
        stopped_B = np.asarray(scored.rollout.stopped_PG).reshape(-1)
        group = self.config.rollout.group_size
        out: dict[str, float] = {"iteration": iteration, "optimizer_step": int(self.state.optimizer_step)}
        # The ratio, clipping and KL of the last step tell how far the iteration went; losses are means over its steps.
        for name in steps[0]:
            values = [float(step[name]) for step in steps]
            out[name] = float(np.mean(values)) if name in ("loss", "policy_loss", "grad_norm") else values[-1]
        out.setdefault("kl/mean", 0.0)
        out.setdefault("kl/p95", 0.0)
        out["kl/beyond_guardrail"] = float(out["kl/mean"] > 2 * self.config.kl.target)
        out["reward/mean"], out["reward/std"] = float(scored.rewards_B.mean()), float(scored.rewards_B.std())
        for name, values in scored.components.items():
            out[f"reward/{name}/mean"], out[f"reward/{name}/std"] = float(values.mean()), float(values.std())
        if "legal" in scored.components:
            out["legal_move_rate"] = float(scored.components["legal"].mean())
        out["groups_without_signal"] = int(flat_B.reshape(-1, group).all(-1).sum())
        out["completion_length/mean"] = float(lengths_B.mean())
        out["truncated_fraction"] = float(1 - stopped_B.mean())
        out["completions/distinct"] = distinct_share(scored.completions, group)
        out["ratio/first_deviation"] = float(steps[0]["ratio/deviation"])
        out |= {f"time/{name}": value for name, value in seconds.items()} | {"time/iteration": total} | peak_memory()
        out["tokens_per_second"] = float(lengths_B.sum() / seconds["rollout"])
        return out


def make_evaluator(trainer: Trainer) -> Evaluator | None:
    """Held-out prompts of the same task, or None when `evaluation.positions` is 0."""
    config = trainer.config
    if config.evaluation.positions == 0:
        return None
    heldout = config.prompts.model_copy(update={"split": "heldout"})
    positions = load_positions(heldout, config.seed + 1)[: config.evaluation.positions]
    return Evaluator(
        trainer.policy,
        trainer.task,
        [trainer.task.prompt(position, index) for index, position in enumerate(positions)],
        max_new_tokens=config.rollout.max_new_tokens,
        max_prompt_tokens=config.prompts.max_prompt_tokens,
        temperature=config.rollout.temperature,
        seed=config.seed,
    )


def train(config: Config) -> Path:
    """Runs a whole training and returns its folder: metrics, resolved config, weights, pictures."""
    run_dir = Path(config.run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.yaml").write_text(config.resolved_yaml())
    trainer = Trainer(config)
    evaluator = make_evaluator(trainer)
    every = config.evaluation.every
    evaluation: Evaluation | None = None
    with MetricsLog(run_dir, config) as log, Console(config) as console:
        console.note(
            f"{config.model.weights or 'random weights'}, {jax.devices()[0].device_kind}, run folder {run_dir}"
        )
        health = HealthLog(run_dir, config, trainer.task.component_weights, console.warning)
        for iteration in range(config.iterations):
            if evaluator and (iteration == 0 or (every and iteration % every == 0)):
                evaluation = evaluator(trainer.state.params)
                log.write({"iteration": iteration, **evaluation.metrics})
                console.evaluation(iteration, evaluation.metrics)
            metrics, scored, batch = trainer.iterate(iteration)
            log.write(metrics)
            log.histograms(iteration, {f"reward/{name}": values for name, values in scored.components.items()})
            console.iteration(metrics)
            health(metrics)
            if config.logging.samples_every and iteration % config.logging.samples_every == 0:
                console.samples(samples(scored, config.logging.samples))
                log.samples(
                    iteration,
                    sample_rows(scored.prompts, scored.completions, scored.rewards_B, scored.components, config),
                )
            if iteration < config.record_batches:
                folder = run_dir / "batches"
                folder.mkdir(exist_ok=True)
                np.savez(
                    folder / f"{iteration:06d}.npz",
                    allow_pickle=False,
                    **record(batch, scored.rewards_B, trainer.group_ids()),
                )
        if evaluator:
            evaluation = evaluator(trainer.state.params)
            log.write({"iteration": config.iterations, **evaluation.metrics})
            console.evaluation(config.iterations, evaluation.metrics)
    architecture = trainer.policy.architecture
    save_hf(run_dir / "weights", architecture, trainer.state.params, trainer.tokenizer)
    made = pictures.save_all(run_dir, evaluator, evaluation)
    trainer.task.close()
    print("saved:", ", ".join(str(path) for path in [run_dir / "weights", run_dir / "metrics.jsonl", *made]))
    return run_dir


def samples(scored: Scored, count: int) -> list[tuple[str, str, float]]:
    """(prompt, completion, reward) of the first sample of `count` prompts."""
    group = len(scored.prompts) // max(len({p.text for p in scored.prompts}), 1) or 1
    rows = range(0, len(scored.prompts), group)
    return [(scored.prompts[i].text, scored.completions[i], float(scored.rewards_B[i])) for i in list(rows)[:count]]


def main(argv: list[str] | None = None) -> None:
    try:
        config = parse_cli(sys.argv[1:] if argv is None else argv, "python -m jax_grpo.train")
        train(config)
    except (EngineError, NonFiniteUpdates, OSError, ValueError) as error:  # the project's input errors are ValueErrors
        raise SystemExit(f"{type(error).__name__}: {error}") from error


if __name__ == "__main__":
    main()
