"""Adapters in PEFT's format, in and out: a folder with adapter_config.json and adapter_model.safetensors.

`peft.PeftModel.from_pretrained` reads what is written here, and what PEFT writes is read; what it can say and this decoder cannot
compute is refused by its key. A folder written here knows its base by a hash, and is refused beside another.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from jax_grpo.config.files import ADAPTER_CONFIG
from jax_grpo.model.architecture import Architecture
from jax_grpo.model.families import tensors_of
from jax_grpo.model.tokenizer import Tokenizer
from jax_grpo.model.weights import WeightsError, open_safetensors, read_json, require_finite, to_hf
from jax_grpo.policy.adapters import Adapter
from jax_grpo.system.whole_files import written_whole

ADAPTER_FILE = "adapter_model.safetensors"
WRAPPER = "base_model.model."  # PEFT's, before every name
# In the file's metadata, which PEFT does not read: the base's hash, and the dtype that it was held in.
BASE_HASH, BASE_DTYPE = "base_sha256", "base_dtype"
# Keys that would change the numbers, with the values at which they do not; the first is that of a key that is not there.
NEEDED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian"),  # others change the base's weights
    **dict.fromkeys(("use_dora", "lora_bias", "use_qalora"), (False, None)),
    **dict.fromkeys(("rank_pattern", "alpha_pattern"), ({}, None)),
    **dict.fromkeys(
        (
            *("layers_to_transform", "modules_to_save", "exclude_modules", "layer_replication"),
            *("trainable_token_indices", "target_parameters", "alora_invocation_tokens", "arrow_config"),
        ),
        (None,),
    ),
}


def read_adapter(folder: Path) -> Adapter:
    """Sizes and places of a folder's adapters.

    Raises:
        WeightsError: unreadable, or a setting has another meaning than can be computed here.
    """
    path = folder / ADAPTER_CONFIG
    settings = read_json(path, "an adapter of PEFT's")
    for key, allowed in NEEDED.items():
        if (value := settings.get(key, allowed[0])) not in allowed:
            raise WeightsError(f"{path}: {key} is {value!r:.60}; only {' or '.join(map(repr, allowed))} is supported")
    rank, alpha, targets = settings.get("r", 8), settings.get("lora_alpha", 8), settings.get("target_modules")
    if type(rank) is not int or rank < 1 or type(alpha) not in (int, float) or alpha <= 0:
        raise WeightsError(
            f"{path}: r is {rank!r} and lora_alpha {alpha!r}; expected a whole number and a number above 0"
        )
    if targets != "all-linear" and not (isinstance(targets, list) and targets and all(map(str, targets))):
        raise WeightsError(f"{path}: target_modules is {targets!r:.60}; expected a list of names, or 'all-linear'")
    places = None if targets == "all-linear" else tuple(sorted(map(str, targets)))
    return Adapter(rank, float(alpha), places, bool(settings.get("use_rslora", False)))


def read_base(folder: Path) -> tuple[str | None, str | None]:
    """What a folder says of the weights that its adapters are of: their hash, and the dtype they were held in; None: nothing."""
    with open_safetensors(folder / ADAPTER_FILE, "adapters") as file:
        metadata = file.metadata() or {}
    return metadata.get(BASE_HASH), metadata.get(BASE_DTYPE)


def load_adapters(folder: Path, architecture: Architecture, like: nnx.State) -> nnx.State:
    """A folder's adapters, in the structure and dtypes of `like`.

    Raises:
        WeightsError: a tensor is missing, left over, of another shape, or not finite.
    """
    path = folder / ADAPTER_FILE
    with open_safetensors(path, "adapters") as file:
        arrays = {name.removeprefix(WRAPPER): file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)

    def parameter(keys: tuple[Any, ...], leaf: nnx.Variable) -> nnx.Variable:
        value = leaf.get_value()
        one = next(iter(tensors_of(architecture, keys, value.shape)))
        if (stored := arrays.pop(one.name, None)) is None:
            raise WeightsError(f"{path}: tensor {WRAPPER + one.name!r} {one.shape} is missing")
        if stored.shape != one.shape:
            raise WeightsError(f"{path}: tensor {WRAPPER + one.name!r} has shape {stored.shape}; expected {one.shape}")
        require_finite(np.asarray(stored), path, one.name)
        return leaf.replace(jnp.asarray(stored.T, value.dtype))

    loaded = nnx.from_flat_state([(keys, parameter(keys, leaf)) for keys, leaf in nnx.to_flat_state(like)])
    if arrays:
        raise WeightsError(f"{path}: tensor {WRAPPER + min(arrays)!r} is no adapter of this {architecture.family}'s")
    return loaded


def save_adapters(
    folder: Path,
    architecture: Architecture,
    adapter: Adapter,
    adapters: nnx.State,
    *,
    base: str,
    base_hash: str,
    base_dtype: str,
    tokenizer: Tokenizer | None = None,
    more: Mapping[str, Any] | None = None,
) -> None:
    """Writes a folder that PEFT reads: adapters of the model in `base`, whose values, held in a dtype, have this hash.

    `more` is what else adapter_config.json says. The file of tensors appears whole or not at all.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {WRAPPER + name: np.ascontiguousarray(x) for name, x in to_hf(adapters, architecture).items()}
    modules = sorted({name.removeprefix(WRAPPER).rpartition(".lora_")[0].rpartition(".")[2] for name in tensors})
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "use_rslora": adapter.rank_stabilised,
        "target_modules": modules if adapter.targets is None else list(adapter.targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": architecture.family == "gpt2",
        "inference_mode": True,
        **(more or {}),
    }
    (folder / ADAPTER_CONFIG).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    if tokenizer is not None:
        tokenizer.save(folder)
    with written_whole(folder / ADAPTER_FILE) as working:
        save_file(tensors, working, {"format": "pt", BASE_HASH: base_hash, BASE_DTYPE: base_dtype})
