"""Hugging Face safetensors folders <-> Flax parameters, both ways, bit for bit.

Tensors are read one by one. Names with and without the `transformer.` prefix are understood; names are written with it. The
embedding is padded to the model's row multiple on the way in and cut to the vocabulary on the way out.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
from flax import nnx
from safetensors.numpy import save_file

from jax_grpo.model.gpt2 import GPT2, GPT2Config
from jax_grpo.model.tokenizer import Tokenizer
from jax_grpo.system.whole_files import written_whole

PREFIX = "transformer."
EMBEDDING = f"{PREFIX}wte.weight"
# Causal-mask buffers of old checkpoints, and the tied head, which holds no values of its own.
IGNORED_SUFFIXES = (".attn.bias", ".attn.masked_bias")
HEAD = "lm_head.weight"
FLOATS = ("F64", "F32", "F16", "BF16")
# Hugging Face's names of `GPT2Config`'s sizes, in their order.
SIZES = ("vocab_size", "n_layer", "n_head", "n_embd", "n_positions")
# GPT-2 settings this model does not implement, with the only value that means what it computes.
FIXED_SETTINGS = {
    "model_type": "gpt2",
    "activation_function": "gelu_new",
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}


class WeightsError(ValueError):
    """A folder's files are not a GPT-2 this model can hold; names the folder, the tensor or setting, and the expectation."""


def hf_name(path: tuple) -> str:
    """Checkpoint name of a parameter path: ('h', 0, 'attn', 'c_attn', 'kernel') -> transformer.h.0.attn.c_attn.weight."""
    *module, kind = (str(part) for part in path)
    return PREFIX + ".".join([*module, "bias" if kind == "bias" else "weight"])


def abstract_params(config: GPT2Config, dtype: Any = jnp.float32) -> nnx.State:
    """Parameter tree of shapes and dtypes, nothing allocated."""
    return nnx.state(nnx.eval_shape(lambda: GPT2(config, rngs=nnx.Rngs(0), param_dtype=dtype)), nnx.Param)


def to_hf(params: nnx.State, config: GPT2Config) -> dict[str, np.ndarray]:
    """Arrays by checkpoint name, the embedding without its padding rows. Also for gradients, which have the same tree."""
    arrays = {hf_name(path): np.asarray(leaf.get_value()) for path, leaf in nnx.to_flat_state(params)}
    return arrays | {EMBEDDING: arrays[EMBEDDING][: config.vocab_size]}


def read_config(directory: str | Path) -> GPT2Config:
    """Architecture from config.json.

    Raises:
        WeightsError: missing or unreadable file, missing size, or a setting with another meaning than this model's.
    """
    path = Path(directory) / "config.json"
    try:
        settings = json.loads(path.read_text())
    except FileNotFoundError as error:
        expected = "a Hugging Face folder with config.json and model.safetensors"
        raise WeightsError(f"{path} does not exist; expected {expected}") from error
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path} is not readable JSON: {error}") from error
    for name, needed in FIXED_SETTINGS.items():
        if (value := settings.get(name, needed)) != needed:
            raise WeightsError(f"{path}: {name} is {value!r}; only {needed!r} is supported")
    try:
        return GPT2Config(
            *(settings[name] for name in SIZES), layer_norm_epsilon=settings.get("layer_norm_epsilon", 1e-5)
        )
    except KeyError as error:
        raise WeightsError(f"{path}: {error.args[0]!r} is missing") from error
    except (TypeError, ValueError) as error:
        raise WeightsError(f"{path}: {error}") from error


def _files(folder: Path) -> list[Path]:
    """The safetensors files: one, or those of the index."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return [folder / "model.safetensors"]
    try:
        return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    except (ValueError, KeyError, AttributeError) as error:
        raise WeightsError(f"{index} is not a safetensors index: {error}") from error


def _tensors(path: Path) -> Iterator[tuple[str, Any]]:
    """(full name, lazily read slice) of a file's tensors, buffers and prefix handled."""
    try:
        with safetensors.safe_open(path, framework="flax") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                if not name.endswith(IGNORED_SUFFIXES):
                    full = name if name == HEAD or name.startswith(PREFIX) else PREFIX + name
                    yield full, (file.get_slice(name), lambda name=name: file.get_tensor(name))
    except FileNotFoundError as error:
        raise WeightsError(f"{path} does not exist; expected the weights as safetensors") from error
    except (OSError, safetensors.SafetensorError) as error:
        raise WeightsError(f"{path} is not a complete safetensors file ({error}); it may be truncated") from error


