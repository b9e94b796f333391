"""Log-probabilities and entropies from hidden states: the definition, for every implementation."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_grpo.lm_head import LM_HEADS

RNG = np.random.default_rng(0)
HIDDEN, EMBEDDING = RNG.normal(size=(2, 5, 8)), RNG.normal(size=(128, 8))
TARGETS, VOCAB = RNG.integers(0, 37, (2, 5)), 37


def _definition(hidden, embedding, temperature):
    """log softmax over the first VOCAB columns only, and -sum p log p."""
    logits = hidden @ embedding[:VOCAB].T / temperature
    logp = logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    return jnp.take_along_axis(logp, TARGETS[..., None], -1)[..., 0], -jnp.sum(jnp.exp(logp) * logp, -1)


@pytest.mark.default_cases("materialised-0.7", "materialised-1.0")
@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.5])
@pytest.mark.parametrize("name", LM_HEADS)
def test_values_and_gradients_are_the_definition(name, temperature, x64):
    weights = RNG.normal(size=(2, 2, 5))

    def scalar(function):
        def loss(hidden, embedding):
            logp, entropy = function(hidden, embedding)
            return jnp.sum(weights[0] * logp + weights[1] * entropy)

        return jax.value_and_grad(loss, argnums=(0, 1))(jnp.asarray(HIDDEN), jnp.asarray(EMBEDDING))

    head = LM_HEADS[name]
    value, grads = scalar(lambda h, e: head(h, e, TARGETS, vocab_size=VOCAB, temperature=temperature))
    expected, expected_grads = scalar(lambda h, e: _definition(h, e, temperature))
    assert abs(value - expected) < 1e-10
    chex.assert_trees_all_close(grads, expected_grads, rtol=1e-10, atol=1e-12)
    assert np.abs(grads[1][:VOCAB]).max() > 0.1 and (grads[1][VOCAB:] == 0).all(), "padding rows learn nothing"


@pytest.mark.parametrize("name", LM_HEADS)
def test_two_tokens_give_the_logistic_function_and_its_entropy(name, x64):
    hidden, embedding = jnp.array([[[2.0]], [[-3.0]]]), jnp.array([[1.0], [0.0], [99.0]])
    logp, entropy = LM_HEADS[name](hidden, embedding, jnp.array([[0], [1]]), vocab_size=2, temperature=0.5)
    p = 1 / (1 + np.exp(-np.array([4.0, -6.0])))
    np.testing.assert_allclose(logp[:, 0], [np.log(p[0]), np.log(1 - p[1])], rtol=1e-12)
    np.testing.assert_allclose(entropy[:, 0], -p * np.log(p) - (1 - p) * np.log(1 - p), rtol=1e-12)


@pytest.mark.parametrize("name", LM_HEADS)
def test_probabilities_of_the_vocabulary_sum_to_one_whatever_the_padding_rows_hold(name, x64):
    embedding = jnp.asarray(EMBEDDING).at[VOCAB:].set(1e3)
    every = jnp.broadcast_to(jnp.arange(VOCAB), (2, VOCAB))
    hidden = jnp.repeat(jnp.asarray(HIDDEN[:, :1]), VOCAB, axis=1)
    logp, entropy = LM_HEADS[name](hidden, embedding, every, vocab_size=VOCAB, temperature=1.0)
    np.testing.assert_allclose(jnp.exp(logp).sum(-1), 1, rtol=1e-12)
    np.testing.assert_allclose(-(jnp.exp(logp) * logp).sum(-1), entropy[:, 0], rtol=1e-12)


@pytest.mark.parametrize("name", LM_HEADS)
def test_a_uniform_distribution_has_the_logarithm_of_the_vocabulary_as_entropy(name):
    logp, entropy = LM_HEADS[name](jnp.zeros((1, 2, 8)), EMBEDDING, TARGETS[:1, :2], vocab_size=VOCAB, temperature=1.0)
    np.testing.assert_allclose(entropy, np.log(VOCAB), rtol=1e-6)
    np.testing.assert_allclose(logp, -np.log(VOCAB), rtol=1e-6)


@pytest.mark.parametrize("name", LM_HEADS)
def test_bfloat16_logits_of_gpt2s_size_are_not_rounded(name):
    """GPT-2's logits are around -100, where bfloat16's steps are 0.5; the sum in float32 of exact products is not."""
    rng = np.random.default_rng(1)
    hidden = jnp.asarray(rng.normal(size=(2, 5, 64)) + 1.0, jnp.bfloat16)
    embedding = jnp.asarray(0.4 * rng.normal(size=(128, 64)) - 1.2, jnp.bfloat16)
    logp, entropy = LM_HEADS[name](hidden, embedding, TARGETS, vocab_size=VOCAB, temperature=1.0)
    assert logp.dtype == entropy.dtype == jnp.float32
    logits = np.asarray(hidden, np.float64) @ np.asarray(embedding, np.float64)[:VOCAB].T
    assert logits.mean() < -60
    logits -= logits.max(-1, keepdims=True)
    exact = np.take_along_axis(logits, TARGETS[..., None], -1)[..., 0] - np.log(np.exp(logits).sum(-1))
    error = np.abs(logp - exact).max()
    print(f"{name}: logp error {error:.1e} (tolerance 1e-4: float32 sums of size 100; rounded logits give 0.3)")
    assert error < 1e-4


@pytest.mark.default_cases("chunked")
@pytest.mark.parametrize("name", LM_HEADS)
def test_bfloat16_gradients_keep_their_parameters_dtype_and_are_close_to_exact(name):
    """Float32 masters under bfloat16 hidden states: their gradient is float32 and more than a rounded bfloat16 one."""
    weights = jnp.asarray(np.random.default_rng(2).normal(size=(2, 5)))

    def loss(hidden, embedding):
        return jnp.sum(weights * LM_HEADS[name](hidden, embedding, TARGETS, vocab_size=VOCAB, temperature=1.0)[0])

    rounded = jnp.asarray(HIDDEN, jnp.bfloat16), jnp.asarray(EMBEDDING, jnp.bfloat16).astype(jnp.float32)
    to_hidden, to_embedding = jax.grad(loss, argnums=(0, 1))(*rounded)
    exact = jax.grad(loss, argnums=(0, 1))(rounded[0].astype(jnp.float32), rounded[1])
    assert to_hidden.dtype == jnp.bfloat16 and to_embedding.dtype == jnp.float32
    assert (to_embedding != to_embedding.astype(jnp.bfloat16).astype(jnp.float32)).any(), "rounded on the way"
    for actual, wanted in zip((to_hidden, to_embedding), exact, strict=True):
        error = np.linalg.norm(actual.astype(jnp.float32) - wanted) / np.linalg.norm(wanted)
        print(f"{name}: relative error {error:.1e} (tolerance 1e-2: the logits' gradient has bfloat16's 8 bits)")
        assert error < 1e-2
