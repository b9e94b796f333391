"""DPPO, GMPO, VESPO and the mismatch modes: their definitions one token at a time, gradients, and values at the edge."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from conftest import config as tiny_config

from jax_grpo import objective
from jax_grpo.config.learning import KLConfig
from jax_grpo.config.objectives import Clip, Dppo, Gmpo, ObjectiveConfig, Vespo, objective_of
from jax_grpo.loss import TokenTerms
from jax_grpo.objective import surrogates
from torch_ref.objective import token_terms as torch_terms

RNG = np.random.default_rng(4)
B, S = 6, 7
MASK = (np.arange(S) < np.array([7, 1, 3, 5, 2, 6])[:, None]).astype(np.float64)
OLD = -RNG.exponential(1.0, (B, S))
LOGP = np.minimum(OLD + 0.5 * RNG.normal(size=(B, S)), -0.01)
SAMPLING = OLD + 0.3 * RNG.normal(size=(B, S))
ADVANTAGES = np.array([1.0, -0.5, 0.0, -1.2, 0.7, -0.3])
CONFIGS = {
    "dppo_tv": Dppo(epsilon_low=0.05, epsilon_high=0.1, delta=1.5),
    "dppo_tv, no delta": Dppo(epsilon_low=0.05, epsilon_high=0.1),
    "dppo_kl": Dppo(name="dppo_kl", epsilon_low=0.01, epsilon_high=0.02),
    "gmpo": Gmpo(epsilon_low=0.1, epsilon_high=0.2),
    "vespo": Vespo(),
}


def numpy_loss(config: ObjectiveConfig, logp: np.ndarray, held: np.ndarray) -> np.ndarray:
    """The definitions, one token at a time; what the definition holds constant is taken at `held`."""
    out = np.zeros((B, S))
    for b in range(B):
        tokens, a = np.flatnonzero(MASK[b]), ADVANTAGES[b]
        rho = {t: np.exp(logp[b, t] - OLD[b, t]) for t in tokens}
        rho_held = {t: np.exp(held[b, t] - OLD[b, t]) for t in tokens}
        for t in tokens:
            if config.name == "gmpo":
                bounded = [
                    min(rho[s], np.exp(config.epsilon_high)) if a > 0 else max(rho[s], np.exp(-config.epsilon_low))
                    for s in tokens
                ]
                out[b, t] = -(np.prod(bounded) ** (1 / len(tokens))) * a
            elif config.name == "vespo":
                w = np.prod(list(rho_held.values()))
                k, decay = (2.0, 3.0) if a >= 0 else (3.0, 2.0)
                out[b, t] = -(w**k) * np.exp(decay * (1 - w)) * a * logp[b, t]
            else:
                p, q = np.exp(held[b, t]), np.exp(OLD[b, t])
                apart = (
                    abs(p - q) if config.name == "dppo_tv" else q * np.log(q / p) + (1 - q) * np.log((1 - q) / (1 - p))
                )
                up, down = (
                    a > 0 and p > q and apart > config.epsilon_high,
                    a < 0 and p < q and apart > config.epsilon_low,
                )
                out[b, t] = -(not up and not down) * min(rho_held[t], config.delta or np.inf) * a * logp[b, t]
    return out


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_both_implementations_are_the_definition_and_its_derivative(config, x64):
    """Garbage in masked places, weights of their own for every token; central differences."""
    weights, garbage = RNG.normal(size=(B, S)), np.where(MASK, 0.0, np.nan)

    def total(logp):
        return jnp.sum(weights * surrogates.surrogate(logp + garbage, OLD + garbage, ADVANTAGES, MASK, config))

    actual, gradient = jax.value_and_grad(total)(jnp.asarray(LOGP))
    expected = numpy_loss(config, LOGP, LOGP)
    # verl's 1e-8 in the divergence moves no token across its bound here
    assert abs(actual - (weights * expected).sum()) < 1e-12
    leaf = torch.tensor(LOGP, requires_grad=True)
    tensors = {name: torch.from_numpy(x) for name, x in (("mask_BT", MASK), ("advantages_B", ADVANTAGES))}
    theirs = torch_terms(config, logp_BT=leaf + torch.from_numpy(garbage), old_logp_BT=torch.from_numpy(OLD), **tensors)
    (torch.from_numpy(weights) * theirs.policy_BT).sum().backward()
    np.testing.assert_allclose(theirs.policy_BT.detach().numpy(), expected, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(gradient, leaf.grad.numpy(), rtol=1e-11, atol=1e-13)
    step = 1e-6
    for b, t in np.argwhere(MASK > 0):
        bump = np.zeros((B, S))
        bump[b, t] = step
        slope = (numpy_loss(config, LOGP + bump, LOGP) - numpy_loss(config, LOGP - bump, LOGP)) / (2 * step)
        assert abs(gradient[b, t] - (weights * slope).sum()) < 1e-6
    assert np.abs(gradient).max() > 0.1 and (np.asarray(gradient)[MASK == 0] == 0).all()


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_on_policy_each_has_the_policy_gradient(config, x64):
    """-A on every token; `gmpo` gives each its sequence's loss, whose gradients add up to that."""
    gradient = jax.grad(lambda x: jnp.sum(surrogates.surrogate(x, LOGP, ADVANTAGES, MASK, config)))(LOGP)
    np.testing.assert_allclose(gradient, -ADVANTAGES[:, None] * MASK, atol=1e-12)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_both_count_the_same_tokens_as_clipped(config, x64):
    low, high = surrogates.clipped(jnp.asarray(LOGP - OLD), jnp.asarray(LOGP), ADVANTAGES[:, None], config)
    arrays = {"logp_BT": LOGP, "old_logp_BT": OLD, "mask_BT": MASK, "advantages_B": ADVANTAGES}
    theirs = torch_terms(config, **{name: torch.from_numpy(x) for name, x in arrays.items()})
    np.testing.assert_array_equal(low * MASK, theirs.clipped_low_BT.numpy())
    np.testing.assert_array_equal(high * MASK, theirs.clipped_high_BT.numpy())
    acts = config.name != "vespo"
    assert (float((low * MASK).sum()) > 0) == acts and (float((high * MASK).sum()) > 0) == acts


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("far", [60.0, -60.0])
def test_ratios_far_off_stay_finite_and_certain_tokens_too(config, far):
    """float32; a probability of exactly 1 before and after has no other token to compare."""
    old = jnp.zeros((3, 4), jnp.float32).at[:2].set(-70.0)
    logp = old.at[:2].add(far)
    advantages, mask = jnp.float32([1.0, -1.0, 1.0]), jnp.ones((3, 4), jnp.float32)
    config = config.model_copy(update={"delta": 1.5} if config.name.startswith("dppo") else {})
    value, gradient = jax.value_and_grad(lambda x: jnp.sum(surrogates.surrogate(x, old, advantages, mask, config)))(
        logp
    )
    assert np.isfinite(value) and np.isfinite(gradient).all()


