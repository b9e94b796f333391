"""Objectives, KL estimators and aggregations against the definitions, written out in NumPy float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import torch_ref.objective
from jax_grpo import objective
from jax_grpo.config.learning import KLConfig
from jax_grpo.config.objectives import OBJECTIVES, Cispo, Clip, Sapo, objective_of
from jax_grpo.loss import TokenTerms
from jax_grpo.objective import surrogates
from jax_grpo.objective.masking import masked_mean, masked_quantile

RNG = np.random.default_rng(0)
B, S = 6, 7
MASK = (np.arange(S) < np.array([7, 1, 3, 5, 2, 6])[:, None]).astype(np.float64)
OLD = -RNG.exponential(2.0, (B, S))
LOGP = OLD + 0.4 * RNG.normal(size=(B, S))
REF = LOGP + 0.5 * RNG.normal(size=(B, S))
ADVANTAGES = np.array([1.0, -0.5, 0.3, -1.2, 0.7, -0.3])

CAPPED = Clip(mismatch_cap=2.0)
LEVELS = ("token", "sequence")


def terms_of(old, ref, advantages, mask, config, kl, *, weight=1.0, policy_weight=None, beta=0.1) -> TokenTerms:
    """Terms without sampling log-probabilities; by default every token weighs 1."""
    policy_weight = mask if policy_weight is None else policy_weight
    return TokenTerms(old, ref, None, advantages, mask, weight, policy_weight, jnp.asarray(beta), 0.0, config, kl)


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


@pytest.mark.parametrize(
    "misshapen",
    [
        lambda: surrogates.surrogate(LOGP, OLD[:1], ADVANTAGES, MASK, Clip()),
        lambda: surrogates.surrogate(LOGP, OLD, ADVANTAGES[:, None], MASK, Clip()),
        lambda: surrogates.surrogate(LOGP, OLD, ADVANTAGES[:1], MASK, Clip()),
        lambda: objective.kl_per_token(LOGP, REF[:, :1], MASK, "k3"),
        lambda: objective.mismatch_weights(OLD[:1], LOGP, MASK, CAPPED),
        lambda: objective.top_entropy_mask(OLD, MASK[:1], 0.5),
        lambda: objective.aggregation_weights(jnp.asarray(MASK[0]), "dapo", 9),
        lambda: terms_of(OLD, REF, ADVANTAGES, MASK, Clip(), KLConfig()).loss(LOGP, LOGP[:1]),
    ],
)
def test_arrays_that_would_be_broadcast_are_refused_in_one_line(misshapen):
    with pytest.raises(AssertionError, match=r"shape|rank") as refusal:
        misshapen()
    assert "\n" not in str(refusal.value)


# Every objective with a ratio of tokens, and those that have one of sequences with that.
AT_LEVEL = [(name, "token") for name in ("clip", "cispo", "sapo", "reinforce")]
AT_LEVEL += [(name, "sequence") for name in ("clip", "cispo", "sapo")]


def level_of(name: str, level: str) -> dict[str, str]:
    """The setting of the level, for an objective that has one."""
    return {"importance_level": level} if "importance_level" in OBJECTIVES[name].model_fields else {}


@pytest.mark.parametrize(
    ("name", "level", "delta"), [(*case, None) for case in AT_LEVEL] + [("clip", level, 1.5) for level in LEVELS]
)
def test_surrogate_is_its_definition(name, level, delta, x64):
    # epsilon_high is the ratio's excess over 1 for `clip` and the weight's bound itself for `cispo`
    high = {"clip": {"epsilon_high": 0.28, "delta": delta}, "cispo": {"epsilon_high": 1.28}}.get(name, {})
    config = objective_of(name=name, **high, **level_of(name, level))
    actual = surrogates.surrogate(LOGP, OLD, ADVANTAGES, MASK, config)
    np.testing.assert_allclose(actual, numpy_surrogate(name, level, LOGP, delta), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("name", "level"), [case for case in AT_LEVEL if case[0] != "cispo"])
def test_gradient_is_the_numerical_derivative_of_the_definition(name, level, x64):
    high = {"epsilon_high": 0.28} if name == "clip" else {}
    config = objective_of(name=name, **high, **level_of(name, level))
    weights = RNG.normal(size=(B, S))
    actual = jax.grad(lambda logp: jnp.sum(weights * surrogates.surrogate(logp, OLD, ADVANTAGES, MASK, config)))(LOGP)
    step = 1e-6
    for b, s in np.argwhere(MASK > 0):
        bump = np.zeros((B, S))
        bump[b, s] = step
        difference = numpy_surrogate(name, level, LOGP + bump) - numpy_surrogate(name, level, LOGP - bump)
        assert abs(actual[b, s] - np.sum(weights * difference) / (2 * step)) < 1e-6
    assert np.abs(actual).max() > 0.1
    assert np.all(np.asarray(actual)[MASK == 0] == 0)


def test_both_clip_sides_stop_the_gradient_only_where_the_advantage_pushes_outwards(x64):
    config = Clip(epsilon_low=0.2, epsilon_high=0.2)
    logp = jnp.log(jnp.array([[1.5], [0.5], [1.5], [0.5]]))
    advantages = jnp.array([1.0, -1.0, -1.0, 1.0])
    grad = jax.grad(
        lambda x: jnp.sum(surrogates.surrogate(x, jnp.zeros((4, 1)), advantages, jnp.ones((4, 1)), config))
    )(logp)
    np.testing.assert_allclose(grad[:, 0], [0.0, 0.0, 1.5, -0.5], atol=1e-12)


def test_delta_stops_the_gradient_of_a_bad_token_that_became_likely(x64):
    config = Clip(epsilon_low=0.2, epsilon_high=0.2, delta=2.0)
    logp, ones = jnp.log(jnp.array([[1.5], [1.99], [2.01], [5.0]])), jnp.ones((4, 1))

    def loss(x):
        return jnp.sum(surrogates.surrogate(x, jnp.zeros((4, 1)), -ones[:, 0], ones, config))

    # A = -1: the loss is rho and so is its derivative in logp, until delta holds both
    assert abs(loss(logp) - (1.5 + 1.99 + 2 + 2)) < 1e-12
    np.testing.assert_allclose(jax.grad(loss)(logp)[:, 0], [1.5, 1.99, 0, 0], atol=1e-12)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_cispo_differentiates_logp_and_not_its_weight(level, x64):
    config = Cispo(epsilon_high=1.28, importance_level=level)
    grad = jax.grad(lambda x: jnp.sum(surrogates.surrogate(x, OLD, ADVANTAGES, MASK, config)))(LOGP)
    mean = ((LOGP - OLD) * MASK).sum(1, keepdims=True) / MASK.sum(1, keepdims=True)
    rho = np.exp(LOGP - OLD if level == "token" else np.broadcast_to(mean, MASK.shape))
    expected = -np.minimum(rho, 1.28) * ADVANTAGES[:, None] * MASK
    np.testing.assert_allclose(grad, expected, rtol=1e-12)
    assert (rho > 1.28)[MASK > 0].any() and (rho < 1.28)[MASK > 0].any(), "both sides of the cap are seen"


def test_sapo_gates_each_sign_with_its_own_temperature(x64):
    config = Sapo(tau=(1.0, 2.0))
    advantages, old, ones = jnp.array([1.0, -1.0, 0.0]), jnp.zeros((3, 1)), jnp.ones((3, 1))

    def loss(x):
        return surrogates.surrogate(x, old, advantages, ones, config)[:, 0]

    # on policy the gate's slope is 1 for any tau: the gradient is the policy gradient's, -A
    np.testing.assert_allclose(jax.grad(lambda x: loss(x).sum())(old)[:, 0], [-1, 1, 0], atol=1e-12)
    # off policy, d/dlogp = -4 A rho s (1 - s), s = sigmoid(tau (rho - 1))
    s = 1 / (1 + np.exp(-np.array([1.0, 2.0, 2.0])))
    expected = -4 * np.array([1.0, -1.0, 0.0]) * 2 * s * (1 - s)
    np.testing.assert_allclose(jax.grad(lambda x: loss(x).sum())(old + np.log(2))[:, 0], expected, atol=1e-12)


@pytest.mark.parametrize("name", ["clip", "cispo", "sapo", "reinforce"])
def test_on_policy_every_objective_has_the_policy_gradient(name, x64):
    """rho = 1: the gradient is -A on every token, at both levels' sum over a sequence."""
    for level in LEVELS:
        high = {"epsilon_high": 1.28} if name in ("clip", "cispo") else {}
        config = objective_of(name=name, **high, **level_of(name, level))
        grad = jax.grad(lambda x, c=config: jnp.sum(surrogates.surrogate(x, LOGP, ADVANTAGES, MASK, c)))(LOGP)
        np.testing.assert_allclose(grad, -ADVANTAGES[:, None] * MASK, atol=1e-12)


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


