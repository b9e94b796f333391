"""Outside judges of both implementations: transformers' GPT-2 and TRL's GRPO loss, in float32 as users run them.

Where our definition differs from TRL's on purpose (docs/trl_differences.md), a test pins the difference.
"""

import ast
import functools
import inspect
import math
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from both import (
    Arrays,
    crafted_batch,
    jax_policy,
    jax_step,
    objective,
    settings,
    show,
    torch_step,
    weights,
)
from conftest import TINY
from flax import nnx
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, get_constant_schedule_with_warmup

from jax_grpo.advantages import combined_advantages, group_advantages
from jax_grpo.config.learning import AdvantageConfig, KLConfig
from jax_grpo.model.weights import to_hf
from jax_grpo.objective import applied_coefficient, next_coefficient
from jax_grpo.optimiser import moved_reference, schedule
from torch_ref.advantages import component_advantages
from torch_ref.advantages import group_advantages as torch_group_advantages
from torch_ref.compare import difference, logp_error, relative_l2, tensor_errors
from torch_ref.entropy_control import behind, in_force
from torch_ref.reference import due

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


def _peer() -> GPT2LMHeadModel:
    sizes = {"n_layer": TINY.num_layers, "n_head": TINY.num_heads, "n_embd": TINY.hidden_size, "n_positions": 32}
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 1}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=TINY.vocab_size, **sizes, **off))
    missing = model.load_state_dict({name: torch.from_numpy(x) for name, x in weights().items()}, strict=False)
    assert missing.missing_keys == ["lm_head.weight"]
    return model


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    """TRL's trainer on a saved copy of the weights, with a tokenizer of one word a token."""
    from datasets import Dataset  # here: with TRL 0.17 GB, which every worker would hold that collects this file
    from trl import GRPOConfig, GRPOTrainer

    folder = tmp_path_factory.mktemp("trl")
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(TINY.vocab_size)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="w1", pad_token="w2", unk_token="w0", padding_side="left"
    ).save_pretrained(folder)
    _peer().save_pretrained(folder)
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
def _batch(left_padded: bool = False) -> Arrays:
    """The crafted batch; without padding before the prompt unless asked for: TRL's positions count it."""
    if left_padded:
        return crafted_batch(weights())
    return crafted_batch(weights(), full_prompts=True)


def _inputs(batch: Arrays, advantages: np.ndarray) -> dict[str, torch.Tensor]:
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


def _trl(
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


def _both(batch: Arrays, **sections) -> tuple[dict[str, Arrays], np.ndarray]:
    """Our two steps on the batch, by name, and the advantages both took from the rewards."""
    config = settings("float32", **sections)
    found = {"jax_grpo": jax_step(config, weights(), batch), "torch_ref": torch_step(config, weights(), batch)}
    return found, found["torch_ref"]["advantages"]


def _agree(found: dict[str, Arrays], theirs: Arrays) -> None:
    for name, arrays in found.items():
        show(f"{name} loss", {"loss": relative_l2("loss", arrays["loss"], theirs["loss"])}, LOSS)
        show(f"{name} gradients", tensor_errors(arrays, theirs), GRADIENTS)


@pytest.mark.parametrize(
    ("loss_type", "level"),
    [(name, level) for name in LOSS_TYPES for level in ("token", "sequence") if (name, level) != ("vespo", "sequence")],
)
def test_trl_agrees_on_every_loss_type(trainer, loss_type, level):
    name, aggregation = LOSS_TYPES[loss_type]
    found, advantages = _both(
        _batch(),
        objective=objective(name, aggregation=aggregation, importance_level=level),
        update={"micro_batches": 1},
    )
    _agree(found, _trl(trainer, _inputs(_batch(), advantages), loss_type, level))


@pytest.mark.parametrize("rows", [None, [slice(0, 4), slice(4, 8)]], ids=["whole", "accumulated"])
def test_trl_agrees_on_gmpo(trainer, rows):
    """TRL's experimental trainer; its mean over sequences is the aggregation `grpo`."""
    from trl.experimental.gmpo import GMPOTrainer  # here: see `trainer`

    parts = 1 if rows is None else len(rows)
    found, advantages = _both(
        _batch(), objective=objective("gmpo", aggregation="grpo"), update={"micro_batches": parts}
    )
    _agree(
        found,
        _trl(trainer, _inputs(_batch(), advantages), "grpo", "token", rows=rows, compute=GMPOTrainer._compute_loss),
    )


@pytest.mark.parametrize("option", OPTIONS)
def test_trl_agrees_on_every_option(trainer, option):
    sections, attributes, arguments = OPTIONS[option]
    sections = {**sections, "objective": objective("clip", **sections.get("objective", {}))}
    if option == "top entropy":  # TRL takes the entropies of the policy being trained: so does a first step
        sections["update"] = {"micro_batches": 1}
    found, advantages = _both(_batch(), **sections)
    _agree(found, _trl(trainer, _inputs(_batch(), advantages), "dapo", "token", attributes, arguments))


def _mismatch_weights(trainer, inputs: dict[str, torch.Tensor], sampling: torch.Tensor) -> torch.Tensor:
    """TRL's weights by the trainer's mode and bounds: its own lines, taken out of a method that needs vLLM to get there."""
    source = textwrap.dedent(inspect.getsource(type(trainer)._generate_and_score_completions))
    asked = "self.use_vllm and self.vllm_importance_sampling_correction"
    (lines,) = (
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.If) and ast.unparse(node.test) == asked and "per_token_logps_diff" in ast.unparse(node)
    )
    names = {"self": trainer, "torch": torch, "math": math, "tool_mask": None, "sampling_per_token_logps": sampling}
    names |= {"completion_mask": inputs["completion_mask"], "old_per_token_logps": inputs["old_per_token_logps"]}
    exec(compile(ast.Module(lines.body, []), "trl", "exec"), names)
    return names["vllm_importance_sampling_ratio"]


