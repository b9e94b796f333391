"""The arithmetic of one tile of logits, in plain JAX: statistics of its rows, and the gradient of a loss of these.

`measure` is the forward, `differentiate` the forward and its gradient; both see whole rows. Knows nothing of loops, embeddings or
objectives: the loss of a token is a function that is handed in.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

TokenLoss = Callable[[Any, jax.Array, jax.Array], jax.Array]
"""`token_loss(rows, logp_C, entropy_C) -> loss_C`: row i of the result depends on row i of the others only.

`rows` is a tree of arrays [C, ...] and of scalars, which are the same for every row.
"""

LOWEST = -1e30  # the logit of padding columns; -inf would make p log p NaN
# Rows of a matmul are whole tensor-core tiles: for others XLA's Triton matmul finds no tiling without autotuning.
ROW_MULTIPLE = 64


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How much of the [T, V] logits exists at a time, and in which dtype.

    Attributes:
        tokens: most rows of a tile; a multiple of `ROW_MULTIPLE`.
        vocab: columns of a tile; None is all of them (three matmuls), a number the minimum-memory mode (four).
        logits_dtype: dtype of logits between the matmul and the softmax, which is float32 at least either way; None is that.
            bfloat16 halves the tile, and rounds logits of size 100 by up to 0.25 nats.
    """

    tokens: int = 1024
    vocab: int | None = None
    logits_dtype: str | None = None

    def rows(self, total: int) -> int:
        """Rows of each of the fewest equal tiles that cover `total`."""
        tiles = -(-total // self.tokens)
        return -(-total // (tiles * ROW_MULTIPLE)) * ROW_MULTIPLE

    def stored(self, dtype) -> Any:
        """The dtype of stored logits for hidden states of `dtype`."""
        return jnp.promote_types(dtype, jnp.float32) if self.logits_dtype is None else jnp.dtype(self.logits_dtype)


WHOLE = Tiling()


class Columns(NamedTuple):
    """Which tokens the columns of a tile are, and what divides their logits."""

    vocab_size: int  # columns from here on are padding
    temperature: float  # > 0
    axis: str | None = None  # of the mesh, over whose devices the vocabulary is cut; None: it is not
    first: jax.Array | int = 0  # token of column 0 of the tile
    fresh: jax.Array | int = 0  # columns before it are an earlier tile's: the last tile reaches back to be whole

    def tokens(self, width: int) -> jax.Array:
        """Token of each column [V], int32."""
        return self.first + jnp.arange(width, dtype=jnp.int32)

    def part(self, first: jax.Array, fresh: jax.Array) -> "Columns":
        """The columns from number `first` on, of which those before number `fresh` do not count."""
        return self._replace(first=self.first + first, fresh=self.first + fresh)

    def inside(self, width: int) -> jax.Array:
        """Whether each column [V] counts."""
        return (self.tokens(width) < self.vocab_size) & (self.tokens(width) >= self.fresh)


class RowStatistics(NamedTuple):
    """Of each row [C], nats: log-probability of its target, entropy, and log-sum-exp of logits / temperature."""

    logp: jax.Array
    entropy: jax.Array
    lse: jax.Array


def take(rows_N: Any, index_C: jax.Array) -> Any:
    """Rows of every array of a tree, and its scalars as they are; zeros where the index is beyond the last."""
    return jax.tree.map(lambda x: x.at[index_C].get(mode="fill", fill_value=0) if jnp.ndim(x) else x, rows_N)


def put(rows_N: Any, index_C: jax.Array, values_C: Any) -> Any:
    """The tree's arrays with those rows replaced; an index beyond the last is left out."""

    def replaced(x_N: jax.Array, x_C: jax.Array) -> jax.Array:
        return x_N.at[index_C].set(x_C.astype(x_N.dtype), mode="drop", unique_indices=True)

    return jax.tree.map(replaced, rows_N, values_C)


def scaled(logits_CV: jax.Array, columns: Columns) -> jax.Array:
    """Logits / temperature in at least float32, `LOWEST` in the columns that are no tokens."""
    logits_CV = logits_CV.astype(jnp.promote_types(logits_CV.dtype, jnp.float32)) / columns.temperature
    return jnp.where(columns.inside(logits_CV.shape[-1]), logits_CV, LOWEST)


def measure(logits_CV: jax.Array, targets_C: jax.Array, columns: Columns) -> RowStatistics:
    """Statistics of whole rows. The target is picked by comparing column numbers: no gather over V."""
    return Partial.of(logits_CV, targets_C, columns).statistics(columns.axis)


class Partial(NamedTuple):
    """Of the columns [C, V] seen so far, z = logits / temperature: max z, sum exp(z - max), sum z exp(z - max), z of the target.

    The online softmax of Milakov & Gimelshein 2018, with the sum for the entropy beside it.
    """

    top: jax.Array
    mass: jax.Array
    weighted: jax.Array
    target: jax.Array

    @classmethod
    def empty(cls, rows: int, dtype) -> "Partial":
        zeros = jnp.zeros(rows, dtype)
        return cls(jnp.full(rows, LOWEST, dtype), zeros, zeros, zeros)

    @classmethod
    def of(cls, logits_CV: jax.Array, targets_C: jax.Array, columns: Columns) -> "Partial":
        width = logits_CV.shape[-1]
        is_target_CV = (columns.tokens(width) == targets_C[:, None]) & columns.inside(width)
        return cls.of_scaled(scaled(logits_CV, columns), is_target_CV)

    @classmethod
    def of_scaled(cls, z_CV: jax.Array, is_target_CV: jax.Array) -> "Partial":
        top_C = jnp.max(z_CV, axis=-1)
        exp_CV = jnp.exp(z_CV - top_C[:, None])
        at_target_CV = jnp.where(is_target_CV, z_CV, 0)
        return cls(top_C, *(jnp.sum(x_CV, axis=-1) for x_CV in (exp_CV, exp_CV * z_CV, at_target_CV)))

    def merge(self, other: "Partial") -> "Partial":
        """Of both sets of columns together."""
        top = jnp.maximum(self.top, other.top)
        mine, theirs = jnp.exp(self.top - top), jnp.exp(other.top - top)
        return Partial(
            top,
            self.mass * mine + other.mass * theirs,
            self.weighted * mine + other.weighted * theirs,
            self.target + other.target,
        )

    def statistics(self, axis: str | None = None) -> RowStatistics:
        """Of whole rows, whose other columns are those of the other devices of a mesh's axis: `merge`, all at once."""
        top, mass, weighted, target = self
        if axis is not None:
            top = jax.lax.pmax(self.top, axis)
            share = jnp.exp(self.top - top)
            mass, weighted, target = jax.lax.psum((self.mass * share, self.weighted * share, self.target), axis)
        lse = top + jnp.log(mass)
        return RowStatistics(target - lse, lse - weighted / mass, lse)


def derivatives(token_loss: TokenLoss, rows: Any, logp_C: jax.Array, entropy_C: jax.Array) -> tuple[jax.Array, ...]:
    """(loss_C, d loss / d logp, d loss / d entropy), each [C]: one row's loss is a function of that row alone."""
    loss_C, pull = jax.vjp(lambda logp, entropy: token_loss(rows, logp, entropy), logp_C, entropy_C)
    return loss_C, *pull(jnp.ones_like(loss_C))


def dlogits(
    logits_CV: jax.Array, targets_C, statistics: RowStatistics, to_logp_C, to_entropy_C, columns: Columns, dtype: Any
) -> jax.Array:
    """Gradient of a loss in the logits of a tile [C, V], in `dtype`; 0 in columns that do not count."""
    width = logits_CV.shape[-1]
    logp_CV = scaled(logits_CV, columns) - statistics.lse[:, None]
    to_C1 = (x_C[:, None] for x_C in (to_logp_C, to_entropy_C, statistics.entropy))
    d_CV = to_logits(logp_CV, columns.tokens(width) == targets_C[:, None], *to_C1)
    return jnp.where(columns.inside(width), d_CV / columns.temperature, 0).astype(dtype)


def to_logits(logp: jax.Array, is_target: jax.Array, g: jax.Array, e: jax.Array, entropy: jax.Array) -> jax.Array:
    """Gradient of a loss L in z = logits / temperature, with g = dL/dlogp, e = dL/dH, p = softmax(z); all broadcast.

    dL/dz_j = g (1[j = target] - p_j) - e p_j (log p_j + H)
    """
    return jnp.where(is_target, g, 0) - jnp.exp(logp) * (g + e * (logp + entropy))


def differentiate(
    logits_CV: jax.Array,
    targets_C: jax.Array,
    rows: Any,
    token_loss: TokenLoss,
    columns: Columns,
    dtype: Any,
    known: RowStatistics | None = None,
) -> tuple[jax.Array, jax.Array, RowStatistics]:
    """(gradient of the summed loss in the logits [C, V] in `dtype`, loss_C, statistics) of whole rows.

    The statistics are measured where they are not `known`.
    """
    statistics = measure(logits_CV, targets_C, columns) if known is None else known
    loss_C, to_logp_C, to_entropy_C = derivatives(token_loss, rows, statistics.logp, statistics.entropy)
    return dlogits(logits_CV, targets_C, statistics, to_logp_C, to_entropy_C, columns, dtype), loss_C, statistics
