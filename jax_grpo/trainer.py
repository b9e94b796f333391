"""What one run computes: its programs, its data, and one iteration from prompts to optimiser steps. No files, no console."""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_grpo.batch import Batch, minibatches
from jax_grpo.config import Config, ConfigError
from jax_grpo.config.tasks import TaskConfig
from jax_grpo.draws import Asked, Draws
from jax_grpo.memory.fit import explain_out_of_memory
from jax_grpo.mesh import layout_of, processes, require_fitting
from jax_grpo.model.named import Policy, load_policy
from jax_grpo.objective import beyond_guardrail
from jax_grpo.optimiser import reference_copy
from jax_grpo.programs import context, kl_across_a_move, make_programs, unscored, with_logps
from jax_grpo.prompts.chat import ChatTemplate
from jax_grpo.rollout.episodes import Episodes, Played, require_fitting_observations
from jax_grpo.rollout.generate import PromptTokens, Rollout, encode_prompts
from jax_grpo.run.checkpoints import abstract, content_hash, restore, set_apart
from jax_grpo.run.resume import Origin, require_same_data
from jax_grpo.scored import Scored, advantages_of
from jax_grpo.scored.metrics import of_iteration
from jax_grpo.scored.refill import Drawn, Filled, Round, batch_of, fill
from jax_grpo.scored.rewards import rewarded
from jax_grpo.system.compilation import compilations, takes_time
from jax_grpo.system.memory import keep_freed, trim
from jax_grpo.system.phases import Phases
from jax_grpo.tasks import make_task, require_task
from jax_grpo.tasks.base import Prompt, Task, caps
from jax_grpo.tasks.episodes import EpisodicTask
from jax_grpo.tasks.imported import code_hashes
from jax_grpo.update import LATER_COUNTERS, TrainState, init_state

DRAWING = "curriculum/"  # the names of its arrays in a checkpoint begin so