@pytest.mark.parametrize("floor", [None, 0.9])
@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_trl_agrees_on_every_mismatch_mode(trainer, mode, floor, monkeypatch):
    bounds = {"mismatch_cap": 1.2, "mismatch_floor": floor, "mismatch_mode": mode}
    found, advantages = _both(_batch(), objective=objective("clip", **bounds))
    inputs, sampling = _inputs(_batch(), advantages), torch.from_numpy(_batch()["sampling_logp"][:, PROMPT:]).float()
    monkeypatch.setattr(trainer, "vllm_importance_sampling_mode", mode)
    monkeypatch.setattr(trainer, "vllm_importance_sampling_clip_max", 1.2)
    monkeypatch.setattr(trainer, "vllm_importance_sampling_clip_min", floor)
    weights_BT = inputs["importance_sampling_ratio"] = _mismatch_weights(trainer, inputs, sampling)
    there = weights_BT[inputs["completion_mask"] == 1] if weights_BT.shape[1] > 1 else weights_BT[:, 0]
    bounded = (there == (0 if "mask" in mode else torch.tensor(1.2))).float().mean()
    assert 0 < bounded < 1, "some beyond the bounds, some not"
    attributes = {"use_vllm": True, "vllm_importance_sampling_correction": True}
    _agree(found, _trl(trainer, inputs, "dapo", "token", attributes))


@pytest.mark.parametrize("loss_type", [name for name in LOSS_TYPES if name != "bnpo"])
def test_trl_agrees_when_gradients_are_accumulated(trainer, loss_type):
    name, aggregation = LOSS_TYPES[loss_type]
    found, advantages = _both(_batch(), objective=objective(name, aggregation=aggregation), update={"micro_batches": 2})
    theirs = _trl(trainer, _inputs(_batch(), advantages), loss_type, "token", rows=[slice(0, 4), slice(4, 8)])
    _agree(found, theirs)


@pytest.mark.slow  # shows a difference; the agreements are run by default
def test_difference_bnpo_is_the_whole_batch_mean_here_and_each_micro_batchs_in_trl(trainer):
    found, advantages = _both(_batch(), objective=objective("clip", aggregation="bnpo"))
    inputs = _inputs(_batch(), advantages)
    _agree(found, _trl(trainer, inputs, "bnpo", "token"))
    accumulated = _trl(trainer, inputs, "bnpo", "token", rows=[slice(0, 3), slice(3, 8)])
    for arrays in found.values():
        assert abs(float(arrays["loss"]) - float(accumulated["loss"])) > 1e-3
        assert max(tensor_errors(arrays, accumulated).values()) > 1e-2


