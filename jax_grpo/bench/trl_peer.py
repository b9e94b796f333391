"""TRL's trainer as a benchmark's peer: the same loss as ours, with its own fused LM head or another. Imports no JAX.

TRL 1.16 multiplies the KL term by the importance ratio unless `use_bias_correction_kl` is off, which is another loss than the
plain k3 of this project's configs; and it always scores tokens by its fused head (`add_fused_lm_head`: tiles of logits,
recomputed in the backward pass), as it came before that by all logits of the completions (`plain`) or, on request, by Liger's loss
(`liger`).
"""

import functools
import time
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, StoppingCriteriaList, TrainerCallback
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.utils import selective_log_softmax_and_entropy

from jax_grpo.bench.machine import finished
from jax_grpo.bench.problems import Problem, config_of, peer_parts, torch_arrays
from jax_grpo.bench.runner import torch_device
from jax_grpo.bench.trl_settings import trl_settings

LIGER_ROWS = 8  # completions whose logits Liger's loss makes at a time


def arguments_of(problem: Problem, folder: Path, **more: Any) -> GRPOConfig:
    """TRL's settings for the problem's own config.

    Raises:
        NotTheSame: its loss has a setting that TRL has no counterpart of.
    """
    settings = trl_settings(config_of(problem), whole_run=False) | {
        "output_dir": str(folder), "use_cpu": torch_device() == "cpu", "report_to": [], "gradient_checkpointing": False,
        "per_device_train_batch_size": problem.rows, "gradient_accumulation_steps": 1, "steps_per_generation": 1,
        "num_iterations": 1,
    }  # fmt: skip
    return GRPOConfig(**settings | more)


def trainer_of(
    problem: Problem, folder: Path, tokenizer: Any, prompts: list[str], head: str, callbacks=None, **more: Any
) -> Any:
    """TRL's trainer of the model in the folder, with a reward of the text that costs next to nothing.

    Tokens are scored by TRL's `fused` head, by a `plain` one, or by Liger's loss; `more` is for `GRPOConfig`.
    """
    trainer = GRPOTrainer(
        model=str(folder), args=arguments_of(problem, folder, **more), processing_class=tokenizer, callbacks=callbacks,
        reward_funcs=lambda completions, **_: [len(set(text)) / 100 for text in completions],
        train_dataset=dataset(prompts),
    )  # fmt: skip
    if head == "plain":
        change_models(trainer, functools.partial(_without_fused_head, temperature=trainer.temperature))
    if head == "liger":
        _with_liger(trainer)
    return trainer


def tokenizer_in(folder: Path) -> Any:
    """The tokenizer of a Hugging Face folder, which pads before the prompts with end-of-text."""
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def dataset(prompts: list[str]) -> Dataset:
    """The prompts as TRL reads them, each with its number as `row`."""
    return Dataset.from_dict({"prompt": prompts, "row": list(range(len(prompts)))})


def change_models(trainer: Any, change: Callable[[Any], None]) -> None:
    """Changes the trainer's model and, where it has one, its reference."""
    for model in (trainer.model, trainer.ref_model):
        if model is not None:
            change(model)


def inputs_of(problem: Problem, *, off_policy: bool) -> list[dict[str, Any]]:
    """The problem's batch as TRL's `_compute_loss` takes it, in micro-batches; without old log-probabilities on the policy."""
    data = torch_arrays(problem)
    mask = torch.ones_like(data["completion"])
    whole = {
        "prompt_ids": data["prompt"], "prompt_mask": torch.ones_like(data["prompt"]), "completion_mask": mask,
        "completion_ids": data["completion"], "advantages": data["advantages"], "ref_per_token_logps": data["ref_logp"],
    }  # fmt: skip
    if off_policy:
        whole["old_per_token_logps"] = data["old_logp"]
    return [
        {key: x[rows] for key, x in whole.items()} | {"num_items_in_batch": mask.sum()}
        for rows in torch.arange(problem.rows).tensor_split(peer_parts(config_of(problem)))
    ]


