"""Many optimiser steps by both implementations on the same recorded batches: AdamW, clipping, schedule, adaptive beta."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from both import (
    WIDTHS,
    Arrays,
    crafted_batch,
    jax_policy,
    settings,
    show,
    torch_model,
    weights,
)

import torch_ref.batch
from jax_grpo.model.weights import to_hf
from jax_grpo.replay import batch_from
from jax_grpo.update import init_state, make_update
from torch_ref.compare import TOLERANCES, difference, observable, tensor_errors
from torch_ref.optimiser import ADAMW, build_optimiser
from torch_ref.update import optimiser_step, start

STEPS = 20


@functools.cache
def _batches(count: int) -> list[Arrays]:
    return [crafted_batch(weights(), seed=seed) for seed in range(count)]


def _config(dtype: str, steps: int):
    return settings(
        dtype,
        iterations=steps,
        kl={"adaptive": True, "target": 0.15, "beta_bounds": [1e-4, 50.0]},
        update={"learning_rate": 3e-3, "schedule": "cosine", "warmup_steps": 4, "max_grad_norm": 0.3},
    )


def _run_jax(dtype: str, steps: int) -> tuple[Arrays, list[dict[str, float]]]:
    config = _config(dtype, steps)
    with jax.enable_x64(dtype == "float64"), jax.default_matmul_precision("highest"):
        policy = jax_policy(weights(), dtype)
        update = make_update(policy.graphdef, config.learning())
        state, records = init_state(policy.params, config.learning()), []
        for arrays in _batches(steps):
            state, metrics = update(state, batch_from(arrays, config.learning()))
            records.append({name: float(x) for name, x in metrics.items()})
        return to_hf(state.params, policy.architecture), records


def _run_torch(dtype: str, steps: int) -> tuple[Arrays, list[dict[str, float]]]:
    config = _config(dtype, steps)
    model = torch_model(weights(), dtype)
    state = start(model, config.learning())
    batches = [
        torch_ref.batch.from_arrays(arrays, config.learning(), dtype=WIDTHS[dtype]) for arrays in _batches(steps)
    ]
    records = [optimiser_step(state, batch, config.learning()) for batch in batches]
    return {name: p.detach().numpy() for name, p in model.named_parameters()}, records


def _change(parameters: Arrays) -> Arrays:
    return {f"change/{name}": x - weights()[name] for name, x in parameters.items()}


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_parameters_after_20_steps(dtype):
    (ours, records), (theirs, expected) = _run_jax(dtype, STEPS), _run_torch(dtype, STEPS)
    assert sum(record["grad_norm"] > 0.3 for record in expected) > STEPS / 2, "clipping acts"
    assert len({record["beta"] for record in expected}) > STEPS / 2, "beta moves"
    show(
        "change",
        tensor_errors(observable(_change(ours)), observable(_change(theirs)), "change/"),
        TOLERANCES[dtype].change,
    )
    for name in ("loss", "kl/mean", "beta", "learning_rate", "grad_norm"):
        pairs = enumerate(zip(records, expected, strict=True))
        errors = {f"step {i}": difference(f"{name}, step {i}", a[name], b[name]) for i, (a, b) in pairs}
        # Scalars of size up to 30; the loss averages away most of what single parameters differ by.
        show(name, errors, {"float64": 1e-12, "float32": 1e-4}[dtype])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_50_step_curves_lie_on_each_other(dtype):
    both = [run(dtype, 50)[1] for run in (_run_jax, _run_torch)]
    # The same rollouts, so nothing feeds back: curves may part by what 50 steps make of one rounding. A curve is judged as the
    # contract judges a tensor, by relative L2, and in bfloat16 by the gradients' tolerance: one token of 17 can make half of
    # a step's KL here, and AdamW turns the sign of a gradient that is only rounding into a full step.
    tolerance = {"float64": 1e-12, "float32": 1e-5, "bfloat16": TOLERANCES["bfloat16"].gradients}[dtype]
    curves = [
        {f"curve/{name}": np.array([record[name] for record in run]) for name in ("loss", "kl/mean")} for run in both
    ]
    show("curves", tensor_errors(*curves, "curve/"), tolerance)


def test_torchs_own_adamw_and_optax_take_the_same_steps():
    """An outside judge of both optimisers: torch.optim.AdamW against optax.adamw, and each of ours against it."""
    config = settings("float64", update={"weight_decay": 0.1, "learning_rate": 0.01}).update
    rng = np.random.default_rng(0)
    start_at, gradients = rng.normal(size=(3, 4)), rng.normal(size=(30, 3, 4)) * 10.0 ** rng.integers(-6, 3, (30, 3, 4))
    actual = {}
    parameter = torch.nn.Parameter(torch.from_numpy(start_at.copy()))
    model = torch.nn.ParameterList([parameter])
    for name in ADAMW:
        parameter.data = torch.from_numpy(start_at.copy())
        optimiser = build_optimiser(model, config, name)
        for gradient in gradients:
            parameter.grad = torch.from_numpy(gradient.copy())
            optimiser.step()
        actual[f"torch_ref {name}"] = parameter.detach().numpy().copy()
    with jax.enable_x64(True):
        theirs = optax.adamw(0.01, b1=config.betas[0], b2=config.betas[1], eps=config.epsilon, weight_decay=0.1)
        x = jnp.asarray(start_at)
        state = theirs.init(x)
        for gradient in gradients:
            change, state = theirs.update(jnp.asarray(gradient), state, x)
            x = x + change
        expected = np.asarray(x)
    show("AdamW", {name: difference(name, y, expected) for name, y in actual.items()}, 1e-12)
    assert np.abs(expected - start_at).max() > 0.1