@pytest.mark.slow  # shows a difference
def test_difference_the_entropy_bonus_is_the_whole_batch_mean_here_and_each_micro_batchs_in_trl(trainer):
    # A bonus large enough to be seen: the tiny model's entropies differ in their third digit.
    found, advantages = _both(
        _batch(), objective=objective("clip", entropy_coefficient=20.0), update={"micro_batches": 2}
    )
    inputs, on = _inputs(_batch(), advantages), {"_entropy_bonus_enabled": True, "entropy_coef": 20.0}
    _agree(found, _trl(trainer, inputs, "dapo", "token", on))
    accumulated = _trl(trainer, inputs, "dapo", "token", on, rows=[slice(0, 3), slice(3, 8)])
    for arrays in found.values():
        assert abs(float(arrays["loss"]) - float(accumulated["loss"])) > 1e-4
        assert max(tensor_errors(arrays, accumulated).values()) > 1e-2


@pytest.mark.slow  # shows a difference
@pytest.mark.parametrize("loss_type", ["dapo", "cispo"])
def test_difference_dapo_divides_by_its_own_steps_tokens_here_and_by_the_generations_in_trl(trainer, loss_type):
    """Two optimiser steps on one generation: TRL's `num_items_in_batch` is of both, rescaled to half."""
    name, aggregation = LOSS_TYPES[loss_type]
    batch = _batch()
    tokens_B = batch["completion_mask"].sum(1)
    share = tokens_B[:4].sum() / tokens_B.sum()  # of the first window; equal windows would make it a half
    assert abs(share - 0.5) > 0.02
    half = {name: x[:4] for name, x in batch.items()}
    found, advantages = _both(
        half,
        objective=objective(name, aggregation=aggregation),
        update={"micro_batches": 1},
        prompts={"per_iteration": 1},
    )
    inputs = _inputs(half, advantages)
    whole = inputs | {"num_items_in_batch": torch.tensor(int(tokens_B.sum()))}
    with pytest.MonkeyPatch.context() as patch:
        real = trainer._compute_loss

        def first_of_two(model, given):  # `_trl` sets one window a generation
            trainer.args.steps_per_generation = 2
            return real(model, given)

        patch.setattr(trainer, "_compute_loss", first_of_two)
        theirs = _trl(trainer, whole, loss_type, "token")
    for side, arrays in found.items():
        # The same loss but for the denominator: half of the generation's tokens instead of the step's own.
        ratio = float(theirs["loss"]) / float(arrays["loss"])
        show(f"{side} loss", {"loss": abs(ratio / (2 * share) - 1)}, LOSS)
        assert abs(ratio - 1) > 0.02


@pytest.mark.slow  # shows a difference
def test_difference_left_padding_does_not_move_positions_here(trainer):
    """TRL's training forward passes no position ids, and GPT-2 then counts padding; its own `generate` does not."""
    batch = _batch(left_padded=True)
    assert (batch["attention_mask"][:, 0] == 0).any()
    found, advantages = _both(batch, objective=objective("clip"))
    theirs = _trl(trainer, _inputs(batch, advantages), "dapo", "token")
    for arrays in found.values():
        assert max(tensor_errors(arrays, theirs).values()) > 1e-2
    ids, mask = (torch.from_numpy(batch[name]).long() for name in ("input_ids", "attention_mask"))
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = _peer()(ids, attention_mask=mask, position_ids=positions).logits / 0.8
    logp = torch.log_softmax(logits[:, :-1], -1).gather(2, ids[:, 1:, None])[..., 0].numpy()
    for name, arrays in found.items():
        show(
            f"{name} logp",
            {"logp": logp_error(arrays["logp"], np.pad(logp, ((0, 0), (1, 0))), batch["completion_mask"])},
            2e-5,
        )


def _trl_advantages(trainer, first: list[float], second: list[float] | None, **attributes) -> np.ndarray:
    """Advantages of TRL's own `_generate_and_score_completions` for given rewards."""
    REWARDS["first"], REWARDS["second"] = first, second or [0.0] * len(first)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in attributes.items():
            patch.setattr(trainer, name, value)
        output = trainer._generate_and_score_completions([{"prompt": "w3 w4 w5"} for _ in first])
    return output["advantages"].numpy()


FIRST = [0.1, 0.9, 0.4, 0.4, -1.0, 2.0, 0.5, 0.0]
SECOND = [5.0, 1.0, 1.0, 7.0, 0.0, 0.0, 0.0, 30.0]
GROUPS = np.repeat([0, 1], 4)


