"""Low-rank adapters of linear maps (LoRA), from their definition; the weights under them stay as they are.

Hu et al. 2021, eq. 3: h = W0 x + (alpha / r) B A x, with A of [r, in] and B of [out, r]. Parameters are named as PEFT names them
behind `base_model.model.`. Knows modules; nothing of losses.
"""

import json
import math
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from jax_grpo.config.files import weights_directory
from jax_grpo.config.model import AdapterConfig, ModelConfig
from torch_ref.int8 import HEAD, RoundedMap, rounded
from torch_ref.model import Conv1D, LanguageModel

WRAPPER = "base_model.model."


def with_adapters(model: LanguageModel, config: ModelConfig, seed: int) -> LanguageModel:
    """The model with the adapters that the config asks for, if any, in place; the weights under them rounded as they are held."""
    if config.adapter is None:
        return model
    if config.base_dtype == "int8":
        rounded(model)
    if config.base_dtype == "bfloat16":
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.bfloat16())
    if config.adapter.weights is not None:
        return load(model, weights_directory(config.adapter.weights))
    return attach(model, config.adapter, torch.Generator().manual_seed(seed))


def attach(model: LanguageModel, config: AdapterConfig, generator: torch.Generator | None = None) -> LanguageModel:
    """Adds A ~ U(-1 / sqrt(in), 1 / sqrt(in)) and B = 0 to every linear map that the config names, in place, and freezes the rest.

    The head is no such map.
    """
    model.requires_grad_(False)
    scale = config.alpha / (math.sqrt(config.rank) if config.rank_stabilised else config.rank)
    for name, module in list(model.named_modules()):
        wanted = config.targets == "all_linear" or any(f".{name}".endswith(f".{end}") for end in config.targets)
        if name == HEAD or not wanted or not isinstance(module, nn.Linear | Conv1D | RoundedMap):
            continue
        weight = module.q_OI if isinstance(module, RoundedMap) else module.weight
        out, into = weight.T.shape if isinstance(module, Conv1D) else weight.shape
        dtype = module.dtype if isinstance(module, RoundedMap) else weight.dtype
        module.lora_A = nn.Linear(into, config.rank, bias=False, dtype=dtype, device=weight.device)
        module.lora_B = nn.Linear(config.rank, out, bias=False, dtype=dtype, device=weight.device)
        nn.init.uniform_(module.lora_A.weight, -(into**-0.5), into**-0.5, generator=generator)
        nn.init.zeros_(module.lora_B.weight)
        module.register_forward_hook(
            lambda module, x, h: h + scale * module.lora_B(module.lora_A(x[0]))  # pyright: ignore[reportCallIssue]
        )
    return model


def load(model: LanguageModel, folder: Path) -> LanguageModel:
    """Attaches the adapters of a folder of PEFT's, of the plain kind, in place.

    Raises:
        ValueError: the folder's tensors are not those of its settings.
    """
    described = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    targets = described["target_modules"]
    attach(
        model,
        AdapterConfig(
            rank=described["r"],
            alpha=float(described["lora_alpha"]),
            targets="all_linear" if targets == "all-linear" else list(targets),
            rank_stabilised=bool(described.get("use_rslora", False)),
        ),
    )
    stored = {name.removeprefix(WRAPPER): x for name, x in load_file(folder / "adapter_model.safetensors").items()}
    own = trained(model)
    if stored.keys() != own.keys():
        raise ValueError(
            f"{folder}: tensors {sorted(stored.keys() ^ own.keys())[:4]} are in one of file and model alone"
        )
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(stored[name])
    return model


def save(model: LanguageModel, config: ModelConfig, folder: Path) -> None:
    """Writes the adapters as `load`, `jax_grpo` and peft read them, in their own dtype."""
    assert config.adapter is not None and config.weights is not None, "the config's own check leaves no null here"
    folder.mkdir(parents=True, exist_ok=True)
    if config.adapter.weights is not None:
        file = weights_directory(config.adapter.weights) / "adapter_config.json"
        described = json.loads(file.read_text(encoding="utf-8"))
    else:
        names = {name.rpartition(".lora_")[0].rpartition(".")[2] for name in trained(model)}
        described = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": config.adapter.rank,
            "lora_alpha": config.adapter.alpha,
            "use_rslora": config.adapter.rank_stabilised,
            "target_modules": sorted(names) if config.adapter.targets == "all_linear" else config.adapter.targets,
        }
    described |= {"base_model_name_or_path": str(weights_directory(config.weights))}
    (folder / "adapter_config.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    tensors = {WRAPPER + name: x.detach().cpu().contiguous() for name, x in trained(model).items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def trained(model: LanguageModel) -> dict[str, nn.Parameter]:
    """The parameters that have gradients, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
