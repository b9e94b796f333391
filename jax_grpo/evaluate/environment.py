"""The `A:` task judged: is the state that the model writes the one the rules give? Knows nothing of generation."""

import zlib
from collections.abc import Sequence
from typing import Any

from jax_grpo.config.sections import TaskConfig
from jax_grpo.tasks.base import Position, Prompt
from jax_grpo.tasks.environment import LONGEST_FEN, EnvironmentTask, plain_number, similarity


def environment_task() -> EnvironmentTask:
    """The task with its default share of illegal moves (5 %)."""
    return EnvironmentTask(TaskConfig.model_validate({"name": "environment"}))


def environment_prompts(task: EnvironmentTask, positions: Sequence[Position]) -> list[Prompt]:
    """One prompt a position; its move is drawn by a checksum of the position, whatever its place in the file."""
    return [task.prompt(position, zlib.crc32(position.fen.encode())) for position in positions]


def environment_rows(prompts: Sequence[Prompt], completions: Sequence[str]) -> list[dict[str, Any]]:
    """One row of measurements a prompt.

    Booleans `format` (four fields, each of its kind), `next_state` (the FEN exactly), `reward`, `terminated`, `truncated`
    (equal to the rules'; False where the field is missing); numbers `similarity` (normalised Levenshtein similarity of
    the FEN, 0 to 1) and `reward_error` (absolute; None where no number was written).
    """
    rows = []
    for prompt, text in zip(prompts, completions, strict=True):
        fen, reward, terminated, truncated = (prompt.answer or "").split("+")
        fields = text.rstrip("+").split("+")
        written_fen, written_reward, *flags = [*fields, "", "", "", ""][:4]
        number = plain_number(written_reward)
        kinds = bool(written_fen) and number is not None and set(flags) <= {"0", "1"}
        rows.append(
            {
                "format": len(fields) == 4 and kinds,
                "next_state": written_fen == fen,
                "similarity": float(similarity(fen, written_fen[:LONGEST_FEN])),
                "reward": number == float(reward),
                "reward_error": None if number is None else abs(number - float(reward)),
                "terminated": flags[0] == terminated,
                "truncated": flags[1] == truncated,
            }
        )
    return rows
