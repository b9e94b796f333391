"""FLOPs by formula agree with what XLA counts, and a rate that no device has is an error."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import config
from flax import nnx

from jax_grpo import flops
from jax_grpo.batch import Batch, FlatTokens
from jax_grpo.model import GPT2, GPT2Config
from jax_grpo.update import make_gradient, make_score

SIZES = GPT2Config(vocab_size=2048, num_layers=2, num_heads=4, hidden_size=256, max_position_embeddings=64)
ROWS, LENGTH = 4, 64
DENSE = flops.Work(ROWS * LENGTH, ROWS * LENGTH**2, ROWS * LENGTH)  # XLA's attention multiplies masked pairs too


def counted(function, *arguments) -> float:
    """XLA's count for the program before optimisation."""
    analysis = jax.jit(function).lower(*arguments).cost_analysis()
    return (analysis[0] if isinstance(analysis, list) else analysis)["flops"]


def problem():
    graphdef, params = nnx.split(nnx.eval_shape(lambda: GPT2(SIZES, rngs=nnx.Rngs(0))), nnx.Param)
    ids, numbers = jnp.zeros((ROWS, LENGTH), jnp.int32), jnp.zeros((ROWS, LENGTH))
    batch = Batch(FlatTokens(ids, ids), ids, jnp.zeros(ROWS), jnp.ones(ROWS, bool), numbers, numbers)
    return graphdef, params, batch


@pytest.mark.parametrize("what", ["forward", "training"])
def test_the_formula_agrees_with_xlas_count(what):
    graphdef, params, batch = problem()
    settings = config(model={"hidden_size": 256, "num_heads": 4, "max_position_embeddings": 64})
    programs = {
        "forward": lambda: counted(make_score(graphdef, settings), params, batch),
        "training": lambda: counted(make_gradient(graphdef, settings), params, batch, jnp.float32(0.1)),
    }
    formula, xla = getattr(flops, what)(SIZES, DENSE), programs[what]()
    print(f"{what}: formula {formula:.4e}, XLA {xla:.4e}, ratio {formula / xla:.4f} (tolerance 5 %)")
    assert formula == pytest.approx(xla, rel=0.05)


def test_a_prompt_is_counted_once_and_a_token_sees_what_stands_before_it():
    prompt, completion = (
        np.array([[0, 1, 1, 1]]),
        np.array([[[1, 1, 0], [1, 0, 0]]]),
    )  # 3 tokens; 2 and 1 of completions
    # The prompt: 3 tokens and 1 + 2 + 3 pairs. The first completion's first token: one more, and it sees 4 keys.
    assert flops.completions_work(prompt, completion) == flops.Work(tokens=4, pairs=10, predicted=3)


def test_padding_is_no_work():
    prompt, completion = np.ones((2, 5), int), np.ones((2, 3, 4), int)
    padded = np.pad(prompt, ((0, 0), (3, 0))), np.pad(completion, ((0, 0), (0, 0), (0, 7)))
    assert flops.completions_work(*padded) == flops.completions_work(prompt, completion)


def test_more_than_the_peak_is_refused_with_the_numbers():
    assert flops.utilisation(5e11, 1.0, 1e12, "update") == 0.5
    with pytest.raises(flops.ImpossibleRate, match=r"update: 2.000e\+12 FLOPs in 1.000000 s are 200.0% of"):
        flops.utilisation(2e12, 1.0, 1e12, "update")


def test_rates_are_of_each_phase_and_without_a_known_peak_there_is_no_mfu():
    work, one = flops.Work(10, 100, 10), flops.forward(SIZES, flops.Work(10, 100, 10))
    passes, seconds = {"rollout": 1, "score": 0, "update": 3}, {"rollout": 2.0, "score": 1.0, "update": 1.0}
    out = flops.rates(SIZES, work, passes, seconds, None)
    assert out == {"flops_per_second/rollout": one / 2, "flops_per_second/update": 3 * one}
    assert flops.rates(SIZES, work, passes, seconds, 4 * one)["mfu/update"] == pytest.approx(0.75)
    assert flops.device_peak("cpu", "float32") is None


def test_the_measured_peak_is_of_this_machine():
    assert 1e8 < flops.measured_peak("float32", 128) < 1e15
