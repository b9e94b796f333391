"""The heads that are compared: this project's, three that hold all logits, and one problem for all of them.

A variant is `loss(hidden_TH, embedding_VH, rows)`, GRPO's clipped loss summed over tokens; the benchmark differentiates it in
its first two arguments. The baselines are written as trainers write them, and the last of them as well as it can be; they take
padding rows for tokens, which costs them nothing.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_grpo.config_sections import ObjectiveConfig
from jax_grpo.lm_head import FUSED_LOSSES, LM_HEADS, chunked
from jax_grpo.lm_head.loops import IDLE, LEARNS
from jax_grpo.lm_head.tiles import WHOLE, Tiling
from jax_grpo.objective import surrogate

OBJECTIVE = ObjectiveConfig()
SEQUENCE = 128  # tokens that share an advantage


class Shape(NamedTuple):
    """T tokens, H width, V rows of the embedding, of which `vocab_size` are tokens."""

    tokens: int
    width: int
    rows: int
    vocab_size: int


SHAPES = {"s1": Shape(8192, 4096, 151936, 151936), "s2": Shape(16384, 768, 50304, 50257)}


class Rows(NamedTuple):
    """Per token [T]."""

    targets: jax.Array
    advantages: jax.Array
    old_logp: jax.Array
    mask: jax.Array


def token_losses(rows: Rows, tokens: int, logp_T: jax.Array) -> jax.Array:
    """Clipped losses [T] of tokens as sequences of length 1, each divided by the tokens of the batch."""
    old_T1, mask_T1 = rows.old_logp[:, None], rows.mask[:, None]
    return surrogate(logp_T[:, None], old_T1, rows.advantages, mask_T1, OBJECTIVE).reshape(-1) / tokens


def _float32_logits(hidden_TH, embedding_VH):
    """What a plain einsum with float32 results gives, transposed by JAX: float32 operands in both backward matmuls."""
    return jnp.einsum("th,vh->tv", hidden_TH, embedding_VH, preferred_element_type=jnp.float32)


def _rounded_logits(hidden_TH, embedding_VH):
    return hidden_TH @ embedding_VH.T


def _log_softmax_gather(logits_TV, targets_T):
    logp_TV = jax.nn.log_softmax(logits_TV.astype(jnp.float32))
    return jnp.take_along_axis(logp_TV, targets_T[:, None], axis=1)[:, 0]


def _gather_minus_lse(logits_TV, targets_T):
    lse_T = jax.nn.logsumexp(logits_TV.astype(jnp.float32), axis=-1)
    return jnp.take_along_axis(logits_TV, targets_T[:, None], axis=1)[:, 0].astype(jnp.float32) - lse_T


def _select_minus_lse(logits_TV, targets_T):
    logits_TV = logits_TV.astype(jnp.float32)
    target_T = jnp.sum(jnp.where(jnp.arange(logits_TV.shape[-1]) == targets_T[:, None], logits_TV, 0), axis=-1)
    return target_T - jax.nn.logsumexp(logits_TV, axis=-1)


def _baseline(logits: Callable, pick: Callable, shape: Shape):
    def loss(hidden_TH, embedding_VH, rows: Rows):
        logits_TV = logits(hidden_TH, embedding_VH.astype(hidden_TH.dtype))
        return jnp.sum(token_losses(rows, shape.tokens, pick(logits_TV, rows.targets)))

    return loss


def _two_passes(head: Callable, tiling: Tiling, shape: Shape):
    def loss(hidden_TH, embedding_VH, rows: Rows):
        logp_1T, _ = head(
            hidden_TH[None],
            embedding_VH,
            rows.targets[None],
            vocab_size=shape.vocab_size,
            temperature=1.0,
            tiling=tiling,
        )
        return jnp.sum(token_losses(rows, shape.tokens, logp_1T[0]))

    return loss


def _fused(head: Callable, tiling: Tiling, shape: Shape):
    def loss(hidden_TH, embedding_VH, rows: Rows):
        value, *_ = head(
            hidden_TH[None],
            embedding_VH,
            rows.targets[None],
            jnp.where(rows.mask > 0, LEARNS, IDLE)[None],
            lambda rows_C, logp_C, entropy_C: token_losses(rows_C, shape.tokens, logp_C),
            rows,
            vocab_size=shape.vocab_size,
            temperature=1.0,
            tiling=tiling,
        )
        return value

    return loss


HALF = Tiling(logits_dtype="bfloat16")
SMALL = Tiling(tokens=4096, vocab=4096)
VARIANTS: dict[str, Callable[[Shape], Callable]] = {
    "naive": functools.partial(_baseline, _float32_logits, _log_softmax_gather),
    "typical": functools.partial(_baseline, _rounded_logits, _log_softmax_gather),
    "plain": functools.partial(_baseline, _rounded_logits, _gather_minus_lse),
    "best": functools.partial(_baseline, _rounded_logits, _select_minus_lse),
    "materialised": functools.partial(_two_passes, LM_HEADS["materialised"], WHOLE),
    "materialised-bf16": functools.partial(_two_passes, LM_HEADS["materialised"], HALF),
    "chunked": functools.partial(_fused, FUSED_LOSSES["chunked"], WHOLE),
    "chunked-bf16": functools.partial(_fused, FUSED_LOSSES["chunked"], HALF),
    "chunked-two-passes": functools.partial(_two_passes, LM_HEADS["chunked"], WHOLE),
    "chunked-small": functools.partial(_fused, FUSED_LOSSES["chunked"], SMALL),
    "pallas": functools.partial(_fused, FUSED_LOSSES["pallas"], WHOLE),
    "pallas-bf16": functools.partial(_fused, FUSED_LOSSES["pallas"], HALF),
    "pallas-small": functools.partial(_fused, FUSED_LOSSES["pallas"], SMALL),
}


def abstract(shape: Shape, dtype: Any, param_dtype: Any) -> Any:
    """Shapes and dtypes of a variant's arguments."""

    def arguments():
        per_token = jnp.zeros(shape.tokens)
        rows = Rows(jnp.zeros(shape.tokens, jnp.int32), per_token, per_token, per_token)
        return jnp.zeros((shape.tokens, shape.width), dtype), jnp.zeros((shape.rows, shape.width), param_dtype), rows

    return jax.eval_shape(arguments)


