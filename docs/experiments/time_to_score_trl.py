"""TRL's trainer as time_to_score.py needs it: our rates and stop rule, a clock, and positions without padding. Imports no JAX."""

import functools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import StoppingCriteriaList, TrainerCallback
from trl.trainer.grpo_trainer import GRPOTrainer

from jax_grpo.bench.machine import finished


class StoppingTrainer(GRPOTrainer):
    """TRL's, with our learning rates by optimiser step, and completions that end where the task's stop rule ends them."""

    def __init__(self, *, rates: Sequence[float], stop: Any, **options: Any):
        super().__init__(**options)
        self._rates, self._stop = rates, stop
        model: Any = self.model
        generate = model.generate

        @functools.wraps(generate)
        def generate_until_stop(*arguments: Any, **options: Any) -> Any:
            return generate(*arguments, stopping_criteria=StoppingCriteriaList([stop.criterion()]), **options)

        model.generate = generate_until_stop

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        of: Any = optimizer or self.optimizer
        peak, last = self.args.learning_rate, len(self._rates) - 1
        # Called once more after the last step.
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(of, lambda step: self._rates[min(step, last)] / peak)
        return self.lr_scheduler

    def _generate_single_turn(self, *arguments: Any, **options: Any) -> Any:
        completion_ids, logprobs = super()._generate_single_turn(*arguments, **options)
        return [self._stop.cut(ids) for ids in completion_ids], logprobs


class Clock(TrainerCallback):
    """Times the iterations, and saves the weights before the first, after every so many, and after the last."""

    def __init__(self, weights: Path, every: int):
        self.iterations: list[int] = []  # after which weights were saved
        self.seconds: list[float] = []  # of training until then
        self.rates: list[float] = []
        self._weights, self._every, self._since = weights, every, 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        self._save(0, 0.0, parts["model"])

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        self.rates.append(parts["optimizer"].param_groups[0]["lr"])

    def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        iteration, rest = divmod(state.global_step, args.num_iterations)
        if rest == 0 and (iteration % self._every == 0 or state.global_step == state.max_steps):
            finished(None)
            self._save(iteration, self.seconds[-1] + time.perf_counter() - self._since, parts["model"])

    def _save(self, iteration: int, seconds: float, model: Any) -> None:
        model.save_pretrained(self._weights / f"{iteration:06d}")
        self.iterations.append(iteration)
        self.seconds.append(seconds)
        self._since = time.perf_counter()


def count_real_tokens(model: Any) -> None:
    """Gives every forward pass that names no positions those that padding does not count for."""
    forward_of = model.forward  # not its class's: TRL has put its fused head on the model itself

    @functools.wraps(forward_of)  # `generate` looks at its arguments
    def forward(*args: Any, attention_mask: Any = None, position_ids: Any = None, **more: Any) -> Any:
        if position_ids is None and attention_mask is not None:
            position_ids = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
        return forward_of(*args, attention_mask=attention_mask, position_ids=position_ids, **more)

    model.forward = forward
