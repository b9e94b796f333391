"""Products over tokens without the padding among them: the same rows there and back, the same gradients, sizes in quarters."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import config, grouped_tokens, relative_error, tiny_model, training_batch

from jax_grpo.arrays.token_rows import TokenRows
from jax_grpo.batch import without_padding
from jax_grpo.update import make_gradient, make_score


def masks(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Of 3 prompts of up to 5 tokens and 2 completions each of up to 4, holes among them."""
    rng = np.random.default_rng(seed)
    return rng.random((3, 5)) < 0.6, rng.random((3, 2, 4)) < 0.6


@pytest.mark.parametrize("more", [0, 1, 30])
@pytest.mark.parametrize("seed", [0, 1])
def test_real_tokens_have_the_first_rows_in_their_order_and_come_back(seed, more):
    prompt_PT, completion_PGC = masks(seed)
    real = int(prompt_PT.sum() + completion_PGC.sum())
    rng = np.random.default_rng(seed + 9)
    x_PTX, x_PGCX = (rng.normal(size=size).astype(np.float32) for size in ((3, 5, 2), (3, 2, 4, 2)))
    rows = TokenRows(jnp.asarray(prompt_PT), jnp.asarray(completion_PGC), real + more)
    joined = rows.join(jnp.asarray(x_PTX), jnp.asarray(x_PGCX))
    np.testing.assert_array_equal(joined[:real], np.concatenate([x_PTX[prompt_PT], x_PGCX[completion_PGC]]))
    assert joined.shape == (real + more, 2) and not joined[real:].any()
    back_PTX, back_PGCX = rows.split(joined)
    np.testing.assert_array_equal(back_PTX, np.where(prompt_PT[..., None], x_PTX, 0))
    np.testing.assert_array_equal(back_PGCX, np.where(completion_PGC[..., None], x_PGCX, 0))


def test_cotangents_go_where_the_rows_came_from(x64):
    """Both maps are linear: <weights, map(moved)> is <cotangents of the weights, moved>."""
    prompt_PT, completion_PGC = (jnp.asarray(mask) for mask in masks(2))
    rows = TokenRows(prompt_PT, completion_PGC, int(prompt_PT.sum() + completion_PGC.sum()) + 2)
    rng = np.random.default_rng(0)
    given = jnp.asarray(rng.normal(size=(3, 5, 2))), jnp.asarray(rng.normal(size=(3, 2, 4, 2)))
    for linear, x in ((rows.join, given), (rows.split, (rows.join(*given) + 1,))):
        out, pull = jax.vjp(linear, *x)
        weights = jax.tree.map(lambda y: jnp.asarray(rng.normal(size=y.shape)), out)
        moved = jax.tree.map(lambda y: jnp.asarray(rng.normal(size=y.shape)), x)
        inner = sum(jnp.vdot(w, y) for w, y in zip(*map(jax.tree.leaves, (weights, linear(*moved))), strict=True))
        pulled = sum(jnp.vdot(g, y) for g, y in zip(pull(weights), moved, strict=True))
        np.testing.assert_allclose(pulled, inner, rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [1, 2, 8])  # the last cuts groups
def test_a_batch_without_its_padding_has_the_same_scores_and_gradients(micro_batches, x64):
    graphdef, params = tiny_model(jnp.float64)
    batch = training_batch(graphdef, params, dtype=jnp.float64)
    short = batch.tokens.completion_mask_PGC & (jnp.arange(6) < 2)
    batch = dataclasses.replace(
        batch, tokens=dataclasses.replace(batch.tokens, completion_mask_PGC=short), mask_BS=short.reshape(16, 6)
    )
    packed = without_padding(batch, micro_batches)
    assert packed.tokens.rows is not None
    learning = config(update={"micro_batches": micro_batches}).learning()
    gradient = jax.jit(make_gradient(graphdef, learning))
    loss, grads, logp_BS, _ = gradient(params, batch, jnp.float64(0.04))
    actual = gradient(params, packed, jnp.float64(0.04))
    assert relative_error(grads, actual[1]) < 1e-12 and abs(loss - actual[0]) < 1e-12 * abs(loss)
    real = batch.mask_BS == 1
    chex.assert_trees_all_close(logp_BS[real], actual[2][real], rtol=1e-12)
    scores = [make_score(graphdef, learning)(params, which)[0] for which in (batch, packed)]
    chex.assert_trees_all_close(scores[0][real], scores[1][real], rtol=1e-12)
    assert not any(score[~real].any() for score in scores), "0 at padding, whether it was left out or not"


def test_rows_are_quarters_that_hold_the_fullest_part():
    tokens = grouped_tokens()
    graphdef, params = tiny_model()
    batch = training_batch(graphdef, params)

    def rows(completions: int, parts: int) -> int | None:
        """Of prompts of one token, with so many completions of the first prompt that are full, and else of one token."""
        prompt = jnp.zeros_like(tokens.prompt_mask_PT).at[:, -1].set(1)
        completion = jnp.ones_like(tokens.completion_mask_PGC).at[..., 1:].set(0).at[0, :completions].set(1)
        given = dataclasses.replace(tokens, prompt_mask_PT=prompt, completion_mask_PGC=completion)
        return without_padding(dataclasses.replace(batch, tokens=given), parts).tokens.rows

    # 4 prompts of 8 columns, 16 completions of 5 that are read: 112 rows. One token each are 20.
    assert [rows(0, 1), rows(2, 1), rows(3, 1)] == [28, 28, 56]
    # A part of one prompt has 28; the first has 5 tokens and 4 more for each full completion.
    assert [rows(n, 4) for n in range(5)] == [7, 14, 14, 21, 21]
    full = dataclasses.replace(tokens, completion_mask_PGC=jnp.ones_like(tokens.completion_mask_PGC))
    full = dataclasses.replace(full, prompt_mask_PT=jnp.ones_like(tokens.prompt_mask_PT))
    assert without_padding(dataclasses.replace(batch, tokens=full), 1).tokens.rows is None
