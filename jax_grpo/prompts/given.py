"""Prompts that a Python program passes as rows: written to a JSONL file in the run folder, which `prompts.source` then names.

The run can be continued and replayed from its folder alone. Knows nothing of tasks, models or what a row means.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jax_grpo.config import Config, ConfigError, load_config
from jax_grpo.config.files import require_run_dir
from jax_grpo.config.loading import read_yaml
from jax_grpo.prompts.rows import READ, PromptFileError, without_none
from jax_grpo.system.whole_files import write_whole

SOURCE = "prompts.source"


def with_dataset(settings: str | Path | Mapping[str, Any], dataset: Iterable[Mapping[str, Any]]) -> Config:
    """`load_config` with the rows of `dataset` as `prompts.source`: a JSONL file in `run_dir`, named by its contents.

    Raises:
        ConfigError: as `load_config`; `prompts.source` is given too; or `run_dir` cannot be written to.
        PromptFileError: a row is no mapping, or holds what JSON has no form for.
    """
    if isinstance(dataset, str | Path | Mapping):
        raise ConfigError(
            f"dataset is {dataset!r:.80}; expected rows, such as a list of dicts; a file's path is {SOURCE}"
        )
    values = settings if isinstance(settings, Mapping) else read_yaml(str(settings))[0]
    if isinstance(prompts := values.get("prompts"), Mapping) and "source" in prompts:
        raise ConfigError(f"{SOURCE} is {prompts['source']!r}, and a dataset is given: leave one out")
    run_dir = load_config(settings, [f"--{SOURCE}", "dataset.jsonl"]).run_dir
    require_run_dir(run_dir)
    text = "".join(_line(number, row) for number, row in enumerate(dataset))
    path = Path(run_dir) / f"prompts-{hashlib.sha256(text.encode()).hexdigest()[:12]}.jsonl"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    except OSError as error:
        raise ConfigError(f"run_dir is {run_dir!r}, which cannot be written ({error.strerror})") from error
    return load_config(settings, [f"--{SOURCE}", json.dumps(str(path))])


def _line(number: int, row: Any) -> str:
    if not isinstance(row, Mapping):
        raise PromptFileError(f"dataset: row {number} is {row!r:.80}; expected a mapping of columns, such as a dict")
    plain = {name: without_none(value) if name in READ else value for name, value in row.items()}
    try:
        _require_texts(plain)
        return json.dumps(plain, default=_plain, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise PromptFileError(f"dataset: row {number} cannot be written as JSON: {error}") from error


def _plain(value: Any) -> Any:
    """A NumPy number or array as Python's own."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{value!r:.80} is a {type(value).__name__}; expected texts, numbers, lists or dicts")


def _require_texts(value: Any) -> None:
    """Raises TypeError: a key is no text, and JSON would make one of it."""
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"the key {key!r} is a {type(key).__name__}; expected a text")
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
        _require_texts(part)
