"""`jax_grpo` against `torch_ref`: loss, metrics, log-probabilities, every gradient, every parameter after the step.

Every objective x importance level x aggregation x KL estimator, on a batch with unequal masks and ratios beyond both clip
bounds. Float64 proves that the formulas are the same; float32 and bfloat16 that their rounding is.
"""

import dataclasses
import functools
import itertools

import numpy as np
import pytest
from both import (
    crafted_batch,
    jax_step,
    objective,
    settings,
    show,
    torch_step,
    weights,
)
from conftest import TINY

from jax_grpo.lm_head import LM_HEADS
from jax_grpo.model.architecture import Architecture
from jax_grpo.objective import AGGREGATIONS, KL_ESTIMATORS
from jax_grpo.objective.surrogates import SURROGATES
from torch_ref.compare import TOLERANCES, logp_error, scalar_errors, tensor_errors

LEVELS = {
    "clip": ("token", "sequence"),
    "cispo": ("token", "sequence"),
    "sapo": ("token", "sequence"),
    "reinforce": ("token",),
    "dppo_tv": ("token",),
    "dppo_kl": ("token",),
    "gmpo": ("token",),
    "vespo": ("token",),
    "clip_cov": ("token",),
    "kl_cov": ("token",),
}
COMBINATIONS = [
    (name, level, aggregation, kl)
    for name in SURROGATES
    for level in LEVELS[name]
    for aggregation, kl in itertools.product(AGGREGATIONS, KL_ESTIMATORS)
]
# By default each objective and level meets two aggregations, and both all KL estimators between them; the others are slow.
TWO = 2
DEFAULT = {
    (
        name,
        level,
        list(AGGREGATIONS)[(row + column) % len(AGGREGATIONS)],
        list(KL_ESTIMATORS)[(row // len(AGGREGATIONS) + column) % len(KL_ESTIMATORS)],
    )
    for row, (name, level) in enumerate((name, level) for name in SURROGATES for level in LEVELS[name])
    for column in range(TWO)
}
EVERY = [pytest.param(*each, marks=[] if each in DEFAULT else [pytest.mark.slow]) for each in COMBINATIONS]
# Every objective and level once, every aggregation and KL estimator once or more: what is rounded, a third of it by default.
COVERING = [
    (name, level, list(AGGREGATIONS)[row % len(AGGREGATIONS)], list(KL_ESTIMATORS)[row % len(KL_ESTIMATORS)])
    for row, (name, level) in enumerate((name, level) for name in SURROGATES for level in LEVELS[name])
]
# What each option of the loss changes, alone, on top of clipping per token, `dapo` and k3.
OPTIONS = {
    "delta": {"objective": {"delta": 1.4}},
    "entropy bonus": {"objective": {"entropy_coefficient": 0.2}},
    "top entropy": {"objective": {"entropy_quantile": 0.6}},
    "mismatch": {"objective": {"mismatch_cap": 1.2}},
    "token mask (IcePop)": {"objective": {"mismatch_cap": 1.3, "mismatch_floor": 0.7, "mismatch_mode": "token_mask"}},
    "sequence truncate": {"objective": {"mismatch_cap": 1.3, "mismatch_mode": "sequence_truncate"}},
    "sequence mask": {"objective": {"mismatch_cap": 1.3, "mismatch_floor": 0.3, "mismatch_mode": "sequence_mask"}},
    "truncated": {"objective": {"mask_truncated": True}},
    "corrected KL": {"kl": {"importance_corrected": True}},
    "corrected KL, sequence": {"kl": {"importance_corrected": True}, "objective": {"importance_level": "sequence"}},
    "no KL": {"kl": {"beta": 0.0}},
    "adaptive beta": {"kl": {"adaptive": True, "target": 0.02}},
    "leave one out": {"advantage": {"baseline": "leave_one_out", "scale": "batch"}},
    "no scale": {"advantage": {"scale": "none"}},
    "robust scale, clipped": {"advantage": {"scale": "robust", "clip": 0.8}},
    "OPO": {"advantage": {"baseline": "opo", "scale": "none"}},
    "MaxRL": {"advantage": {"scale": "maxrl"}},
    "pass at k": {"advantage": {"pass_at_k": 3}},
    "warm-up": {"update": {"warmup_steps": 3, "schedule": "cosine", "total_steps": 9}},
    "not clipped": {"update": {"max_grad_norm": 1e3}},
    "Clip-Cov, top entropy": {"objective": objective("clip_cov", entropy_quantile=0.3)},
    "KL-Cov, mismatch, truncated": {"objective": objective("kl_cov", mismatch_cap=1.2, mask_truncated=True)},
    "one micro-batch": {"update": {"micro_batches": 1}},  # last: its operations are of other shapes than the others'
}


# The loss's own settings reach a layer by its gradients alone, which one shows as well as two, in two thirds of the time.
ONE_LAYER = dataclasses.replace(TINY, num_layers=1)


@functools.cache
def _batch(architecture: Architecture = TINY):
    return crafted_batch(weights(4.0, architecture), architecture=architecture)


def compare(dtype: str, *, compiled: bool = False, architecture: Architecture = TINY, **sections) -> None:
    config, of, batch = settings(dtype, **sections), weights(4.0, architecture), _batch(architecture)
    if config.advantage.scale == "maxrl":  # which takes rewards of at least 0
        batch = batch | {"rewards": np.square(batch["rewards"])}
    actual = jax_step(config, of, batch, compiled=compiled, architecture=architecture)
    reference = torch_step(config, of, batch, architecture)
    allowed = TOLERANCES[dtype]
    if config.objective.name in ("clip", "gmpo", "dppo_tv", "dppo_kl"):
        never_negative = config.advantage.pass_at_k is not None
        assert reference["clip_fraction/low"] > 0 or never_negative, "both clip sides act"
        assert reference["clip_fraction/high"] > 0, "both clip sides act"
    show("logp", {"logp": logp_error(actual["logp"], reference["logp"], batch["completion_mask"])}, allowed.logp)
    show("loss and metrics", scalar_errors(actual, reference, dtype), allowed.scalars)
    show("gradients", tensor_errors(actual, reference), allowed.gradients)


def test_the_default_combinations_have_every_value_and_every_aggregation_every_estimator():
    for place in range(4):
        assert {each[place] for each in DEFAULT} == {each[place] for each in COMBINATIONS}
    assert {each[2:] for each in DEFAULT} == {each[2:] for each in COMBINATIONS}


@pytest.mark.default_cases(
    "cispo-sequence-luspo-k2",
    "clip-sequence-dapo-k2",
    "clip-token-grpo-k1",
    "clip_cov-token-bnpo-k3",
    "dppo_kl-token-dr_grpo-k2",
    "dppo_tv-token-dapo-k2",
    "gmpo-token-luspo-k2",
    "kl_cov-token-dr_grpo-k1",
    "reinforce-token-dapo-k3",
    "sapo-sequence-bnpo-k3",
    "sapo-token-grpo-k2",
    "vespo-token-bnpo-k1",
)
@pytest.mark.parametrize(("name", "level", "aggregation", "kl"), EVERY)
def test_float64_every_combination(name, level, aggregation, kl):
    combined = objective(name, importance_level=level, aggregation=aggregation)
    compare("float64", architecture=ONE_LAYER, objective=combined, kl={"estimator": kl})


@pytest.mark.slow_cases(
    "corrected KL",
    "mismatch",
    "no KL",
    "no scale",
    "not clipped",
    "one micro-batch",
    "sequence truncate",
    "token mask (IcePop)",
    "top entropy",
    "warm-up",
)
@pytest.mark.parametrize("option", OPTIONS)
def test_float64_every_option_of_the_loss(option):
    sections = {"objective": {}} | OPTIONS[option]
    if "name" not in sections["objective"]:
        sections["objective"] = objective("clip", **sections["objective"])
    compare("float64", architecture=ONE_LAYER, **sections)


def test_float64_the_top_entropy_mask_is_of_the_policy_that_sampled():
    """Later steps on a rollout keep its tokens: entropies that the batch brings are used, not the current policy's."""
    config = settings("float64", objective=objective("clip", entropy_quantile=0.6))
    of, batch = weights(4.0, ONE_LAYER), _batch(ONE_LAYER)
    old = batch | {"entropy": np.random.default_rng(5).exponential(size=batch["input_ids"].shape)}
    reference = torch_step(config, of, old, ONE_LAYER)
    actual = jax_step(config, of, old, architecture=ONE_LAYER)
    show("gradients", tensor_errors(actual, reference), TOLERANCES["float64"].gradients)
    current = torch_step(config, of, batch, ONE_LAYER)
    assert max(tensor_errors(reference, current).values()) > 0.1, "other tokens than the current policy's"


def _steady(dtype: str, name: str) -> bool:
    """Whether the loss differs by rounding alone: DPPO drops a whole token at its bound, and bfloat16 moves one across it."""
    return dtype != "bfloat16" or not name.startswith("dppo")


@pytest.mark.default_cases(
    "bfloat16-cispo-sequence-dr_grpo-k1",
    "bfloat16-kl_cov-token-dapo-k1",
    "float32-clip-token-grpo-k1",
    "float32-gmpo-token-luspo-k1",
)
@pytest.mark.parametrize(
    ("dtype", "name", "level", "aggregation", "kl"),
    [(dtype, *each) for dtype in ("float32", "bfloat16") for each in COVERING if _steady(dtype, each[0])],
)
def test_rounded_a_covering_set(dtype, name, level, aggregation, kl):
    combined = objective(name, importance_level=level, aggregation=aggregation)
    compare(dtype, compiled=True, architecture=ONE_LAYER, objective=combined, kl={"estimator": kl})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "name", "level", "aggregation", "kl"),
    [(dtype, *each) for dtype in ("float32", "bfloat16") for each in COMBINATIONS if _steady(dtype, each[0])],
)
def test_rounded_every_combination(dtype, name, level, aggregation, kl):
    compare(dtype, objective=objective(name, importance_level=level, aggregation=aggregation), kl={"estimator": kl})