@pytest.mark.default_cases(
    "cispo-dapo-sequence",
    "clip-dapo-token",
    "clip-grpo-sequence",
    "clip-luspo-sequence",
    "reinforce-dapo-token",
    "sapo-dapo-token",
)
@pytest.mark.parametrize(
    ("name", "aggregation", "level"),
    [("clip", aggregation, level) for aggregation in objective.AGGREGATIONS for level in LEVELS]
    + [(name, "dapo", level) for name in ("cispo", "sapo") for level in LEVELS]
    + [("reinforce", "dapo", "token")],
)
def test_any_cut_into_micro_batches_sums_to_the_same_loss_and_gradient(name, aggregation, level, x64):
    """The weights are of the whole batch; its rows, cut 1, 2, 4 and 8 times, add up to the single loss."""
    config, kl = objective_of(name=name, **level_of(name, level)), KLConfig(importance_corrected=True)
    rng = np.random.default_rng(1)
    old = -rng.exponential(2.0, (8, S))
    logp, ref = old + 0.4 * rng.normal(size=old.shape), old + 0.4 * rng.normal(size=old.shape)
    mask = (np.arange(S) < np.array([7, 1, 3, 0, 2, 6, 4, 5])[:, None]).astype(np.float64)
    advantages = rng.normal(size=8)
    weights = objective.aggregation_weights(jnp.asarray(mask), aggregation, 9)

    def loss(logp, rows):
        terms = terms_of(old[rows], ref[rows], advantages[rows], mask[rows], config, kl, weight=weights[rows])
        return jnp.sum(terms.loss(logp[rows], logp[rows]))

    whole, whole_grad = jax.value_and_grad(loss)(logp, np.arange(8))
    assert np.abs(whole_grad).max() > 1e-3
    for cuts in (2, 4, 8):
        parts = [jax.value_and_grad(loss)(logp, rows) for rows in np.split(np.arange(8), cuts)]
        assert abs(sum(value for value, _ in parts) - whole) < 1e-12
        np.testing.assert_allclose(sum(grad for _, grad in parts), whole_grad, rtol=1e-12, atol=1e-15)


