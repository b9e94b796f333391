"""Every setting of advantages, objective and KL either changes what it is set beside, or is refused with one sentence."""

import functools
import itertools
import re

import jax.numpy as jnp
import numpy as np
import pydantic
import pytest
import torch
from both import Arrays, crafted_batch, settings, show, torch_step, weights
from conftest import config as tiny_config

from jax_grpo.advantages import over_batch
from jax_grpo.config.learning import AdvantageConfig, KLConfig
from jax_grpo.config.objectives import OBJECTIVES
from jax_grpo.iteration import reward as jax_reward
from jax_grpo.optimiser import adamw, apply_adamw
from jax_grpo.replay import BatchError, batch_from
from jax_grpo.rollout.generate import Rollout
from jax_grpo.tasks.base import Prompt, RewardError, as_component
from torch_ref import train as torch_train
from torch_ref.batch import BatchError as TorchBatchError
from torch_ref.rollout import Rollout as TorchRollout

# The losses, each with the ratio at both levels where it has one, that every setting is tried on.
LOSSES = {
    "clip": {"name": "clip"},
    "clip, sequence": {"name": "clip", "importance_level": "sequence"},
    "cispo": {"name": "cispo", "epsilon_high": 1.2},
    "cispo, sequence": {"name": "cispo", "epsilon_high": 1.2, "importance_level": "sequence"},
    "sapo": {"name": "sapo"},
    "sapo, sequence": {"name": "sapo", "importance_level": "sequence"},
    "reinforce": {"name": "reinforce"},
    "dppo_tv": {"name": "dppo_tv", "epsilon_low": 0.002, "epsilon_high": 0.003},
    "dppo_kl": {"name": "dppo_kl", "epsilon_low": 2e-4, "epsilon_high": 3e-4},
    "gmpo": {"name": "gmpo"},
    "vespo": {"name": "vespo"},
    "clip_cov": {"name": "clip_cov", "cov_share": 0.2, "cov_bounds": [0.0, 5.0]},
    "kl_cov": {"name": "kl_cov", "cov_share": 0.2},
}
DPPO, COV = ("dppo_tv", "dppo_kl"), ("clip_cov", "kl_cov")
NOT_COV = ("clip", "cispo", "sapo", "reinforce", *DPPO, "gmpo", "vespo")
# Setting -> the losses that refuse it, by the first word of their name.
LOSS_SETTINGS = {
    ("objective", "epsilon_low", 0.35): ("cispo", "sapo", "reinforce", "vespo", "kl_cov"),
    ("objective", "epsilon_high", 1.05): ("sapo", "reinforce", "vespo", "kl_cov"),
    ("objective", "delta", 1.3): ("cispo", "sapo", "reinforce", "gmpo", "vespo", *COV),
    ("objective", "tau", (2.0, 1.05)): ("clip", "cispo", "reinforce", *DPPO, "gmpo", "vespo", *COV),
    ("objective", "tau", (1.0, 2.0)): ("clip", "cispo", "reinforce", *DPPO, "gmpo", "vespo", *COV),
    ("objective", "power", (1.5, 3.0)): ("clip", "cispo", "sapo", "reinforce", *DPPO, "gmpo", *COV),
    ("objective", "decay", (1.5, 2.0)): ("clip", "cispo", "sapo", "reinforce", *DPPO, "gmpo", *COV),
    ("objective", "power", (2.0, 1.5)): ("clip", "cispo", "sapo", "reinforce", *DPPO, "gmpo", *COV),
    ("objective", "decay", (3.0, 1.5)): ("clip", "cispo", "sapo", "reinforce", *DPPO, "gmpo", *COV),
    ("objective", "cov_share", 0.5): NOT_COV,
    ("objective", "cov_bounds", (0.2, 5.0)): (*NOT_COV, "kl_cov"),
    ("objective", "cov_bounds", (0.0, 0.3)): (*NOT_COV, "kl_cov"),
    ("objective", "cov_penalty", 3.0): (*NOT_COV, "clip_cov"),
    ("objective", "aggregation", "grpo"): (),
    ("objective", "aggregation", "dr_grpo"): (),
    ("objective", "aggregation", "luspo"): (),
    ("objective", "entropy_coefficient", 0.3): (),
    ("objective", "entropy_quantile", 0.5): ("gmpo",),
    ("objective", "mask_truncated", True): (),
    ("objective", "mismatch_cap", 1.1): ("vespo",),
    ("advantage", "baseline", "leave_one_out"): (),
    ("advantage", "baseline", "opo"): (),
    ("advantage", "pass_at_k", 2): (),
    ("advantage", "scale", "none"): (),
    ("advantage", "scale", "batch"): (),
    ("advantage", "scale", "robust"): (),
    ("advantage", "clip", 0.5): (),
    ("kl", "beta", 0.0): (),
    ("kl", "estimator", "k1"): (),
    ("kl", "estimator", "k2"): (),
    ("kl", "importance_corrected", True): (),
}
# Read elsewhere than in one loss, and tried below or in the files named.
ELSEWHERE = {
    ("objective", "name"), ("objective", "importance_level"),  # they make up LOSSES
    ("objective", "overlong_penalty"), ("advantage", "components"),  # below
    ("objective", "mismatch_floor"), ("objective", "mismatch_mode"),  # test_surrogates
    ("objective", "entropy_target"), ("objective", "entropy_step"),  # between steps: test_entropy_target
    ("objective", "entropy_bounds"),  # there too
    ("kl", "adaptive"), ("kl", "target"), ("kl", "beta_bounds"),  # test_kl_control, test_parity_steps
    ("kl", "guardrail"),  # test_parity_iterations
    ("kl", "reference_dtype"), ("kl", "offload_reference"),  # how the reference is stored: test_update, test_memory
    ("kl", "reference_every"), ("kl", "reference_mix"),  # between steps: test_moving_reference
}  # fmt: skip