@pytest.mark.parametrize("name", surrogates.SURROGATES)
def test_a_ratio_beyond_float32_breaks_no_token_whose_loss_does_not_depend_on_it(name):
    """exp(119) is infinite there, and 0 times that NaN: an advantage of 0 has no loss, one above 0 a bounded or a large one."""
    config, shape = objective_of(name=name), (2, 4)
    old, logp, mask = (np.full(shape, value, np.float32) for value in (-120.0, -1.0, 1.0))
    advantages = np.float32([0.0, 1.0])
    ours = jax.grad(lambda x: jnp.sum(surrogates.surrogate(x, old, advantages, mask, config)))(jnp.asarray(logp))
    leaf = torch.tensor(logp, requires_grad=True)
    tensors = {"mask_BT": mask, "advantages_B": advantages, "old_logp_BT": old}
    terms = torch_terms(config, logp_BT=leaf, **{key: torch.from_numpy(x) for key, x in tensors.items()})
    terms.policy_BT.sum().backward()
    assert leaf.grad is not None
    for actual in (np.asarray(ours), leaf.grad.numpy(), terms.policy_BT.detach().numpy(), terms.rho_BT.numpy()):
        assert np.isfinite(actual).all()
    assert (np.asarray(ours)[0] == 0).all() and (leaf.grad.numpy()[0] == 0).all()


def test_dppo_bounds_probabilities_where_clip_bounds_their_ratio(x64):
    """A rare token eight times as likely moves on; a likely one by a quarter more does not. With clip the other way round."""
    p, q = np.array([[0.008], [0.75]]), np.array([[0.001], [0.6]])
    dppo = Dppo(epsilon_high=0.1)
    ones = np.ones((2, 1))
    for config, expected in ((dppo, [-8.0, 0.0]), (Clip(epsilon_high=0.3), [0.0, -1.25])):
        gradient = jax.grad(lambda x, c=config: jnp.sum(surrogates.surrogate(x, np.log(q), ones[:, 0], ones, c)))(
            np.log(p)
        )
        np.testing.assert_allclose(gradient[:, 0], expected, rtol=1e-12)


