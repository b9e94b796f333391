"""TRL's own trainer as a judge of both implementations, in float32 as users run it: its loss and gradients of a batch of ours."""

import functools

import numpy as np
import pytest
import torch
from both import (
    Arrays,
    crafted_batch,
    jax_step,
    settings,
    show,
    torch_step,
    weights,
)
from conftest import TINY
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from torch_ref.compare import relative_l2, tensor_errors

PROMPT, NEW, ROWS = 6, 7, 8

# TRL's loss_type, and ours
LOSS_TYPES = {
    "grpo": ("clip", "grpo"),
    "bnpo": ("clip", "bnpo"),
    "dr_grpo": ("clip", "dr_grpo"),
    "dapo": ("clip", "dapo"),
    "luspo": ("clip", "luspo"),
    "cispo": ("cispo", "dapo"),
    "sapo": ("sapo", "grpo"),
    "vespo": ("vespo", "dapo"),
}
# Our setting, and the attributes of TRL's trainer and of its arguments that mean the same.
OPTIONS = {
    "delta": ({"objective": {"delta": 1.4}}, {}, {"delta": 1.4}),
    "corrected KL": ({"kl": {"importance_corrected": True}}, {}, {"use_bias_correction_kl": True}),
    "no KL": ({"kl": {"beta": 0.0}}, {"beta": 0.0}, {}),
    "entropy bonus": ({"objective": {"entropy_coefficient": 0.2}}, {"_entropy_bonus_enabled": True, "entropy_coef": 0.2}, {}),
    "top entropy": ({"objective": {"entropy_quantile": 0.6}}, {"top_entropy_quantile": 0.4}, {}),
    "mismatch": (
        {"objective": {"mismatch_cap": 1.2}}, {"use_vllm": True, "vllm_importance_sampling_correction": True}, {},
    ),
}  # fmt: skip
# TRL against us in float32: logits rounded to 24 bits in another order; gradients sum 50 tokens that cancel.
LOSS, GRADIENTS = 1e-5, 1e-4


def peer() -> GPT2LMHeadModel:
    sizes = {"n_layer": TINY.num_layers, "n_head": TINY.num_heads, "n_embd": TINY.hidden_size, "n_positions": 32}
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 1}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=TINY.vocab_size, **sizes, **off))
    missing = model.load_state_dict({name: torch.from_numpy(x) for name, x in weights().items()}, strict=False)
    assert missing.missing_keys == ["lm_head.weight"]
    return model


@pytest.fixture(scope="module", name="trainer")
def trl_trainer(tmp_path_factory):
    """TRL's trainer on a saved copy of the weights, with a tokenizer of one word a token."""
    from datasets import Dataset  # here: with TRL 0.17 GB, which every worker would hold that collects this file
    from trl import GRPOConfig, GRPOTrainer

    folder = tmp_path_factory.mktemp("trl")
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(TINY.vocab_size)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="w1", pad_token="w2", unk_token="w0", padding_side="left"
    ).save_pretrained(folder)
    peer().save_pretrained(folder)
    arguments = GRPOConfig(
        output_dir=str(folder / "out"),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=ROWS,
        num_generations=4,
        max_completion_length=NEW,
        temperature=0.8,
        beta=0.3,
        epsilon=0.15,
        epsilon_high=0.25,
        use_bias_correction_kl=False,
        steps_per_generation=1,
        gradient_checkpointing=False,
        report_to=[],
    )
    return GRPOTrainer(
        model=str(folder),
        args=arguments,
        reward_funcs=[_first_reward, _second_reward],
        train_dataset=Dataset.from_dict({"prompt": ["w3 w4 w5"] * ROWS}),
        processing_class=PreTrainedTokenizerFast.from_pretrained(folder),
    )


REWARDS = {"first": [0.0] * ROWS, "second": [0.0] * ROWS}


def _first_reward(completions, **_):
    return REWARDS["first"]


def _second_reward(completions, **_):
    return REWARDS["second"]


@functools.cache
def judged_batch(left_padded: bool = False) -> Arrays:
    """The crafted batch; without padding before the prompt unless asked for: TRL's positions count it."""
    if left_padded:
        return crafted_batch(weights())
    return crafted_batch(weights(), full_prompts=True)


def inputs_of(batch: Arrays, advantages: np.ndarray) -> dict[str, torch.Tensor]:
    """The batch as TRL's `_compute_loss` takes it."""

    def cut(name: str, dtype=torch.float32) -> torch.Tensor:
        return torch.from_numpy(batch[name][:, PROMPT:]).to(dtype)

    return {
        "prompt_ids": torch.from_numpy(batch["input_ids"][:, :PROMPT]).long(),
        "prompt_mask": torch.from_numpy(batch["attention_mask"][:, :PROMPT]).long(),
        "completion_ids": cut("input_ids", torch.long),
        "completion_mask": cut("completion_mask", torch.long),
        "advantages": torch.from_numpy(np.asarray(advantages)).float(),
        "old_per_token_logps": cut("old_logp"),
        "ref_per_token_logps": cut("ref_logp"),
        "importance_sampling_ratio": torch.exp(cut("old_logp") - cut("sampling_logp")).clamp(max=1.2),
        "num_items_in_batch": torch.tensor(int(batch["completion_mask"].sum())),
    }  # fmt: skip


def trl_step(
    trainer, inputs, loss_type: str, level: str, attributes=None, arguments=None, rows=None, compute=None
) -> Arrays:
    """TRL's loss and gradients; `rows` are the micro-batches, one `_compute_loss` each, or `compute` of another trainer's class."""
    if loss_type == "vespo":  # with a mismatch it would be part of w
        inputs = {name: x for name, x in inputs.items() if name != "importance_sampling_ratio"}
    attributes = {"loss_type": loss_type, "importance_sampling_level": level, "beta": 0.3} | (attributes or {})
    attributes["epsilon_high"] = 1.25 if loss_type == "cispo" else 0.25
    with pytest.MonkeyPatch.context() as patch:
        for name, value in attributes.items():
            patch.setattr(trainer, name, value)
        for name, value in (arguments or {}).items():
            patch.setattr(trainer.args, name, value)
        rows = rows or [slice(None)]
        trainer.current_gradient_accumulation_steps = len(rows)
        patch.setattr(trainer.args, "steps_per_generation", len(rows))
        trainer.model.train()
        trainer.model.zero_grad()
        losses = []
        for part in rows:
            given = {k: x if x.ndim == 0 else x[part] for k, x in inputs.items()}
            loss = compute(trainer, trainer.model, given) if compute else trainer._compute_loss(trainer.model, given)
            loss.backward()
            losses.append(float(loss.detach()))
    gradients = {f"grad/{n}": p.grad.numpy().copy() for n, p in trainer.model.named_parameters()}
    return gradients | {"loss": np.asarray(sum(losses))}


def both_steps(batch: Arrays, **sections) -> tuple[dict[str, Arrays], np.ndarray]:
    """Our two steps on the batch, by name, and the advantages both took from the rewards."""
    config = settings("float32", **sections)
    found = {"jax_grpo": jax_step(config, weights(), batch), "torch_ref": torch_step(config, weights(), batch)}
    return found, found["torch_ref"]["advantages"]


def agree(found: dict[str, Arrays], theirs: Arrays) -> None:
    for name, arrays in found.items():
        show(f"{name} loss", {"loss": relative_l2("loss", arrays["loss"], theirs["loss"])}, LOSS)
        show(f"{name} gradients", tensor_errors(arrays, theirs), GRADIENTS)