def require_finite(values: np.ndarray, file: Path, name: str) -> None:
    """Refuses weights of a run that diverged: every logit, reward and step after them would be NaN too.

    Raises:
        WeightsError: names the file, the tensor, how many of its values are not finite, and the first.
    """
    finite = np.isfinite(values)
    if (bad := values.size - np.count_nonzero(finite)) == 0:
        return
    first = tuple(int(i) for i in np.unravel_index(np.argmin(finite), values.shape))
    raise WeightsError(
        f"{file}: tensor {name!r} has {bad} of {values.size} values that are NaN or infinite (the first, {values[first]}, at "
        f"{list(first)}); such weights cannot be trained. Set model.weights to earlier ones"
    )


def load_hf(directory: str | Path, dtype: Any = jnp.float32) -> tuple[GPT2Config, nnx.State]:
    """Architecture, and parameters on the default device, of a folder with config.json and safetensors: one file or an index.

    Raises:
        WeightsError: see the class; also a value that is not finite. Shapes are checked before a tensor is read.
    """
    folder = Path(directory)
    config = read_config(folder)
    tree = abstract_params(config, dtype)
    expected = {hf_name(path): leaf.get_value().shape for path, leaf in nnx.to_flat_state(tree)}
    expected[EMBEDDING] = (config.vocab_size, config.hidden_size)
    arrays: dict[str, jax.Array] = {}
    head = None
    for path in _files(folder):
        for name, (view, read) in _tensors(path):
            shape, kind = tuple(view.get_shape()), view.get_dtype()
            if name == HEAD:
                head = np.asarray(read())
                continue
            if name not in expected:
                raise WeightsError(f"{path}: tensor {name!r} {shape} is not part of a {config.num_layers}-layer GPT-2")
            if shape != expected[name]:
                raise WeightsError(f"{path}: tensor {name!r} has shape {shape}; expected {expected[name]}")
            if kind not in FLOATS:
                raise WeightsError(f"{path}: tensor {name!r} has dtype {kind}; expected one of {', '.join(FLOATS)}")
            values = read()
            require_finite(np.asarray(values), path, name)
            arrays[name] = jnp.asarray(values, dtype)
    missing = [name for name in expected if name not in arrays]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise WeightsError(f"{folder}: tensor {missing[0]!r} {expected[missing[0]]} is missing{more}")
    if head is not None and not np.array_equal(head, np.asarray(arrays[EMBEDDING])):
        raise WeightsError(f"{folder}: {HEAD!r} differs from {EMBEDDING!r}; only tied embeddings are supported")
    arrays[EMBEDDING] = jnp.pad(arrays[EMBEDDING], ((0, config.padded_vocab_size - config.vocab_size), (0, 0)))
    return config, nnx.from_flat_state(
        [(path, leaf.replace(arrays[hf_name(path)])) for path, leaf in nnx.to_flat_state(tree)]
    )


def save_hf(
    directory: str | Path,
    config: GPT2Config,
    params: nnx.State,
    tokenizer: Tokenizer | None = None,
    said: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Writes a folder that `transformers.AutoModelForCausalLM` and `load_hf` read. The weights file appears whole or not at all.

    `said` is what else config.json says of the model.
    """
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    eos_id = tokenizer.eos_id if tokenizer else config.vocab_size - 1
    settings = {
        **FIXED_SETTINGS,
        "architectures": ["GPT2LMHeadModel"],
        **dict(zip(SIZES, dataclasses.astuple(config), strict=False)),
        "n_ctx": config.max_position_embeddings,
        "layer_norm_epsilon": config.layer_norm_epsilon,
        **dict.fromkeys(("bos_token_id", "eos_token_id"), eos_id),
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        **said,
    }
    (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    generation = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), eos_id)
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    if tokenizer is not None:
        tokenizer.save(folder)
    tensors = {name: np.ascontiguousarray(x) for name, x in to_hf(params, config).items()}
    with written_whole(folder / "model.safetensors") as working:
        save_file(tensors, working, {"format": "pt"})
