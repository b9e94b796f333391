"""`python -m torch_ref.train --config C`: the same training as `jax_grpo.train`, by the reference implementation.

Same config files, tasks, prompts in the same order, metrics under the same names; its own random numbers. It is for
comparison: it writes metrics, curves and weights, and has neither checkpoints nor the shared prompt cache.
"""

import argparse
import copy
import dataclasses
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from jax_grpo.config import Config, ConfigError, check_files, load_config
from jax_grpo.config.files import weights_directory
from jax_grpo.config.model import ModelConfig
from jax_grpo.model.tokenizer import Tokenizer, tokenizer_of
from jax_grpo.prompts.dataset import PromptDataset, describe_rows, heldout_rows
from jax_grpo.report.console import Console
from jax_grpo.report.log import MetricsLog
from jax_grpo.report.records import read_records, sample_rows
from jax_grpo.run.folder import require_no_finished_run
from jax_grpo.tasks import make_task
from jax_grpo.tasks.base import Component, Prompt, Task, TaskError, TrainerState, applicable, total_reward
from jax_grpo.tasks.checked import about_every_row, caps, checked_score, made_prompt, not_negative, require_outcome
from jax_grpo.tasks.episodes import EpisodicTask
from torch_ref import adapters
from torch_ref import options as choices
from torch_ref.advantages import (
    component_advantages,
    group_advantages,
    groups_with_signal,
    overlong_penalty,
    settings_of,
)
from torch_ref.batch import Batch, write_batch
from torch_ref.curriculum import Curriculum
from torch_ref.evaluate import evaluate
from torch_ref.kl_control import beyond_guardrail
from torch_ref.model import GPT2, GPT2Config, LanguageModel
from torch_ref.objective import KL_ESTIMATORS
from torch_ref.options import Options
from torch_ref.reference import due, move
from torch_ref.refill import Sampled, costs, sample, silent, trained_on
from torch_ref.rollout import Rollout, Texts
from torch_ref.update import NonFiniteUpdates, TrainState, optimiser_step, score_batch, start
from torch_ref.weights import load_hf, save_hf

MASTERS = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


