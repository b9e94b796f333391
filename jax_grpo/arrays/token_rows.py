"""Tokens of prompts and their completions as rows of one matrix, with the padding among them or without it.

What a decoder does to each token by itself is one product over these rows; attention sees prompts and completions apart, padded.
Knows nothing of layers and of what the rows hold.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Picked(NamedTuple):
    """Rows of another array: which, and where there is one; 0 elsewhere."""

    index: jax.Array  # int32 [rows]
    real: jax.Array  # bool [rows]


@jax.custom_vjp
def _pick(x_NX: jax.Array, picked: Picked, back: Picked) -> jax.Array:
    """The rows that are `picked` of x; `back` picks x's of those. Each row has one place at most, so that its cotangent has too."""
    real = picked.real.reshape(-1, *(1,) * (x_NX.ndim - 1))
    return jnp.where(real, jnp.take(x_NX, picked.index, axis=0, mode="clip"), jnp.zeros((), x_NX.dtype))


# By default the cotangents would be added up at their places, one after the other.
_pick.defvjp(
    lambda x_NX, picked, back: (_pick(x_NX, picked, back), (picked, back)),
    lambda places, to_picked: (_pick(to_picked, *reversed(places)), None, None),
)


class TokenRows:
    """Places of prompts' [P, T] and completions' [P, G, C] tokens among the rows of one matrix.

    Args:
        prompt_mask_PT, completion_mask_PGC: real tokens, anywhere in their rows.
        count: rows of the matrix, at least as many as there are real tokens, which then stand in the first ones; the rest is 0.
            None: padding has rows too, [P T + P G C] in all.
    """

    def __init__(self, prompt_mask_PT: jax.Array, completion_mask_PGC: jax.Array, count: int | None):
        self._prompts, self._completions = prompt_mask_PT.shape, completion_mask_PGC.shape
        self._packed: tuple[Picked, Picked] | None = None
        if count is not None:
            real_N = _all_rows(prompt_mask_PT.astype(bool), completion_mask_PGC.astype(bool))
            here_N = jnp.cumsum(real_N, dtype=jnp.int32)
            of_row_R = jnp.nonzero(real_N, size=count, fill_value=0)[0].astype(jnp.int32)
            rows = Picked(of_row_R, jnp.arange(count) < here_N[-1])
            self._packed = rows, Picked(jnp.maximum(here_N - 1, 0), real_N)

    def join(self, x_PTX: jax.Array, x_PGCX: jax.Array) -> jax.Array:
        """The rows [R, ...] of what prompts' and completions' tokens have."""
        x_NX = _all_rows(x_PTX, x_PGCX)
        return x_NX if self._packed is None else _pick(x_NX, *self._packed)

    def split(self, x_RX: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The inverse of `join`, [P, T, ...] and [P, G, C, ...]; 0 at padding that has no row."""
        x_NX = x_RX if self._packed is None else _pick(x_RX, *reversed(self._packed))
        prompts, rest = self._prompts[0] * self._prompts[1], x_NX.shape[1:]
        return x_NX[:prompts].reshape(*self._prompts, *rest), x_NX[prompts:].reshape(*self._completions, *rest)


def _all_rows(x_PTX: jax.Array, x_PGCX: jax.Array) -> jax.Array:
    """[P T + P G C, ...]: the prompts' tokens, then the completions'."""
    return jnp.concatenate([x_PTX.reshape(-1, *x_PTX.shape[2:]), x_PGCX.reshape(-1, *x_PGCX.shape[3:])])