def test_the_table_has_every_setting():
    tried = {(section, key) for section, key, _ in LOSS_SETTINGS} | ELSEWHERE
    sections = [
        ("advantage", AdvantageConfig),
        ("kl", KLConfig),
        *(("objective", kind) for kind in OBJECTIVES.values()),
    ]
    assert tried == {(name, key) for name, section in sections for key in section.model_fields}


@functools.cache
def _batch() -> Arrays:
    return crafted_batch(weights(), seed=11)  # rows of either sign beyond either bound, as wholes too


def _gradients(loss: str, changes: dict) -> np.ndarray:
    sections = {"objective": LOSSES[loss]}
    for section, values in changes.items():
        sections[section] = sections.get(section, {}) | values
    actual = torch_step(settings("float64", update={"micro_batches": 1}, **sections), weights(), _batch())
    return np.concatenate([actual[name].reshape(-1) for name in sorted(actual) if name.startswith("grad/")])


@functools.cache
def _plain(loss: str) -> np.ndarray:
    return _gradients(loss, {})


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("section", "key", "value"), LOSS_SETTINGS, ids=str)
def test_a_setting_changes_the_gradient_or_is_refused(section, key, value, loss):
    """By the reference; `test_parity` has the product agree with it on each."""
    refused = LOSS_SETTINGS[section, key, value]
    change = {section: {key: value}}
    if loss.split(",")[0] in refused:
        shown = "1.05" if key == "epsilon_high" else f"{value}"
        with pytest.raises(
            pydantic.ValidationError, match=rf"{section}.{key} {re.escape(shown)} is of objective.name .*ignore"
        ):
            _gradients(loss, change)
        return
    plain, actual = _plain(loss), _gradients(loss, change)
    moved = np.linalg.norm(actual - plain) / np.linalg.norm(plain)
    print(f"{section}.{key} {value} on {loss}: gradient moves by {moved:.2g}")
    assert moved > 1e-3


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"advantage": {"components": "normalise_each", "scale": "none"}}, "advantage.scale none is of advantage.components sum"),
        ({"advantage": {"components": "normalise_each", "scale": "batch"}}, "normalise_each scales each component by its group"),
        ({"advantage": {"components": "gdpo", "scale": "robust"}}, "advantage.scale robust is of advantage.components sum_first"),
        ({"advantage": {"components": "gdpo", "scale": "batch"}}, "advantage.components sum_first; gdpo"),
        ({"advantage": {"components": "gdpo", "baseline": "leave_one_out"}}, "advantage.baseline leave_one_out does nothing with"),
        ({"advantage": {"components": "gdpo", "baseline": "opo"}}, "advantage.baseline opo: GDPO, advantage.components gdpo"),
        ({"advantage": {"components": "gdpo", "scale": "maxrl"}}, "advantage.scale maxrl is of advantage.components sum_first"),
        ({"advantage": {"pass_at_k": 2, "baseline": "opo"}}, "advantage.baseline opo does nothing with advantage.pass_at_k 2"),
        ({"advantage": {"pass_at_k": 2, "components": "gdpo"}}, "advantage.pass_at_k 2 is of one reward"),
        ({"advantage": {"pass_at_k": 2, "scale": "maxrl"}}, "advantage.scale maxrl is itself a mixture of all pass@k"),
        ({"objective": {"mismatch_cap": 2.0}, "rollout": {"top_k": 9}}, "objective.mismatch_cap 2.0 compares what is recorded"),
        ({"objective": {"mismatch_cap": 2.0}, "rollout": {"min_p": 0.1}}, "rollout.min_p 0.1 draws from another distribution"),
        ({"objective": {"mismatch_cap": 2.0}, "rollout": {"top_p": 0.9}}, "rollout.top_p 0.9 draws from another distribution"),
        ({"objective": {"mismatch_cap": 2.0}, "rollout": {"repetition_penalty": 1.1}}, "rollout.repetition_penalty 1.1 draws"),
        ({"advantage": {"pass_at_k": 5}}, "advantage.pass_at_k 5 exceeds rollout.group_size 4"),
        ({"objective": {"name": "reinforce", "importance_level": "sequence"}}, "objective.importance_level sequence is of obj"),
        ({"objective": {"entropy_step": 0.1}}, "objective.entropy_step 0.1 needs objective.entropy_target"),
        ({"objective": {"entropy_bounds": [0.1, 1]}}, "objective.entropy_bounds (0.1, 1.0) needs objective.entropy_target"),
        (
            {"objective": {"entropy_target": 1.0, "entropy_coefficient": 1.5}},
            "objective.entropy_coefficient 1.5 must lie within objective.entropy_bounds [0.0, 1.0] with objective.entropy_target",
        ),
        ({"kl": {"beta": 0.0, "estimator": "k1"}}, "kl.estimator k1 needs kl.beta > 0"),
        ({"kl": {"beta": 0.0, "importance_corrected": True}}, "kl.importance_corrected true needs kl.beta > 0"),
        ({"kl": {"beta": 0.0, "adaptive": True}}, "kl.adaptive true needs kl.beta > 0"),
        ({"kl": {"beta": 0.0, "guardrail": "end_epoch"}, "update": {"epochs": 2}}, "kl.guardrail end_epoch needs kl.beta > 0"),
        ({"kl": {"beta": 0.0, "reference_every": 2}}, "kl.reference_every 2 needs kl.beta > 0"),
        ({"kl": {"beta": 0.0, "reference_dtype": "bfloat16"}}, "kl.reference_dtype bfloat16 needs kl.beta > 0"),
        ({"kl": {"beta": 0.0, "offload_reference": True}}, "kl.offload_reference true needs kl.beta > 0"),
        ({"kl": {"reference_every": 2, "offload_reference": True}}, "kl.offload_reference true with kl.reference_every 2: each"),
        ({"kl": {"reference_mix": 0.5}}, "kl.reference_mix 0.5 needs kl.reference_every"),
        (
            {"kl": {"reference_every": 2, "reference_mix": 0.5, "reference_dtype": "bfloat16"}},
            "kl.reference_mix 0.5 with kl.reference_dtype bfloat16: a share of a small difference is rounded away",
        ),
        ({"kl": {"guardrail": "end_epoch"}}, "kl.guardrail end_epoch needs more than one optimiser step an iteration"),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(value),
)  # fmt: skip
def test_settings_that_would_do_nothing_together_are_refused(sections, message):
    with pytest.raises(pydantic.ValidationError, match=re.escape(message)):
        tiny_config(**sections)


