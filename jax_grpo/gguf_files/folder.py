"""A GGUF file as a Hugging Face folder, made once and named by a hash of the file's contents.

A folder takes its place when all of it is written, so that a killed process leaves none that is half written.
"""

import functools
import hashlib
import json
import math
import os
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from jax_grpo.gguf_files.families import config_of, names_of, values_in_hf
from jax_grpo.gguf_files.names import file_of
from jax_grpo.gguf_files.reading import GGUFFile, dtype_of, read, shape_of
from jax_grpo.gguf_files.tokenizer import ends_of, tokenizer_of

MADE_BY = 1  # counted up whenever another folder is made of the same file
SHARD_BYTES = 2**31  # of weights in memory and in a file; one tensor more may be


def folder_of(name: str) -> Path:
    """The folder of a name that `is_gguf`, in `$XDG_CACHE_HOME/jax_grpo` (or `~/.cache/jax_grpo`), converted when it is not there.

    Raises:
        GGUFError: see `file_of` and `convert`.
        OSError: the folder cannot be written.
    """
    file = file_of(name).resolve()
    status = file.stat()
    return _converted(file, status.st_size, status.st_mtime_ns)


@functools.cache
def _converted(file: Path, size: int, changed: int) -> Path:
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256")
    digest.update(b"%d" % MADE_BY)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jax_grpo"
    folder = cache / f"{file.stem}-{digest.hexdigest()[:16]}"
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix=f".{file.stem}-") as working:
        made = Path(working) / folder.name
        convert(file, made)
        try:
            made.rename(folder)
        except OSError:  # another process was first
            if not folder.is_dir():
                raise
    return folder


def convert(source: Path, folder: Path) -> None:
    """Writes what `transformers` and this project load: safetensors, config.json, generation_config.json and the tokenizer.

    Values are float32, but for what the file has in float16 or bfloat16. The folder is made; a failure leaves it incomplete.

    Raises:
        GGUFError: not a GGUF file, or one with a key or tensor that is not read; none is ignored.
    """
    file = read(source)
    config = config_of(file)
    names = names_of(file, config)
    tokenizer, settings = tokenizer_of(file)
    if (tokens := 1 + max(tokenizer.get_vocab().values())) > config["vocab_size"]:
        raise file.refusal(f"it has {tokens} tokens, but an embedding of {config['vocab_size']}")
    ends = ends_of(file)
    of_bos = file.fields.get("tokenizer.ggml.bos_token_id")
    ids = {"bos_token_id": of_bos, "eos_token_id": ends if len(ends) > 1 else ends[0]}
    ids["pad_token_id"] = tokenizer.token_to_id(settings["pad_token"])
    stored = {dtype_of(tensor) for name in names if len((tensor := file.tensors[name]).shape) > 1}
    config |= ids | {"dtype": str(stored.pop() if len(stored) == 1 else np.dtype(np.float32))}
    settings["model_max_length"] = config.get("max_position_embeddings", config.get("n_positions"))
    folder.mkdir(parents=True)
    _write_weights(file, names, config, folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write(folder / "tokenizer_config.json", settings)
    _write(folder / "config.json", config)
    _write(folder / "generation_config.json", ids)
    _write(folder / "provenance.json", _provenance(file))


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _provenance(file: GGUFFile) -> dict[str, Any]:
    """Where the model comes from, for the card of an export."""
    about = {"name": "general.name", "organisation": "general.organization", "licence": "general.license"}
    return {"source": file.path.name} | {ours: file.fields[key] for ours, key in about.items() if key in file.fields}


def _write_weights(file: GGUFFile, names: dict[str, str], config: dict[str, Any], folder: Path) -> None:
    """One safetensors file, or several with an index, so that no more than one of them is in memory."""
    shards, where = _shards(file, names), {}
    for number, shard in enumerate(shards, 1):
        end = f"-{number:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
        to = folder / f"model{end}.safetensors"
        tensors = {names[name]: values_in_hf(file, name, config) for name in shard}
        save_file(tensors, to, {"format": "pt"})
        where |= dict.fromkeys(tensors, to.name)
    if len(shards) > 1:
        total = sum((folder / name).stat().st_size for name in set(where.values()))
        _write(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": where})


def _shards(file: GGUFFile, names: dict[str, str]) -> list[list[str]]:
    shards: dict[int, list[str]] = defaultdict(list)
    end = 0
    for name in names:
        end += math.prod(shape_of(file.tensors[name])) * dtype_of(file.tensors[name]).itemsize
        shards[(end - 1) // SHARD_BYTES].append(name)
    return list(shards.values())
