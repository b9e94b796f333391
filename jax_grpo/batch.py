"""What an optimiser step trains on: token sequences in one of two layouts, with per-token and per-row arrays.

`GroupedTokens` is what training uses: a prompt stands once for its G completions, and the head sees completion tokens only.
`FlatTokens` is one row a completion, aligned to token positions: the layout of recorded batches. Both give the same loss
and gradients. Knows nothing of objectives.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct


class CannotCut(ValueError):
    """The batch does not divide into that number of parts."""


@struct.dataclass
class FlatTokens:
    """`input_ids_BT` and `attention_mask_BT`; `x[:, t]` belongs to token t given what stands before it, t = 0 unused."""

    input_ids_BT: jax.Array
    attention_mask_BT: jax.Array

    def predictions(self, model: Any) -> tuple[jax.Array, jax.Array]:
        """Hidden states [B, T, H] aligned with the tokens they predict, and those tokens [B, T].

        Position 0 has no predecessor; it reuses row 0's own hidden state and is masked everywhere.
        """
        hidden_BTH = model(self.input_ids_BT, self.attention_mask_BT)
        return jnp.concatenate([hidden_BTH[:, :1], hidden_BTH[:, :-1]], axis=1), self.input_ids_BT


@struct.dataclass
class GroupedTokens:
    """Left-padded prompts [P, T] and right-padded completions [P, G, C]."""

    prompt_ids_PT: jax.Array
    prompt_mask_PT: jax.Array
    completion_ids_PGC: jax.Array
    completion_mask_PGC: jax.Array
    # Of each micro-batch's products over tokens, no fewer than it has real tokens; None: padding has rows too.
    rows: int | None = struct.field(pytree_node=False, default=None, kw_only=True)

    def predictions(self, model: Any) -> tuple[jax.Array, jax.Array]:
        """Hidden states [P*G, C, H] that predict the completion tokens, and those tokens [P*G, C]."""
        hidden_PGCH = model.grouped(
            self.prompt_ids_PT, self.prompt_mask_PT, self.completion_ids_PGC, self.completion_mask_PGC, self.rows
        )
        rows = (-1, self.completion_ids_PGC.shape[-1])
        return hidden_PGCH.reshape(*rows, hidden_PGCH.shape[-1]), self.completion_ids_PGC.reshape(rows)

    def split_into(self, parts: int) -> "GroupedTokens":
        """The same sequences in a number of groups that `parts` divides: if need be, of slices of a group with its prompt."""
        prompts, group, _ = self.completion_ids_PGC.shape
        _rows_each(prompts * group, parts)
        if prompts % parts == 0:
            return self
        slices = parts // prompts
        if parts % prompts or group % slices:
            raise CannotCut(
                f"{prompts} prompts x {group} completions do not divide into {parts} parts of whole groups "
                f"or equal slices of a group"
            )
        sliced = (prompts * slices, group // slices, -1)
        return GroupedTokens(
            *(jnp.repeat(x, slices, axis=0) for x in (self.prompt_ids_PT, self.prompt_mask_PT)),
            *(x.reshape(sliced) for x in (self.completion_ids_PGC, self.completion_mask_PGC)),
            rows=self.rows,
        )

    def flat(self) -> FlatTokens:
        """The same sequences, one row a completion, prompt tokens repeated."""
        group = self.completion_ids_PGC.shape[1]

        def rows(prompt_PT, completion_PGC):
            repeated_PGT = jnp.repeat(jnp.asarray(prompt_PT)[:, None], group, axis=1)
            joined = jnp.concatenate([repeated_PGT, completion_PGC], axis=-1)
            return joined.reshape(-1, joined.shape[-1])

        return FlatTokens(
            rows(self.prompt_ids_PT, self.completion_ids_PGC), rows(self.prompt_mask_PT, self.completion_mask_PGC)
        )


@struct.dataclass
class Batch:
    """One optimiser batch, or all of an iteration's completions. S is T (flat) or C (grouped).

    `old_logp_BS` is of the policy that made the rollout; None means that the current policy is that policy (first and only
    optimiser step on the rollout), so that its own value, held constant, is used.
    """

    tokens: FlatTokens | GroupedTokens
    mask_BS: jax.Array  # 1 on completion tokens up to and including the stop, else 0
    advantages_B: jax.Array
    stopped_B: jax.Array  # False where the completion was cut at the cap
    old_logp_BS: jax.Array | None = None
    ref_logp_BS: jax.Array | None = None  # under the reference; None when beta is 0
    sampling_logp_BS: jax.Array | None = None  # as sampled; None when not recorded
    entropy_BS: jax.Array | None = None  # of the old policy, for the top-entropy mask; None when unused


CACHED = ("old_logp", "ref_logp", "sampling_logp", "entropy")  # the last fields' names in a recorded batch


def _rows_each(rows: int, parts: int) -> int:
    if rows % parts:
        raise CannotCut(f"{rows} completions do not divide into {parts} equal parts")
    return rows // parts


def split(rows: Any, parts: int) -> Any:
    """Every array of a tree with a new leading axis of `parts` equal pieces of its rows, in order; a scan runs over it.

    `rows` is a `Batch`, tokens, or any tree of arrays whose leading axis is completions. Whole groups of `GroupedTokens` stay
    together while there are prompts enough; beyond that a group is split and its prompt repeated, which is exact because
    advantages are already computed.

    Raises:
        CannotCut: the rows do not divide; says the sizes.
    """

    def pieces(x: Any) -> Any:
        if isinstance(x, GroupedTokens):
            return jax.tree.map(pieces, x.split_into(parts))
        return x.reshape(parts, _rows_each(x.shape[0], parts), *x.shape[1:])

    return jax.tree.map(pieces, rows, is_leaf=lambda x: isinstance(x, GroupedTokens))


def piece(pieces: Any, number: int) -> Any:
    """One of the pieces of a batch, or of another tree, that is split."""
    return jax.tree.map(lambda x: x[number], pieces)


def without_padding(batch: Batch, parts: int, on_host: GroupedTokens | None = None) -> Batch:
    """The batch, of whose tokens a model computes `rows_without_padding`.

    `on_host` are its tokens as numpy arrays; None: they are read from the device, which is waited for.
    """
    tokens = batch.tokens
    assert isinstance(tokens, GroupedTokens), "the trainer's own layout"
    rows = rows_without_padding(jax.device_get(tokens) if on_host is None else on_host, parts)
    return dataclasses.replace(batch, tokens=dataclasses.replace(tokens, rows=rows))


def rows_without_padding(tokens: GroupedTokens, parts: int) -> int | None:
    """Rows for each of so many micro-batches of tokens on the host, which hold the fullest one; None: all, padding too.

    In quarters of what there are with padding: each is a program to compile.
    """
    pieces: GroupedTokens = split(tokens, parts)
    read_NPGC = pieces.completion_mask_PGC[..., :-1]  # the last column predicts nothing
    real = max(prompt.sum() + read.sum() for prompt, read in zip(pieces.prompt_mask_PT, read_NPGC, strict=True))
    quarter = -(-(pieces.prompt_mask_PT[0].size + read_NPGC[0].size) // 4)
    quarters = -(-int(real) // quarter)
    return quarters * quarter if quarters < 4 else None


def minibatches(
    batch: Batch, epochs: int, count: int, seed: int, iteration: int, parts: int | None = None
) -> Iterator[Batch]:
    """The optimiser batches of an iteration in order, each cut when its turn comes: `count` an epoch.

    Where there are several to mix, groups have a new order in each epoch, a function of (seed, iteration, epoch). With `parts`,
    micro-batches of each, padding is left out as `without_padding` does.
    """
    # Once: in its turn the host would wait for the steps before.
    on_host = None if parts is None else jax.device_get(batch.tokens)
    for epoch in range(epochs):
        order_P = None
        if count > 1:
            assert isinstance(batch.tokens, GroupedTokens), "the trainer's own layout"
            order_P = np.random.default_rng((seed, iteration, epoch)).permutation(len(batch.tokens.prompt_ids_PT))
        pieces = split(batch if order_P is None else _reordered(batch, order_P), count)
        tokens = on_host if order_P is None else jax.tree.map(lambda x, order_P=order_P: x[order_P], on_host)
        tokens = split(tokens, count)
        for number in range(count):
            one = piece(pieces, number)
            yield one if parts is None else without_padding(one, parts, piece(tokens, number))


def _reordered(batch: Batch, order_P: np.ndarray) -> Batch:
    """The groups in that order."""
    assert isinstance(batch.tokens, GroupedTokens), "the trainer's own layout"
    group = batch.tokens.completion_ids_PGC.shape[1]
    order_B = (order_P[:, None] * group + np.arange(group)).reshape(-1)
    rows = jax.tree.map(lambda x: x[order_B], dataclasses.replace(batch, tokens=None))
    return dataclasses.replace(rows, tokens=jax.tree.map(lambda x: x[order_P], batch.tokens))


def record(
    batch: Batch, rewards_B: np.ndarray, group_ids_B: np.ndarray, vocabulary: int | None = None
) -> dict[str, np.ndarray]:
    """Arrays of the replay interface, [B, T] aligned to token positions, from a grouped or flat batch.

    `vocabulary` is the number of tokens whose softmax the log-probabilities are of; None: all rows that the weights have.
    """
    tokens = batch.tokens.flat() if isinstance(batch.tokens, GroupedTokens) else batch.tokens
    length = tokens.input_ids_BT.shape[1]

    def aligned(x_BS) -> np.ndarray:
        x_BS = np.asarray(x_BS)
        return np.pad(x_BS, ((0, 0), (length - x_BS.shape[1], 0)))

    arrays = {
        "input_ids": np.asarray(tokens.input_ids_BT),
        "attention_mask": np.asarray(tokens.attention_mask_BT),
        "completion_mask": aligned(batch.mask_BS),
        "rewards": np.asarray(rewards_B),
        "advantages": np.asarray(batch.advantages_B),
        "group_ids": np.asarray(group_ids_B),
        "stopped": np.asarray(batch.stopped_B),
    }
    if vocabulary is not None:
        arrays["vocabulary"] = np.asarray(vocabulary)
    cached = {name: getattr(batch, f"{name}_BS") for name in CACHED}
    return arrays | {name: aligned(x) for name, x in cached.items() if x is not None}
