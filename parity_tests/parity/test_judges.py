"""Outside judges of both implementations' losses: TRL's GRPO loss and transformers' GPT-2.

Where our definition differs from TRL's on purpose (docs/trl_differences.md), a test pins the difference.
"""

import ast
import inspect
import math
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from both import (
    jax_policy,
    objective,
    show,
    weights,
)
from conftest import TINY
from flax import nnx
from trl_judge import (
    GRADIENTS,
    LOSS,
    LOSS_TYPES,
    OPTIONS,
    PROMPT,
    agree,
    both_steps,
    inputs_of,
    judged_batch,
    peer,
    trl_step,
    trl_trainer,  # noqa: F401 (a fixture)
)

from jax_grpo.model.weights import to_hf
from torch_ref.compare import difference, logp_error, tensor_errors


@pytest.mark.default_cases("cispo-token", "dapo-token", "grpo-sequence", "vespo-token")
@pytest.mark.parametrize(
    ("loss_type", "level"),
    [(name, level) for name in LOSS_TYPES for level in ("token", "sequence") if (name, level) != ("vespo", "sequence")],
)
def test_trl_agrees_on_every_loss_type(trainer, loss_type, level):
    name, aggregation = LOSS_TYPES[loss_type]
    actual, advantages = both_steps(
        judged_batch(),
        objective=objective(name, aggregation=aggregation, importance_level=level),
        update={"micro_batches": 1},
    )
    agree(actual, trl_step(trainer, inputs_of(judged_batch(), advantages), loss_type, level))


@pytest.mark.default_cases("whole")
@pytest.mark.parametrize("rows", [None, [slice(0, 4), slice(4, 8)]], ids=["whole", "accumulated"])
def test_trl_agrees_on_gmpo(trainer, rows):
    """TRL's experimental trainer; its mean over sequences is the aggregation `grpo`."""
    from trl.experimental.gmpo import GMPOTrainer  # here: see `trl_trainer`

    parts = 1 if rows is None else len(rows)
    actual, advantages = both_steps(
        judged_batch(), objective=objective("gmpo", aggregation="grpo"), update={"micro_batches": parts}
    )
    agree(
        actual,
        trl_step(
            trainer,
            inputs_of(judged_batch(), advantages),
            "grpo",
            "token",
            rows=rows,
            compute=GMPOTrainer._compute_loss,
        ),
    )


@pytest.mark.default_cases("delta", "mismatch", "top entropy")
@pytest.mark.parametrize("option", OPTIONS)
def test_trl_agrees_on_every_option(trainer, option):
    sections, attributes, arguments = OPTIONS[option]
    # One micro-batch: TRL takes the entropies of the policy being trained, and so does a first step.
    sections = {
        **sections,
        "objective": objective("clip", **sections.get("objective", {})),
        "update": {"micro_batches": 1},
    }
    actual, advantages = both_steps(judged_batch(), **sections)
    agree(actual, trl_step(trainer, inputs_of(judged_batch(), advantages), "dapo", "token", attributes, arguments))


def _mismatch_weights(trainer, inputs: dict[str, torch.Tensor], sampling: torch.Tensor) -> torch.Tensor:
    """TRL's weights by the trainer's mode and bounds: its own lines, taken out of a method that needs vLLM to get there."""
    source = textwrap.dedent(inspect.getsource(type(trainer)._generate_and_score_completions))
    requested = "self.use_vllm and self.vllm_importance_sampling_correction"
    (lines,) = (
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.If)
        and ast.unparse(node.test) == requested
        and "per_token_logps_diff" in ast.unparse(node)
    )
    names = {"self": trainer, "torch": torch, "math": math, "tool_mask": None, "sampling_per_token_logps": sampling}
    names |= {"completion_mask": inputs["completion_mask"], "old_per_token_logps": inputs["old_per_token_logps"]}
    exec(compile(ast.Module(lines.body, []), "trl", "exec"), names)
    return names["vllm_importance_sampling_ratio"]


