"""Dynamic sampling (DAPO, Yu et al. 2025, section 3.2): groups that teach nothing are replaced by groups of further prompts.

Prompts are drawn `prompts.per_iteration` at a time, so that the compiled programs serve every draw. A batch keeps its shape: a
slot for which no draw has a group with signal keeps its own one, whose advantages are 0, and the denominators and the KL term
are those of any batch. Knows nothing of how prompts are drawn, completed and rewarded.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_grpo.config.sections import RefillConfig
from jax_grpo.iteration.draw import Draw
from jax_grpo.iteration.reward import Samples, written
from jax_grpo.rollout.generate import joined_prompts
from jax_grpo.tasks.base import Component, Logged, is_of
from jax_grpo.tasks.shared import joined_logs


def is_last(draw: Draw, earlier: Sequence[Samples], settings: RefillConfig | None) -> bool:
    """Whether the iteration's budget ends with this draw, whatever its rewards; None: there are no further draws."""
    if settings is None or len(earlier) == settings.rounds:
        return True
    return settings.tokens is not None and tokens_of([*earlier, draw]) >= settings.tokens


def is_full(draws: Sequence[Samples]) -> bool:
    """Whether as many groups have signal as a batch has groups."""
    return sum(int((~samples.flat_P).sum()) for samples in draws) >= len(draws[0].flat_P)


def gated(samples: Samples, settings: RefillConfig | None) -> Samples:
    """The samples, where a group whose completions are all alike in the component `settings.by` is without signal too.

    Otherwise what is paid beside the outcome, such as a short text, is all that a group teaches in which nobody is right.
    """
    if settings is None or (by := settings.by) is None:
        return samples
    (values_B, about_B), shape = samples.components[by], samples.advantages_PG.shape
    about_B = about_B & is_of(by, samples.prompts)
    flat_P = samples.flat_P | alike(values_B.reshape(shape), about_B.reshape(shape))
    return samples._replace(advantages_PG=jnp.where(flat_P[:, None], 0, samples.advantages_PG), flat_P=flat_P)


def alike(values_PG: np.ndarray, about_PG: np.ndarray) -> np.ndarray:
    """Whether the completions of a group that a component is about all have the same value of it, [P].

    False where it is about none of them, as of another task of a mixture: such a group is judged by its reward alone.

    >>> alike(np.array([[0, 0], [0, 1], [0, 0]]), np.array([[True, True], [True, True], [False, False]])).tolist()
    [True, False, False]
    """
    least_P = np.where(about_PG, values_PG, np.inf).min(-1)
    return least_P == np.where(about_PG, values_PG, -np.inf).max(-1)


def slots(signal_P: Sequence[np.ndarray]) -> np.ndarray:
    """The group of each of a batch's P slots, numbered through all draws in their order.

    A group of the first draw stays in its slot if it has signal; the slots of the others get, in order, the first groups of later
    draws that have it, and keep their own when these run out.

    >>> slots([np.array([True, False, False, False]), np.array([False, False, True, True])]).tolist()
    [0, 6, 7, 3]
    """
    first, later = signal_P[0], np.concatenate(signal_P)[len(signal_P[0]) :]
    groups_P = np.arange(len(first))
    empty, others = np.flatnonzero(~first), len(first) + np.flatnonzero(later)
    taken = min(len(empty), len(others))
    groups_P[empty[:taken]] = others[:taken]
    return groups_P


def _slots_of(draws: Sequence[Samples]) -> np.ndarray:
    return slots([~np.asarray(samples.flat_P) for samples in draws])


def batch_of(draws: Sequence[Samples], pad_id: int) -> Samples:
    """The groups that are trained on, as if one draw had made them.

    What the rewards logged as metrics is of every completion that was rewarded; everything else is of the batch's own.
    """
    if len(draws) == 1:
        return draws[0]
    groups_P, group = _slots_of(draws), draws[0].advantages_PG.shape[1]
    rows_B = (groups_P[:, None] * group + np.arange(group)).reshape(-1)

    def rows(name: str) -> list:
        every = [value for samples in draws for value in getattr(samples, name)]
        return [every[row] for row in rows_B]

    def groups(*of_draws: Any) -> np.ndarray:
        return np.concatenate([np.asarray(x_P) for x_P in of_draws])[groups_P]

    rollout = jax.tree.map(
        lambda *x: jnp.asarray(groups(*x)), *[samples.rollout._replace(episodes=None) for samples in draws]
    )
    metrics, extras = joined_logs([(samples.logged, len(samples.rewards_B)) for samples in draws])
    return Samples(
        prompts=rows("prompts"),
        tokens=joined_prompts([samples.tokens for samples in draws], groups_P, pad_id),
        rollout=rollout._replace(episodes=None if draws[0].episodes is None else rows("episodes")),
        completions=rows("completions"),
        components={
            name: Component(*map(np.concatenate, zip(*(one.components[name] for one in draws), strict=True))).at(rows_B)
            for name in draws[0].components
        },
        rewards_B=np.concatenate([samples.rewards_B for samples in draws])[rows_B],
        advantages_PG=groups(*(samples.advantages_PG for samples in draws)),
        flat_P=groups(*(samples.flat_P for samples in draws)),
        logged=Logged(metrics, {name: [values[row] for row in rows_B] for name, values in extras.items()}),
    )


def counts(draws: Sequence[Samples], unused: Draw | None, settings: RefillConfig) -> dict[str, float]:
    """What filling a batch took, as metrics; `refill/reward` is the mean reward of every completion that was rewarded."""
    size, tokens_P = len(draws[0].flat_P), np.concatenate([written(samples.rollout).sum(-1) for samples in draws])
    of_unused: dict[str, float] = {
        "refill/unused": 0 if unused is None else size,
        "refill/unused_tokens": 0 if unused is None else tokens_of([unused]),
    }
    return {
        "refill/rounds": len(draws) - 1,
        "refill/drawn": len(draws) * size,
        "refill/without_signal": sum(int(samples.flat_P.sum()) for samples in draws),
        "refill/discarded": (len(draws) - 1) * size,
        "refill/discarded_tokens": int(tokens_P.sum() - tokens_P[_slots_of(draws)].sum()),
        "refill/reward": float(np.concatenate([samples.rewards_B for samples in draws]).mean()),
    } | (of_unused if settings.ahead else {})


def tokens_of(draws: Sequence[Samples | Draw]) -> int:
    """Tokens of all their completions."""
    return sum(int(written(one.rollout).sum()) for one in draws)
