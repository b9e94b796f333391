"""What one run computes: its programs, its data, and one iteration from prompts to optimiser steps. No files, no console."""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_grpo.advantages import over_batch
from jax_grpo.batch import Batch, minibatches, without_padding
from jax_grpo.config import Config, ConfigError
from jax_grpo.config.imported import code_hashes
from jax_grpo.config.tasks import task_of
from jax_grpo.iteration.draw import Draw, PromptSampler
from jax_grpo.iteration.metrics import of_iteration, unselected
from jax_grpo.iteration.refill import batch_of, gated, is_full, is_last
from jax_grpo.iteration.reward import Samples, rewarded
from jax_grpo.memory.fit import explain_out_of_memory
from jax_grpo.mesh import ONE_DEVICE, layout_of, processes, require_fitting
from jax_grpo.model.tokenizer import tokenizer_of
from jax_grpo.objective import beyond_guardrail
from jax_grpo.optimiser import reference_copy
from jax_grpo.policy.adapters import divided, joined
from jax_grpo.policy.named import Policy, base_hash, load_policy
from jax_grpo.programs import kl_across_a_move, make_programs, unscored, with_logps
from jax_grpo.prompts.chat import ChatTemplate
from jax_grpo.rollout.episodes import Episodes, require_fitting_observations
from jax_grpo.rollout.generate import PromptTokens, Rollout, encode_prompts
from jax_grpo.run.checkpoints import abstract, content_hash, restore
from jax_grpo.run.resume import Origin, require_same_data
from jax_grpo.system.compilation import compilations, takes_time
from jax_grpo.system.memory import keep_freed, trim
from jax_grpo.system.phases import Phases
from jax_grpo.tasks import make_task, require_task
from jax_grpo.tasks.base import Prompt, Task, TrainerState
from jax_grpo.tasks.checked import caps, require_outcome
from jax_grpo.tasks.episodes import EpisodicTask
from jax_grpo.update import LATER_COUNTERS, TrainState, init_state

DRAWING = "curriculum/"  # the names of its arrays in a checkpoint begin so


class NonFiniteUpdates(RuntimeError):
    """Too many optimiser steps in a row had a non-finite loss or gradient; the weights saved are the last good ones."""


def task_of_run(config: Config, task: Task | None, rewards: Sequence[Callable[..., Any]] | None) -> Task:
    """The task that is given, or the one that the config names, with the functions that are given.

    Raises:
        ConfigError: two of them are given, of which one would do nothing; or as `make_task`.
    """
    if task is None:
        return make_task(config.task, rewards, tokenizer_of(config.model))
    if config.task != task_of(episode=config.task.episode):
        raise ConfigError(
            "task: beside a task that is given to `train`, the config's section does nothing; leave it out (but for "
            "task.episode)"
        )
    if rewards is not None:
        raise ConfigError(
            "rewards: a task that is given scores by itself, and the functions would do nothing; leave one out"
        )
    task = require_task(task, "task")
    task.chat = task.chat or ChatTemplate(tokenizer_of(config.model))
    return task