class Trainer:
    """One run's model, data and state; `iterate` does one iteration."""

    def __init__(self, config: Config, chosen: Options):
        self.config = config
        self.tokenizer = Tokenizer.load(tokenizer_of(config.model))
        if config.rollout.top_k >= self.tokenizer.vocab_size:
            raise ConfigError(
                f"rollout.top_k {config.rollout.top_k} leaves none of the vocabulary's {self.tokenizer.vocab_size} tokens out; "
                "expected fewer, or 0"
            )
        model = choices.prepare(load_model(config.model, config.seed, self.tokenizer), chosen)
        self.reference = copy.deepcopy(model).eval() if config.kl.beta > 0 else None
        self.state: TrainState = start(model, config.learning(), chosen.adamw)
        self.task: Task = make_task(config.task, tokenizer=tokenizer_of(config.model))
        if isinstance(self.task, EpisodicTask):
            raise ConfigError(
                f"task.name is {config.task.name}, whose completions are answered: torch_ref.train has one turn; train it with "
                "jax_grpo.train, and compare the update on its record_batches with torch_ref.replay"
            )
        require_outcome(self.task, config)
        self.tokenizer.require_writable(self.task.answers, self.task.name)
        self.texts = Texts(model, self.tokenizer, self.task, config)
        self.positions = self.task.read(config.prompts, config.seed, config.compilation_cache)
        self.dataset = PromptDataset(self.positions, config.seed)
        self.generator = torch.Generator(chosen.device).manual_seed(config.seed)
        how = config.prompts.curriculum
        self.curriculum = None if how is None else Curriculum(how, config.seed, self.dataset)
        self.further_draws = 0  # of prompts, by refill, beside one an iteration
        self.picked = 0  # of an iteration's first draw, the prompts that a curriculum draws again; they come first

    def iterate(self, iteration: int) -> tuple[dict[str, float], list[dict], Batch, np.ndarray]:
        """One iteration: metrics, some samples (`records.sample_rows`), the batch and its rewards [B]."""
        config, group = self.config, self.config.rollout.group_size
        seconds, began = {}, time.perf_counter()
        numbers: list[int] = []

        def draw(number: int) -> Sampled:
            sampling = time.perf_counter()
            first = self.further_draws + iteration
            if self.curriculum is None:
                own = [index for index, _ in self.dataset.batch(first + number, config.prompts.per_iteration)]
            else:
                own = self.curriculum.draw(config.prompts.per_iteration, numbers)
                if not numbers:
                    self.picked = self.curriculum.again
                numbers.extend(own)
            prompts = [made_prompt(self.task, self.positions[index], config.seed * 1_000_003 + index) for index in own]
            repeated = [prompt for prompt in prompts for _ in range(group)]
            rollout = self.texts.complete(repeated, self.generator)
            seconds["time/rollout"] = seconds.get("time/rollout", 0.0) + time.perf_counter() - sampling
            state = TrainerState(iteration, config.iterations)
            components = checked_score(self.task, repeated, rollout.completions, rollout.completion_ids(), state)
            rewards_B, _, signal = self._advantages(repeated, components, rollout)
            if self.curriculum is not None:
                self.curriculum.observe(own, rewards_B.tolist())
            return Sampled(repeated, rollout, components, rewards_B, signal, self.task.logged())

        draws = sample(draw, config.rollout.refill)
        self.further_draws += len(draws) - 1
        repeated, rollout, components, _, _, logged = trained_on(draws)
        rewards_B, advantages_B, signal = self._advantages(repeated, components, rollout)
        seconds["time/reward"] = time.perf_counter() - began - sum(seconds.values())
        batch = self.scored(self._batch(rollout, advantages_B))
        seconds["time/score"] = time.perf_counter() - began - sum(seconds.values())
        steps = self.optimise(batch, iteration)
        seconds["time/update"] = time.perf_counter() - began - sum(seconds.values())

        lengths_B = rollout.completion_mask_BT.sum(1).float()
        metrics = over_steps(steps) | {
            "iteration": iteration,
            "optimizer_step": self.state.step,
            "reward/mean": float(rewards_B.mean()),
            "reward/std": float(rewards_B.std(correction=0)),
            "groups_without_signal": signal.count(False),
            "completion_length/mean": float(lengths_B.mean()),
            "truncated_fraction": 1 - float(rollout.stopped_B.float().mean()),
            "tokens_per_second": sum(one.tokens for one in draws) / seconds["time/rollout"],
            "time/iteration": time.perf_counter() - began,
        }
        for name, values in applicable(components, repeated).items():
            metrics |= {f"reward/{name}/mean": float(values.mean()), f"reward/{name}/std": float(values.std())}
            metrics |= {
                h.metric: float(values.mean()) for h in self.task.headlines if name.split("/")[-1] == h.component
            }
        if config.picks_prompts():
            others_B = draws[0].rewards_B[self.picked * group :]
            metrics["reward/unselected"] = float(others_B.mean())  # NaN where there are none
        metrics |= costs(draws) if config.rollout.refill else {}
        metrics |= {} if self.curriculum is None else self.curriculum.metrics()
        metrics |= {f"log/{name}": float(np.mean(values)) for name, values in logged.metrics.items()}
        samples = sample_rows(
            self.task, repeated, rollout.completions, rewards_B.cpu().numpy(), components, config, logged.extras
        )
        return metrics | seconds, samples, batch, rewards_B.cpu().numpy()

    def group_ids(self) -> Tensor:
        """The group of each completion, [B]."""
        return torch.arange(self.config.prompts.per_iteration).repeat_interleave(self.config.rollout.group_size)

    def _advantages(
        self, prompts: Sequence[Prompt], components: dict[str, Component], rollout: Rollout
    ) -> tuple[Tensor, Tensor, list[bool]]:
        """Rewards with penalties [B], advantages [B] on the model's device, and of each group whether it has signal.

        The penalty for long completions is part of the reward, and where components count one by one it is one of them.
        """
        config, advantage = self.config, self.config.advantage
        dtype = torch.promote_types(MASTERS[config.model.param_dtype], torch.float32)
        weights = self.task.component_weights
        rewards_B = torch.from_numpy(total_reward(components, weights)).to(dtype)
        counted = [
            (torch.from_numpy(x.values_B).to(dtype), weights[name])
            for name, x in components.items()
            if weights.get(name)
        ]
        penalty = config.objective.overlong_penalty
        lengths_B = rollout.completion_mask_BT.sum(1).cpu().to(dtype)
        if penalty is not None:
            caps_B = torch.from_numpy(caps(prompts, config.rollout.max_new_tokens))
            long_B = overlong_penalty(lengths_B, caps_B, penalty.length, 1.0)
            rewards_B = rewards_B + penalty.weight * long_B
            counted.append((long_B, penalty.weight))
        if advantage.scale == "maxrl":
            not_negative(rewards_B.numpy())
        group_ids_B, how = self.group_ids(), settings_of(advantage)
        if (refill := config.rollout.refill) is not None and refill.by is not None:
            values_B, about_B = components[refill.by]
            about_B = about_B & [prompt.task in ("", refill.by.partition("/")[0]) for prompt in prompts]
            how["silent_B"] = silent(torch.from_numpy(values_B), torch.from_numpy(about_B), group_ids_B)
        if advantage.components == "sum_first":
            judged = rewards_B
            advantages_B = group_advantages(judged, group_ids_B, lengths_B=lengths_B, **how)
        else:
            about_every_row(components, self.task.component_weights)
            judged = torch.stack([x_B for x_B, _ in counted], dim=1)
            share = [weight for _, weight in counted]
            how["components"] = advantage.components
            advantages_B = component_advantages(judged, share, group_ids_B, lengths_B=lengths_B, **how)
        signal = groups_with_signal(judged, advantages_B, group_ids_B, advantage.pass_at_k)
        return rewards_B, advantages_B.to(self.texts.device), signal

    def _batch(self, rollout: Rollout, advantages_B: Tensor) -> Batch:
        dtype = torch.promote_types(next(self.state.model.parameters()).dtype, torch.float32)
        return Batch(
            rollout.input_ids_BT,
            rollout.attention_mask_BT,
            rollout.completion_mask_BT.to(dtype),
            advantages_B.to(dtype),
            sampling_logp_BT=rollout.sampling_logp_BT.to(dtype),
            stopped_B=rollout.stopped_B,
        )

    def scored(self, batch: Batch) -> Batch:
        """The batch with the old and the reference log-probabilities and the old entropies, computed once."""
        old_logp_BT, entropy_BT = score_batch(self.state.model, batch, self.config.learning())
        batch = dataclasses.replace(batch, old_logp_BT=old_logp_BT, entropy_BT=entropy_BT)
        if self.reference is None:
            return batch
        return dataclasses.replace(batch, ref_logp_BT=score_batch(self.reference, batch, self.config.learning())[0])

    def optimise(self, batch: Batch, iteration: int) -> list[dict[str, float]]:
        """mu epochs of minibatch steps; groups stay whole and come in the order that `jax_grpo` takes them in.

        Where the reference has moved, the last step's metrics say how far the policy is from where it was and where it is. With
        the guardrail `end_epoch` the first step that sees a KL beyond it is the iteration's last.
        """
        steps, moved = self._steps(batch, iteration)
        if moved:
            assert self.reference is not None and batch.ref_logp_BT is not None, "kl.reference_every needs kl.beta"
            policy_BT, now_BT = (
                score_batch(of, batch, self.config.learning())[0] for of in (self.state.model, self.reference)
            )
            there = batch.loss_mask_BT(self.config.objective.mask_truncated).bool()
            for name, reference_BT in {"kl/before_move": batch.ref_logp_BT, "kl/after_move": now_BT}.items():
                kl_K = KL_ESTIMATORS[self.config.kl.estimator]((reference_BT - policy_BT)[there])
                steps[-1][name] = float(kl_K.mean())
        return steps

    def _steps(self, batch: Batch, iteration: int) -> tuple[list[dict[str, float]], bool]:
        """Metrics of each optimiser step, and whether one moved the reference."""
        config, steps, moved = self.config, [], False
        prompts, group = config.prompts.per_iteration, config.rollout.group_size
        for epoch in range(config.update.epochs):
            order_P = np.arange(prompts)
            if config.update.minibatches > 1:
                order_P = np.random.default_rng((config.seed, iteration, epoch)).permutation(prompts)
            for part_P in np.split(order_P, config.update.minibatches):
                rows_B = torch.from_numpy((part_P[:, None] * group + np.arange(group)).reshape(-1))
                before = self.state.step
                steps.append(
                    optimiser_step(self.state, batch.rows(rows_B.to(self.texts.device)), self.config.learning())
                )
                if self.state.step > before and due(self.state.step, config.kl):
                    assert self.reference is not None, "kl.reference_every needs kl.beta"
                    move(self.reference, self.state.model, config.kl.reference_mix)
                    moved = True
                if config.kl.guardrail == "end_epoch" and beyond_guardrail(steps[-1]["kl/mean"], config.kl):
                    return steps, moved
        return steps, moved


