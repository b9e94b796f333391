"""TRL's trainer as a benchmark's peer: the same loss as ours, with its own fused LM head or another. Imports no JAX.

TRL 1.16 multiplies the KL term by the importance ratio unless `use_bias_correction_kl` is off, which is another loss than the
plain k3 of this project's configs; and it always scores tokens by its fused head (`add_fused_lm_head`: tiles of logits,
recomputed in the backward pass), as it came before that by all logits of the completions (`plain`) or, on request, by Liger's loss
(`liger`).
"""

import functools
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.utils import selective_log_softmax_and_entropy

from jax_grpo.bench.problems import Problem, config_of, peer_parts, torch_arrays
from jax_grpo.bench.runner import torch_device
from jax_grpo.bench.trl_settings import trl_settings

LIGER_ROWS = 8  # completions whose logits Liger's loss makes at a time


def arguments_of(problem: Problem, folder: Path, **more: Any) -> GRPOConfig:
    """TRL's settings for the problem's own config. Raises NotTheSame: its loss has a setting that TRL has no counterpart of."""
    settings = trl_settings(config_of(problem), whole_run=False) | {
        "output_dir": str(folder), "use_cpu": torch_device() == "cpu", "report_to": [], "gradient_checkpointing": False,
        "per_device_train_batch_size": problem.rows, "gradient_accumulation_steps": 1, "steps_per_generation": 1,
        "num_iterations": 1,
    }  # fmt: skip
    return GRPOConfig(**settings | more)


def trainer_of(problem: Problem, folder: Path, prompts: list[str], head: str, callbacks=None, **more: Any) -> Any:
    """TRL's trainer of the model and the tokenizer in the folder, with a reward of the text that costs next to nothing.

    Tokens are scored by TRL's `fused` head, by a `plain` one, or by Liger's loss; `more` is for `GRPOConfig`.
    """
    trainer = GRPOTrainer(
        model=str(folder), args=arguments_of(problem, Path(tempfile.mkdtemp()), **more), callbacks=callbacks,
        processing_class=tokenizer_in(folder), train_dataset=dataset(prompts),
        reward_funcs=lambda completions, **_: [len(set(text)) / 100 for text in completions],
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
    parts = max(peer_parts(config_of(problem)), problem.micro_batches)
    return [
        {key: x[rows] for key, x in whole.items()} | {"num_items_in_batch": mask.sum()}
        for rows in torch.arange(problem.rows).tensor_split(parts)
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
    learnt = [parameter for parameter in model.parameters() if parameter.grad is not None]
    # PyTorch's own adds float32 up in float32 on a CPU: up to 1 % short for an embedding's gradient.
    norms = [torch.linalg.vector_norm(parameter.grad, dtype=torch.float64) for parameter in learnt]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    torch.nn.utils.clip_grads_with_norm_(learnt, config_of(problem).update.max_grad_norm, norm.float())
    return {"loss": loss, "grad_norm": float(norm)}


def _with_liger(trainer: Any) -> None:
    """Puts Liger's fused linear GRPO loss in the place of TRL's head and loss, and on a GPU its layer norms into the model.

    So TRL had it until it got a fused head of its own; what `use_liger_kernel` still does there knows no GPT-2.
    Raises ModuleNotFoundError: Liger or its Triton is not installed.
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
