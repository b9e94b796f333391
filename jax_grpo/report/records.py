"""Records of a run, one JSON object with its `iteration` a line: read back, and made of an iteration's completions."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jax_grpo.config import Config
from jax_grpo.tasks.base import Prompt, applicable
from jax_grpo.tasks.episodes import Episode
from jax_grpo.tasks.policy import in_style

YARDSTICK = "yardstick/"  # before `player/component` in the names of metrics
_MOVE = re.compile(r"(?<![a-h0-9])[a-h][1-8][a-h][1-8][qrbn]?(?![a-z0-9])")


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
    """(player in words, component, value) of each yardstick in a record; see `evaluate.yardsticks`."""
    found = [(*name.removeprefix(YARDSTICK).split("/"), record[name]) for name in record if name.startswith(YARDSTICK)]
    return [(player.replace("_", " "), component, value) for player, component, value in found]


def sample_rows(
    prompts: Sequence[Prompt],
    completions: Sequence[str],
    rewards_B: np.ndarray,
    components: Mapping[str, np.ndarray],
    config: Config,
    extras: Mapping[str, Sequence[Any]] | None = None,
    episodes: Sequence[Episode] | None = None,
) -> list[dict]:
    """One JSON-ready record for the first completion of each of `logging.samples` prompts.

    There is one of `prompts` for each of `completions`, whose texts end at the stop, groups of `rollout.group_size` together;
    `rewards_B` are weighted sums with penalties, `components` the raw rewards [B] by name. A record has `prompt`, `completion`,
    `reward` and `components`, and where the prompt has a position also `fen`, `engine_move` (the labels' first, or null) and
    `model_move` (the last move written, as it is on that board, or null). A number that is not finite is null. `extras` are
    columns of the user's rewards, one value a completion, which stand in `extra`. An episode has its `turns`, pairs of completion
    and observation, and `truncated`: `cut` (a completion at its cap), `out of turns`, or null.
    """
    rows = []
    for i in range(0, len(prompts), config.rollout.group_size)[: config.logging.samples]:
        own = applicable({name: values[i : i + 1] for name, values in components.items()}, prompts[i : i + 1])
        row = {
            "prompt": prompts[i].text,
            "completion": completions[i],
            "reward": _finite(rewards_B[i]),
            "components": {name: _finite(values[0]) for name, values in own.items()},
        }
        if extras:
            row["extra"] = {name: _plain(values[i]) for name, values in extras.items()}
        if (position := prompts[i].position) is not None:
            # A completion of a task that rewards no legal moves is not moves.
            moves = _MOVE.findall(completions[i]) if any(name.endswith("legal") for name in own) else []
            engine = position.moves[0] if position.moves else None
            model = in_style(config.task.prompt_style, moves[-1], position.fen) if moves else None
            row |= {"fen": position.fen, "engine_move": engine, "model_move": model}
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


def episode_shares(episodes: Sequence[Episode]) -> dict[str, float]:
    """Metrics of episodes of several turns: completions an episode, and why those that are truncated are so."""
    return {
        "episode/turns/mean": float(np.mean([len(episode.turns) for episode in episodes])),
        "episode/cut_fraction": float(np.mean([episode.cut for episode in episodes])),
        "episode/out_of_turns_fraction": float(np.mean([not episode.done for episode in episodes])),
    }


def _plain(value: Any) -> Any:
    """A value as strict JSON has it: anything it has no word for is a text, a number that is not finite null."""
    if isinstance(value, str | int | None):
        return value
    return _finite(float(value)) if hasattr(value, "__float__") else str(value)


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
