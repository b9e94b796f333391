"""Log-probabilities and entropies from hidden states: the definition, for every implementation."""

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
    for found, wanted in zip(grads, expected_grads, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-10, atol=1e-12)
    assert np.abs(grads[1][:VOCAB]).max() > 0.1 and (grads[1][VOCAB:] == 0).all(), "padding rows learn nothing"


@pytest.mark.parametrize("name", LM_HEADS)
def test_bfloat16_hidden_states_give_float32_results_close_to_exact(name):
    hidden = jnp.asarray(HIDDEN, jnp.bfloat16)
    logp, entropy = LM_HEADS[name](
        hidden, jnp.asarray(EMBEDDING, jnp.float32), TARGETS, vocab_size=VOCAB, temperature=1.0
    )
    assert logp.dtype == entropy.dtype == jnp.float32
    exact, _ = _definition(jnp.asarray(HIDDEN), jnp.asarray(EMBEDDING), 1.0)
    # bfloat16 keeps 8 bits: logits of size 10 are off by up to 0.04, and their rounding again as much
    assert np.abs(logp - exact).max() < 0.1