@pytest.mark.parametrize("scale", ["none", "group", "batch"])
def test_trl_agrees_on_advantages(trainer, scale):
    expected = _trl_advantages(trainer, FIRST, SECOND, scale_rewards=scale)
    rewards = np.float32(FIRST) + np.float32(SECOND)
    ours, _ = group_advantages(jnp.asarray(rewards), jnp.asarray(GROUPS), AdvantageConfig(scale=scale))
    theirs = torch_group_advantages(torch.from_numpy(rewards), torch.from_numpy(GROUPS), scale=scale)
    for name, found in (("jax_grpo", ours), ("torch_ref", theirs)):
        # float32 rounding of rewards of size 30
        show(name, {"advantages": difference(name, found, expected)}, 1e-5)
    assert np.abs(expected).max() > 0.5


@pytest.mark.parametrize(
    "second", [SECOND, [5.0, 1.0, 1.0, 7.0, 3.0, 3.0, 3.0, 3.0]], ids=["both vary", "one is constant in a group"]
)
@pytest.mark.parametrize("weights", [[1.0, 1.0], [1.0, 0.25]], ids=str)
def test_trl_agrees_on_gdpo(trainer, second, weights):
    """TRL's normalize_then_sum: each component over its group, the weighted sum over the batch."""
    theirs = _trl_advantages(
        trainer, FIRST, second, multi_objective_aggregation="normalize_then_sum", reward_weights=torch.tensor(weights)
    )
    components = np.float32([FIRST, second])
    config = AdvantageConfig(components="gdpo")
    ours, _ = combined_advantages(jnp.asarray(components), jnp.asarray(weights), jnp.asarray(GROUPS), config)
    reference = component_advantages(
        torch.from_numpy(components.T), weights, torch.from_numpy(GROUPS), components="gdpo"
    )
    for name, found in (("jax_grpo", ours), ("torch_ref", reference)):
        # float32: three digits of a reward of 30 are lost where its group's mean is taken off
        show(name, {"advantages": float(np.abs(np.asarray(found) - theirs).max())}, 1e-5)
    assert np.abs(theirs).max() > 0.5


def test_difference_components_are_normalised_in_their_group_and_not_once_more_over_the_batch(trainer):
    theirs = _trl_advantages(trainer, FIRST, SECOND, multi_objective_aggregation="normalize_then_sum")
    components = np.float32([FIRST, SECOND])
    config = AdvantageConfig(components="normalise_each")
    ours = np.asarray(combined_advantages(jnp.asarray(components), jnp.ones(2), jnp.asarray(GROUPS), config)[0])
    reference = component_advantages(
        torch.from_numpy(components.T), [1.0, 1.0], torch.from_numpy(GROUPS), components="normalise_each"
    )
    np.testing.assert_allclose(ours, reference.numpy(), atol=1e-6)
    assert np.abs(ours - theirs).max() > 0.03
    # TRL's last step, on ours: the batch's own mean (0) and deviation
    np.testing.assert_allclose((ours - ours.mean()) / (ours.std(ddof=1) + 1e-4), theirs, atol=1e-5)


def test_difference_a_group_of_equal_rewards_has_exactly_no_advantage(trainer):
    """TRL divides the rounding of r - mean(r) by 0 + 1e-4: a group that taught nothing still moves the policy a little."""
    rewards, group = [2.6] * 6, np.zeros(6, int)
    theirs = _trl_advantages(trainer, rewards, None, num_generations=6)
    assert 1e-3 < np.abs(theirs).max() < 1e-2
    ours, without_signal = group_advantages(jnp.float32(rewards), jnp.asarray(group), AdvantageConfig())
    assert (np.asarray(ours) == 0).all() and np.asarray(without_signal).all()
    assert (torch_group_advantages(torch.tensor(rewards), torch.from_numpy(group)) == 0).all()


def test_difference_the_first_warm_up_step_learns_here_and_has_rate_zero_in_trl(trainer):
    config = settings("float32", update={"warmup_steps": 4, "total_steps": 20, "learning_rate": 1.0}).update
    ours = [float(schedule(config, 20)(t)) for t in range(5)]
    optimiser = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    theirs = get_constant_schedule_with_warmup(optimiser, 4)
    rates = []
    for _ in range(5):
        rates.append(optimiser.param_groups[0]["lr"])
        optimiser.step()
        theirs.step()
    assert rates == [0.0, 0.25, 0.5, 0.75, 1.0]
    np.testing.assert_allclose(ours, [0.25, 0.5, 0.75, 1.0, 1.0], rtol=1e-6)


