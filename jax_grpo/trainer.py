"""What one run computes: its programs, its data, and one iteration from prompts to optimiser steps. No files, no console."""

import dataclasses
import functools
import inspect
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jax_grpo
from jax_grpo import advantages
from jax_grpo.batch import Batch, piece, split
from jax_grpo.config import Config, ConfigError
from jax_grpo.config.tasks import TaskConfig
from jax_grpo.memory.fit import explain_out_of_memory
from jax_grpo.model import flops
from jax_grpo.model.named import Policy, load_policy
from jax_grpo.objective import beyond_guardrail
from jax_grpo.positions.checked_files import Remembered
from jax_grpo.positions.dataset import PromptDataset, sampling_numbers
from jax_grpo.programs import context, make_programs, phase_flops, reference_copy, unscored, with_logps
from jax_grpo.prompts.chat import ChatTemplate
from jax_grpo.report.records import distinct_share, episode_shares
from jax_grpo.rollout.episodes import Episodes, Played, require_fitting_observations
from jax_grpo.rollout.generate import (
    PromptTokens,
    Rollout,
    completion_ids,
    decode_completions,
    encode_fitting,
    encode_prompts,
)
from jax_grpo.run.checkpoints import abstract, content_hash, restore
from jax_grpo.run.resume import Origin, require_same_data
from jax_grpo.system.compilation import compilations, takes_time
from jax_grpo.system.devices import device_peak
from jax_grpo.system.memory import keep_freed, peak_memory, trim
from jax_grpo.system.phases import Phases
from jax_grpo.tasks import make_task, require_task
from jax_grpo.tasks.base import (
    Logged,
    Prompt,
    Task,
    TrainerState,
    about_every_row,
    applicable,
    caps,
    checked_score,
    total_reward,
)
from jax_grpo.tasks.episodes import Episode, EpisodicTask
from jax_grpo.tasks.imported import code_hashes
from jax_grpo.update import LATER_COUNTERS, TrainState, init_state


class NonFiniteUpdates(RuntimeError):
    """Too many optimiser steps in a row had a non-finite loss or gradient; the weights saved are the last good ones."""


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


