"""Small functions that both implementations write for themselves, side by side: they meet in a step only at a point or two."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from both import show, torch_model, weights
from conftest import config as tiny_config

import torch_ref.advantages
import torch_ref.kl_control
import torch_ref.optimiser
from jax_grpo.advantages import overlong_penalty
from jax_grpo.config.learning import KLConfig, UpdateConfig
from jax_grpo.objective import adaptive_beta, beyond_guardrail
from jax_grpo.optimiser import schedule
from torch_ref.compare import difference
from torch_ref.generate import StopTable, generate


def test_beta_is_moved_alike_within_and_at_its_bounds(x64):
    config = KLConfig(beta=0.05, adaptive=True, target=0.1, beta_bounds=(0.04, 0.06))
    actual, expected = {}, {}
    for beta, kl in itertools.product((0.04, 0.041, 0.05, 0.059, 0.06), (-1.0, 0.0, 0.085, 0.1, 0.115, 0.2, 5.0)):
        actual[f"{beta}, KL {kl}"] = float(adaptive_beta(jnp.float64(beta), jnp.float64(kl), config))
        expected[f"{beta}, KL {kl}"] = torch_ref.kl_control.next_beta(beta, kl, config)
        assert bool(beyond_guardrail(kl, config)) == torch_ref.kl_control.beyond_guardrail(kl, config)
    show("beta", {name: difference(name, actual[name], expected[name]) for name in actual}, 1e-15)
    assert min(expected.values()) == 0.04 and max(expected.values()) == 0.06


def test_the_schedule_has_as_many_steps_as_the_run_takes():
    run = tiny_config(iterations=5, update={"epochs": 3, "minibatches": 2})
    assert run.optimizer_steps() == 5 * 3 * 2
    assert tiny_config(iterations=5, update={"epochs": 3, "total_steps": 7}).optimizer_steps() == 7


@pytest.mark.parametrize("warmup", [0, 1, 4, 19, 20, 50])  # 19 leaves one step to decay in, 20 and more none
@pytest.mark.parametrize("shape", ["constant", "cosine"])
def test_the_learning_rate_is_alike_at_every_step(warmup, shape, x64):
    config = UpdateConfig(learning_rate=0.3, schedule=shape, warmup_steps=warmup, final_learning_rate_fraction=0.1)
    rate = schedule(config, 20)
    errors = {
        f"step {t}": difference(f"step {t}", float(rate(t)), torch_ref.optimiser.learning_rate(t, config, 20))
        for t in range(25)
    }
    show("learning rate", errors, 1e-7)  # the schedule's own float32
    assert torch_ref.optimiser.learning_rate(19, config, 20) <= 0.3, "a run of 20 steps warms up in 19 at most"
    assert warmup < 19 or torch_ref.optimiser.learning_rate(18, config, 20) == 0.3


def test_the_overlong_penalty_is_alike_from_none_to_full(x64):
    lengths, caps = np.arange(0, 13), np.repeat([12, 10, 12], [4, 4, 5])
    ours = np.asarray(overlong_penalty(jnp.asarray(lengths), jnp.asarray(caps), 4, 0.5))
    theirs = torch_ref.advantages.overlong_penalty(torch.from_numpy(lengths), torch.from_numpy(caps), 4, 0.5).numpy()
    show("penalty", {"penalty": difference("penalty", ours, theirs)}, 1e-7)
    assert {0.0, -0.125, -0.5} <= set(np.abs(theirs).round(6) * -1)


def test_the_references_completions_end_at_each_rows_own_cap():
    model = torch_model(weights(), "float64")
    never = StopTable(torch.zeros(2, model.config.vocab_size, dtype=torch.long), 1, torch.zeros(3, dtype=torch.long))
    ids, mask = torch.tensor([[3, 4], [5, 6], [7, 8]]), torch.ones(3, 2, dtype=torch.long)
    made = generate(model, ids, mask, max_new_tokens=torch.tensor([1, 3, 5]), stop=never)
    assert made.mask_BC.sum(1).tolist() == [1, 3, 5] and made.tokens_BC.shape == (3, 5) and not made.stopped_B.any()
    assert jax.tree.leaves(made.mask_BC[0].tolist()) == [1, 0, 0, 0, 0]
