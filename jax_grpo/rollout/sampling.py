"""From logits to one token: temperature, top-k, top-p, min-p, repetition penalty, and a draw from what is left.

Order as in Hugging Face's generation: repetition penalty, temperature, top-k, top-p, min-p. Every operation is local to a
row, and each row draws from its own key, so a token does not depend on its neighbours in the batch.
"""

import dataclasses

import jax
import jax.numpy as jnp

BLOCK = 128  # columns a draw looks at together; the padded vocabulary is a multiple of it


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Sampling settings; the defaults change nothing."""

    temperature: float = 1.0  # divides the logits; 0 means greedy
    top_k: int = 0  # keep the k most likely tokens; 0 keeps all
    top_p: float = 1.0  # keep the fewest most likely tokens that sum to at least p (Holtzman et al. 2020)
    min_p: float = 0.0  # keep tokens at least min_p times as likely as the most likely one (Nguyen et al. 2024)
    repetition_penalty: float = 1.0  # of tokens already in the prompt or completion (Keskar et al. 2019)


def penalise_repetition(logits_RV: jax.Array, seen_RV: jax.Array, penalty: float) -> jax.Array:
    """CTRL's penalty on the tokens marked in `seen_RV`: divides positive logits and multiplies negative ones.

    >>> penalise_repetition(jnp.array([[2.0, -2.0, 2.0]]), jnp.array([[True, True, False]]), 2.0).tolist()
    [[1.0, -4.0, 2.0]]
    """
    penalised_RV = jnp.where(logits_RV > 0, logits_RV / penalty, logits_RV * penalty)
    return jnp.where(seen_RV, penalised_RV, logits_RV)


def keep_likely(logits_RV: jax.Array, sampling: Sampling) -> jax.Array:
    """Logits with the tokens ruled out by top-k, top-p and min-p set to -inf.

    The vocabulary is sorted only for a top-p without top-k; with top-k, top-p looks at the k survivors.

    >>> logits = jnp.log(jnp.array([[0.5, 0.3, 0.15, 0.05]]))
    >>> for settings in (Sampling(top_k=3), Sampling(top_p=0.75), Sampling(min_p=0.5)):
    ...     print(jnp.isfinite(keep_likely(logits, settings)).tolist())
    [[True, True, True, False]]
    [[True, True, False, False]]
    [[True, True, False, False]]
    """
    vocab = logits_RV.shape[-1]
    k = min(sampling.top_k or vocab, vocab)
    if k < vocab or sampling.top_p < 1.0:
        top_RK = jax.lax.top_k(logits_RV, k)[0] if k < vocab else -jnp.sort(-logits_RV, axis=-1)
        threshold_R = top_RK[..., -1]
        if sampling.top_p < 1.0:
            probs_RK = jax.nn.softmax(top_RK, axis=-1)
            before_RK = jnp.cumsum(probs_RK, axis=-1) - probs_RK  # mass of the tokens ahead of this one
            survivors_R = jnp.sum(before_RK < sampling.top_p, axis=-1)
            threshold_R = jnp.take_along_axis(top_RK, survivors_R[..., None] - 1, axis=-1)[..., 0]
        logits_RV = jnp.where(logits_RV >= threshold_R[..., None], logits_RV, -jnp.inf)
    if sampling.min_p > 0.0:
        floor_R = jnp.max(logits_RV, axis=-1) + jnp.log(sampling.min_p)
        logits_RV = jnp.where(logits_RV >= floor_R[..., None], logits_RV, -jnp.inf)
    return logits_RV


def draw(logits_RV: jax.Array, uniform_R: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One token a row by inversion of the cumulative distribution, int32 [R], and log sum exp of the row, [R].

    Never a token whose logit is -inf. One uniform number in [0, 1) a row instead of V Gumbel draws; two levels (blocks, then
    columns), because a flat cumulative sum over 50,304 float32 terms costs more and rounds worse. V is a multiple of `BLOCK`.

    >>> logits = jnp.full((3, BLOCK), -jnp.inf).at[:, :2].set(jnp.log(jnp.array([1.0, 3.0])))
    >>> tokens, norm = draw(logits, jnp.array([0.0, 0.26, 0.99]))
    >>> tokens.tolist(), jnp.exp(norm).tolist()
    ([0, 1, 1], [4.0, 4.0, 4.0])
    """
    rows, vocab = logits_RV.shape
    top_R1 = jnp.max(logits_RV, axis=-1, keepdims=True)
    weights_RV = jnp.exp(logits_RV - top_R1)
    weights_RNK = weights_RV.reshape(rows, vocab // BLOCK, BLOCK)
    block_RN = jnp.cumsum(jnp.sum(weights_RNK, axis=-1), axis=-1)
    target_R = uniform_R * block_RN[:, -1]
    n_R = _first_above(block_RN, target_R)
    before_R = jnp.where(n_R > 0, jnp.take_along_axis(block_RN, jnp.maximum(n_R - 1, 0)[:, None], axis=1)[:, 0], 0.0)
    column_RK = jnp.cumsum(jnp.take_along_axis(weights_RNK, n_R[:, None, None], axis=1)[:, 0], axis=-1)
    token_R = n_R * BLOCK + _first_above(column_RK, target_R - before_R)
    return token_R, top_R1[:, 0] + jnp.log(block_RN[:, -1])


def _first_above(cumulative_RN: jax.Array, target_R: jax.Array) -> jax.Array:
    """First index whose cumulative weight exceeds the target: never one of zero weight.

    Rounding can leave the target at or above the last sum; it is pulled just below, which picks the last weight > 0.
    """
    last_R = cumulative_RN[:, -1]
    target_R = jnp.minimum(target_R, jnp.nextafter(last_R, jnp.zeros_like(last_R)))
    return jnp.argmax(cumulative_RN > target_R[:, None], axis=-1).astype(jnp.int32)


def sample(
    logits_RV: jax.Array, uniform_R: jax.Array, sampling: Sampling, seen_RV: jax.Array | None, vocab_size: int
) -> tuple[jax.Array, jax.Array]:
    """Draws one token a row with its random number in [0, 1): int32, and its log-probability.

    That is under softmax(logits / temperature), before penalty and truncation: the quantity that the trainer recomputes and
    differentiates, so the two can be compared. Greedy reports it at temperature 1.

    Logits are raw, float32 or wider; columns from `vocab_size` on are padding, and never sampled. `seen_RV` marks the tokens that
    count as repeated; None: no repetition penalty.

    >>> logits = jnp.zeros((1, BLOCK)).at[0, 5].set(2.0)
    >>> token, logp = sample(logits, jnp.array([0.5]), Sampling(temperature=0.0), None, vocab_size=6)
    >>> int(token[0]), round(float(logp[0]), 4)
    (5, -0.5168)
    """
    temperature = sampling.temperature or 1.0
    real_V = jnp.arange(logits_RV.shape[-1]) < vocab_size
    logits_RV = jnp.where(real_V, logits_RV, -jnp.inf)
    scaled_RV = limited_RV = logits_RV / temperature
    if seen_RV is not None:
        limited_RV = penalise_repetition(logits_RV, seen_RV, sampling.repetition_penalty) / temperature
    if sampling.temperature == 0.0:
        token_R, norm_R = jnp.argmax(limited_RV, axis=-1).astype(jnp.int32), jax.nn.logsumexp(scaled_RV, axis=-1)
    else:
        limited_RV = keep_likely(limited_RV, sampling)
        token_R, norm_R = draw(limited_RV, uniform_R)
        if limited_RV is not scaled_RV:  # else nothing was ruled out, and the draw's sum is that of all columns
            norm_R = jax.nn.logsumexp(scaled_RV, axis=-1)
    # log_softmax's value at one column: the whole array of them would be written and never read.
    return token_R, jnp.take_along_axis(scaled_RV, token_R[:, None], axis=-1)[:, 0] - norm_R
