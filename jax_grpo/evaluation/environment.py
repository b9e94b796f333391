"""The `A:` task judged: is the state that the model writes the one the rules give? Knows nothing of generation."""

import zlib
from collections.abc import Sequence
from typing import Any

from jax_grpo.config_sections import TaskConfig
from jax_grpo.tasks.base import Position, Prompt
from jax_grpo.tasks.environment import EnvironmentTask, plain_number, similarity

LONGEST_FEN = 120  # characters compared; what runs on beyond any FEN only costs time


def environment_prompts(task: EnvironmentTask, positions: Sequence[Position]) -> list[Prompt]:
    """One prompt a position; its move is drawn by a checksum of the position, whatever its place in the file."""
    return [task.prompt(position, zlib.crc32(position.fen.encode())) for position in positions]


def environment_task() -> EnvironmentTask:
    """The task with its default share of illegal moves (5 %)."""
    return EnvironmentTask(TaskConfig.model_validate({"name": "environment"}))


def environment_rows(prompts: Sequence[Prompt], completions: Sequence[str]) -> list[dict[str, Any]]:
    """One row of measurements a prompt.

    Returns:
        Booleans `format` (four fields, each of its kind), `next_state` (the FEN exactly), `reward`, `terminated`, `truncated`
        (equal to the rules'; False where the field is missing); numbers `similarity` (normalised Levenshtein similarity of
        the FEN, 0 to 1) and `reward_error` (absolute; None where no number was written).
    """
    return [_row(prompt.answer or "", text) for prompt, text in zip(prompts, completions, strict=True)]


def is_legal_move(prompt: Prompt) -> bool:
    """Whether the prompt's move is legal, by the answer's `truncated`."""
    return (prompt.answer or "").endswith("+0")


def _row(answer: str, text: str) -> dict[str, Any]:
    fen, reward, terminated, truncated = answer.split("+")
    found = [*text.rstrip("+").split("+"), "", "", "", ""]
    written = plain_number(found[1])
    flags_there = found[2] in ("0", "1") and found[3] in ("0", "1")
    return {
        "format": len(found) == 8 and bool(found[0]) and written is not None and flags_there,
        "next_state": found[0] == fen,
        "similarity": float(similarity(fen, found[0][:LONGEST_FEN])),
        "reward": written == float(reward),
        "reward_error": None if written is None else abs(written - float(reward)),
        "terminated": found[2] == terminated,
        "truncated": found[3] == truncated,
    }
