"""GRPO for GPT-2 in JAX/Flax: `jax_grpo.train(jax_grpo.load_config("configs/quickstart.yaml"))`.

The names of `__all__` are the public face (docs/api.md); each is imported when it is first asked for: `import jax_grpo` is free.

Letters of shapes, the same everywhere: B completions, P prompts, G completions a prompt, T tokens of a prompt (or of a whole
row), C tokens of a completion (in `lm_head`: rows of a tile), S tokens of either layout, H width, V vocabulary, N heads (in
`lm_head`: all rows), D width of a head, K reward components (in `sampling`: candidates).
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = ""

if TYPE_CHECKING:
    from jax_grpo.config import Config as Config
    from jax_grpo.config import load_config as load_config
    from jax_grpo.model.named import Policy as Policy
    from jax_grpo.model.named import load_named as load_named
    from jax_grpo.model.tokenizer import Tokenizer as Tokenizer
    from jax_grpo.positions.position import Position as Position
    from jax_grpo.report.records import read_records as read_records
    from jax_grpo.tasks.base import Prompt as Prompt
    from jax_grpo.tasks.base import Task as Task
    from jax_grpo.tasks.stop import StopRule as StopRule
    from jax_grpo.tasks.stop import word_stop as word_stop
    from jax_grpo.train import train as train
    from jax_grpo.trainer import Trainer as Trainer

_HOMES = {
    "Config": "config",
    "Policy": "model.named",
    "Position": "positions.position",
    "Prompt": "tasks.base",
    "StopRule": "tasks.stop",
    "Task": "tasks.base",
    "Tokenizer": "model.tokenizer",
    "Trainer": "trainer",
    "load_config": "config",
    "load_named": "model.named",
    "read_records": "report.records",
    "word_stop": "tasks.stop",
}
__all__ = [
    "Config",
    "Policy",
    "Position",
    "Prompt",
    "StopRule",
    "Task",
    "Tokenizer",
    "Trainer",
    "load_config",
    "load_named",
    "read_records",
    "train",
    "word_stop",
]


def __getattr__(name: str) -> Any:
    if name == "train":  # the module, which can be called: the name is both
        return importlib.import_module("jax_grpo.train")
    if name not in _HOMES:
        raise AttributeError(f"module 'jax_grpo' has no attribute {name!r}; its names: {', '.join(__all__)}")
    return getattr(importlib.import_module(f"jax_grpo.{_HOMES[name]}"), name)