# Every head has every objective in test_lm_head_fused.
@pytest.mark.default_cases("cispo-chunked", "sapo-pallas")
@pytest.mark.parametrize(
    ("name", "implementation"),
    list(itertools.product(SURROGATES, LM_HEADS)),
)
def test_float64_every_head_compiled(name, implementation):
    compare("float64", compiled=True, objective=objective(name), lm_head={"implementation": implementation})


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_gpt2_smalls_own_shape(dtype):
    """All 148 gradients at 124,439,808 parameters."""
    architecture = Architecture(
        vocab_size=50257, num_layers=12, num_heads=12, hidden_size=768, max_position_embeddings=1024
    )
    of = weights(1.0, architecture)
    batch = crafted_batch(of, architecture=architecture)
    config = settings(dtype)
    actual = jax_step(config, of, batch, compiled=True, architecture=architecture)
    reference = torch_step(config, of, batch, architecture)
    allowed = TOLERANCES[dtype]
    assert reference["clip_fraction/low"] > 0 and reference["clip_fraction/high"] > 0, "both clip sides act"
    show("logp", {"logp": logp_error(actual["logp"], reference["logp"], batch["completion_mask"])}, allowed.logp)
    show("loss and metrics", scalar_errors(actual, reference, dtype), allowed.scalars)
    errors = tensor_errors(actual, reference)
    assert len(errors) == 148
    show("gradients", errors, allowed.gradients)