class Trainer:
    """The programs and data of one run. `iterate` does one iteration; `state` is what training has changed so far.

    A `task` that is given takes the place of the one that the config names, whose settings are then refused (ConfigError).
    """

    def __init__(self, config: Config, task: Task | None = None, rewards: Sequence[Callable[..., Any]] | None = None):
        if task is not None and config.task != TaskConfig(episode=config.task.episode):
            raise ConfigError(
                "task: beside a task that is given to `train`, the config's section does nothing; leave it out (but for "
                "task.episode)"
            )
        if task is not None and rewards is not None:
            raise ConfigError(
                "rewards: a task that is given scores by itself, and the functions would do nothing; leave one out"
            )
        if (task is not None or rewards is not None) and config.update.micro_batches == "auto":
            raise ConfigError(
                "update.micro_batches is 'auto', which sizes the config's own task; beside another give a number"
            )
        self.config = config
        if task is None:
            self.task: Task = make_task(config.task, rewards, config.model.tokenizer)
        else:
            self.task = require_task(task, "task")
            self.task.chat = self.task.chat or ChatTemplate(config.model.tokenizer)
        self.positions = self.task.read(config.prompts, config.seed, config.compilation_cache)
        self.dataset = PromptDataset(self.positions, config.seed)
        self.policy: Policy = load_policy(config.model, config.seed, context(config))
        self.tokenizer = self.policy.tokenizer
        self.tokenizer.require_writable(self.task.answers, self.task.name)
        self._require_fitting_prompts()
        if isinstance(self.task, EpisodicTask):
            require_fitting_observations(self.task, self.prompts(0)[1], self.tokenizer, config.windows())
        programs = make_programs(config, self.policy.graphdef, self.tokenizer, self.task)
        self.generate, self.score, self.update, self.next_turn, self.partner = programs
        # The update donates its parameters, so the frozen reference needs a copy; without a KL term there is none.
        self.reference = reference_copy(self.policy.params, config) if config.kl.beta > 0 else None
        if self.partner is not None and isinstance(self.task, EpisodicTask) and self.task.asks == "reference":
            if self.reference is None:
                raise ConfigError(
                    f"task {self.task.name!r} asks the reference, which is kept with kl.beta > 0; it is 0"
                )
            self.partner = self.partner._replace(frozen=self.reference)
        self.state: TrainState = init_state(self.policy.params, config)
        self.policy = self.policy._replace(params=None)
        self.identity = {
            "architecture": dataclasses.asdict(self.policy.architecture),
            "reference": None if self.reference is None else content_hash(self.reference),
            "positions": self.positions.identity,
            "task": None if task is None else f"{type(task).__module__}.{type(task).__qualname__}",
            "code": code_hashes(self.task.code()),
        }

    def iterate(self, iteration: int, phases: Phases | None = None) -> tuple[dict[str, float], Scored, Batch]:
        """One iteration; returns its metrics, the scored completions and the batch it trained on."""
        phases, compiled_since, started = phases or Phases(), compilations(), time.perf_counter()
        with explain_out_of_memory(phases, self.config):
            prompts, rollout, bare = self._generate(iteration, phases)
            # Log-probabilities need no rewards: the device computes them while the host computes those.
            logps = functools.partial(with_logps, self.config, self.score, self.state.params, self.reference, bare)
            cached = phases.run("score", logps, wait=False)
            scored = phases.run("reward", lambda: self._reward(iteration, prompts, rollout))
            batch, flat_B = phases.run("score", lambda: self._with_advantages(cached, scored))
            steps = phases.run("update", lambda: self._optimise(batch, iteration))
        seconds = time.perf_counter() - started
        metrics = self._metrics(iteration, scored, batch, flat_B, steps, phases.seconds, seconds)
        compiled = compiled_since()
        if takes_time(compiled):
            trim()  # a compiler frees half a gigabyte, which would stay
            keep_freed()
        return metrics | compiled, scored, batch

    def restore(self, origin: Origin) -> None:
        """Puts the checkpoint's state in the place of the fresh one, which is freed first: two do not fit everywhere.

        Raises:
            CheckpointError: the model, the reference weights or the positions are not those of the checkpoint.
        """
        positions = self.positions.identity_as_in(origin.content["identity"]["positions"])
        require_same_data(origin, self.identity | {"positions": positions})
        like, self.state = abstract(self.state), None  # pyright: ignore[reportAttributeAccessIssue]
        self.state = restore(origin, like, LATER_COUNTERS)

    def manifest(self, iterations_done: int, metrics_bytes: int) -> dict[str, Any]:
        """What a checkpoint says beside its arrays; with those it is all that the iterations to come depend on."""
        return {
            "config": self.config.model_dump(),
            "architecture": self.identity["architecture"],
            "identity": self.identity,
            "seed": self.config.seed,  # with the iteration, the position of every random stream
            "next_prompt": iterations_done * self.config.prompts.per_iteration,
            "metrics_bytes": metrics_bytes,
            "nonfinite_total": int(self.state.nonfinite_total),
        }

    def prompts(self, iteration: int) -> tuple[list[int], list[Prompt]]:
        """The numbers of an iteration's positions in their data set, and its prompts."""
        drawn = self.dataset.batch(iteration, self.config.prompts.per_iteration)
        seed = self.config.seed * 1_000_003
        return [index for index, _ in drawn], [self.task.prompt(position, seed + index) for index, position in drawn]

    def _require_fitting_prompts(self) -> None:
        """Refuses, before anything is compiled, a run that would come upon a too long prompt."""
        config = self.config
        drawn = min(config.iterations, -(-len(self.dataset) // config.prompts.per_iteration))  # at most an epoch
        # An engine changes no prompt; but `value` without one has every position looked at.
        task = [config.task.model_dump(exclude={"engine"}), config.task.engine is None]
        order = [config.seed, drawn, config.prompts.per_iteration]
        what = [jax_grpo.__version__, self.positions.identity, self.tokenizer.fingerprint(), task, order]
        own = any(inspect.isclass(made) and not made.__module__.startswith("jax_grpo.") for made in self.task.code())
        remembered = Remembered(None if own else config.compilation_cache, "longest_prompt", what)
        if isinstance(remembered.value, int) and remembered.value <= config.prompts.max_prompt_tokens:
            return
        longest = 0
        for iteration in range(drawn):
            texts = [prompt.text for prompt in self.prompts(iteration)[1]]
            encoded = encode_fitting(texts, self.tokenizer, config.prompts.max_prompt_tokens)
            longest = max(longest, *map(len, encoded))
        remembered.keep(longest)

    def _generate(self, iteration: int, phases: Phases) -> tuple[list[Prompt], Rollout | Played, Batch]:
        """The prompt of each completion, the completions, and their bare batch; the task prepares for scoring meanwhile."""
        config = self.config
        indices, prompts = self.prompts(iteration)
        ids_PT, mask_PT = encode_prompts([p.text for p in prompts], self.tokenizer, config.prompts.max_prompt_tokens)
        numbers_P = np.array(sampling_numbers(indices, len(self.dataset)), np.int32)
        if isinstance(self.task, EpisodicTask):
            rollout = self._play(iteration, prompts, PromptTokens(ids_PT, mask_PT), numbers_P, phases)
            return self._grouped(prompts, ids_PT, mask_PT, rollout)
        states_P = np.array([p.start_state for p in prompts], np.int32)
        caps_P = caps(prompts, config.rollout.max_new_tokens)

        def generate() -> Rollout:
            rollout = self.generate(
                self.state.params, ids_PT, mask_PT, states_P, numbers_P, config.seed, jnp.int32(iteration), caps_P
            )
            self.task.prepare(prompts)
            return rollout

        return self._grouped(prompts, ids_PT, mask_PT, phases.run("rollout", generate))

    def _grouped(
        self, prompts: list[Prompt], ids_PT: np.ndarray, mask_PT: np.ndarray, rollout: Rollout | Played
    ) -> tuple[list[Prompt], Rollout | Played, Batch]:
        """What `_generate` returns."""
        repeated = [prompt for prompt in prompts for _ in range(self.config.rollout.group_size)]
        return repeated, rollout, unscored(jnp.asarray(ids_PT), jnp.asarray(mask_PT), rollout)

    def _play(
        self, iteration: int, prompts: list[Prompt], tokens: PromptTokens, numbers_P: np.ndarray, phases: Phases
    ) -> Played:
        """The prompts' episodes, all turns of them."""
        config = self.config
        assert isinstance(self.task, EpisodicTask), "asked of such a task alone"
        episodes = Episodes(
            self.task,
            self.tokenizer,
            config.windows(),
            config.rollout.group_size,
            self.generate,
            self.next_turn,
            self.partner,
        )
        drawn = numbers_P, config.seed, iteration
        return episodes.play(self.state.params, prompts, tokens, *drawn, phases, lambda: self.task.prepare(prompts))

    def _reward(self, iteration: int, prompts: list[Prompt], rollout: Rollout | Played) -> Scored:
        """Stop-truncated texts, their raw components [B], and the weighted sum with penalties."""
        config = self.config
        if isinstance(rollout, Played):
            judged, completions = rollout.episodes, [str(episode) for episode in rollout.episodes]
        else:
            states_B = [prompt.start_state for prompt in prompts]
            judged = completions = decode_completions(rollout, self.tokenizer, self.task.stop_rule, states_B)
        ids = completion_ids(rollout.completion_ids_PGC, rollout.completion_mask_PGC)
        components = checked_score(self.task, prompts, judged, ids, TrainerState(iteration, config.iterations))
        rewards_B = total_reward(components, self.task.component_weights)
        if (penalty := config.objective.overlong_penalty) is not None:
            rewards_B = rewards_B + self._overlong(prompts, rollout, penalty.length) * np.float32(penalty.weight)
        return Scored(prompts, completions, components, rewards_B, rollout, self.task.logged())

    def _overlong(self, prompts: list[Prompt], rollout: Rollout | Played, length: int) -> np.ndarray:
        """DAPO's soft penalty for long completions as a component [B]: 0 down to -1 at the cap."""
        lengths_B = np.asarray(rollout.completion_mask_PGC).sum(-1).reshape(-1)
        caps_B = jnp.asarray(caps(prompts, self.config.rollout.max_new_tokens))
        return np.asarray(advantages.overlong_penalty(jnp.asarray(lengths_B), caps_B, length, 1.0))

    def _with_advantages(self, batch: Batch, scored: Scored) -> tuple[Batch, np.ndarray]:
        """The batch to train on, and which of its rows have no signal."""
        group_ids_B, config = jnp.asarray(self.group_ids()), self.config.advantage
        dtype = jnp.promote_types(self.config.model.param_dtype, jnp.float32)
        if config.components == "sum_first":
            rewards_B = jnp.asarray(scored.rewards_B, dtype)
            advantages_B, flat_B = advantages.group_advantages(rewards_B, group_ids_B, config)
        else:
            about_every_row(scored.components, self.task.component_weights)
            weights, penalty = self.task.component_weights, self.config.objective.overlong_penalty
            weighted = [(weights[name], x_B) for name, x_B in scored.components.items() if weights.get(name)]
            if penalty is not None:  # no component of the task, but of the reward
                weighted.append((penalty.weight, self._overlong(scored.prompts, scored.rollout, penalty.length)))
            components_KB = jnp.stack([jnp.asarray(x_B, dtype) for _, x_B in weighted])
            weights_K = jnp.array([weight for weight, _ in weighted], dtype)
            advantages_B, flat_B = advantages.combined_advantages(components_KB, weights_K, group_ids_B, config)
        return dataclasses.replace(batch, advantages_B=advantages_B), np.asarray(flat_B)

    def group_ids(self) -> np.ndarray:
        """The group of each completion, int32 [B]."""
        return np.repeat(np.arange(self.config.prompts.per_iteration, dtype=np.int32), self.config.rollout.group_size)

    def _optimise(self, batch: Batch, iteration: int) -> list[dict[str, jax.Array]]:
        """mu epochs of minibatch steps, up to the first beyond a guardrail that ends them; metrics of each, on the device."""
        config, steps = self.config, []
        for minibatch in self._minibatches(batch, iteration):
            self.state, metrics = self.update(self.state, minibatch)
            steps.append(metrics)
            if config.kl.guardrail == "end_epoch" and bool(beyond_guardrail(metrics["kl/mean"], config.kl)):
                break
        skipped, most = int(self.state.nonfinite_in_a_row), config.update.max_consecutive_nonfinite
        if skipped >= most:
            raise NonFiniteUpdates(
                f"{skipped} optimiser steps in a row had a non-finite loss or gradient "
                f"(update.max_consecutive_nonfinite = {most}); the parameters are "
                f"those of optimiser step {int(self.state.optimizer_step)}. Try a lower update.learning_rate."
            )
        return steps

    def _minibatches(self, batch: Batch, iteration: int) -> Iterator[Batch]:
        """The optimiser batches of an iteration in order, each cut when its turn comes."""
        update = self.config.update
        for epoch in range(update.epochs):
            pieces = split(self._shuffled(batch, iteration, epoch), update.minibatches)
            for number in range(update.minibatches):
                yield piece(pieces, number)

    def _shuffled(self, batch: Batch, iteration: int, epoch: int) -> Batch:
        """Groups in a new order, a function of (seed, iteration, epoch), when there are minibatches to mix."""
        if self.config.update.minibatches == 1:
            return batch
        prompts, group = self.config.prompts.per_iteration, self.config.rollout.group_size
        order_P = np.random.default_rng((self.config.seed, iteration, epoch)).permutation(prompts)
        order_B = (order_P[:, None] * group + np.arange(group)).reshape(-1)
        rows = jax.tree.map(lambda x: x[order_B], dataclasses.replace(batch, tokens=None))
        return dataclasses.replace(rows, tokens=jax.tree.map(lambda x: x[order_P], batch.tokens))

    def _metrics(
        self, iteration, scored: Scored, batch: Batch, flat_B, steps, seconds: dict[str, float], total: float
    ) -> dict[str, float]:
        lengths_B = np.asarray(scored.rollout.completion_mask_PGC).sum(-1).reshape(-1)
        stopped_B = np.asarray(scored.rollout.stopped_PG).reshape(-1)
        group = self.config.rollout.group_size
        out: dict[str, float] = {"iteration": iteration, "optimizer_step": int(self.state.optimizer_step)}
        steps = jax.device_get(steps)  # all at once: each by itself would wait for the device again
        out |= over_steps(steps)
        out.setdefault("kl/mean", 0.0)
        out.setdefault("kl/p95", 0.0)
        kl = out["kl/mean"]
        out["kl/beyond_guardrail"] = kl if math.isnan(kl) else float(beyond_guardrail(kl, self.config.kl))
        out["reward/mean"], out["reward/std"] = float(scored.rewards_B.mean()), float(scored.rewards_B.std())
        for name, values in applicable(scored.components, scored.prompts).items():
            out[f"reward/{name}/mean"], out[f"reward/{name}/std"] = float(values.mean()), float(values.std())
            if name.endswith("legal"):
                out["legal_move_rate"] = float(values.mean())
        out |= {f"log/{name}": float(np.mean(values)) for name, values in scored.logged.metrics.items()}
        out["groups_without_signal"] = int(flat_B.reshape(-1, group).all(-1).sum())
        out["completion_length/mean"] = float(lengths_B.mean())
        out["truncated_fraction"] = float(1 - stopped_B.mean())
        out["completions/distinct"] = distinct_share(scored.completions, group)
        if scored.episodes is not None and self.next_turn is not None:
            out |= episode_shares(scored.episodes)
        # An empty step moves nothing: the first that has tokens is the first on fresh completions.
        out["ratio/first_deviation"] = next((float(s["ratio/deviation"]) for s in steps if not s["empty"]), math.nan)
        out |= {f"time/{name}": value for name, value in seconds.items()} | {"time/iteration": total} | peak_memory()
        # Scoring ran beside the rewards: its own time is not known, at most the two phases'.
        spans = seconds | {"score": seconds["score"] + seconds["reward"]}
        peak = device_peak(jax.devices()[0].device_kind, self.config.model.compute_dtype)
        out |= flops.rates(phase_flops(self.config, self.policy.architecture, batch, len(steps)), spans, peak)
        out["tokens_per_second"] = float(lengths_B.sum() / seconds["rollout"])
        return out


MEANS = ("loss", "policy_loss", "grad_norm")
OF_THE_STATE = ("beta", "learning_rate", "nonfinite", "empty_steps")


def over_steps(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """An iteration's metrics from those of its optimiser steps.

    Losses and the gradient norm are means; the ratio, clipping and KL of the last step tell how far the iteration went. A step
    without a token to train on has seen nothing and is left out of both; where all are such, the metric is NaN, not 0.
    """
    seen = [step for step in steps if not step["empty"]]

    def value(name: str) -> float:
        if name in OF_THE_STATE:
            return float(steps[-1][name])
        values = [float(step[name]) for step in seen] or [math.nan]
        return float(np.mean(values)) if name in MEANS else values[-1]

    return {name: value(name) for name in steps[0] if name != "empty"}