def load_model(settings: ModelConfig, seed: int, tokenizer: Tokenizer) -> LanguageModel:
    """The weights that are named, or GPT-2's initialisation from the seed; its softmax is over the tokenizer's tokens."""
    model = _weights(settings, seed, tokenizer)
    if model.config.vocab_size < tokenizer.vocab_size:
        raise ConfigError(
            f"model.tokenizer {tokenizer_of(settings)!r} has {tokenizer.vocab_size} tokens but the model's vocabulary has "
            f"{model.config.vocab_size}; use the tokenizer the weights were trained with"
        )
    model.vocabulary = tokenizer.vocab_size
    return model


def _weights(sizes: ModelConfig, seed: int, tokenizer: Tokenizer) -> LanguageModel:
    dtype = MASTERS[sizes.param_dtype]
    if sizes.weights is not None:
        model = load_hf(weights_directory(sizes.weights, tensors=True), dtype=dtype, remat=bool(sizes.remat))
        return adapters.with_adapters(model, sizes, seed)
    architecture = GPT2Config(
        sizes.vocab_size or tokenizer.vocab_size,
        sizes.num_layers or 0,  # the config's own check leaves no null here
        sizes.num_heads or 0,
        sizes.hidden_size or 0,
        sizes.max_position_embeddings or 0,
    )
    return GPT2(architecture, remat=bool(sizes.remat)).to(dtype).initialise(torch.Generator().manual_seed(seed))