@pytest.mark.default_cases("sequence_truncate-0.9", "token_mask-0.9")
@pytest.mark.parametrize("floor", [None, 0.9])
@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_trl_agrees_on_every_mismatch_mode(trainer, mode, floor, monkeypatch):
    bounds = {"mismatch_cap": 1.2, "mismatch_floor": floor, "mismatch_mode": mode}
    actual, advantages = both_steps(judged_batch(), objective=objective("clip", **bounds), update={"micro_batches": 1})
    inputs, sampling = (
        inputs_of(judged_batch(), advantages),
        torch.from_numpy(judged_batch()["sampling_logp"][:, PROMPT:]).float(),
    )
    monkeypatch.setattr(trainer, "vllm_importance_sampling_mode", mode)
    monkeypatch.setattr(trainer, "vllm_importance_sampling_clip_max", 1.2)
    monkeypatch.setattr(trainer, "vllm_importance_sampling_clip_min", floor)
    weights_BT = inputs["importance_sampling_ratio"] = _mismatch_weights(trainer, inputs, sampling)
    there = weights_BT[inputs["completion_mask"] == 1] if weights_BT.shape[1] > 1 else weights_BT[:, 0]
    bounded = (there == (0 if "mask" in mode else torch.tensor(1.2))).float().mean()
    assert 0 < bounded < 1, "some beyond the bounds, some not"
    attributes = {"use_vllm": True, "vllm_importance_sampling_correction": True}
    agree(actual, trl_step(trainer, inputs, "dapo", "token", attributes))


@pytest.mark.slow
@pytest.mark.parametrize("loss_type", [name for name in LOSS_TYPES if name != "bnpo"])
def test_trl_agrees_when_gradients_are_accumulated(trainer, loss_type):
    name, aggregation = LOSS_TYPES[loss_type]
    actual, advantages = both_steps(
        judged_batch(), objective=objective(name, aggregation=aggregation), update={"micro_batches": 2}
    )
    theirs = trl_step(
        trainer, inputs_of(judged_batch(), advantages), loss_type, "token", rows=[slice(0, 4), slice(4, 8)]
    )
    agree(actual, theirs)


@pytest.mark.slow  # shows a difference; the agreements are run by default
def test_difference_bnpo_is_the_whole_batch_mean_here_and_each_micro_batchs_in_trl(trainer):
    actual, advantages = both_steps(judged_batch(), objective=objective("clip", aggregation="bnpo"))
    inputs = inputs_of(judged_batch(), advantages)
    agree(actual, trl_step(trainer, inputs, "bnpo", "token"))
    accumulated = trl_step(trainer, inputs, "bnpo", "token", rows=[slice(0, 3), slice(3, 8)])
    for arrays in actual.values():
        assert abs(float(arrays["loss"]) - float(accumulated["loss"])) > 1e-3
        assert max(tensor_errors(arrays, accumulated).values()) > 1e-2


@pytest.mark.slow  # shows a difference
def test_difference_the_entropy_bonus_is_the_whole_batch_mean_here_and_each_micro_batchs_in_trl(trainer):
    # A bonus large enough to be seen: the tiny model's entropies differ in their third digit.
    actual, advantages = both_steps(
        judged_batch(), objective=objective("clip", entropy_coefficient=20.0), update={"micro_batches": 2}
    )
    inputs, on = inputs_of(judged_batch(), advantages), {"_entropy_bonus_enabled": True, "entropy_coef": 20.0}
    agree(actual, trl_step(trainer, inputs, "dapo", "token", on))
    accumulated = trl_step(trainer, inputs, "dapo", "token", on, rows=[slice(0, 3), slice(3, 8)])
    for arrays in actual.values():
        assert abs(float(arrays["loss"]) - float(accumulated["loss"])) > 1e-4
        assert max(tensor_errors(arrays, accumulated).values()) > 1e-2


