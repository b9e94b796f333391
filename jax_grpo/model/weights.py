"""Hugging Face safetensors folders <-> Flax parameters, both ways, bit for bit.

Tensors are read one by one. Names with and without the family's prefix are understood; names are written with it. Embeddings are
padded to the model's row multiple on the way in and cut to the vocabulary on the way out.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
from flax import nnx
from safetensors.numpy import save_file

from jax_grpo.config.files import parsed_json, read_settings
from jax_grpo.model import int8
from jax_grpo.model.architecture import Architecture
from jax_grpo.model.families import FAMILIES, HEAD, Tensor, UnsupportedModel, described, read_architecture, tensors_of
from jax_grpo.model.tokenizer import Tokenizer
from jax_grpo.system.whole_files import written_whole

# Causal masks and rotary angles of old checkpoints, which hold no values of their own.
IGNORED_SUFFIXES = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
WRAPPED = ("_orig_mod.", "module.", "base_model.model.")  # prefixes of compiled, distributed and PEFT's models
FLOATS = ("F64", "F32", "F16", "BF16")
# Of a folder's config.json that does not go through: they are of its files, or of who loaded it.
OF_THE_FILES = ("torch_dtype", "dtype", "transformers_version", "_name_or_path", "_attn_implementation")


class WeightsError(ValueError):
    """A folder's files are not a model this decoder can hold; names the folder, the tensor or setting, and the expectation."""


def abstract_params(config: Architecture, dtype: Any = jnp.float32) -> nnx.State:
    """Parameter tree of shapes and dtypes, nothing allocated; of int8 see `int8`."""
    return nnx.state(nnx.eval_shape(lambda: int8.decoder(config, dtype, rngs=nnx.Rngs(0))), nnx.Param)


def to_hf(params: nnx.State, config: Architecture) -> dict[str, np.ndarray]:
    """Arrays by checkpoint name, embeddings without their padding rows. Also for gradients, which have the same tree."""
    leaves = [(path, np.asarray(leaf.get_value())) for path, leaf in nnx.to_flat_state(params)]
    return {one.name: one.of(x) for path, x in leaves for one in tensors_of(config, path, x.shape)}


def from_hf(read: Callable[[str], Any], config: Architecture, dtype: Any = jnp.float32) -> nnx.State:
    """Parameters on the default device, of arrays by checkpoint name, which are read one by one. The inverse of `to_hf`.

    In int8 each is made small before the next is read.
    """
    small = jnp.dtype(dtype) == int8.INT8
    floats = int8.OTHERS if small else dtype

    def parameter(path: tuple[Any, ...], leaf: nnx.Variable) -> nnx.Variable:
        shape = leaf.get_value().shape
        parts = [(one, jnp.asarray(read(one.name), floats)) for one in tensors_of(config, path, shape)]
        parts = [part.T if one.transposed else part for one, part in parts]
        joined = parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)
        pad = [(0, full - size) for full, size in zip(shape, joined.shape, strict=True)]
        return leaf.replace(jnp.pad(joined, pad) if any(after for _, after in pad) else joined)

    def matrix(path: tuple[Any, ...], shape: tuple[int, ...]) -> list[jax.Array]:
        """A matrix in int8 and its scales."""
        tensors = list(tensors_of(config, path, shape))
        parts = [int8.quantised(np.asarray(read(one.name)), axis=int(one.transposed)) for one in tensors]
        columns = [q.T if one.transposed else q for one, (q, _) in zip(tensors, parts, strict=True)]
        return [jnp.asarray(np.concatenate(x, axis=-1)) for x in (columns, [scale for _, scale in parts])]

    leaves = []
    for path, leaf in nnx.to_flat_state(abstract_params(config, floats)):
        if small and path[-1] == int8.KERNEL:
            values, scale = matrix(path, leaf.get_value().shape)
            leaves += [(path, leaf.replace(values)), ((*path[:-1], int8.SCALE), nnx.Param(scale))]
        else:
            leaves.append((path, parameter(path, leaf)))
    return nnx.from_flat_state(leaves)


def read_json(path: Path, expected: str) -> dict[str, Any]:
    """An object of a JSON file; a WeightsError where there is none."""
    try:
        content = parsed_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise WeightsError(f"{path} does not exist; expected {expected}") from error
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(content, dict):
        raise WeightsError(f"{path} holds {content!r:.60}; expected an object")
    return content


def open_safetensors(path: Path, what: str) -> Any:
    """A reader of a safetensors file, to be closed as a context. Its header is checked here, and that no tensor is cut off.

    Raises:
        WeightsError: no file, with what was expected in it; or not a complete one.
    """
    try:
        return safetensors.safe_open(path, framework="flax")
    except FileNotFoundError as error:
        raise WeightsError(f"{path} does not exist; expected {what} as safetensors") from error
    except (OSError, safetensors.SafetensorError) as error:
        raise WeightsError(f"{path} is not a complete safetensors file ({error}); it may be truncated") from error


def read_config(directory: str | Path) -> Architecture:
    """Architecture from a folder's config.json, or from such a file of any name.

    Raises:
        WeightsError: missing or unreadable file, missing size, or a setting with another meaning than this model's.
    """
    path = Path(directory)
    path = path if path.suffix == ".json" else path / "config.json"
    settings = read_json(path, "a Hugging Face folder with config.json and model.safetensors")
    try:
        return read_architecture(settings)
    except (UnsupportedModel, ValueError) as error:
        raise WeightsError(f"{path}: {error}") from error


