"""What the trainer reaches by its name in a config or a file, and where it is: imported when it is first needed.

Everything of chess is here and nowhere else in the trainer; a task of the user's own is reached the same way, by `module:name`.
"""

import importlib
from typing import Any

TASKS = {  # task.name
    "policy": "jax_grpo.chess.tasks.policy:PolicyTask",
    "environment": "jax_grpo.chess.tasks.environment:EnvironmentTask",
    "game": "jax_grpo.chess.tasks.game:GameTask",
    "length": "jax_grpo.tasks.toy:LengthTask",
    "guess": "jax_grpo.tasks.guess:GuessTask",
    "instructions": "jax_grpo.tasks.instructions.task:InstructionsTask",
    "reasoning_gym": "jax_grpo.tasks.reasoning_gym:ReasoningGymTask",
    "prompts": "jax_grpo.tasks.rewards:RewardsTask",
}
SETTINGS = {  # of the tasks that have settings of their own: apart from these, so that a config is read without python-chess
    "policy": "jax_grpo.chess.settings:PolicySettings",
    "environment": "jax_grpo.chess.settings:EnvironmentSettings",
    "game": "jax_grpo.chess.settings:GameSettings",
    "length": "jax_grpo.tasks.toy:LengthSettings",
    "guess": "jax_grpo.tasks.guess:GuessSettings",
    "reasoning_gym": "jax_grpo.tasks.reasoning_gym:ReasoningGymSettings",
    "prompts": "jax_grpo.tasks.rewards:PromptsSettings",
}
READERS = {  # `Task.reads`: `(PromptsConfig, seed, cache folder) -> Rows`
    "positions": "jax_grpo.chess.positions.sources:load_positions",
}
TOKENIZERS = {"chess": "jax_grpo.chess.vocabulary:chess_backend"}  # model.tokenizer
LESSONS = "jax_grpo.chess.lessons"  # of a warm start: rows of chess
STYLES = "jax_grpo.chess.style"  # of the prompts that a model of chess was trained on
CARDS = "jax_grpo.chess.card"  # of a model of chess, with code that prompts it
EVALUATIONS = "jax_grpo.chess.evaluate.tables:read_report"  # an evaluation's folder
COMMANDS = {  # `python -m jax_grpo.NAME`
    "evaluate": "jax_grpo.chess.evaluate.__main__:main",
    "data": "jax_grpo.chess.data.__main__:main",
    "uci": "jax_grpo.chess.play.uci:main",
    "match": "jax_grpo.chess.play.match:main",
}
BOARDS = "jax_grpo.chess.boards"  # pictures of samples with a FEN


def by_name(place: str) -> Any:
    """The module, or what `module:name` names in it."""
    module, _, name = place.partition(":")
    loaded = importlib.import_module(module)
    return getattr(loaded, name) if name else loaded
