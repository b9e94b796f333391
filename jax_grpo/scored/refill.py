"""Dynamic sampling (DAPO, Yu et al. 2025, section 3.2): groups that teach nothing are replaced by groups of further prompts.

Prompts are drawn in whole rounds of `prompts.per_iteration`, so that the compiled programs serve every round. A batch keeps its
shape: a slot for which no round has a group with signal keeps its own one, whose advantages are 0, and the denominators and the
KL term are those of any batch. Knows nothing of how a round is drawn, generated and rewarded.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jax_grpo.batch import Batch
from jax_grpo.config.sections import RefillConfig
from jax_grpo.rollout.episodes import Played
from jax_grpo.rollout.generate import Rollout
from jax_grpo.scored import Scored
from jax_grpo.tasks.base import Logged, Prompt


class Drawn(NamedTuple):
    """One draw of P prompts and their completions, which nobody has rewarded yet."""

    numbers: list[int]  # of the prompts in their data set
    prompts: list[Prompt]  # of each completion
    rollout: Rollout | Played
    bare: Batch  # their tokens, before anything is known of them


class Round(NamedTuple):
    """The P groups of one draw of prompts."""

    scored: Scored
    bare: Batch
    flat_B: np.ndarray  # of a group without signal

    @property
    def signal_P(self) -> np.ndarray:
        """Whether some advantage of the group is not 0."""
        prompts, group = self.scored.rollout.completion_mask_PGC.shape[:2]
        return ~np.asarray(self.flat_B).reshape(prompts, group)[:, 0]


class Filled(NamedTuple):
    """Every round that was rewarded, and a draw that was generated ahead of its need, if there is one."""

    rounds: list[Round]
    unused: Drawn | None

    @property
    def generated(self) -> list[Batch]:
        """The tokens of all of them."""
        return [one.bare for one in self.rounds] + ([] if self.unused is None else [self.unused.bare])

    @property
    def tokens(self) -> int:
        """How many tokens all of them wrote."""
        return tokens_of(self.rounds) + self.unused_tokens

    @property
    def unused_tokens(self) -> int:
        """How many of them were thrown away unrewarded."""
        return 0 if self.unused is None else _tokens(self.unused)


def fill(
    begin: Callable[[int], Drawn],
    finish: Callable[[Drawn], Drawn],
    reward: Callable[[Drawn], Round],
    settings: RefillConfig,
) -> Filled:
    """Rounds 0, 1, ... until as many groups have signal as one round has groups, or the budget is spent.

    What a round has decides whether there is another one, and nothing else does: the same state draws the same rounds.

    Args:
        begin: has the device generate the draw of this number; with `settings.ahead` the next one begins before rewards of this
            one are asked for.
        finish: waits for what was begun.
        reward: the draw's rewards, and which of its groups have signal.
    """
    rounds: list[Round] = []
    drawn = begin(0)
    while True:
        drawn = finish(drawn)
        spent = len(rounds) == settings.rounds or (
            settings.tokens is not None and tokens_of(rounds) + _tokens(drawn) >= settings.tokens
        )
        ahead = begin(len(rounds) + 1) if settings.ahead and not spent else None
        rounds.append(reward(drawn))
        if spent or sum(int(one.signal_P.sum()) for one in rounds) >= len(rounds[0].signal_P):
            return Filled(rounds, ahead)
        drawn = begin(len(rounds)) if ahead is None else ahead


def slots(signal_P: Sequence[np.ndarray]) -> np.ndarray:
    """The group of each of a batch's P slots, numbered through all rounds in the order in which they were drawn.

    A group of the first round stays in its slot if it has signal; the slots of the others get, in order, the first groups of later
    rounds that have it, and keep their own when these run out.

    >>> slots([np.array([True, False, False, False]), np.array([False, False, True, True])]).tolist()
    [0, 6, 7, 3]
    """
    first, later = signal_P[0], np.concatenate(signal_P)[len(signal_P[0]) :]
    groups_P = np.arange(len(first))
    empty, found = np.flatnonzero(~first), len(first) + np.flatnonzero(later)
    taken = min(len(empty), len(found))
    groups_P[empty[:taken]] = found[:taken]
    return groups_P


def batch_of(rounds: Sequence[Round]) -> Scored:
    """The groups that are trained on, as if one round had drawn them.

    What the rewards logged as metrics is of every completion that was rewarded; everything else is of the batch's own.
    """
    drawn, groups_P = [one.scored for one in rounds], slots([one.signal_P for one in rounds])
    group = drawn[0].rollout.completion_mask_PGC.shape[1]
    rows_B = (groups_P[:, None] * group + np.arange(group)).reshape(-1)

    def rows(lists: Sequence[Sequence]) -> list:
        every = [value for values in lists for value in values]
        return [every[row] for row in rows_B]

    return Scored(
        prompts=rows([one.prompts for one in drawn]),
        completions=rows([one.completions for one in drawn]),
        # A component may be masked, which an array's own concatenation forgets.
        components={
            name: _as_given(np.ma.concatenate([one.components[name] for one in drawn])[rows_B])
            for name in drawn[0].components
        },
        rewards_B=np.concatenate([one.rewards_B for one in drawn])[rows_B],
        rollout=_rollout([one.rollout for one in drawn], groups_P, rows),
        logged=_logged([one.logged for one in drawn], len(rows_B), rows),
    )


def counts(filled: Filled, settings: RefillConfig) -> dict[str, float]:
    """What filling a batch took, as metrics; `refill/reward` is the mean reward of everything that was drawn and rewarded."""
    rounds, unused = filled
    thrown_away: dict[str, float] = {
        "refill/unused": 0 if unused is None else len(unused.numbers),
        "refill/unused_tokens": filled.unused_tokens,
    }
    size = len(rounds[0].signal_P)
    groups_P = slots([one.signal_P for one in rounds])
    tokens_P = np.concatenate([one.scored.lengths_B.reshape(size, -1).sum(-1) for one in rounds])
    return {
        "refill/rounds": len(rounds) - 1,
        "refill/drawn": len(rounds) * size,
        "refill/without_signal": sum(int((~one.signal_P).sum()) for one in rounds),
        "refill/discarded": (len(rounds) - 1) * size,
        "refill/discarded_tokens": tokens_of(rounds) - int(tokens_P[groups_P].sum()),
        "refill/reward": float(np.concatenate([one.scored.rewards_B for one in rounds]).mean()),
    } | (thrown_away if settings.ahead else {})


def tokens_of(rounds: Sequence[Round]) -> int:
    """Tokens of all completions that were drawn."""
    return sum(int(one.scored.lengths_B.sum()) for one in rounds)


def _tokens(drawn: Drawn) -> int:
    return int(np.asarray(drawn.rollout.completion_mask_PGC).sum())


def _as_given(values: np.ma.MaskedArray) -> np.ndarray:
    return values if np.ma.is_masked(values) else np.ma.getdata(values)


def _rollout(rollouts: Sequence[Rollout | Played], groups_P: np.ndarray, rows: Callable) -> Rollout | Played:
    first = rollouts[0]
    arrays = {
        name: jnp.asarray(np.concatenate([np.asarray(getattr(one, name)) for one in rollouts])[groups_P])
        for name in first._fields
        if name != "episodes"
    }
    if isinstance(first, Played):
        return first._replace(**arrays, episodes=rows([one.episodes for one in rollouts if isinstance(one, Played)]))
    return first._replace(**arrays)


def _logged(logged: Sequence[Logged], batch_rows: int, rows: Callable) -> Logged:
    """Metrics of all rounds; of the extras those of the batch, None where a round's rewards had no such column."""
    metrics: dict[str, list[float]] = {}
    for one in logged:
        for name, values in one.metrics.items():
            metrics.setdefault(name, []).extend(values)
    names = dict.fromkeys(name for one in logged for name in one.extras)
    extras = {name: rows([one.extras.get(name, [None] * batch_rows) for one in logged]) for name in names}
    return Logged(metrics, extras)