@pytest.mark.default_cases("vespo")
@pytest.mark.parametrize(
    "config", [CONFIGS["gmpo"], CONFIGS["vespo"], CONFIGS["dppo_kl"]], ids=["gmpo", "vespo", "dppo_kl"]
)
def test_any_cut_into_micro_batches_sums_to_the_same_loss_and_gradient(config, x64):
    weights = objective.aggregation_weights(jnp.asarray(MASK), "grpo", 9)
    config = config.model_copy(
        update={} if config.name == "vespo" else {"mismatch_cap": 1.5, "mismatch_mode": "sequence_mask"}
    )

    def loss(logp, rows):
        arrays = (x[rows] for x in (OLD, LOGP - 0.1, SAMPLING, ADVANTAGES, MASK, weights, MASK))
        terms = TokenTerms(*arrays, jnp.asarray(0.1), 0.0, config, KLConfig())
        return jnp.sum(terms.loss(logp[rows], logp[rows]))

    whole, whole_gradient = jax.value_and_grad(loss)(LOGP, np.arange(B))
    for cuts in (2, 3, 6):
        parts = [jax.value_and_grad(loss)(LOGP, rows) for rows in np.split(np.arange(B), cuts)]
        assert abs(sum(value for value, _ in parts) - whole) < 1e-12
        np.testing.assert_allclose(sum(gradient for _, gradient in parts), whole_gradient, rtol=1e-12, atol=1e-15)


# mismatch modes -------------------------------------------------------------------------------------------------

MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


@pytest.mark.parametrize("floor", [None, 0.8])
@pytest.mark.parametrize("mode", MODES)
def test_mismatch_weights_are_their_definition_capped_or_masked_and_constant(mode, floor, x64):
    config = Clip(mismatch_cap=1.25, mismatch_floor=floor, mismatch_mode=mode)
    garbage = np.where(MASK, 0.0, np.inf)
    actual = objective.mismatch_weights(jnp.asarray(OLD + garbage), jnp.asarray(SAMPLING - garbage), MASK, config)
    low = floor or 0.0
    expected, beyond = np.zeros((B, S)), 0
    for b, t in np.argwhere(MASK > 0):
        row = np.exp(OLD[b] - SAMPLING[b])
        ratio = row[t] if mode.startswith("token") else math.prod(row[MASK[b] > 0])
        beyond += ratio > 1.25 or ratio < low
        retained = ratio if low <= ratio <= 1.25 else 0.0
        expected[b, t] = min(max(ratio, low), 1.25) if mode.endswith("truncate") else retained
    np.testing.assert_allclose(actual * MASK, expected, rtol=1e-12)
    assert 2 < beyond < MASK.sum() - 2, "some are beyond a bound and some are not"
    gradient = jax.grad(lambda old: jnp.sum(objective.mismatch_weights(old, SAMPLING, MASK, config)))(jnp.asarray(OLD))
    assert (gradient == 0).all()


@pytest.mark.parametrize("mode", MODES)
def test_a_sampler_that_agrees_weighs_every_token_1(mode):
    config = Clip(mismatch_cap=1.25, mismatch_floor=0.8, mismatch_mode=mode)
    assert (objective.mismatch_weights(jnp.asarray(OLD), jnp.asarray(OLD), MASK, config) == 1).all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mismatch_mode": "token_mask"}, "objective.mismatch_mode token_mask needs objective.mismatch_cap"),
        ({"mismatch_floor": 0.5}, "objective.mismatch_floor 0.5 needs objective.mismatch_cap"),
        (
            {"mismatch_floor": 2.0, "mismatch_cap": 2.0},
            "objective.mismatch_floor 2.0 must be below objective.mismatch_cap 2.0",
        ),
        ({"name": "vespo", "mismatch_cap": 2.0}, "objective.mismatch_cap 2.0 is of objective.name"),
        ({"name": "gmpo", "entropy_quantile": 0.5}, "objective.entropy_quantile 0.5 is of objective.name"),
        *(
            (
                {"name": name, "importance_level": "sequence"},
                f"importance_level sequence is of objective.name clip, cispo, sapo; {name}",
            )
            for name in ("dppo_tv", "dppo_kl", "gmpo", "vespo", "reinforce")
        ),
    ],
    ids=str,
)
def test_settings_that_do_not_go_together_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        tiny_config(objective=settings)


def test_what_is_of_whole_sequences_is_not_fused():
    whole = [{"name": "gmpo"}, {"name": "vespo"}, {"importance_level": "sequence"}]
    whole += [{"mismatch_cap": 2.0, "mismatch_mode": mode} for mode in MODES[2:]]
    tokens = [{}, {"name": "dppo_kl"}, *({"mismatch_cap": 2.0, "mismatch_mode": mode} for mode in MODES[:2])]
    assert all(objective_of(**settings).of_sequences for settings in whole)
    assert not any(objective_of(**settings).of_sequences for settings in tokens)