def test_a_reward_below_0_is_refused_where_advantages_are_divided_by_the_mean_reward(monkeypatch):
    config = settings("float32", advantage={"scale": "maxrl"})
    batch = {name: x for name, x in _batch().items() if name != "advantages"}
    low = f"{batch['rewards'].min():g}"
    with pytest.raises(BatchError, match=f"rewards go down to {low}; advantage.scale maxrl"):
        batch_from(batch, config.learning())
    with pytest.raises(TorchBatchError, match=f"rewards go down to {low}; advantage.scale maxrl"):
        torch_step(config, weights(), batch)
    penalty = {"overlong_penalty": {"length": 4, "weight": 9.0}}
    for other in (torch_train, jax_reward):  # each by itself: the one that does not look lets the other one refuse
        with monkeypatch.context() as patch:
            patch.setattr(other, "not_negative", lambda rewards_B: None)
            with pytest.raises(RewardError, match=r"the reward of completion 1 is -\S+; advantage.scale maxrl"):
                _advantages(advantage={"scale": "maxrl"}, objective=penalty)


def test_groups_of_a_recorded_batch_may_stand_in_any_order_but_not_be_of_two_sizes(x64):
    config, order = settings("float64"), np.array([3, 6, 0, 1, 5, 2, 7, 4])
    batch = {name: x for name, x in _batch().items() if name != "advantages"}
    whole = batch_from(batch, config.learning()).advantages_B
    np.testing.assert_allclose(
        batch_from({n: x[order] for n, x in batch.items() if np.ndim(x)}, config.learning()).advantages_B, whole[order]
    )
    with pytest.raises(BatchError, match="group_ids: groups have 3 to 5 rows; expected as many in each"):
        batch_from(batch | {"group_ids": np.array([0] * 5 + [1] * 3)}, config.learning())


