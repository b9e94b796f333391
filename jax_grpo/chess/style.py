"""How a model of chess was taught to be asked for one move, as ever or in `own_side`'s way, and whether its run trained chess.

Reads files; plays nothing.
"""

from collections.abc import Mapping
from typing import Any

from jax_grpo.chess.settings import OWN_SIDE
from jax_grpo.config import ConfigError
from jax_grpo.config.files import (
    ADAPTER_CONFIG,
    RUN_WEIGHTS,
    is_adapter,
    is_checkpoint,
    read_settings,
    weights_directory,
)
from jax_grpo.config.loading import read_yaml
from jax_grpo.names import TASKS
from jax_grpo.run.files import read_manifest

OF_CHESS = "jax_grpo.chess."
PROMPT_STYLE = "prompt_style"  # what config.json calls how a model is asked, where that is `OWN_SIDE`


def find_style(weights: str) -> str:
    """How weights that are there were taught to be asked for one move, by a checkpoint's config or config.json (of adapters,
    theirs): `own_side` where they say so, else `best_move`.
    """
    folder = weights_directory(weights)
    if is_checkpoint(folder):
        styles = [style for _, style in tasks_of(read_manifest(folder).get("config", {}).get("task", {}))]
    else:
        styles = [read_settings(folder / (ADAPTER_CONFIG if is_adapter(folder) else "config.json")).get(PROMPT_STYLE)]
    return OWN_SIDE if OWN_SIDE in styles else "best_move"


def require_chess(weights: str) -> None:
    """Refuses, with a ConfigError, weights of a run whose tasks are all others of this package than chess."""
    folder = run = weights_directory(weights)
    config = folder.parent / "config.yaml"
    if is_checkpoint(folder):
        section = read_manifest(folder).get("config", {}).get("task", {})
    elif folder.name == RUN_WEIGHTS and config.is_file():
        section, run = read_yaml(str(config))[0].get("task", {}), folder.parent
    else:
        return
    tasks = [task for task, _ in tasks_of(section)]
    # Of a task of the user's own nothing is known.
    if not any(TASKS.get(task, OF_CHESS).startswith(OF_CHESS) for task in tasks):
        raise ConfigError(
            f"--weights {weights}: its run trained {', '.join(tasks)}, and all suites are of chess; for its held-out scores run "
            f"python -m jax_grpo.evaluate {run}. To see how it plays chess give the suites, such as --suite policy"
        )


def tasks_of(section: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The tasks of a config's section `task`, as it stands in a file, each with its prompt style where it has one."""
    parts = {name: part for name, part in (section.get("mixture") or {}).items() if part}
    parts = parts or {section.get("name", "policy"): {}}
    style = section.get(PROMPT_STYLE, "full")
    return [(part.get("task", name), part.get(PROMPT_STYLE, style)) for name, part in parts.items()]


def model_settings(style: str) -> dict[str, Any]:
    """What config.json says of a model that was taught a prompt style; nothing of those that are asked as ever."""
    return {PROMPT_STYLE: style} if style == OWN_SIDE else {}
