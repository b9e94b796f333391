"""Weights from and to a Hugging Face folder (config.json and safetensors), under Hugging Face's names."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from torch_ref.decoder import Decoder
from torch_ref.families import FAMILIES, UnsupportedModel, read_config, require_harmless
from torch_ref.model import GPT2, GPT2Config, LanguageModel

# GPT-2's config.json key, by our name
SIZES = {
    "vocab_size": "vocab_size",
    "num_layers": "n_layer",
    "num_heads": "n_head",
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "layer_norm_epsilon": "layer_norm_epsilon",
    "inner_size": "n_inner",
}
# GPT-2's keys that would change the numbers, and the values at which they do not; a missing key has the first.
FIXED = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),  # two names of one function
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
}
BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")  # what old checkpoints carry and a model computes
HEAD = "lm_head.weight"


def build(described: Mapping[str, Any], *, remat: bool = False) -> LanguageModel:
    """The model that a config.json describes, its weights still to be filled in.

    Raises:
        UnsupportedModel: a family that is not here, or a key's value that cannot be computed here.
    """
    family = described.get("model_type", "gpt2")
    if family in FAMILIES:
        return Decoder(read_config(described), remat=remat)
    if family != "gpt2":
        raise UnsupportedModel(f"model_type {family}: expected one of gpt2, {', '.join(FAMILIES)}")
    require_harmless(described)
    for key, values in FIXED.items():
        if described.get(key, values[0]) not in values:
            raise UnsupportedModel(f"{key} {described[key]}: expected {values[0]}")
    config = GPT2Config(**{ours: described[theirs] for ours, theirs in SIZES.items() if theirs in described})
    return GPT2(config, remat=remat)


def load_hf(directory: str | Path, *, dtype: torch.dtype = torch.float32, remat: bool = False) -> LanguageModel:
    """A model of the folder's family with the folder's weights, stored in dtype.

    Names with and without the base model's prefix are read; where the head is the embedding, `lm_head.weight` may stand for it,
    and must equal it where both are there.

    Raises:
        FileNotFoundError: no config.json, or no safetensors beside it.
        ValueError: tensors missing, left over, of another shape, or an untied head where config.json has none.
        UnsupportedModel: see `build`.
    """
    directory = Path(directory)
    described = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    try:
        model = build(described, remat=remat).to(dtype)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{directory / 'config.json'}: {error}") from error
    wanted = {name: parameter.shape for name, parameter in model.named_parameters()}
    embedding = next(iter(wanted))  # under the base model's prefix, as everything but the head
    prefix = embedding[: embedding.index(".") + 1]
    tensors = {_prefixed(name, prefix): x for name, x in _read(directory).items() if not name.endswith(BUFFERS)}
    head = None if HEAD in wanted else tensors.pop(HEAD, None)
    if head is not None:
        tensors.setdefault(embedding, head)
    wrong = [f"{name} missing" for name in wanted.keys() - tensors.keys()]
    wrong += [f"{name} unknown" for name in tensors.keys() - wanted.keys()]
    wrong += [
        f"{name} is {list(tensors[name].shape)}, config.json means {list(wanted[name])}"
        for name in wanted.keys() & tensors.keys()
        if tensors[name].shape != wanted[name]
    ]
    if head is not None and not wrong and not torch.equal(head, tensors[embedding]):
        wrong = [f"{HEAD} differs from {embedding}: this model's head is its embedding"]
    if wrong:
        raise ValueError(f"{directory}: not the weights that config.json means: " + "; ".join(sorted(wrong)[:5]))
    model.load_state_dict(tensors)
    return model


def save_hf(directory: str | Path, model: LanguageModel) -> None:
    """Writes config.json and model.safetensors, in the parameters' dtype, as `load_hf` and transformers read them."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: parameter.detach().cpu().contiguous() for name, parameter in model.named_parameters()}
    (directory / "config.json").write_text(json.dumps(_described(model), indent=2) + "\n", encoding="utf-8")
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def _described(model: LanguageModel) -> dict[str, Any]:
    """The model's config.json without a dtype, which may have changed: the tensors tell theirs."""
    if isinstance(model, Decoder):
        return {key: x for key, x in model.config.described.items() if key not in ("dtype", "torch_dtype")}
    sizes = {theirs: getattr(model.config, ours) for ours, theirs in SIZES.items()}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **sizes, **dropout}


def _prefixed(name: str, prefix: str) -> str:
    return name if name.startswith(prefix) or name == HEAD else prefix + name


def _read(directory: Path) -> dict[str, Tensor]:
    """All tensors of the folder: of model.safetensors, or where there is none of the shards that the index names."""
    shards = ["model.safetensors"]
    index = directory / "model.safetensors.index.json"
    if not (directory / shards[0]).exists() and index.exists():
        shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    tensors: dict[str, Tensor] = {}
    for shard in shards:
        tensors |= load_file(directory / shard)
    return tensors