@pytest.mark.parametrize("update", [{"epochs": 2}, {"minibatches": 2}])
def test_a_guardrail_that_can_act_is_taken(update):
    assert tiny_config(kl={"guardrail": "end_epoch"}, update=update).kl.guardrail == "end_epoch"


@pytest.mark.parametrize(
    ("sections", "missing"),
    [
        ({"objective": {"mask_truncated": True}}, "stopped"),
        ({"objective": {"mismatch_cap": 2.0}}, "sampling_logp"),
        ({"advantage": {"components": "gdpo"}}, "advantages"),
        ({"advantage": {"components": "normalise_each"}}, "advantages"),
    ],
)
def test_a_recorded_batch_without_what_a_setting_reads_is_refused_by_both(sections, missing):
    arrays = {name: x for name, x in _batch().items() if name != missing}
    config = settings("float32", **sections)
    with pytest.raises(BatchError, match=missing):
        batch_from(arrays, config.learning())
    with pytest.raises(TorchBatchError, match=missing):
        torch_step(config, weights(), arrays)


# Advantages: what both trainers make of the same components and completions -------------------------------------------

FIRST = np.float32([0.1, 0.9, 0.4, 0.4, 0.3, 2.0, 0.5, 0.0, 3.0, 3.0, 3.0, 3.0])
SECOND = np.float32([5.0, 1.0, 1.0, 7.0, 0.0, 0.0, 0.0, 30.0, 1.0, 1.0, 1.0, 1.0])
LENGTHS = np.array([2, 6, 4, 5, 1, 6, 3, 6, 2, 2, 2, 2])
WEIGHTS = {"first": 1.0, "second": 0.5, "diagnostic": 0.0}


def _advantages(**sections) -> dict[str, tuple[np.ndarray, np.ndarray, int]]:
    """(rewards, advantages, groups without signal) of 3 groups of 4 completions of at most 6 tokens, by both trainers' own code."""
    config = tiny_config(prompts={"per_iteration": 3}, **sections)
    mask_BC = (np.arange(6) < LENGTHS[:, None]).astype(np.int32)
    values = {"first": FIRST, "second": SECOND, "diagnostic": FIRST**2}
    components = {name: as_component(values_B) for name, values_B in values.items()}
    prompts = [Prompt("p", 0, max_new_tokens=4 if 4 <= row < 8 else None) for row in range(12)]

    class Task:
        component_weights = WEIGHTS

        class stop_rule:
            truncate = staticmethod(lambda text, state: (text, True))

    mask_PGC = jnp.asarray(mask_BC.reshape(3, 4, 6))
    rollout = Rollout(jnp.zeros((3, 4, 6), int), mask_PGC, jnp.zeros((3, 4, 6)), jnp.ones((3, 4), bool))
    rewards_B, advantages_PG, flat_P = jax_reward.weighed(config.learning(), WEIGHTS, prompts, components, rollout)
    rewards_PG = jnp.asarray(rewards_B).reshape(3, 4)
    advantages_PG = over_batch(jnp.asarray(advantages_PG), jnp.asarray(flat_P), rewards_PG, config.advantage)
    actual = {"jax_grpo": (rewards_B, np.asarray(advantages_PG).reshape(-1), int(flat_P.sum()))}

    theirs = torch_train.Trainer.__new__(torch_train.Trainer)
    theirs.config, theirs.task = config, Task()
    mask_BT = torch.from_numpy(mask_BC)
    theirs.texts = type("Texts", (), {"device": torch.device("cpu")})()
    made = TorchRollout(["x"] * 12, mask_BT, mask_BT, mask_BT, mask_BT.float(), torch.ones(12, dtype=torch.bool))
    rewards, advantages, signal = theirs._advantages(prompts, components, made)
    actual["torch_ref"] = (rewards.numpy(), advantages.numpy(), signal.count(False))
    return actual


