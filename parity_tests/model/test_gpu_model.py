"""Logits, log-probabilities and every gradient on the default device, against `torch_ref` in float64 on the host.

The batch has the trainer's layout, in which a group's completions share their prompt; the reference reads one row a completion.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from both import Arrays, jax_policy, settings, show, torch_model, torch_step, weights
from conftest import grouped_tokens
from device import PRECISIONS, needs_gpu, on_gpu, precision, wide_model
from flax import nnx
from test_update import kept_on_the_device_and_offloaded

from jax_grpo.batch import Batch, record
from jax_grpo.model.architecture import Architecture
from jax_grpo.model.weights import to_hf
from jax_grpo.update import init_state, make_score, make_step
from torch_ref.compare import TOLERANCES, difference, logp_error, relative_l2, scalar_errors, tensor_errors
from torch_ref.model import score
from torch_ref.parity import logits_error

pytestmark = pytest.mark.gpu
LAYERS = 12  # on a GPU: all of GPT-2 small
PROMPTS, GROUP, CAP = 4, 4, 6
SHAPE = {"prompts": {"per_iteration": PROMPTS}, "rollout": {"group_size": GROUP, "max_new_tokens": CAP}}
# How the same step may be computed; what saves memory changes no number beyond rounding.
WAYS = {
    "as it comes": {"update": {"micro_batches": 1}},
    "all that saves memory": {
        "model": {"remat": True},
        "lm_head": {"implementation": "chunked", "chunk_tokens": 64},
        "update": {"micro_batches": 4, "offload_optimizer": True},
    },
}


class Compared(NamedTuple):
    """One batch for both implementations, and the reference's numbers."""

    architecture: Architecture
    weights: Arrays
    batch: Batch  # float64 on the host
    flat: Arrays  # the same, one row a completion
    logp_BT: np.ndarray
    entropy_BT: np.ndarray
    step: Arrays


@functools.cache
def compared() -> Compared:
    architecture, scale = wide_model(LAYERS)
    of, tokens, rng = weights(scale, architecture), grouped_tokens(), np.random.default_rng(1)
    mask_BC = tokens.completion_mask_PGC.reshape(PROMPTS * GROUP, CAP)
    advantages_B, stopped_B = rng.normal(size=PROMPTS * GROUP), np.ones(PROMPTS * GROUP, bool)
    groups_B = np.repeat(np.arange(PROMPTS), GROUP)
    flat = record(Batch(tokens, mask_BC, advantages_B, stopped_B), advantages_B, groups_B)  # pyright: ignore
    ids, attention, mask = (
        torch.from_numpy(flat[name].copy()) for name in ("input_ids", "attention_mask", "completion_mask")
    )
    with torch.no_grad():
        model = torch_model(of, "float64", architecture)
        logp, entropy = score(model, ids.long(), attention.long(), mask.double(), settings().rollout.temperature)
    near = {
        name: logp.numpy() - away_from_the_clip(0.3 * rng.normal(size=logp.shape))
        for name in ("old_logp", "ref_logp", "sampling_logp")
    }
    flat |= near
    batch = Batch(tokens, mask_BC, advantages_B, stopped_B, *(x[:, -CAP:] for x in near.values()))  # pyright: ignore
    step = torch_step(settings("float64", **SHAPE), of, flat, architecture)
    return Compared(architecture, of, batch, flat, logp.numpy(), entropy.numpy(), step)


def away_from_the_clip(x: np.ndarray) -> np.ndarray:
    """The log ratios, doubled where rounding would decide on which side of a clip bound they are."""
    objective = settings().objective
    bounds = np.log([1 - objective.epsilon_low, 1 + objective.epsilon_high])
    undecided = (np.abs(x[..., None] - bounds) < TOLERANCES["bfloat16"].logp).any(-1)
    return np.where(undecided, 2 * x, x)


def in_float32(batch: Batch) -> Batch:
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32 if np.asarray(x).dtype == float else None), batch)


def aligned(x_BC: jax.Array) -> np.ndarray:
    """Of completion tokens, as rows [B, T]."""
    rows = np.asarray(x_BC, np.float64)
    return np.pad(rows, ((0, 0), (compared().logp_BT.shape[1] - CAP, 0)))


@pytest.mark.parametrize("name", PRECISIONS)
def test_logits_and_scores_are_the_references_in_float64(name):
    how, problem = precision(name), compared()
    policy = jax_policy(problem.weights, how.dtype, problem.architecture)
    config = settings(how.dtype, **SHAPE)
    model = torch_model(problem.weights, "float64", problem.architecture)
    with jax.default_matmul_precision(how.matmuls):
        largest, error = logits_error("float64", policy, model, problem.flat)
        logp_BC, entropy_BC = make_score(policy.graphdef, config.learning())(policy.params, in_float32(problem.batch))
    show("logits", {"logits": error}, how.allowed.logits * max(1.0, largest / 8))  # see `logits_tolerance`
    there = problem.flat["completion_mask"]
    show("logp", {"logp": logp_error(aligned(logp_BC), problem.logp_BT, there)}, how.allowed.logp)
    # An entropy is a mean of log-probabilities.
    entropy = difference("entropy", aligned(entropy_BC)[there == 1], problem.entropy_BT[there == 1])
    show("entropy", {"entropy": entropy}, how.allowed.logp)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", PRECISIONS)
def test_every_gradient_of_the_update_is_the_references_in_float64(name, way):
    how, problem, sections = precision(name), compared(), SHAPE | WAYS[way]
    config = settings(how.dtype, **sections)
    policy = jax_policy(problem.weights, how.dtype, problem.architecture)
    model = nnx.merge(policy.graphdef, policy.params)
    model.remat = config.model.recomputed
    graphdef = nnx.split(model, nnx.Param)[0]
    with jax.default_matmul_precision(how.matmuls):
        step = jax.jit(make_step(graphdef, config.learning()))
        _, metrics, logp_BC, grads = step(init_state(policy.params, config.learning()), in_float32(problem.batch))
    actual = {key: np.asarray(value) for key, value in metrics.items()}
    actual |= {f"grad/{key}": x for key, x in to_hf(grads, problem.architecture).items()}
    assert problem.step["clip_fraction/low"] > 0 and problem.step["clip_fraction/high"] > 0, "both clip sides act"
    there = problem.flat["completion_mask"]
    show("logp", {"logp": logp_error(aligned(logp_BC), problem.step["logp"], there)}, how.allowed.logp)
    show("loss and metrics", scalar_errors(actual, problem.step, how.floors), how.allowed.scalars)
    show("gradients", tensor_errors(actual, problem.step), how.allowed.gradients)


@pytest.mark.parametrize("first_moment", ["parameters", "bfloat16"])
def test_moments_in_host_memory_train_the_same(first_moment):
    """On a CPU bit for bit. On a GPU two programs whose sums need not be in one order: as far apart as AdamW makes of that."""
    if first_moment == "bfloat16":
        needs_gpu("a CPU's two memories are one, and test_update's slow tests have this moment")
    beside, offloaded = kept_on_the_device_and_offloaded(first_moment)
    allowed = TOLERANCES["float32"].change if on_gpu() else 0.0
    names = (jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(beside.params))
    pairs = zip(names, jax.tree.leaves(offloaded.params), jax.tree.leaves(beside.params), strict=True)
    show("parameters", {name: relative_l2(name, actual, wanted) for name, actual, wanted in pairs}, allowed)
