"""Dynamic sampling (DAPO, Yu et al. 2025, eq. 11), from the definition: an iteration trains on groups that have an advantage.

It samples P prompts at a time until P groups have one, or `rollout.refill` allows no more. A group without one gives its place to
the next group that has one; where there are not enough of those, it keeps it. Knows nothing of how completions are made.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from jax_grpo.config.sections import RefillConfig
from jax_grpo.tasks.base import Component, Logged, Prompt
from torch_ref.rollout import Rollout


class Sampled(NamedTuple):
    """P groups of completions, one after another, with their rewards."""

    prompts: list[Prompt]
    """One a completion."""
    rollout: Rollout
    components: dict[str, Component]
    rewards_B: Tensor
    signal: list[bool]
    """Of each group: some advantage is not 0."""
    logged: Logged

    @property
    def tokens(self) -> int:
        return int(self.rollout.completion_mask_BT.sum())


def silent(values_B: Tensor, about_B: Tensor, group_ids_B: Tensor) -> Tensor:
    """Of each row [B], whether its group is without signal by `rollout.refill.by`, whose values these are.

    It is where the rows of the group that the component is about all have one value.
    """
    silent_B = torch.zeros_like(about_B)
    for group in group_ids_B.unique():
        member_B = group_ids_B == group
        silent_B[member_B] = len(values_B[member_B & about_B].unique()) == 1
    return silent_B


def sample(draw: Callable[[int], Sampled], settings: RefillConfig | None) -> list[Sampled]:
    """What an iteration draws, in order; `draw` is given the number of the draw, from 0. Without settings it draws once."""
    rounds = [draw(0)]
    if settings is None:
        return rounds
    for number in range(1, settings.rounds + 1):
        full = sum(sum(one.signal) for one in rounds) >= len(rounds[0].signal)
        spent = settings.tokens is not None and sum(one.tokens for one in rounds) >= settings.tokens
        if full or spent:
            break
        rounds.append(draw(number))
    return rounds


def trained_on(rounds: Sequence[Sampled]) -> Sampled:
    """The batch's groups, each in its place. Of logged metrics it has all, of everything else its own."""
    if len(rounds) == 1:
        return rounds[0]
    rows = [(number, row) for number, group in _places(rounds) for row in _rows_of(rounds[number], group)]

    def own(lists: Sequence[Any]) -> list:
        return [lists[number][row] for number, row in rows]

    nothing = [None] * len(rounds[0].prompts)
    logs = [one.logged for one in rounds]
    metrics = dict.fromkeys(name for one in logs for name in one.metrics)
    extras = dict.fromkeys(name for one in logs for name in one.extras)
    flat = [number * len(nothing) + row for number, row in rows]
    return Sampled(
        prompts=own([one.prompts for one in rounds]),
        rollout=_rollout([one.rollout for one in rounds], rows),
        components={
            name: Component(*(np.array(own([one.components[name][field] for one in rounds])) for field in range(2)))
            for name in rounds[0].components
        },
        rewards_B=torch.cat([one.rewards_B for one in rounds])[flat],
        signal=[rounds[number].signal[group] for number, group in _places(rounds)],
        logged=Logged(
            {name: [value for one in logs for value in one.metrics.get(name, [])] for name in metrics},
            {name: own([one.extras.get(name, nothing) for one in logs]) for name in extras},
        ),
    )


def costs(rounds: Sequence[Sampled]) -> dict[str, float]:
    """Metrics of what a batch took."""
    groups, places = sum(len(one.signal) for one in rounds), _places(rounds)
    written = [one.rollout.completion_mask_BT.sum(1) for one in rounds]
    trained = sum(int(written[number][_rows_of(rounds[number], group)].sum()) for number, group in places)
    return {
        "refill/rounds": len(rounds) - 1,
        "refill/drawn": groups,
        "refill/without_signal": sum(one.signal.count(False) for one in rounds),
        "refill/discarded": groups - len(places),
        "refill/discarded_tokens": sum(one.tokens for one in rounds) - trained,
        "refill/reward": float(torch.cat([one.rewards_B for one in rounds]).mean()),
    }


def _places(rounds: Sequence[Sampled]) -> list[tuple[int, int]]:
    """(draw, group) for each place of the batch."""
    later = iter(
        [(number, group) for number in range(1, len(rounds)) for group, has in enumerate(rounds[number].signal) if has]
    )
    return [(0, group) if has else next(later, (0, group)) for group, has in enumerate(rounds[0].signal)]


def _rows_of(one: Sampled, group: int) -> list[int]:
    size = len(one.prompts) // len(one.signal)
    return list(range(group * size, (group + 1) * size))


def _rollout(rollouts: Sequence[Rollout], rows: Sequence[tuple[int, int]]) -> Rollout:
    """The rows (rollout, row) as one rollout: prompts end in one column, and no column is padding alone."""
    prompts = [
        int(one.completion_mask_BT.any(0).int().argmax()) for one in rollouts
    ]  # columns of each rollout's prompts
    completions = [one.input_ids_BT.shape[1] - columns for one, columns in zip(rollouts, prompts, strict=True)]
    wider = [(max(prompts) - one, max(completions) - other) for one, other in zip(prompts, completions, strict=True)]

    def of(name: str) -> Tensor:
        wide = [pad(getattr(one, name), margins) for one, margins in zip(rollouts, wider, strict=True)]
        return torch.stack([wide[number][row] for number, row in rows])

    used = of("attention_mask_BT").any(0).nonzero()
    columns = slice(int(used.min()), int(used.max()) + 1)
    return Rollout(
        completions=[rollouts[number].completions[row] for number, row in rows],
        input_ids_BT=of("input_ids_BT")[:, columns],
        attention_mask_BT=of("attention_mask_BT")[:, columns],
        completion_mask_BT=of("completion_mask_BT")[:, columns],
        sampling_logp_BT=of("sampling_logp_BT")[:, columns],
        stopped_B=torch.stack([rollouts[number].stopped_B[row] for number, row in rows]),
    )