COMPONENTS = ("sum_first", "normalise_each", "gdpo")
PENALTIES = (None, {"length": 4, "weight": 0.5}, {"length": 4, "weight": 3.0}, {"length": 2, "weight": 3.0})


@pytest.mark.parametrize("components", COMPONENTS)
def test_the_penalty_for_long_completions_reaches_the_advantages(components):
    """The logged reward fell and the advantages stayed as they were, where components are normalised one by one."""
    seen = []
    for penalty in PENALTIES:
        actual = _advantages(advantage={"components": components}, objective={"overlong_penalty": penalty})
        (rewards, ours, flat), (expected, theirs, same) = actual["jax_grpo"], actual["torch_ref"]
        show("rewards", {"jax_grpo": float(np.abs(rewards - expected).max())}, 1e-5)  # float32, rewards of size 15
        show("advantages", {"jax_grpo": float(np.abs(ours - theirs).max())}, 1e-5)
        assert flat == same == 1, "the third group: equal components and lengths"
        assert (ours[8:] == 0).all() and (theirs[8:] == 0).all()
        seen.append(ours)
    for one, other in itertools.combinations(seen, 2):
        assert np.abs(one - other).max() > 1e-2
    if components == "normalise_each":
        caps = np.repeat([6, 4, 6], 4)
        penalised = -np.clip((LENGTHS - (caps - 4)) / 4, 0, 1).reshape(3, 4)
        part = (penalised - penalised.mean(1, keepdims=True)) / (penalised.std(1, ddof=1, keepdims=True) + 1e-4)
        np.testing.assert_allclose(seen[1] - seen[0], 0.5 * part.reshape(-1), atol=1e-5)


def test_every_accepted_pair_of_advantage_settings_differs_and_both_implementations_agree():
    scales = ("none", "group", "batch", "robust")
    accepted = [("mean", "group", how, None) for how in COMPONENTS]
    accepted += [(b, s, "sum_first", None) for b in ("mean", "leave_one_out", "opo") for s in (*scales, "maxrl")]
    accepted += [(baseline, "group", "normalise_each", None) for baseline in ("leave_one_out", "opo")]
    pairs = list(itertools.product(dict.fromkeys(accepted), (None, 0.7)))
    # Of four samples only the best has a credit at k = 4, and a clip at 0.7 leaves no scale to tell apart.
    pairs += [(("mean", scale, "sum_first", k), None) for scale in scales for k in (2, 3, 4)]
    actual = {}
    for (baseline, scale, components, k), clip in pairs:
        settings = {"baseline": baseline, "scale": scale, "components": components, "pass_at_k": k, "clip": clip}
        both = _advantages(advantage=settings)
        (_, ours, _), (_, theirs, _) = both["jax_grpo"], both["torch_ref"]
        # float32 rounding of rewards of size 15
        show(", ".join(map(str, settings.values())), {"advantages": float(np.abs(ours - theirs).max())}, 1e-5)
        actual[tuple(settings.values())] = ours
    for one, other in itertools.combinations(actual, 2):
        assert np.abs(actual[one] - actual[other]).max() > 1e-3, (one, other)


def test_cispo_with_the_other_losses_bound_is_a_caution_that_names_the_usual_one():
    (caution,) = tiny_config(objective={"name": "cispo"}).cautions()
    assert re.search(r"objective.epsilon_high 0.2 .*cispo.*usual bound is 5", caution)
    assert not tiny_config(objective={"name": "cispo", "epsilon_high": 5.0}).cautions()
    assert not tiny_config().cautions()


@pytest.mark.parametrize("rate", [1e-5, 1e-4])
def test_a_caution_names_the_weights_that_bfloat16_parameters_do_not_move(rate):
    """Twenty steps of one sign: weights beyond the caution's number stay, and those of a quarter of it move."""
    config = tiny_config(model={"param_dtype": "bfloat16"}, update={"learning_rate": rate})
    (caution,) = config.cautions()
    beyond = float(re.search(r"weights beyond (\S+),", caution)[1])  # pyright: ignore[reportOptionalSubscript]
    params = jnp.array([1.05 * beyond, 1.0, beyond / 4], jnp.bfloat16)
    moved, state = params, adamw(config.update).init(params)
    for _ in range(20):
        moved, state = apply_adamw(config.update, moved, jnp.ones_like(params), state, rate, jnp.bool_(True))
    assert (moved == params).tolist() == [True, True, False]
    assert not tiny_config(update={"learning_rate": rate}).cautions()
