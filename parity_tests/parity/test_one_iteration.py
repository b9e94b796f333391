"""docs/one_iteration.py, the loop to read first, takes the package's own steps, and learns."""

import runpy
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import config
from flax import nnx

from jax_grpo.advantages import group_advantages
from jax_grpo.batch import Batch, FlatTokens
from jax_grpo.update import init_state, make_step

PAGE = Path(__file__).parents[2] / "docs" / "one_iteration.py"


@pytest.fixture
def page(x64):
    return SimpleNamespace(**runpy.run_path(str(PAGE)))


class Toy(nnx.Module):
    """The page's model as the package's programs take one: hidden states, and the matrix that makes logits of them."""

    def __init__(self, page, params):
        self.compute_dtype, self.vocabulary, self._hidden_states = jnp.dtype(jnp.float64), page.V, page.hidden_states
        for name, value in params.items():
            setattr(self, name, nnx.Param(value))
        self._names = tuple(params)

    @property
    def head_VH(self):
        return self.embedding_VH[...]

    def __call__(self, ids_BT, mask_BT):
        return self._hidden_states({name: getattr(self, name)[...] for name in self._names}, ids_BT)


def test_both_take_the_same_two_steps_in_float64(page):
    # Three times the page's weights: from a policy that is nearly uniform two steps would reach no clip bound.
    params = jax.tree.map(lambda x: 3 * x.astype(jnp.float64), page.init_params(jax.random.key(0)))
    prompts_P = jnp.arange(page.P) % page.V
    ids_BT = page.rollout(params, prompts_P, jax.random.key(1))
    rewards_B = page.rewards_of(ids_BT)
    settings = config(
        prompts={"per_iteration": page.P},
        rollout={"group_size": page.G, "max_new_tokens": page.C},
        kl={"beta": page.BETA},
        update={"learning_rate": page.LEARNING_RATE, "epochs": 2},
        model={"compute_dtype": "float64", "param_dtype": "float64"},
    )
    advantages_B = group_advantages(rewards_B.reshape(page.P, page.G), settings.advantage)[0].reshape(-1)
    np.testing.assert_allclose(page.advantages_of(rewards_B), advantages_B, atol=1e-14)

    # A reference of its own and a mask with zeros: else the KL and the mask would be those of any batch.
    reference = jax.tree.map(lambda x: 1.1 * x, params)
    logps = page.token_logps(params, ids_BT), page.token_logps(reference, ids_BT)
    mask_BC = jnp.arange(page.C) < 1 + jnp.arange(page.P * page.G)[:, None] % page.C
    ours = page.Batch(ids_BT, advantages_B, *logps, mask_BC.astype(jnp.float64))
    behind_prompt = [jnp.pad(x, ((0, 0), (1, 0))) for x in (mask_BC, *logps)]
    tokens = FlatTokens(ids_BT, jnp.ones_like(ids_BT))
    theirs = Batch(tokens, behind_prompt[0], advantages_B, jnp.ones(len(ids_BT), bool), *behind_prompt[1:])

    graphdef, start = nnx.split(Toy(page, params), nnx.Param)
    state, opt_state = init_state(start, settings.learning()), page.OPTIMISER.init(params)
    step = make_step(graphdef, settings.learning())
    for _ in range(2):
        loss = page.loss_of(params, ours)
        state, metrics, *_ = jax.jit(step)(state, theirs)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-12)
        params, opt_state = page.update(params, opt_state, ours)
    for name, value in params.items():
        np.testing.assert_allclose(state.params[name][...], value, atol=1e-9)  # AdamW divides small by small
    assert metrics["clip_fraction/high"] + metrics["clip_fraction/low"] > 0 and float(metrics["grad_norm"]) > 0.01


@pytest.mark.slow
def test_the_page_learns(capsys):
    runpy.run_path(str(PAGE), run_name="__main__")
    lines = [float(line.split("reward")[1].split()[0]) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] < 0.3 and lines[-1] > 0.8