def test_trl_agrees_on_an_entropy_that_is_held(trainer):
    """Its own steps move the coefficient, and give the bonus or not by the entropy of the step before."""
    held = {"entropy_coefficient": 0.2, "entropy_target": 4.5, "entropy_step": 0.05, "entropy_coefficient_max": 0.22}
    config = settings("float32", objective=objective("clip", **held)).objective
    names = {"entropy_target": 4.5, "entropy_coef_delta": 0.05, "entropy_coef_min": 0.0, "entropy_coef_max": 0.22}
    found = {c: _both(_batch(), objective=objective("clip", entropy_coefficient=c)) for c in (0.0, 0.2)}
    inputs, behind_each = _inputs(_batch(), found[0.0][1]), []

    def and_look(of, model, given):
        loss = of._compute_loss(model, given)
        behind_each.append((of.entropy_coef, of._last_world_entropy))
        return loss

    for before, target in ((float("inf"), 4.5), (4.4, 4.5), (4.6, 4.5), (4.4, 9.0)):
        attributes = {"use_adaptive_entropy": True, "_entropy_bonus_enabled": True, "entropy_coef": 0.2}
        attributes |= {"_last_world_entropy": before, "_entropy_window_stats": None}
        theirs = _trl(
            trainer, inputs, "dapo", "token", attributes, names | {"entropy_target": target}, compute=and_look
        )
        config = config.model_copy(update={"entropy_target": target})
        given = in_force(0.2, before, config)
        assert given == (0.2 if before <= target else 0.0)
        assert float(applied_coefficient(jnp.float32(0.2), jnp.float32(before), config)) == pytest.approx(given)
        _agree(found[given][0], theirs)
        coefficient, entropy = behind_each[-1]
        assert behind(0.2, entropy, config) == pytest.approx(coefficient) == pytest.approx(0.15 if target < 5 else 0.22)
        assert float(next_coefficient(jnp.float32(0.2), jnp.float32(entropy), config)) == pytest.approx(coefficient)
        for arrays in found[0.0][0].values():  # the mean over the same tokens; float32
            assert float(arrays["entropy"]) == pytest.approx(entropy, rel=1e-5)


@pytest.mark.parametrize("share", [0.6, 1.0])
def test_trl_agrees_on_where_the_reference_moves(share):
    from trl.trainer.callbacks import SyncRefModelCallback  # here: see `trainer`

    rng, config = np.random.default_rng(2), KLConfig(reference_every=3, reference_mix=share)
    old, new = (rng.normal(size=(40, 7)).astype(np.float32) for _ in range(2))
    theirs, policy = (torch.nn.ParameterList([torch.from_numpy(x.copy())]) for x in (old, new))
    # What `on_step_end` does where ref_model_sync_steps divides global_step.
    SyncRefModelCallback._sync_target_model(policy, theirs, share)
    for step in (2, 3, 4, 6):
        found = moved_reference(config, jnp.asarray(old), jnp.asarray(new), jnp.int32(step), jnp.bool_(True))
        expected = theirs[0].detach().numpy() if step % 3 == 0 else old
        # float32: two products and a sum of size 1, in another order
        show(f"step {step}", {"reference": float(np.abs(np.asarray(found) - expected).max())}, 3e-7)
        assert due(step, config) == (step % 3 == 0)


def test_transformers_agrees_on_logits_and_every_gradient():
    batch = _batch(left_padded=True)
    ids, mask = (torch.from_numpy(batch[name]).long() for name in ("input_ids", "attention_mask"))
    rng = np.random.default_rng(0)
    cotangent = rng.normal(size=(*ids.shape, TINY.vocab_size)).astype(np.float32) * batch["attention_mask"][:, :, None]
    peer = _peer()
    logits = peer(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits
    (logits * torch.from_numpy(cotangent)).sum().backward()
    expected = {f"grad/{name}": p.grad.numpy() for name, p in peer.named_parameters()}

    policy = jax_policy(weights(), "float32")

    def weighted(params):
        model = nnx.merge(policy.graphdef, params)
        hidden = model(jnp.asarray(batch["input_ids"]), jnp.asarray(batch["attention_mask"]))
        ours = hidden @ model.wte.embedding[...][: TINY.vocab_size].T
        return jnp.sum(ours * cotangent), ours

    with jax.default_matmul_precision("highest"):
        (_, ours), grads = jax.jit(jax.value_and_grad(weighted, has_aux=True))(policy.params)
    found = {f"grad/{name}": x for name, x in to_hf(grads, TINY).items()}
    real = batch["attention_mask"].astype(bool)
    show("logits", {"logits": difference("logits", np.asarray(ours)[real], logits.detach().numpy()[real])}, 1e-4)
    show("gradients", tensor_errors(found, expected), GRADIENTS)