OF_THE_STATE = (
    *("beta", "learning_rate", "nonfinite", "empty_steps", "kl/before_move", "kl/after_move"),
    *("entropy_bonus/coefficient", "entropy_bonus/applied"),
)


def over_steps(steps: list[dict[str, float]]) -> dict[str, float]:
    """Losses and the gradient norm are means over the iteration's steps, everything else is the last step's.

    Steps that had no token to train on measured nothing and are passed over; with none but those, what is measured is NaN.
    """
    measured, last = [step for step in steps if not step["empty"]], steps[-1]
    combined: dict[str, float] = {"kl/mean": 0.0, "kl/p95": 0.0}
    for name in last.keys() - {"empty", "nonfinite_in_a_row"}:  # of a step, not of an iteration
        if name in OF_THE_STATE:
            combined[name] = last[name]
        elif not measured:
            combined[name] = math.nan
        elif name in ("loss", "policy_loss", "grad_norm"):
            combined[name] = float(np.mean([step[name] for step in measured]))
        else:
            combined[name] = measured[-1][name]
    return combined


def train(config: Config, chosen: Options) -> Path:
    """Runs a training; returns its folder: resolved config, metrics, curves, weights."""
    from jax_grpo.report.curves import curves  # matplotlib is slow to import

    run_dir = Path(config.run_dir)
    require_no_finished_run(run_dir, "choose another run_dir, or remove it")
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.yaml").write_text(config.resolved_yaml())
    with (
        choices.computing(chosen),
        MetricsLog(run_dir, config) as log,
        Console(config, (trainer := Trainer(config, chosen)).task) as console,
    ):
        console.note(f"{config.model.weights or 'random weights'}, PyTorch on {chosen.device}, run folder {run_dir}")
        for caution in config.cautions():
            console.warning(f"caution: {caution}")
        held = heldout_rows(config, trainer.positions, trainer.task.read)
        console.note(describe_rows(trainer.positions, held))
        heldout = [
            made_prompt(trainer.task, position, index, heldout=True)
            for index, position in enumerate(held.rows if held else [])
        ]
        for iteration in range(config.iterations + 1):
            last = iteration == config.iterations
            every = config.evaluation.every
            if heldout and (iteration == 0 or last or (every and iteration % every == 0)):
                scores = evaluate(trainer.texts, heldout, iteration)
                log.write({"iteration": iteration, **scores})
                console.evaluation(iteration, scores)
            if last:
                break
            metrics, samples, batch, rewards_B = trainer.iterate(iteration)
            log.write(metrics)
            console.iteration(metrics)
            if config.logging.samples_every and iteration % config.logging.samples_every == 0:
                console.samples(samples)
            if iteration < config.record_batches:
                file = run_dir / "batches" / f"{iteration:06d}.npz"
                write_batch(file, batch, rewards_B, trainer.group_ids(), trainer.tokenizer.vocab_size)
    if config.model.adapter is None:
        save_hf(run_dir / "weights", trainer.state.model)
    else:
        adapters.save(trainer.state.model, config.model, run_dir / "weights")
    trainer.tokenizer.save(run_dir / "weights")
    curves_file = run_dir / "curves.png"
    curves(read_records(run_dir / "metrics.jsonl"), curves_file, trainer.task.headlines)
    trainer.task.close()
    print(f"saved: {run_dir / 'weights'}, {run_dir / 'metrics.jsonl'}, {curves_file}")
    return run_dir


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m torch_ref.train",
        description="The reference's training; settings of the config as in jax_grpo.train: --section.key value",
    )
    parser.add_argument("--config", required=True)
    choices.add_arguments(parser)
    arguments, overrides = parser.parse_known_args(argv)
    try:
        config = load_config(arguments.config, overrides)
        config = config.with_micro_batches(config.update.parts)  # refuses auto before anything runs
        check_files(config)
        train(config, choices.options(arguments))
    except (ConfigError, NonFiniteUpdates, TaskError, OSError, ValueError) as error:
        sys.exit(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