def test_more_padding_changes_no_loss_and_no_gradient(x64):
    config, kl = Clip(importance_level="sequence"), KLConfig()
    pad = lambda x: np.concatenate([x, np.full((B, 4), 7.0)], axis=1)  # noqa: E731
    for aggregation in objective.AGGREGATIONS:

        def loss(logp, old, ref, mask, aggregation=aggregation):
            weights = objective.aggregation_weights(jnp.asarray(mask), aggregation, 9)
            return jnp.sum(terms_of(old, ref, ADVANTAGES, mask, config, kl, weight=weights).loss(logp, logp))

        value, grad = jax.value_and_grad(loss)(LOGP, OLD, REF, MASK)
        padded_mask = np.concatenate([MASK, np.zeros((B, 4))], axis=1)
        padded, padded_grad = jax.value_and_grad(loss)(pad(LOGP), pad(OLD), pad(REF), padded_mask)
        assert abs(value - padded) < 1e-14, aggregation
        np.testing.assert_allclose(padded_grad, np.pad(grad, ((0, 0), (0, 4))), rtol=1e-12, atol=1e-16)


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("estimator", objective.KL_ESTIMATORS)
def test_token_losses_add_beta_times_the_kl_and_weigh_the_policy_alone(estimator, level, corrected, x64):
    config, kl = Clip(importance_level=level), KLConfig(estimator=estimator, importance_corrected=corrected)
    policy_weights = RNG.uniform(size=(B, S))
    terms = terms_of(OLD, REF, ADVANTAGES, MASK, config, kl, policy_weight=policy_weights, beta=0.3)
    d = REF - LOGP
    values = {"k1": -d, "k2": d**2 / 2, "k3": np.exp(d) - 1 - d}[estimator]
    mean = ((LOGP - OLD) * MASK).sum(1, keepdims=True) / MASK.sum(1, keepdims=True)
    rho = np.exp(LOGP - OLD if level == "token" else mean) if corrected else 1.0
    policy = surrogates.surrogate(LOGP, OLD, ADVANTAGES, MASK, config)
    expected = policy_weights * policy + 0.3 * values * rho * MASK
    np.testing.assert_allclose(terms.loss(LOGP, LOGP), expected, rtol=1e-10, atol=1e-12)