class Trainer:
    """The programs and data of one run. `iterate` does one iteration; `state` is what training has changed so far.

    A `task` that is given takes the place of the one that the config names, whose settings are then refused (ConfigError).
    """

    def __init__(self, config: Config, task: Task | None = None, rewards: Sequence[Callable[..., Any]] | None = None):
        self.config, self.layout = config, layout_of(config.mesh)
        # Micro-batches of an optimiser step, whose padding is not computed; None: on several devices it is.
        self._parts = config.update.parts if self.layout is ONE_DEVICE else None
        self._prompt_limit = config.prompt_limit()
        self.task = task_of_run(config, task, rewards)
        require_outcome(self.task, config)
        self.positions = self.task.read(config.prompts, config.seed, config.compilation_cache)
        self.prompts = PromptSampler(config, self.task, self.positions)
        self.policy: Policy = load_policy(config.model, config.seed, config.context())
        sizes = self.policy.architecture
        columns = sum(sizes.qkv), sizes.inner, *(() if config.model.adapter is None else sizes.qkv)
        require_fitting(config.mesh, sizes.num_heads, sizes.kv_heads, sizes.hidden_size, *columns)
        trained, self.base = divided(self.layout.place(self.policy.params))
        self.policy = self.policy._replace(params=None)
        self.tokenizer = self.policy.tokenizer
        self.tokenizer.require_writable(self.task.answers, self.task.name)
        self.prompts.require_fitting(self.tokenizer)
        if isinstance(self.task, EpisodicTask):
            require_fitting_observations(self.task, self.prompts.in_order(0)[1], self.tokenizer, config.windows())
        programs = make_programs(config, self.policy.graphdef, self.tokenizer, self.task, self.layout)
        self.generate, self.score, self.update, self.next_turn, self.task_policy = programs
        # The update donates its parameters, so the reference needs a copy; without a KL term there is none.
        stays = config.kl.beta > 0 and config.kl.reference_every is None
        self._frozen = reference_copy(trained, config.kl) if stays else None
        if self.task_policy is not None and isinstance(self.task, EpisodicTask) and self.task.asks == "reference":
            if self._frozen is None:
                raise ConfigError(
                    f"task {self.task.name!r} asks the frozen reference, which is kept with kl.beta > 0 and kl.reference_every "
                    f"null; they are {config.kl.beta} and {config.kl.reference_every}"
                )
            self.task_policy = self.task_policy._replace(frozen=joined(self._frozen, self.base))
        self.state: TrainState = self.layout.place(init_state(trained, config.learning()))
        self.identity = {
            "architecture": self.policy.architecture.as_json(),
            "reference": None if (reference := self._own_reference) is None else content_hash(reference),
            "base": None if self.base is None else base_hash(self.base),
            "positions": self.positions.identity,
            "task": None if task is None else f"{type(task).__module__}.{type(task).__qualname__}",
            "code": code_hashes(self.task.code()),
        }

    @property
    def weights(self) -> Any:
        """All that the policy's model reads: what is trained, and the base that is not."""
        return joined(self.state.params, self.base)

    @property
    def reference(self) -> Any:
        """Weights that the KL is measured to, on the same base: frozen, or the state's own that move; None without a KL term."""
        return None if (own := self._own_reference) is None else joined(own, self.base)

    @property
    def _own_reference(self) -> Any:
        return self._frozen if self.state.reference is None else self.state.reference

    def iterate(self, iteration: int, phases: Phases | None = None) -> tuple[dict[str, float], Samples, Batch]:
        """One iteration; returns its metrics, its samples and the batch it trained on."""
        phases, compiled_since, started = phases or Phases(), compilations(), time.perf_counter()
        with explain_out_of_memory(phases, self.config):
            draw = self._finished(self._draw(iteration, phases), phases)
            # Without refill the batch is this draw. Log-probabilities need no rewards: the device computes them beside the host's.
            beside = self._with_logps(draw, phases) if self.config.rollout.refill is None else None
            draws, unused = self._refill(draw, iteration, phases)
            samples = batch_of(draws, self.tokenizer.pad_id)
            scored = beside or self._with_logps(samples, phases)
            batch = phases.run("score", functools.partial(self._with_advantages, scored, samples))
            before = int(self.state.optimizer_step)
            steps = phases.run("update", lambda: self._optimise(batch, iteration))
            if self._reference_moved(before):
                both = self.weights, self.reference
                moved = functools.partial(kl_across_a_move, self.config.learning(), self.score, *both, batch)
                steps[-1] |= phases.run("reference", moved)
            batch = processes.gathered(batch)
        seconds = phases.seconds | {"iteration": time.perf_counter() - started}
        metrics = {"iteration": iteration, "optimizer_step": int(self.state.optimizer_step)}
        steps = jax.device_get(steps)  # all at once: each by itself would wait for the device again
        metrics |= of_iteration(
            self.config, self.policy.architecture, samples, batch, steps, seconds, draws, unused, self.task.headlines
        )
        if self.config.picks_prompts():
            first_PG = draws[0].rewards_B.reshape(-1, self.config.rollout.group_size)
            metrics["reward/unselected"] = unselected(first_PG, self.prompts.picked)
        metrics |= self.prompts.metrics()
        compiled = compiled_since()
        if takes_time(compiled):
            trim()  # a compiler frees half a gigabyte, which would stay
            keep_freed()
        return metrics | compiled, samples, batch

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
        drawing = origin.take(DRAWING)
        like, self.state = abstract(self.state), None  # pyright: ignore[reportAttributeAccessIssue]
        self.state = restore(origin, like, LATER_COUNTERS)
        self.prompts.restore(origin.content["next_prompt"], origin.iteration, drawing)

    def saved(self) -> Any:
        """The arrays of a checkpoint: the state, and what a curriculum has observed."""
        if (curriculum := self.prompts.curriculum) is None:
            return self.state
        return vars(self.state) | {DRAWING.removesuffix("/"): curriculum.arrays()}

    def manifest(self, iterations_done: int, metrics_bytes: int) -> dict[str, Any]:
        """What a checkpoint says beside its arrays; with those it is all that the iterations to come depend on."""
        return {
            "config": self.config.model_dump(),
            "architecture": self.identity["architecture"],
            "identity": self.identity,
            "seed": self.config.seed,  # with the iteration, the position of every random stream
            "next_prompt": self.prompts.next_prompt(iterations_done),
            "metrics_bytes": metrics_bytes,
            "nonfinite_total": int(self.state.nonfinite_total),
        }

    def _draw(self, iteration: int, phases: Phases, number: int = 0) -> Draw:
        """The iteration's draw of prompts of this number, which the device completes, and may still be at."""
        numbers, prompts, sampling_P = self.prompts.next(iteration, number)
        tokens = encode_prompts([prompt.text for prompt in prompts], self.tokenizer, self._prompt_limit)
        generate = self._play if isinstance(self.task, EpisodicTask) else self._complete
        rollout = generate(iteration, prompts, tokens, sampling_P, phases)
        return Draw(numbers, prompts, tokens, rollout)

    def _finished(self, draw: Draw, phases: Phases) -> Draw:
        """The draw once the device has completed it."""
        # Gathered now: behind what the device is given next it would wait for that.
        return draw._replace(rollout=processes.gathered(phases.run("rollout", lambda: draw.rollout)))

    def _refill(self, draw: Draw, iteration: int, phases: Phases) -> tuple[list[Samples], Draw | None]:
        """The first draw's samples and, with refill, those of further ones until a batch is full or its budget spent.

        Also the draw that was begun beside the last rewards and turned out not to be needed, if there is one. What a draw has
        decides whether there is another one, and nothing else does: the same state draws the same.
        """
        refill, draws = self.config.rollout.refill, []
        while True:
            last = is_last(draw, draws, refill)
            begins = refill is not None and refill.ahead and not last
            ahead = self._draw(iteration, phases, len(draws) + 1) if begins else None
            # Not waited for: advantages come behind the log-probabilities that the device may be at.
            draws.append(phases.run("reward", functools.partial(self._reward, iteration, draw), wait=False))
            if last or is_full(draws):
                break
            draw = self._finished(ahead or self._draw(iteration, phases, len(draws)), phases)
        self.prompts.further += len(draws) - 1
        if ahead is not None:
            ahead = self._finished(ahead, phases)
            self.prompts.undo()
        return draws, ahead

    def _complete(
        self, iteration: int, prompts: list[Prompt], tokens: PromptTokens, sampling_P: np.ndarray, phases: Phases
    ) -> Rollout:
        """The prompts' completions; the task prepares for scoring meanwhile."""
        states_P = np.array([prompt.start_state for prompt in prompts], np.int32)
        caps_P = caps(prompts, self.config.rollout.max_new_tokens)
        sampled_by = sampling_P, self.config.seed, jnp.int32(iteration)

        def generate() -> Rollout:
            rollout = self.generate(self.weights, *tokens, states_P, *sampled_by, caps_P)
            self.task.prepare(prompts[processes.own(len(prompts))])
            return rollout

        return phases.run("rollout", generate, wait=False)

    def _play(
        self, iteration: int, prompts: list[Prompt], tokens: PromptTokens, sampling_P: np.ndarray, phases: Phases
    ) -> Rollout:
        """The prompts' episodes, all turns of them."""
        assert isinstance(self.task, EpisodicTask), "see `_draw`"
        config, programs = self.config, (self.generate, self.next_turn, self.task_policy)
        episodes = Episodes(self.task, self.tokenizer, config.windows(), config.rollout.group_size, *programs)
        sampled_by, own = (sampling_P, config.seed, iteration), processes.own(len(prompts))
        return episodes.play(
            self.weights, prompts, tokens, *sampled_by, phases, lambda: self.task.prepare(prompts[own]), own
        )

    def _reward(self, iteration: int, draw: Draw) -> Samples:
        """The draw's completions with their rewards, which a curriculum learns too."""
        state = TrainerState(iteration, self.config.iterations)
        samples = rewarded(self.config.learning(), self.task, self.tokenizer, draw, state)
        samples = gated(samples, self.config.rollout.refill)
        self.prompts.observe(draw.numbers, samples.rewards_B)
        return samples

    def _with_logps(self, made: Draw | Samples, phases: Phases) -> Batch:
        """Its tokens as a batch with log-probabilities of policy and reference, which the device may still be computing."""
        batch = unscored(*made.tokens, made.rollout)
        if self._parts is not None:
            batch = without_padding(batch, self.config.update.minibatches * self._parts)
        given = self.config.learning(), self.score, self.weights, self.reference, batch
        return phases.run("score", lambda: with_logps(*given), wait=False)

    def _with_advantages(self, batch: Batch, samples: Samples) -> Batch:
        advantages_PG, flat_P = jnp.asarray(samples.advantages_PG), jnp.asarray(samples.flat_P)
        rewards_PG = jnp.asarray(samples.rewards_B, advantages_PG.dtype).reshape(advantages_PG.shape)
        advantages_PG = over_batch(advantages_PG, flat_P, rewards_PG, self.config.advantage)
        return dataclasses.replace(batch, advantages_B=advantages_PG.reshape(-1))

    def group_ids(self) -> np.ndarray:
        """The group of each completion, int32 [B]."""
        return np.repeat(np.arange(self.config.prompts.per_iteration, dtype=np.int32), self.config.rollout.group_size)

    def _optimise(self, batch: Batch, iteration: int) -> list[dict[str, jax.Array]]:
        """mu epochs of minibatch steps, up to the first beyond a guardrail that ends them; metrics of each, on the device."""
        config, steps = self.config, []
        cut = config.update.epochs, config.update.minibatches, config.seed, iteration
        for minibatch in minibatches(batch, *cut, self._parts):
            self.state, metrics = self.update(self.state, minibatch, self.base)
            steps.append(metrics)
            if config.kl.guardrail == "end_epoch" and bool(beyond_guardrail(metrics["kl/mean"], config.kl)):
                break
        # The longest row: the last step may be sound. After each step by itself the host would wait for the device.
        skipped = max(int(row) for row in jax.device_get([step["nonfinite_in_a_row"] for step in steps]))
        most = config.update.max_consecutive_nonfinite
        if skipped >= most:
            raise NonFiniteUpdates(
                f"{skipped} optimiser steps in a row had a non-finite loss or gradient "
                f"(update.max_consecutive_nonfinite = {most}); the parameters are "
                f"those of optimiser step {int(self.state.optimizer_step)}. Try a lower update.learning_rate."
            )
        return steps
