"""Objectives, KL estimators and aggregations against the definitions, written out in NumPy float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_grpo import objective
from jax_grpo.config import KLConfig, ObjectiveConfig

RNG = np.random.default_rng(0)
B, S = 6, 7
MASK = (np.arange(S) < np.array([7, 1, 3, 5, 2, 6])[:, None]).astype(np.float64)
OLD = -RNG.exponential(2.0, (B, S))
LOGP = OLD + 0.4 * RNG.normal(size=(B, S))
REF = LOGP + 0.5 * RNG.normal(size=(B, S))
ADVANTAGES = np.array([1.0, -0.5, 0.3, -1.2, 0.7, -0.3])


def numpy_surrogate(name: str, level: str, logp, delta=None) -> np.ndarray:
    """The definitions of the objectives for one token at a time."""
    out = np.zeros((B, S))
    for b in range(B):
        real = MASK[b] > 0
        mean = (logp[b] - OLD[b])[real].mean()
        for s in np.flatnonzero(real):
            log_rho = logp[b, s] - OLD[b, s] if level == "token" else mean
            rho, a = np.exp(log_rho), ADVANTAGES[b]
            if name == "clip":
                first = min(rho, delta) if delta else rho
                out[b, s] = -min(first * a, min(max(rho, 0.8), 1.28) * a)
            elif name == "cispo":
                out[b, s] = -min(rho, 1.28) * a * logp[b, s]
            elif name == "sapo":
                tau = 1.0 if a > 0 else 1.05
                out[b, s] = -(4 / tau) / (1 + np.exp(-tau * (rho - 1))) * a
            else:
                out[b, s] = -a * logp[b, s]
    return out


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(
    ("name", "delta"), [("clip", None), ("clip", 1.5), ("cispo", None), ("sapo", None), ("reinforce", None)]
)
def test_surrogate_is_its_definition(name, delta, level, x64):
    # epsilon_high is the ratio's excess over 1 for `clip` and the weight's bound itself for `cispo`
    high = 1.28 if name == "cispo" else 0.28
    config = ObjectiveConfig(name=name, epsilon_low=0.2, epsilon_high=high, delta=delta, importance_level=level)
    found = objective.surrogate(LOGP, OLD, ADVANTAGES, MASK, config)
    np.testing.assert_allclose(found, numpy_surrogate(name, level, LOGP, delta), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("name", ["clip", "sapo", "reinforce"])
def test_gradient_is_the_numerical_derivative_of_the_definition(name, level, x64):
    config = ObjectiveConfig(name=name, epsilon_low=0.2, epsilon_high=0.28, importance_level=level)
    weights = RNG.normal(size=(B, S))
    found = jax.grad(lambda logp: jnp.sum(weights * objective.surrogate(logp, OLD, ADVANTAGES, MASK, config)))(LOGP)
    step = 1e-6
    for b, s in np.argwhere(MASK > 0):
        bump = np.zeros((B, S))
        bump[b, s] = step
        difference = numpy_surrogate(name, level, LOGP + bump) - numpy_surrogate(name, level, LOGP - bump)
        assert abs(found[b, s] - np.sum(weights * difference) / (2 * step)) < 1e-6
    assert np.abs(found).max() > 0.1
    assert np.all(np.asarray(found)[MASK == 0] == 0)


def test_both_clip_sides_stop_the_gradient_only_where_the_advantage_pushes_outwards(x64):
    config = ObjectiveConfig(epsilon_low=0.2, epsilon_high=0.2)
    logp = jnp.log(jnp.array([[1.5], [0.5], [1.5], [0.5]]))
    advantages = jnp.array([1.0, -1.0, -1.0, 1.0])
    grad = jax.grad(lambda x: jnp.sum(objective.surrogate(x, jnp.zeros((4, 1)), advantages, jnp.ones((4, 1)), config)))(
        logp
    )
    np.testing.assert_allclose(grad[:, 0], [0.0, 0.0, 1.5, -0.5], atol=1e-12)


def test_cispo_differentiates_logp_and_not_its_weight(x64):
    config = ObjectiveConfig(name="cispo", epsilon_high=1.28)
    grad = jax.grad(lambda x: jnp.sum(objective.surrogate(x, OLD, ADVANTAGES, MASK, config)))(LOGP)
    expected = -np.minimum(np.exp(LOGP - OLD), 1.28) * ADVANTAGES[:, None] * MASK
    np.testing.assert_allclose(grad, expected, rtol=1e-12)


def test_kl_estimators_are_their_closed_forms(x64):
    d = REF - LOGP
    for name, expected in {"k1": -d, "k2": d**2 / 2, "k3": np.exp(d) - 1 - d}.items():
        np.testing.assert_allclose(
            objective.kl_per_token(LOGP, REF, MASK, name), expected * MASK, rtol=1e-12, atol=1e-15
        )


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_unbiased_kl_estimators_average_to_the_exact_kl(name, x64):
    p, q = np.array([0.5, 0.3, 0.15, 0.05]), np.array([0.25, 0.25, 0.25, 0.25])
    exact = np.sum(p * np.log(p / q))
    per_token = objective.kl_per_token(np.log(p)[None], np.log(q)[None], np.ones((1, 4)), name)
    assert abs(np.sum(p * per_token[0]) - exact) < 1e-12


def test_k3_is_never_negative_and_k2_matches_k3_nearby(x64):
    d = np.linspace(-3, 3, 201)[None]
    k3 = objective.kl_per_token(jnp.zeros((1, 201)), d, np.ones((1, 201)), "k3")
    assert (k3 >= 0).all() and k3[0, 100] == 0
    small = np.full((1, 1), 1e-3)
    k2, k3 = (objective.kl_per_token(jnp.zeros((1, 1)), small, np.ones((1, 1)), k) for k in ("k2", "k3"))
    assert abs(k2 / k3 - 1).item() < 1e-3


def test_aggregations_are_their_definitions(x64):
    loss, lengths = RNG.normal(size=(B, S)), MASK.sum(1)
    expected = {
        "grpo": np.mean([(loss[b] * MASK[b]).sum() / lengths[b] for b in range(B)]),
        "bnpo": (loss * MASK).sum() / lengths.sum(),
        "dapo": (loss * MASK).sum() / lengths.sum(),
        "dr_grpo": (loss * MASK).sum() / (B * 9),
        "luspo": np.mean([(loss[b] * MASK[b]).sum() for b in range(B)]),
    }
    for name, value in expected.items():
        assert abs(jnp.sum(objective.aggregation_weights(jnp.asarray(MASK), name, 9) * loss) - value) < 1e-12, name


def test_an_all_masked_row_and_an_empty_mask_give_finite_weights():
    for name in objective.AGGREGATIONS:
        assert np.isfinite(objective.aggregation_weights(jnp.zeros((2, 3)), name, 3)).all()


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 1e30])
def test_masked_positions_may_hold_anything(poison):
    garbage = jnp.where(MASK > 0, LOGP, poison).astype(jnp.float32)
    config, kl = ObjectiveConfig(), KLConfig(importance_corrected=True)

    def loss(logp, old, ref):
        return jnp.sum(
            objective.token_losses(logp, old, ref, ADVANTAGES, MASK, jnp.asarray(MASK), jnp.float32(0.1), config, kl)
        )

    clean = jnp.asarray(LOGP, jnp.float32), jnp.asarray(OLD, jnp.float32), jnp.asarray(REF, jnp.float32)
    value, grad = jax.value_and_grad(loss)(
        garbage, jnp.where(MASK > 0, clean[1], poison), jnp.where(MASK > 0, clean[2], -poison)
    )
    expected, expected_grad = jax.value_and_grad(loss)(*clean)
    assert value == expected
    np.testing.assert_array_equal(grad, np.where(MASK > 0, expected_grad, 0))


def test_mismatch_weights_are_capped_and_constant():
    sampling = OLD - np.array([[0.0], [5.0], [0.1], [-0.1], [0.0], [-5.0]])
    weights = objective.mismatch_weights(OLD, sampling, MASK, 2.0)
    np.testing.assert_allclose(weights[:, 0], [1, 2, np.exp(0.1), np.exp(-0.1), 1, np.exp(-5)], rtol=1e-5)
    grad = jax.grad(lambda old: jnp.sum(objective.mismatch_weights(old, sampling, MASK, 2.0)))(jnp.asarray(OLD))
    assert (grad == 0).all()


def test_top_entropy_mask_keeps_the_upper_quantile_of_real_tokens():
    entropy = jnp.array([[1.0, 2.0, 3.0, 100.0], [4.0, 5.0, 100.0, 100.0]])
    mask = jnp.array([[1.0, 1, 1, 0], [1.0, 1, 0, 0]])
    assert objective.top_entropy_mask(entropy, mask, 0.6).tolist() == [[0, 0, 0, 0], [1, 1, 0, 0]]
