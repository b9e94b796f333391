"""The KL coefficient's controller: its formula, its bounds, and what a broken observation does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_grpo.config.learning import KLConfig
from jax_grpo.objective import adaptive_beta, beyond_guardrail

KL = KLConfig(target=0.05, beta=0.04, beta_bounds=(0.01, 0.1))


def _moved(beta: float, observed: float) -> float:
    return float(adaptive_beta(jnp.float32(beta), jnp.float32(observed), KL))


@pytest.mark.parametrize(
    ("observed", "log_change"),
    [(0.05, 0.0), (0.055, 0.1), (0.0475, -0.05), (0.06, 0.2), (0.0601, 0.2), (5.0, 0.2), (0.04, -0.2), (0.0, -0.2)],
)
def test_beta_moves_by_the_relative_error_and_at_most_a_fifth(observed, log_change):
    assert _moved(0.04, observed) == pytest.approx(0.04 * np.exp(log_change), rel=1e-5)


def test_beta_keeps_its_bounds():
    assert _moved(0.0995, 5.0) == pytest.approx(0.1)
    assert _moved(0.0101, 0.0) == pytest.approx(0.01)


@pytest.mark.parametrize("observed", [np.nan, np.inf, -np.inf])
def test_a_nonfinite_observation_leaves_beta_alone(observed):
    assert _moved(0.04, observed) == float(jnp.float32(0.04))


def test_a_negative_observation_lowers_beta():
    # k1 is unbiased and so may average below zero over one batch
    assert _moved(0.04, -0.3) == pytest.approx(0.04 * np.exp(-0.2), rel=1e-5)


def test_beta_settles_where_the_kl_meets_the_target():
    """A policy whose KL falls as 0.002 / beta: the target 0.05 is met at beta = 0.04, from either bound."""
    for start in KL.beta_bounds:
        beta = start
        for _ in range(40):
            beta = _moved(beta, 0.002 / beta)
        print(f"beta {beta:.5f}, wanted 0.04 (tolerance 1 %)")
        assert beta == pytest.approx(0.04, rel=0.01)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_the_controller_compiles_and_keeps_betas_dtype(dtype, x64):
    # a carry of the jitted update: a changed dtype would compile it anew
    beta = jax.jit(lambda b, kl: adaptive_beta(b, kl, KL))(dtype(0.04), jnp.float64(0.055))
    assert beta.dtype == dtype
    assert float(beta) == pytest.approx(0.04 * np.exp(0.1), rel=1e-6)


def test_the_guardrail_is_beyond_twice_the_target():
    assert beyond_guardrail(0.1001, KL)
    assert not beyond_guardrail(0.0999, KL)
    assert not beyond_guardrail(np.nan, KL)
    assert jax.jit(lambda kl: beyond_guardrail(kl, KL))(jnp.array([0.2, 0.05])).tolist() == [True, False]
