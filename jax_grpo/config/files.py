"""Do the files that a config names exist? Asked by the command line before anything is compiled, and not by the schema,
so that a config for another machine can still be read, shown and compared.

Knows what the folders that hold weights look like from outside, and where the packaged models are; reads no file's contents,
but for the JSON of a tokenizer's settings.
"""

import functools
import json
import re
from pathlib import Path
from typing import Any

from jax_grpo.config.loading import ConfigError, did_you_mean
from jax_grpo.config.sections import BUILT_IN_SOURCES, is_built_in
from jax_grpo.gguf_files.names import PACKAGES, GGUFError, file_of, is_gguf

PACKAGED_MODELS = Path(__file__).parents[1] / "assets" / "models"
PACKAGED = "packaged:"
HUB = "hub:"  # before the name of a model of Hugging Face's hub
REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")  # how such a name looks
# Of a model's repository: its settings, its tokenizer and its templates; and with its tensors. Copies in other formats stay there.
HUB_SETTINGS = ["*.json", "*.jinja", "*.txt", "*.model"]
HUB_WEIGHTS = [*HUB_SETTINGS, "*.safetensors"]
HUB_OTHERS = ["*/*.json", "*/*.txt", "*/*.model", "*/*.safetensors", "consolidated*"]
RUN_WEIGHTS = "weights"  # the folder of a finished run's exported weights, in its run folder
MANIFEST = "manifest.json"  # the file that a complete checkpoint has
ADAPTER_CONFIG = "adapter_config.json"  # the file of a folder of adapters that says what they are of, as PEFT calls it
# What Hugging Face's libraries call the files of a tokenizer.
TOKENIZER_FILE, TOKENIZER_CONFIG, CHAT_TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"


def parsed_json(text: str | bytes) -> Any:
    """What a JSON text says. Raises ValueError: it is none, or nested so deep that Python cannot read it."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_settings(path: Path) -> dict[str, Any]:
    """A file's JSON object, {} where there is no file; a ValueError names a file that is none."""
    if not path.is_file():
        return {}
    try:
        settings = parsed_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error})") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{path}: {settings!r:.60}; expected an object")
    return settings


def is_checkpoint(path: Path) -> bool:
    """Whether `path` is a complete checkpoint's folder (its contents may still be damaged)."""
    return (path / MANIFEST).is_file()


def is_adapter(path: Path) -> bool:
    """Whether `path` is a folder of adapters, which are of weights elsewhere, and of no whole model."""
    return (path / ADAPTER_CONFIG).is_file() and not (path / "config.json").is_file()


def base_of(folder: Path) -> str:
    """What the adapters of a folder are of: a name of weights. Raises ConfigError: it does not say."""
    base = read_settings(folder / ADAPTER_CONFIG).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise ConfigError(
            f"{folder / ADAPTER_CONFIG}: base_model_name_or_path is {base!r}; expected the folder of the weights"
        )
    return base


@functools.cache
def _of_hub(weights: str, tensors: bool) -> Path:
    """The folder of `hub:OWNER/NAME`, or `hub:OWNER/NAME@REVISION`, in the cache of `huggingface_hub`; downloads what it lacks.

    Raises:
        ConfigError: that library is not installed, or has the model neither in its cache nor from the hub.
    """
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ConfigError(f"model.weights is {weights!r}, which needs: pip install 'jax_grpo[hub]'") from None
    name, _, revision = weights.removeprefix(HUB).partition("@")
    files = HUB_WEIGHTS if tensors else HUB_SETTINGS
    try:
        folder = snapshot_download(name, revision=revision or None, allow_patterns=files, ignore_patterns=HUB_OTHERS)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.weights is {weights!r}: {' '.join(str(error).split())}") from error
    return Path(folder)


def weights_directory(weights: str, *, tensors: bool = False) -> Path:
    """Folder of what a user calls a model: `packaged:NAME`, a run's folder (its exported weights), or the path itself.

    Of a GGUF file, or of a package that holds one, it is what `gguf.folder` converts it to; a ConfigError says why it cannot. Of a
    model of the hub it is a folder of `huggingface_hub`'s cache, where its tensors are only once `tensors` were asked for.
    """
    if weights.startswith(PACKAGED):
        return PACKAGED_MODELS / weights.removeprefix(PACKAGED)
    if weights.startswith(HUB):
        return _of_hub(weights, tensors)
    if is_gguf(weights):
        from jax_grpo.gguf_files.folder import folder_of

        try:
            return folder_of(weights)
        except (GGUFError, OSError) as error:
            raise ConfigError(f"model.weights: {error}") from error
    exported = Path(weights) / RUN_WEIGHTS
    return exported if (exported / "config.json").is_file() or is_adapter(exported) else Path(weights)


def adapter_directory(weights: str) -> Path:
    """The folder of `model.adapter.weights`. Raises ConfigError: there are no adapters in it."""
    if not is_adapter(folder := weights_directory(weights, tensors=True)):
        raise ConfigError(
            f"model.adapter.weights is {weights!r}, and {folder} has no {ADAPTER_CONFIG} of adapters alone; expected a folder of "
            "PEFT's, or that of a finished run which trained adapters"
        )
    return folder


def positions_of(weights: str) -> int | None:
    """The positions of a model, by its config.json or a checkpoint's manifest; None: they do not say, or are not there."""
    folder = weights_directory(weights)
    if is_adapter(folder):
        return positions_of(base_of(folder))
    if is_checkpoint(folder):
        described = parsed_json((folder / MANIFEST).read_text(encoding="utf-8"))["content"].get("architecture", {})
    else:
        described = read_settings(folder / "config.json")
    stated = (described.get(name) for name in ("n_positions", "max_position_embeddings"))
    return next((count for count in stated if type(count) is int), None)


def tokenizer_path(name: str) -> Path:
    """File or folder of what `model.tokenizer` names beside `gpt2` and `chess`; of a model that is no path its own."""
    return weights_directory(name) if name.startswith((PACKAGED, HUB)) or is_gguf(name) else Path(name)


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
    if is_gguf(weights):
        try:
            file_of(weights)
        except GGUFError as error:
            raise ConfigError(f"model.weights: {error}") from error
        return
    folder = weights_directory(weights)
    file = folder / "config.json"
    if is_adapter(folder):
        return require_weights(base_of(folder))
    if file.is_file() or is_checkpoint(folder):
        return
    if (folder / "config.yaml").is_file():
        raise ConfigError(
            f"{folder} is the folder of a run that has not exported its weights ({folder / RUN_WEIGHTS} is missing): finish "
            f"it with --resume auto, or give one of its checkpoints ({folder}/checkpoints/NUMBER)"
        )
    hub = f" Of Hugging Face's hub? Then give {HUB}{weights}." if REPOSITORY.fullmatch(weights) else ""
    raise ConfigError(
        f"model.weights is {weights!r}, but {file} does not exist; expected a Hugging Face folder: put the model's "
        f"config.json and model.safetensors in {Path(weights).absolute()}, use packaged:rook-small, or give a .gguf file, a "
        f"finished run's folder or a checkpoint (runs/NAME/checkpoints/000050).{hub}{did_you_mean(weights, list(PACKAGES))}"
    )


def require_source(source: str, key: str = "prompts.source") -> None:
    """Refuses, with a ConfigError, positions of neither a known name, nor a file, nor a data set's folder."""
    path = Path(source)
    folder = any((path / name).is_file() for name in ("provenance.json", "state.json"))
    if not is_built_in(source) and not path.is_file() and not folder:
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