def _files(folder: Path) -> list[Path]:
    """The safetensors files as `transformers` takes them: one, else those of the index."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file() or not index.is_file():
        return [single]
    names = read_json(index, "a safetensors index").get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise WeightsError(f"{index}: weight_map is {names!r:.60}; expected the file of each tensor by its name")
    if outside := [name for name in names.values() if Path(name).name != name]:
        raise WeightsError(f"{index}: weight_map names {outside[0]!r}; expected files of its own folder")
    return [folder / name for name in sorted(set(names.values()))]


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


def load_hf(directory: str | Path, dtype: Any = jnp.float32) -> tuple[Architecture, nnx.State]:
    """Architecture, and parameters on the default device, of a folder with config.json and safetensors: one file or an index.

    Raises:
        WeightsError: see the class; also a value that is not finite. Names and shapes are checked before a tensor is read.
    """
    folder = Path(directory)
    config = read_config(folder)
    parameters = ((path, leaf.get_value().shape) for path, leaf in nnx.to_flat_state(abstract_params(config)))
    expected = {one.name: one for path, shape in parameters for one in tensors_of(config, path, shape)}
    embedding = next(iter(tensors_of(config, ("wte", "embedding"), (config.padded_vocab_size, config.hidden_size))))
    stored = _stored(folder, config, {HEAD: embedding, **expected})

    def read(full: str) -> jax.Array:
        path, name = stored[full]
        # Opened each time: the memory of an open file has all that was read of it.
        with open_safetensors(path, "the weights") as file:
            values = file.get_tensor(name)
        require_finite(np.asarray(values), path, name)
        return values

    if config.tied and HEAD in stored:  # a tied head has no values of its own; it may stand for the embedding
        if embedding.name in stored and not np.array_equal(np.asarray(read(HEAD)), np.asarray(read(embedding.name))):
            both = f"{HEAD!r} differs from {embedding.name!r}"
            raise WeightsError(
                f"{stored[HEAD][0]}: {both}, and config.json ties them; set tie_word_embeddings to false"
            )
        stored.setdefault(embedding.name, stored[HEAD])
    if missing := [name for name in expected if name not in stored]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise WeightsError(f"{folder}: tensor {missing[0]!r} {expected[missing[0]].shape} is missing{more}")
    return config, from_hf(read, config, dtype)


def _stored(folder: Path, config: Architecture, expected: Mapping[str, Tensor]) -> dict[str, tuple[Path, str]]:
    """Of each tensor, by the name that it is written with: its file, and its name there."""
    places: dict[str, tuple[Path, str]] = {}
    prefix = FAMILIES[config.family].prefix
    for path in _files(folder):
        with open_safetensors(path, "the weights") as file:
            views = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            described = {name: (tuple(view.get_shape()), view.get_dtype()) for name, view in views.items()}
        for name, (shape, kind) in described.items():
            if name.endswith(IGNORED_SUFFIXES):
                continue
            full = name if name == HEAD or name.startswith(prefix) else prefix + name
            if wrapped := [wrapper for wrapper in WRAPPED if name.startswith(wrapper)]:
                reason = f"begins with {wrapped[0]!r}, as a wrapped model's do; save the model inside the wrapper"
            elif full in places:
                other, also = places[full]
                reason = f"is {full!r}, which {also!r} of {other} is already; expected one of them"
            elif full not in expected:
                reason = f"{shape} is not part of a {config.num_layers}-layer {config.family}"
            elif shape != expected[full].shape:
                reason = f"has shape {shape}; expected {expected[full].shape}"
            elif kind not in FLOATS:
                reason = f"has dtype {kind}; expected one of {', '.join(FLOATS)}"
            else:
                places[full] = path, name
                continue
            raise WeightsError(f"{path}: tensor {name!r} {reason}")
    return places


def save_hf(
    directory: str | Path,
    config: Architecture,
    params: nnx.State,
    tokenizer: Tokenizer | None = None,
    more: Mapping[str, Any] = MappingProxyType({}),
    source: Path | None = None,
) -> None:
    """Writes a folder that `transformers.AutoModelForCausalLM` and `load_hf` read. The weights file appears whole or not at all.

    `more` are further settings for config.json. Of the Hugging Face folder `source`, which the model came from, all settings
    that this decoder does not know go through, and generation_config.json does as it is.
    """
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    last, before = config.vocab_size - 1, {} if source is None else read_settings(source / "config.json")
    through = {key: value for key, value in before.items() if key not in OF_THE_FILES}
    special: Mapping[str, Any] = {key: through.get(key, last) for key in ("bos_token_id", "eos_token_id")}
    if tokenizer is not None:
        special = tokenizer.special_ids()
    # Without it, `transformers` may take the tokenizer for one of the model's family, with other rules.
    kind = {"tokenizer_class": "PreTrainedTokenizerFast"} if tokenizer and not tokenizer.names_its_class else {}
    settings = {"dtype": "float32", **through, **special, **kind, **described(config), **more}
    (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    generation = json.dumps({"pad_token_id": last, **special}, indent=2) + "\n"
    if source is not None and (own := source / "generation_config.json").is_file():
        generation = own.read_text(encoding="utf-8")
    (folder / "generation_config.json").write_text(generation, encoding="utf-8")
    if tokenizer is not None:
        tokenizer.save(folder)
    tensors = {name: np.ascontiguousarray(x) for name, x in to_hf(params, config).items()}
    with written_whole(folder / "model.safetensors") as working:
        save_file(tensors, working, {"format": "pt"})
