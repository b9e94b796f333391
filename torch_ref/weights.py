"""GPT-2 weights from and to a Hugging Face folder (config.json and safetensors), under Hugging Face's names."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from torch_ref.model import GPT2, GPT2Config

PREFIX = "transformer."
# config.json key, by our name
SIZES = {
    "vocab_size": "vocab_size",
    "num_layers": "n_layer",
    "num_heads": "n_head",
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "layer_norm_epsilon": "layer_norm_epsilon",
}
BUFFERS = (".attn.bias", ".attn.masked_bias")  # causal masks that old checkpoints carry
HEAD = "lm_head.weight"


def load_hf(directory: str | Path, *, dtype: torch.dtype = torch.float32, remat: bool = False) -> GPT2:
    """A GPT-2 with the folder's weights, stored in dtype.

    Names with and without `transformer.` are read; a separate `lm_head.weight` must equal the tied embedding.

    Raises:
        FileNotFoundError: no config.json, or no safetensors beside it.
        ValueError: tensors missing, left over, of another shape, or an untied head.
    """
    directory = Path(directory)
    described = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    config = GPT2Config(**{ours: described[theirs] for ours, theirs in SIZES.items() if theirs in described})
    model = GPT2(config, remat=remat).to(dtype)
    tensors = {_prefixed(name): tensor for name, tensor in _read(directory).items() if not name.endswith(BUFFERS)}
    head = tensors.pop(HEAD, None)
    wanted = {name: parameter.shape for name, parameter in model.named_parameters()}
    wrong = [f"{name} missing" for name in wanted.keys() - tensors.keys()]
    wrong += [f"{name} unknown" for name in tensors.keys() - wanted.keys()]
    wrong += [
        f"{name} is {list(tensors[name].shape)}, config.json means {list(wanted[name])}"
        for name in wanted.keys() & tensors.keys()
        if tensors[name].shape != wanted[name]
    ]
    if head is not None and not wrong and not torch.equal(head, tensors[PREFIX + "wte.weight"]):
        wrong = [f"{HEAD} differs from {PREFIX}wte.weight: GPT-2's head is its embedding"]
    if wrong:
        raise ValueError(f"{directory}: not the weights of this GPT-2: " + "; ".join(sorted(wrong)[:5]))
    model.load_state_dict(tensors)
    return model


def save_hf(directory: str | Path, model: GPT2) -> None:
    """Writes config.json and model.safetensors, in the parameters' dtype, as `load_hf` and transformers read them."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    sizes = {theirs: getattr(model.config, ours) for ours, theirs in SIZES.items()}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    described = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **sizes, **dropout}
    (directory / "config.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    tensors = {name: parameter.detach().cpu().contiguous() for name, parameter in model.named_parameters()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def _prefixed(name: str) -> str:
    return name if name.startswith(PREFIX) or name == HEAD else PREFIX + name


def _read(directory: Path) -> dict[str, Tensor]:
    """All tensors of the folder, from one file or from the shards that the index names."""
    index = directory / "model.safetensors.index.json"
    shards = ["model.safetensors"]
    if index.exists():
        shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    tensors: dict[str, Tensor] = {}
    for shard in shards:
        tensors |= load_file(directory / shard)
    return tensors
