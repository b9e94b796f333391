"""Verifiable instructions (IFEval, Zhou et al. 2023): their checkers, rows, drawn prompts with answers, and rewards.

This room owns what it means to follow an instruction, by the published ids and arguments; `docs/instructions.md` has the table. It
knows no tokens, models or training. `strict`, `loose` and `share` are reward functions for `task.rewards_from` and for TRL.
"""

from jax_grpo.tasks.instructions.arguments import BadInstruction
from jax_grpo.tasks.instructions.catalogue import CATALOGUE, NOT_OFFERED
from jax_grpo.tasks.instructions.rewards import followed, loose, score, share, strict
from jax_grpo.tasks.instructions.rows import read_rows, write_rows
from jax_grpo.tasks.instructions.task import InstructionsTask

__all__ = [
    "CATALOGUE",
    "NOT_OFFERED",
    "BadInstruction",
    "InstructionsTask",
    "followed",
    "loose",
    "read_rows",
    "score",
    "share",
    "strict",
    "write_rows",
]
