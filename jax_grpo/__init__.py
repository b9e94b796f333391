"""GRPO for language models in JAX/Flax: `jax_grpo.train.train("configs/quickstart.yaml")`.

The names of `__all__` and `train.train` are the public face (docs/api.md); each is imported when it is first used, so that
`import jax_grpo` is free.

Letters of shapes, the same everywhere: B completions, P prompts, G completions a prompt, T tokens of a prompt (or of a whole
row), C tokens of a completion (in `lm_head`: rows of a tile), S tokens of either layout, H width, V vocabulary, N heads (in
`lm_head`: all rows), D width of a head, K reward components (in `sampling`: candidates).
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from jax_grpo.chess.positions.position import Position
    from jax_grpo.config import Config, load_config
    from jax_grpo.config.tasks import Settings
    from jax_grpo.model.tokenizer import Tokenizer
    from jax_grpo.prompts.rows import Row
    from jax_grpo.report.records import read_records
    from jax_grpo.rollout.texts import Policy, load_named
    from jax_grpo.tasks.base import Prompt, Task
    from jax_grpo.tasks.episodes import EpisodicTask
    from jax_grpo.tasks.stop import StopRule, text_stop, word_stop
    from jax_grpo.trainer import Trainer

_NAMES = {
    "config": ("Config", "load_config"),
    "config.tasks": ("Settings",),
    "model.tokenizer": ("Tokenizer",),
    "chess.positions.position": ("Position",),
    "prompts.rows": ("Row",),
    "report.records": ("read_records",),
    "rollout.texts": ("Policy", "load_named"),
    "tasks.base": ("Prompt", "Task"),
    "tasks.episodes": ("EpisodicTask",),
    "tasks.stop": ("StopRule", "text_stop", "word_stop"),
    "trainer": ("Trainer",),
}
__all__ = [
    "Config",
    "EpisodicTask",
    "Policy",
    "Position",
    "Prompt",
    "Row",
    "Settings",
    "StopRule",
    "Task",
    "Tokenizer",
    "Trainer",
    "load_config",
    "load_named",
    "read_records",
    "text_stop",
    "word_stop",
]


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def __getattr__(name: str) -> Any:
    if name == "train":  # a module, which has the function of that name
        return importlib.import_module("jax_grpo.train")
    for module, names in _NAMES.items():
        if name in names:
            return getattr(importlib.import_module(f"jax_grpo.{module}"), name)
    raise AttributeError(f"module 'jax_grpo' has no attribute {name!r}; its names: {', '.join(__all__)}")