class NonFiniteUpdates(RuntimeError):
    """Too many optimiser steps in a row had a non-finite loss or gradient; the weights saved are the last good ones."""


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
        self.config, self.layout = config, layout_of(config.mesh)
        if task is None:
            self.task: Task = make_task(config.task, rewards, config.model.tokenizer)
        else:
            self.task = require_task(task, "task")
            self.task.chat = self.task.chat or ChatTemplate(config.model.tokenizer)
        self.positions = self.task.read(config.prompts, config.seed, config.compilation_cache)
        self.draws = Draws(config, self.task, self.positions)
        self.policy: Policy = load_policy(config.model, config.seed, context(config))
        require_fitting(config.mesh, self.policy.architecture.num_heads, self.policy.architecture.hidden_size)
        self.policy = self.policy._replace(params=self.layout.place(self.policy.params))
        self.tokenizer = self.policy.tokenizer
        self.tokenizer.require_writable(self.task.answers, self.task.name)
        self.draws.require_fitting(self.tokenizer)
        if isinstance(self.task, EpisodicTask):
            require_fitting_observations(self.task, self.draws.in_order(0)[1], self.tokenizer, config.windows())
        programs = make_programs(config, self.policy.graphdef, self.tokenizer, self.task, self.layout)
        self.generate, self.score, self.update, self.next_turn, self.partner = programs
        # The update donates its parameters, so the reference needs a copy; without a KL term there is none.
        kept = config.kl.beta > 0 and config.kl.reference_every is None
        self._frozen = reference_copy(self.policy.params, config.kl) if kept else None
        if self.partner is not None and isinstance(self.task, EpisodicTask) and self.task.asks == "reference":
            if self._frozen is None:
                raise ConfigError(
                    f"task {self.task.name!r} asks the frozen reference, which is kept with kl.beta > 0 and kl.reference_every "
                    f"null; they are {config.kl.beta} and {config.kl.reference_every}"
                )
            self.partner = self.partner._replace(frozen=self._frozen)
        self.state: TrainState = self.layout.place(init_state(self.policy.params, config))
        self.policy = self.policy._replace(params=None)
        self.identity = {
            "architecture": dataclasses.asdict(self.policy.architecture),
            "reference": None if self.reference is None else content_hash(self.reference),
            "positions": self.positions.identity,
            "task": None if task is None else f"{type(task).__module__}.{type(task).__qualname__}",
            "code": code_hashes(self.task.code()),
        }

    @property
    def reference(self) -> Any:
        """Weights that the KL is measured to: frozen, or the state's own that move; None without a KL term."""
        return self._frozen if self.state.reference is None else self.state.reference

    def iterate(self, iteration: int, phases: Phases | None = None) -> tuple[dict[str, float], Scored, Batch]:
        """One iteration; returns its metrics, the scored completions and the batch it trained on."""
        phases, compiled_since, started = phases or Phases(), compilations(), time.perf_counter()
        with explain_out_of_memory(phases, self.config):
            filled, scored, cached = self._drawn(iteration, phases)
            batch, flat_B = phases.run("score", lambda: self._with_advantages(cached, scored))
            before = int(self.state.optimizer_step)
            steps = phases.run("update", lambda: self._optimise(batch, iteration))
            if self._reference_moved(before):
                told = functools.partial(kl_across_a_move, self.config, self.score, self.state, batch)
                steps[-1] |= phases.run("reference", told)
            batch = processes.gathered(batch)
        seconds = time.perf_counter() - started
        metrics = {"iteration": iteration, "optimizer_step": int(self.state.optimizer_step)}
        steps = jax.device_get(steps)  # all at once: each by itself would wait for the device again
        metrics |= of_iteration(
            self.config, self.policy.architecture, scored, batch, flat_B, steps, phases.seconds, seconds, filled
        )
        metrics |= self.draws.metrics()
        compiled = compiled_since()
        if takes_time(compiled):
            trim()  # a compiler frees half a gigabyte, which would stay
            keep_freed()
        return metrics | compiled, scored, batch

    def _reference_moved(self, before: int) -> bool:
        """Whether an optimiser step behind number `before` has moved the reference."""
        every = self.config.kl.reference_every
        return every is not None and int(self.state.optimizer_step) // every > before // every

    def restore(self, origin: Origin) -> None:
        """Puts the checkpoint's state in the place of the fresh one, which is freed first: two do not fit everywhere.

        Raises:
            CheckpointError: the model, the reference weights or the positions are not those of the checkpoint.
        """
        positions = self.positions.identity_as_in(origin.content["identity"]["positions"])
        require_same_data(origin, self.identity | {"positions": positions})
        origin, drawing = set_apart(origin, DRAWING)
        like, self.state = abstract(self.state), None  # pyright: ignore[reportAttributeAccessIssue]
        self.state = restore(origin, like, LATER_COUNTERS)
        self.draws.restore(origin.content["next_prompt"], origin.iteration, drawing)

    def saved(self) -> Any:
        """The arrays of a checkpoint: the state, and what a curriculum has observed."""
        if (curriculum := self.draws.curriculum) is None:
            return self.state
        return vars(self.state) | {DRAWING.removesuffix("/"): curriculum.arrays()}

    def manifest(self, iterations_done: int, metrics_bytes: int) -> dict[str, Any]:
        """What a checkpoint says beside its arrays; with those it is all that the iterations to come depend on."""
        return {
            "config": self.config.model_dump(),
            "architecture": self.identity["architecture"],
            "identity": self.identity,
            "seed": self.config.seed,  # with the iteration, the position of every random stream
            "next_prompt": self.draws.next_prompt(iterations_done),
            "metrics_bytes": metrics_bytes,
            "nonfinite_total": int(self.state.nonfinite_total),
        }

    def _drawn(self, iteration: int, phases: Phases) -> tuple[Filled, Scored, Batch]:
        """What refill drew (nothing without it), the groups to train on, and their batch but for its advantages."""
        refill, before = self.config.rollout.refill, None
        logps = functools.partial(with_logps, self.config, self.score, self.state.params, self.reference)

        def begin(number: int) -> Drawn:
            nonlocal before
            before = self.draws.place
            return self._generate(iteration, phases, number)

        def finish(drawn: Drawn) -> Drawn:
            # Gathered now: behind what the device is given next it would wait for that.
            return drawn._replace(rollout=processes.gathered(phases.run("rollout", lambda: drawn.rollout)))

        def reward(drawn: Drawn) -> Round:
            scored = phases.run("reward", lambda: self._reward(iteration, drawn))
            bare = processes.gathered(drawn.bare)
            return Round(scored, bare, advantages_of(self.config, self.task.component_weights, scored)[1])

        if refill is None:
            drawn = finish(begin(0))
            # Log-probabilities need no rewards: the device computes them while the host computes those.
            cached = phases.run("score", lambda: logps(drawn.bare), wait=False)
            return Filled([], None), phases.run("reward", lambda: self._reward(iteration, drawn)), cached
        filled = fill(begin, finish, reward, refill)
        if filled.unused is not None:
            unused = finish(filled.unused)
            filled = filled._replace(unused=unused._replace(bare=processes.gathered(unused.bare)))
            self.draws.back_to(before)
        self.draws.further += len(filled.rounds) - 1
        scored = batch_of(filled.rounds)
        tokens = self._encoded(scored.prompts[:: self.config.rollout.group_size])
        bare = unscored(jnp.asarray(tokens.ids_PT), jnp.asarray(tokens.mask_PT), scored.rollout)
        return filled, scored, phases.run("score", lambda: logps(bare))

    def _encoded(self, prompts: Sequence[Prompt]) -> PromptTokens:
        return encode_prompts([p.text for p in prompts], self.tokenizer, self.config.prompts.max_prompt_tokens)

    def _generate(self, iteration: int, phases: Phases, number: int = 0) -> Drawn:
        """The iteration's draw of prompts of this number, which the device completes, and may still be at."""
        asked = self.draws.next(iteration, number)
        tokens = self._encoded(asked.prompts)
        rollout = (self._play if isinstance(self.task, EpisodicTask) else self._complete)(
            iteration, asked, tokens, phases
        )
        repeated = [prompt for prompt in asked.prompts for _ in range(self.config.rollout.group_size)]
        bare = unscored(jnp.asarray(tokens.ids_PT), jnp.asarray(tokens.mask_PT), rollout)
        return Drawn(asked.numbers, repeated, rollout, bare)

    def _complete(self, iteration: int, asked: Asked, tokens: PromptTokens, phases: Phases) -> Rollout:
        """The prompts' completions; the task prepares for scoring meanwhile."""
        config, prompts = self.config, asked.prompts
        states_P = np.array([prompt.start_state for prompt in prompts], np.int32)
        caps_P = caps(prompts, config.rollout.max_new_tokens)

        def generate() -> Rollout:
            drawn_by = asked.sampling_P, config.seed, jnp.int32(iteration)
            rollout = self.generate(self.state.params, *tokens, states_P, *drawn_by, caps_P)
            self.task.prepare(prompts[processes.own(len(prompts))])
            return rollout

        return phases.run("rollout", generate, wait=False)

    def _play(self, iteration: int, asked: Asked, tokens: PromptTokens, phases: Phases) -> Played:
        """The prompts' episodes, all turns of them."""
        config, prompts = self.config, asked.prompts
        assert isinstance(self.task, EpisodicTask), "asked of such a task alone"
        programs = self.generate, self.next_turn, self.partner
        episodes = Episodes(self.task, self.tokenizer, config.windows(), config.rollout.group_size, *programs)
        drawn_by, own = (asked.sampling_P, config.seed, iteration), processes.own(len(prompts))
        return episodes.play(
            self.state.params, prompts, tokens, *drawn_by, phases, lambda: self.task.prepare(prompts[own])
        )

    def _reward(self, iteration: int, drawn: Drawn) -> Scored:
        """The draw's completions with their rewards, which a curriculum learns too."""
        scored = rewarded(self.config, self.task, self.tokenizer, drawn, iteration)
        self.draws.observe(drawn.numbers, scored.rewards_B)
        return scored

    def _with_advantages(self, batch: Batch, scored: Scored) -> tuple[Batch, np.ndarray]:
        """The batch to train on, and which of its rows have no signal."""
        advantages_B, flat_B = advantages_of(self.config, self.task.component_weights, scored)
        return dataclasses.replace(batch, advantages_B=advantages_B), flat_B

    def group_ids(self) -> np.ndarray:
        """The group of each completion, int32 [B]."""
        return np.repeat(np.arange(self.config.prompts.per_iteration, dtype=np.int32), self.config.rollout.group_size)

    def _optimise(self, batch: Batch, iteration: int) -> list[dict[str, jax.Array]]:
        """mu epochs of minibatch steps, up to the first beyond a guardrail that ends them; metrics of each, on the device."""
        config, steps = self.config, []
        cut = config.update.epochs, config.update.minibatches, config.seed, iteration
        for minibatch in minibatches(batch, *cut):
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
