"""The supervised warm start's optimiser."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import tiny_model

from jax_grpo.sft.__main__ import SFTConfig, Stage, make_optimiser


@pytest.mark.slow
def test_the_warm_start_decays_weights_and_embeddings_and_neither_biases_nor_norms():
    _, params = tiny_model()
    params = jax.tree.map(lambda x: x + 1.0, params)  # biases begin at 0, which decay would leave there
    stage = Stage(mixture={"policy": 1.0}, rows=64 * 20, learning_rate=0.1)
    optimiser = make_optimiser(SFTConfig(out="unused", stages=[stage], warmup_steps=0, weight_decay=0.5))
    still = jax.tree.map(jnp.zeros_like, params)
    updates, _ = optimiser.update(still, optimiser.init(params), params)
    moved = optax.apply_updates(params, updates)
    kinds = {"decays": 0, "stays": 0}
    for before, after in zip(jax.tree.leaves(params), jax.tree.leaves(moved), strict=True):
        matrix = before.ndim >= 2
        kinds["decays" if matrix else "stays"] += 1
        np.testing.assert_allclose(after, before * (1 - 0.1 * 0.5) if matrix else before, rtol=1e-6)
    assert min(kinds.values()) > 3, kinds
