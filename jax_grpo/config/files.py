"""Do the files that a config names exist? Asked by the command line before anything is compiled, and not by the schema,
so that a config for another machine can still be read, shown and compared.

Knows what the folders that hold weights look like from outside, and where the packaged models are; reads no file's contents,
but for the JSON of a tokenizer's settings, where it is asked to.
"""

import json
from pathlib import Path
from typing import Any

from jax_grpo.config.loading import ConfigError, did_you_mean
from jax_grpo.config.sections import BUILT_IN_SOURCES

PACKAGED_MODELS = Path(__file__).parents[1] / "assets" / "models"
PACKAGED = "packaged:"
RUN_WEIGHTS = "weights"  # the folder of a finished run's exported weights, in its run folder
MANIFEST = "manifest.json"  # the file that a complete checkpoint has
# What Hugging Face's libraries call the files of a tokenizer.
TOKENIZER_FILE, TOKENIZER_CONFIG, CHAT_TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"


def read_settings(path: Path) -> dict[str, Any]:
    """A file's JSON object, {} where there is no file; a ValueError names a file that is none."""
    if not path.is_file():
        return {}
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error})") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{path}: {settings!r:.60}; expected an object")
    return settings


def is_checkpoint(path: Path) -> bool:
    """Whether `path` is a complete checkpoint's folder (its contents may still be damaged)."""
    return (path / MANIFEST).is_file()


def weights_directory(weights: str) -> Path:
    """Folder of what a user calls a model: `packaged:NAME`, a run's folder (its exported weights), or the path itself."""
    if weights.startswith(PACKAGED):
        return PACKAGED_MODELS / weights.removeprefix(PACKAGED)
    exported = Path(weights) / RUN_WEIGHTS
    return exported if (exported / "config.json").is_file() else Path(weights)


def tokenizer_path(name: str) -> Path:
    """File or folder of what `model.tokenizer` names beside `gpt2` and `chess`; of a packaged model its own."""
    return weights_directory(name) if name.startswith(PACKAGED) else Path(name)


def require_weights(weights: str | None) -> None:
    """Refuses, with a ConfigError, a packaged model that is not there, and a folder without a model or exported weights."""
    if weights is None:
        return
    if weights.startswith(PACKAGED):
        names = sorted(PACKAGED + folder.name for folder in PACKAGED_MODELS.iterdir() if folder.is_dir())
        if weights not in names:
            hint = did_you_mean(weights, names)
            raise ConfigError(f"model.weights is {weights!r}; the packaged models are {', '.join(names)}.{hint}")
        return
    folder = weights_directory(weights)
    file = folder / "config.json"
    if file.is_file() or is_checkpoint(folder):
        return
    if (folder / "config.yaml").is_file():
        raise ConfigError(
            f"{folder} is the folder of a run that has not exported its weights ({folder / RUN_WEIGHTS} is missing): finish "
            f"it with --resume auto, or give one of its checkpoints ({folder}/checkpoints/NUMBER)"
        )
    raise ConfigError(
        f"model.weights is {weights!r}, but {file} does not exist; expected a Hugging Face folder: put the model's "
        f"config.json and model.safetensors in {Path(weights).absolute()}, use packaged:rook-small, or give a finished "
        f"run's folder or a checkpoint (runs/NAME/checkpoints/000050)"
    )


def require_source(source: str, key: str = "prompts.source") -> None:
    """Refuses, with a ConfigError, positions of neither a known name, nor a file, nor a data set's folder."""
    path = Path(source)
    folder = any((path / name).is_file() for name in ("provenance.json", "state.json"))
    if source not in BUILT_IN_SOURCES and not path.is_file() and not folder:
        hint = did_you_mean(source, [*BUILT_IN_SOURCES, *map(str, Path(source).parent.glob("*.*"))])
        raise ConfigError(
            f"{key} is {source!r}: no such file; expected {', '.join(BUILT_IN_SOURCES)}, a .jsonl, .csv, .parquet, .pgn "
            f"or .txt file, or a folder made by `python -m jax_grpo.data` or saved by Hugging Face's `datasets`.{hint}"
        )


def require_run_dir(run_dir: str) -> None:
    """Refuses, with a ConfigError, a run folder that is, or lies in, a file."""
    path = Path(run_dir)
    for part in (path, *path.parents):
        if part.exists() and not part.is_dir():
            raise ConfigError(f"run_dir is {run_dir!r}, but {part} is a file; expected a folder, new or existing")
