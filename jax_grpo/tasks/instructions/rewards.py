"""Rewards of completions by the instructions they follow: pure functions of rows and texts. Knows no task, token or model.

`score` gives arrays. `strict`, `loose` and `share` are the same numbers with TRL's signature of a reward function, for
`task.rewards_from` and for TRL; a row's instructions are the columns `instruction_id_list` and `kwargs`, as IFEval has them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jax_grpo.tasks.instructions.catalogue import CATALOGUE, follows, follows_loosely, instructions_of

COMPONENTS = ("strict", "loose", "share")


def score(rows: Sequence[Mapping[str, Any]], completions: Sequence[str]) -> dict[str, np.ndarray]:
    """Components [B] float32 of completions, one to a row with `instruction_id_list` and `kwargs`.

    Returns:
        strict, loose: 1 if all of the row's instructions are followed, else 0. share: of its instructions, those followed
        strictly. And by the id of each instruction, the share of the row's of that type that are followed; NaN: it has none.

    Raises BadInstruction: an instruction cannot be checked.
    """
    instructions = [
        instructions_of(row["instruction_id_list"], row["kwargs"], f"row {number}") for number, row in enumerate(rows)
    ]
    pairs = list(zip(instructions, completions, strict=True))
    strict = [[follows(text, one) for one in row] for row, text in pairs]
    loose = [all(follows_loosely(text, one) for one in row) for row, text in pairs]
    by_type = {identifier: np.full(len(pairs), np.nan, np.float32) for identifier in CATALOGUE}
    for index, (row, verdicts) in enumerate(zip(instructions, strict, strict=True)):
        for identifier in {one.identifier for one in row}:
            own = [verdict for one, verdict in zip(row, verdicts, strict=True) if one.identifier == identifier]
            by_type[identifier][index] = np.mean(own)
    summary = ([all(row) for row in strict], loose, [np.mean(row) for row in strict])
    return {name: np.array(values, np.float32) for name, values in zip(COMPONENTS, summary, strict=True)} | by_type


Completion = str | Sequence[Mapping[str, str]]  # a text, or the messages of a conversation, of which the last is scored


def followed(component: str) -> Callable[..., list[float | None]]:
    """A reward function with TRL's signature that gives a component of `score`; None where the row has no such instruction.

    `log_metric`, where the trainer has one, is given the mean of each type.
    """

    def reward(
        prompts: Sequence[Any] | None = None,
        completions: Sequence[Completion] = (),
        completion_ids: Sequence[Sequence[int]] | None = None,
        *,
        instruction_id_list: Sequence[Sequence[str]],
        kwargs: Sequence[Sequence[Mapping[str, Any] | None]],
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        rows = [
            {"instruction_id_list": row[0], "kwargs": row[1]} for row in zip(instruction_id_list, kwargs, strict=True)
        ]
        values = score(rows, [text if isinstance(text, str) else text[-1]["content"] for text in completions])
        if log_metric is not None:
            for identifier in CATALOGUE:
                if not np.isnan(values[identifier]).all():
                    log_metric(identifier, float(np.nanmean(values[identifier])))
        return [None if np.isnan(value) else float(value) for value in values[component]]

    reward.__name__ = reward.__qualname__ = component  # trainers name their metrics by it
    return reward


strict, loose, share = map(followed, COMPONENTS)