@pytest.mark.slow  # shows a difference
@pytest.mark.parametrize("loss_type", ["dapo", "cispo"])
def test_difference_dapo_divides_by_its_own_steps_tokens_here_and_by_the_generations_in_trl(trainer, loss_type):
    """Two optimiser steps on one generation: TRL's `num_items_in_batch` is of both, rescaled to half."""
    name, aggregation = LOSS_TYPES[loss_type]
    batch = judged_batch()
    tokens_B = batch["completion_mask"].sum(1)
    share = tokens_B[:4].sum() / tokens_B.sum()  # of the first window; equal windows would make it a half
    assert abs(share - 0.5) > 0.02
    half = {name: x[:4] for name, x in batch.items()}
    actual, advantages = both_steps(
        half,
        objective=objective(name, aggregation=aggregation),
        update={"micro_batches": 1},
        prompts={"per_iteration": 1},
    )
    inputs = inputs_of(half, advantages)
    whole = inputs | {"num_items_in_batch": torch.tensor(int(tokens_B.sum()))}
    with pytest.MonkeyPatch.context() as patch:
        real = trainer._compute_loss

        def first_of_two(model, given):  # `_trl` sets one window a generation
            trainer.args.steps_per_generation = 2
            return real(model, given)

        patch.setattr(trainer, "_compute_loss", first_of_two)
        theirs = trl_step(trainer, whole, loss_type, "token")
    for side, arrays in actual.items():
        # The same loss but for the denominator: half of the generation's tokens instead of the step's own.
        ratio = float(theirs["loss"]) / float(arrays["loss"])
        show(f"{side} loss", {"loss": abs(ratio / (2 * share) - 1)}, LOSS)
        assert abs(ratio - 1) > 0.02


@pytest.mark.slow  # shows a difference
def test_difference_left_padding_does_not_move_positions_here(trainer):
    """TRL's training forward passes no position ids, and GPT-2 then counts padding; its own `generate` does not."""
    batch = judged_batch(left_padded=True)
    assert (batch["attention_mask"][:, 0] == 0).any()
    actual, advantages = both_steps(batch, objective=objective("clip"))
    theirs = trl_step(trainer, inputs_of(batch, advantages), "dapo", "token")
    for arrays in actual.values():
        assert max(tensor_errors(arrays, theirs).values()) > 1e-2
    ids, mask = (torch.from_numpy(batch[name]).long() for name in ("input_ids", "attention_mask"))
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = peer()(ids, attention_mask=mask, position_ids=positions).logits / 0.8
    logp = torch.log_softmax(logits[:, :-1], -1).gather(2, ids[:, 1:, None])[..., 0].numpy()
    for name, arrays in actual.items():
        show(
            f"{name} logp",
            {"logp": logp_error(arrays["logp"], np.pad(logp, ((0, 0), (1, 0))), batch["completion_mask"])},
            2e-5,
        )


def test_transformers_agrees_on_logits_and_every_gradient():
    batch = judged_batch(left_padded=True)
    ids, mask = (torch.from_numpy(batch[name]).long() for name in ("input_ids", "attention_mask"))
    rng = np.random.default_rng(0)
    cotangent = rng.normal(size=(*ids.shape, TINY.vocab_size)).astype(np.float32) * batch["attention_mask"][:, :, None]
    model = peer()
    logits = model(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits
    (logits * torch.from_numpy(cotangent)).sum().backward()
    expected = {f"grad/{name}": p.grad.numpy() for name, p in model.named_parameters()}

    policy = jax_policy(weights(), "float32")

    def weighted(params):
        model = nnx.merge(policy.graphdef, params)
        hidden = model(jnp.asarray(batch["input_ids"]), jnp.asarray(batch["attention_mask"]))
        ours = hidden @ model.head_VH[: TINY.vocab_size].T
        return jnp.sum(ours * cotangent), ours

    with jax.default_matmul_precision("highest"):
        (_, ours), grads = jax.jit(jax.value_and_grad(weighted, has_aux=True))(policy.params)
    actual = {f"grad/{name}": x for name, x in to_hf(grads, TINY).items()}
    real = batch["attention_mask"].astype(bool)
    show("logits", {"logits": difference("logits", np.asarray(ours)[real], logits.detach().numpy()[real])}, 1e-4)
    show("gradients", tensor_errors(actual, expected), GRADIENTS)
