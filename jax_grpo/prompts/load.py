"""What a task reads: positions of chess, or rows of a user's file."""

from collections.abc import Callable
from typing import Any, Literal

from jax_grpo.positions.dataset import load_positions
from jax_grpo.prompts.rows import load_prompts

Loader = Callable[..., Any]
LOADERS: dict[Literal["positions", "prompts"], Loader] = {"positions": load_positions, "prompts": load_prompts}
