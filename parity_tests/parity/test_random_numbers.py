"""Each token of each completion is drawn by a number of its own, and the texts are what was drawn."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from jax_grpo.model.tokenizer import Tokenizer
from jax_grpo.rollout.generate import Rollout, decode_completions, row_keys, uniforms
from jax_grpo.tasks.stop import text_stop

PROMPTS, GROUP, LENGTH = np.array([3, 8]), 3, 4


def _numbers(seed: int, step: int) -> np.ndarray:
    return np.asarray(uniforms(row_keys(seed, jnp.int32(step), PROMPTS, GROUP), LENGTH, jnp.float32))


def test_no_two_tokens_share_their_number():
    """Of no seed, iteration, prompt, sample or place in the completion: a shared one makes completions repeat each other."""
    numbers = [_numbers(seed, step) for seed, step in itertools.product((0, 1), (0, 1))]
    assert {x.shape for x in numbers} == {(2, GROUP, LENGTH)}
    together = np.concatenate([x.reshape(-1) for x in numbers])
    assert len(np.unique(together)) == len(together) and (together >= 0).all() and (together < 1).all()


def test_numbers_are_a_function_of_their_own_row():
    alone = uniforms(row_keys(1, jnp.int32(2), PROMPTS[1:], 1), LENGTH, jnp.float32)
    np.testing.assert_array_equal(
        alone[0, 0], uniforms(row_keys(1, jnp.int32(2), PROMPTS, GROUP), LENGTH, jnp.float32)[1, 0]
    )


@pytest.mark.parametrize("name", ["chess", "gpt2"])
def test_texts_are_the_tokens_under_the_mask(name):
    tokenizer = Tokenizer.load(name)
    texts = [["e2e4 e7e5", "d2d4"], ["g1f3", "a7a8q b"]]
    encoded = [[tokenizer.encode(text) for text in group] for group in texts]
    width = 1 + max(len(ids) for group in encoded for ids in group)
    ids_PGC = np.full((2, 2, width), tokenizer.encode("x")[0], np.int32)  # not padding: the mask alone says what counts
    mask_PGC = np.zeros((2, 2, width), np.int32)
    for p, g in itertools.product(range(2), range(2)):
        ids_PGC[p, g, : len(encoded[p][g])] = encoded[p][g]
        mask_PGC[p, g, : len(encoded[p][g])] = 1
    rollout = Rollout(*map(jnp.asarray, (ids_PGC, mask_PGC)), jnp.zeros(mask_PGC.shape), jnp.ones((2, 2), bool))
    assert decode_completions(rollout, tokenizer, text_stop(), [0] * 4) == [text for group in texts for text in group]