def problem(shape: Shape, dtype: Any, param_dtype: Any, masked: float) -> tuple[jax.Array, jax.Array, Rows]:
    """Logits of standard deviation 2, and old log-probabilities 0.3 nats off the true ones: both sides of the clip are met.

    Args:
        masked: share of tokens without a loss.
    """
    keys = jax.random.split(jax.random.key(0), 3)
    hidden_TH = jax.random.normal(keys[0], (shape.tokens, shape.width), dtype)
    embedding_VH = jax.random.normal(keys[1], (shape.rows, shape.width), param_dtype) * (2 / shape.width**0.5)
    embedding_VH = embedding_VH.astype(param_dtype)
    rng = np.random.default_rng(0)
    targets_T = jnp.asarray(rng.integers(0, shape.vocab_size, shape.tokens), jnp.int32)
    logp_1T, _ = jax.jit(
        lambda h, e: chunked.token_logprobs(
            h[None], e, targets_T[None], vocab_size=shape.vocab_size, temperature=1.0, tiling=SMALL
        )
    )(hidden_TH, embedding_VH)
    sequences = -(-shape.tokens // SEQUENCE)
    advantages_T = jnp.asarray(np.repeat(rng.normal(size=sequences), SEQUENCE)[: shape.tokens], jnp.float32)
    noise_T = jnp.asarray(rng.normal(size=shape.tokens) * 0.3, jnp.float32)
    mask_T = jnp.asarray(rng.random(shape.tokens) >= masked, jnp.float32)
    return hidden_TH, embedding_VH, Rows(targets_T, advantages_T, logp_1T[0] + noise_T, mask_T)