def test_an_all_masked_row_and_an_empty_mask_give_finite_weights():
    for name in objective.AGGREGATIONS:
        assert np.isfinite(objective.aggregation_weights(jnp.zeros((2, 3)), name, 3)).all()


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 1e30])
@pytest.mark.parametrize(
    ("name", "level"),
    [(name, level) for name in surrogates.SURROGATES for level in LEVELS if level == "token" or level_of(name, level)],
)
def test_masked_positions_may_hold_anything(name, level, poison):
    garbage = jnp.where(MASK > 0, LOGP, poison).astype(jnp.float32)
    config, kl = objective_of(name=name, **level_of(name, level)), KLConfig(importance_corrected=True)

    def loss(logp, old, ref):
        return jnp.sum(terms_of(old, ref, ADVANTAGES, jnp.asarray(MASK), config, kl).loss(logp, logp))

    clean = jnp.asarray(LOGP, jnp.float32), jnp.asarray(OLD, jnp.float32), jnp.asarray(REF, jnp.float32)
    value, grad = jax.value_and_grad(loss)(
        garbage, jnp.where(MASK > 0, clean[1], poison), jnp.where(MASK > 0, clean[2], -poison)
    )
    expected, expected_grad = jax.value_and_grad(loss)(*clean)
    assert value == expected
    np.testing.assert_array_equal(grad, np.where(MASK > 0, expected_grad, 0))


def test_mismatch_weights_are_capped_and_constant():
    sampling = OLD - np.array([[0.0], [5.0], [0.1], [-0.1], [0.0], [-5.0]])
    weights = objective.mismatch_weights(OLD, sampling, MASK, CAPPED)
    np.testing.assert_allclose(weights[:, 0], [1, 2, np.exp(0.1), np.exp(-0.1), 1, np.exp(-5)], rtol=1e-5)
    grad = jax.grad(lambda old: jnp.sum(objective.mismatch_weights(old, sampling, MASK, CAPPED)))(jnp.asarray(OLD))
    assert (grad == 0).all()


def test_top_entropy_mask_keeps_the_upper_quantile_of_real_tokens():
    entropy = jnp.array([[1.0, 2.0, 3.0, 100.0], [4.0, 5.0, 100.0, 100.0]])
    mask = jnp.array([[1.0, 1, 1, 0], [1.0, 1, 0, 0]])
    assert objective.top_entropy_mask(entropy, mask, 0.6).tolist() == [[0, 0, 0, 0], [1, 1, 0, 0]]


def test_entropies_at_the_quantile_are_kept_whatever_their_rounding(x64):
    """Tokens of one context are tied: a group's first ones always are."""
    rng, mask = np.random.default_rng(0), np.ones((5, 6))
    entropy = np.tile([0.5, 0.5, 2.0, 2.0, 2.0, 3.0], (5, 1))
    for noise in (0.0, 1e-15, 1e-7):
        noisy = entropy + noise * rng.normal(size=entropy.shape)
        ours = objective.top_entropy_mask(jnp.asarray(noisy), jnp.asarray(mask), 0.5)
        theirs = torch_ref.objective.top_entropy_mask(torch.from_numpy(noisy), torch.from_numpy(mask), 0.5)
        np.testing.assert_array_equal(ours, entropy >= 2)
        np.testing.assert_array_equal(theirs, entropy >= 2)


@pytest.mark.slow
def test_poison_outside_the_mask_reaches_no_weight_and_no_statistic():
    for poison in (np.nan, np.inf, -np.inf):
        dirty = jnp.where(MASK > 0, LOGP, poison)
        clean = jnp.where(MASK > 0, LOGP, 0.0)
        for function in (
            lambda x: objective.top_entropy_mask(x, jnp.asarray(MASK), 0.7),
            lambda x: objective.mismatch_weights(x, x, jnp.asarray(MASK), CAPPED),
            lambda x: masked_mean(x, MASK),
            lambda x: masked_quantile(x, MASK, 0.95),
        ):
            np.testing.assert_array_equal(function(dirty), function(clean))
