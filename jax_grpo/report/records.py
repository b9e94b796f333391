"""Records of a run, one JSON object with its `iteration` a line: read back, and made of an iteration's completions."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jax_grpo.config import Config
from jax_grpo.tasks.base import Component, Prompt, Task, applicable
from jax_grpo.tasks.copies import plain
from jax_grpo.tasks.episodes import Episode

WORD = re.compile(r"[^\W\d_]+")
OTHERS = 7  # completions recorded beside a group's first one
YARDSTICK = "yardstick/"  # before `player/component` in the names of metrics


class RecordsError(ValueError):
    """A file of records is not one; names the file, the line, what is there and what was expected."""


def read_records(path: str | Path, *, missing_ok: bool = False) -> list[dict]:
    """Objects of a JSON-lines file, in order, without a last line that a kill cut short; a RecordsError where it is none."""
    if missing_ok and not Path(path).exists():
        return []
    try:
        lines = Path(path).read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        raise RecordsError(f"{path}: cannot be read ({error})") from error
    records = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            if number == len(lines):  # no line end after it
                continue
            raise RecordsError(f"{path}:{number}: {line[:60]!r} is not JSON ({error})") from error
        if not isinstance(record, dict):
            raise RecordsError(f"{path}:{number}: {line[:60]!r}; expected an object")
        if type(record.get("iteration")) is not int:
            raise RecordsError(f"{path}:{number}: iteration is {record.get('iteration')!r}; expected a whole number")
        records.append(record)
    return records


def yardsticks_of(record: Mapping[str, Any]) -> list[tuple[str, str, float]]:
    """(player in words, component, value) of each yardstick in a record; see `Task.yardsticks`."""
    parts = [(*name.removeprefix(YARDSTICK).split("/"), record[name]) for name in record if name.startswith(YARDSTICK)]
    return [(player.replace("_", " "), component, value) for player, component, value in parts]


def outcome(records: Sequence[Mapping[str, Any]], completions: int, heldout: int) -> str:
    """What a run changed, in a line, from which to which: held-out rewards if it has two evaluations, else those of training.

    `completions` are those of an iteration, `heldout` the held-out prompts. With refill or a
    curriculum the reward is of prompts that were not picked by their rewards.
    """
    evaluated = [record for record in records if "eval/sampled/reward" in record]
    if len(evaluated) > 1:
        first, last = evaluated[0], evaluated[-1]
        changes = [
            f"{mode} {first[name]:.3f} -> {last[name]:.3f}"
            for mode in ("greedy", "sampled")
            if None not in (first.get(name := f"eval/{mode}/reward"), last.get(name))
        ]
        what = f"held-out reward, {heldout} prompts, iteration {first['iteration']} -> {last['iteration']}"
        return f"{what}: {', '.join(changes)}"
    names = ("reward/unselected", "refill/reward", "reward/mean")  # the first that the run has
    rewards = [next((r[name] for name in names if name in r), None) for r in records if "loss" in r]
    rewards = [reward for reward in rewards if reward is not None]
    if not rewards:
        return "no iteration was trained"
    count = max(min(len(rewards) // 2, 10), 1)
    before, after = (float(np.mean(part)) for part in (rewards[:count], rewards[-count:]))
    return (
        f"training reward, first {count} -> last {count} of {len(rewards)} iterations of {completions} completions: "
        f"{before:.3f} -> {after:.3f}"
    )


def sample_rows(
    task: Task,
    prompts: Sequence[Prompt],
    completions: Sequence[str],
    rewards_B: np.ndarray,
    components: Mapping[str, Component],
    config: Config,
    extras: Mapping[str, Sequence[Any]] | None = None,
    episodes: Sequence[Episode] | None = None,
    advantages_B: np.ndarray | None = None,
) -> list[dict]:
    """One JSON-ready record for the first completion of each of `logging.samples` prompts.

    There is one of `prompts` for each of `completions`, whose texts end at the stop, groups of `rollout.group_size` together;
    `rewards_B` are weighted sums with penalties, `components` the raw rewards by name. A record has `prompt`, `completion`,
    `reward` and `components`, and what the task adds (`Task.sample_fields`). A number that is not finite is null. `extras` are
    columns of the user's rewards, one value a completion, which stand in `extra`. An episode has its `turns`, pairs of completion
    and observation, and `truncated`: `cut` (a completion at its cap), `out of turns`, or null. With `advantages_B` a record has its
    `advantage`, and in `others` the completions after it in its group, up to `OTHERS`, with theirs.
    """

    def judged(i: int) -> dict[str, Any]:
        own = applicable({name: one.at(slice(i, i + 1)) for name, one in components.items()}, prompts[i : i + 1])
        scores = {name: _finite(values[0]) for name, values in own.items()}
        given = {} if advantages_B is None else {"advantage": _finite(advantages_B[i])}
        return {"completion": completions[i], "reward": _finite(rewards_B[i]), "components": scores, **given}

    rows = []
    for i in range(0, len(prompts), config.rollout.group_size)[: config.logging.samples]:
        row = {"prompt": prompts[i].text, **judged(i)}
        if advantages_B is not None:
            row["others"] = [judged(j) for j in range(i + 1, i + min(config.rollout.group_size, OTHERS + 1))]
        if extras:
            row["extra"] = {name: plain(values[i]) for name, values in extras.items()}
        row |= task.sample_fields(prompts[i], completions[i])
        if episodes is not None:
            episode = episodes[i]
            truncated = "cut" if episode.cut else None if episode.done else "out of turns"
            row |= {"turns": [list(turn) for turn in episode.turns], "truncated": truncated}
        rows.append(row)
    return rows


def distinct_share(completions: Sequence[str], group_size: int) -> float:
    """Distinct texts in a group over its size, mean over groups: 1 where all differ, 1 / group_size where all are one."""
    groups = [completions[i : i + group_size] for i in range(0, len(completions), group_size)]
    return float(np.mean([len(set(group)) / len(group) for group in groups]))


def repeated_share(prompts: Sequence[Prompt], completions: Sequence[str]) -> float:
    """How much of its prompt a completion repeats: of the prompt's runs of three words, the share that the completion has too.

    Of messages the last one is the prompt. The mean is over completions of prompts that have such runs; NaN: none has.

    >>> repeated_share([Prompt("Do not use commas.", 0)], ["I think: do not use any."])
    0.5
    """
    shares = []
    for prompt, completion in zip(prompts, completions, strict=True):
        runs = _runs(prompt.text if prompt.messages is None else prompt.messages[-1].get("content") or "")
        if runs:
            shares.append(len(runs & _runs(completion)) / len(runs))
    return float(np.mean(shares)) if shares else math.nan


def _runs(text: str) -> set[tuple[str, ...]]:
    words = WORD.findall(text.casefold())
    return set(zip(words, words[1:], words[2:], strict=False))


def episode_shares(episodes: Sequence[Episode]) -> dict[str, float]:
    """Metrics of episodes of several turns: completions an episode, and why those that are truncated are so."""
    return {
        "episode/turns/mean": float(np.mean([len(episode.turns) for episode in episodes])),
        "episode/cut_fraction": float(np.mean([episode.cut for episode in episodes])),
        "episode/out_of_turns_fraction": float(np.mean([not episode.done for episode in episodes])),
    }


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