def backward(trainer: Any, problem: Problem, micro_batches: list[dict[str, Any]]) -> dict[str, float]:
    """The loss and the norm of its gradients, which are left on the model, clipped to 1 or as the config says."""
    trainer.current_gradient_accumulation_steps = 1  # `num_items_in_batch` is the whole batch's already
    model, loss = trainer.model, 0.0
    for inputs in micro_batches:
        with torch.autocast(torch_device(), torch.bfloat16, enabled=problem.dtype == "bfloat16"):
            part = trainer._compute_loss(model, inputs)
        part.backward()
        loss += float(part.detach())
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config_of(problem).update.max_grad_norm)
    return {"loss": loss, "grad_norm": float(norm)}


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


def _with_liger(trainer: Any) -> None:
    """Puts Liger's fused linear GRPO loss in the place of TRL's head and loss, and on a GPU its layer norms into the model.

    So TRL had it until it got a fused head of its own; what `use_liger_kernel` still does there knows no GPT-2.

    Raises:
        ModuleNotFoundError: Liger or its Triton is not installed.
    """
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss  # pyright: ignore[reportMissingImports]

    from torch_ref.options import use_liger

    config = trainer.args
    dtype = torch.bfloat16 if config.bf16 else torch.float32
    head = LigerFusedLinearGRPOLoss(
        beta=config.beta, use_ref_model=config.beta > 0, loss_type=config.loss_type, temperature=config.temperature,
        epsilon_low=config.epsilon, epsilon_high=config.epsilon_high, chunk_size=LIGER_ROWS,
    )  # fmt: skip
    if torch_device() != "cpu":
        use_liger(trainer.model)

    def loss(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        ids, mask = (torch.cat([inputs[f"prompt_{what}"], inputs[f"completion_{what}"]], 1) for what in ("ids", "mask"))
        completion = inputs["completion_ids"].shape[1]
        with torch.autocast(torch_device(), torch.bfloat16, enabled=config.bf16):
            hidden = model.transformer(input_ids=ids, attention_mask=mask).last_hidden_state[:, -completion - 1 : -1]
        return head(
            _input=hidden.to(dtype), lin_weight=model.lm_head.weight.to(dtype),
            selected_token_ids=inputs["completion_ids"], attention_mask=inputs["completion_mask"],
            advantages=inputs["advantages"], ref_per_token_logps=inputs.get("ref_per_token_logps"),
            old_per_token_logps=inputs.get("old_per_token_logps"), num_items_in_batch=inputs["num_items_in_batch"],
        )[0]  # fmt: skip

    trainer._compute_loss = loss


def _without_fused_head(model: Any, temperature: float) -> None:
    """Has the model score tokens from all logits of the completions, by TRL's own functions, instead of by its fused head."""
    forward_of = type(model).forward

    @functools.wraps(forward_of)  # `generate` looks at its arguments
    def forward(self: Any, *args: Any, fused_lm_head: bool = False, labels: Any = None, **more: Any) -> Any:
        if not fused_lm_head:
            return forward_of(self, *args, labels=labels, **more)
        scored_BT = labels[:, 1:] != -100
        first = int(scored_BT.any(0).int().argmax())  # columns before it are prompt, in every row
        completion = scored_BT.shape[1] - first
        logits = forward_of(self, *args, use_cache=False, logits_to_keep=completion + 1, **more).logits[:, :-1]
        scores = selective_log_softmax_and_entropy(
            logits, labels[:, -completion:].clamp(min=0), entropy_requires_grad=False, temperature=temperature
        )
        padded = (torch.nn.functional.pad(x, (first, 0)) * scored_BT for x in scores)
        return types.SimpleNamespace(**dict(zip(("log_probs", "entropy"), padded, strict=True)))

    model.forward = types.MethodType(forward, model)
