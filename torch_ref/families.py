"""What a Hugging Face config.json means for the models with rotary positions: Llama, Mistral, Qwen 2, Qwen 3, Gemma 3 (text).

Reads the keys of transformers 4 and 5 with the defaults that transformers documents for each family. A value that would change the
numbers and is not supported is refused by the name of its key. Knows no tensors but the rotary frequencies.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import pi
from typing import Any

import torch
from torch import Tensor

Described = Mapping[str, Any]


class UnsupportedModel(ValueError):
    """A config.json describes a model that cannot be computed here; the message names the key and its value."""


@dataclass(frozen=True)
class Rotary:
    """Rotary position embedding (Su et al. 2021): one frequency a pair of channels, possibly slowed down for longer texts."""

    base: float
    kind: str = "default"
    """default; linear (Chen et al. 2023): positions divided by `factor`; llama3: long wavelengths alone (Llama 3 herd, 2024)."""
    factor: float = 1.0
    low: float = 1.0
    """llama3: a wavelength that fits fewer times than this into `original` positions is stretched by `factor`."""
    high: float = 4.0
    """llama3: one that fits more often than this stays; between the two the frequency is interpolated."""
    original: int = 8192

    def frequencies(self, head_dim: int) -> Tensor:
        """Radians a position of each pair of channels, [D / 2], float64: base^(-2 i / D), i = 0, 1, ..."""
        frequency_d = self.base ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        return SCALINGS[self.kind](self, frequency_d)


def _llama3(rotary: Rotary, frequency_d: Tensor) -> Tensor:
    turns_d = rotary.original * frequency_d / (2 * pi)  # within the original context
    share_d = ((turns_d - rotary.low) / (rotary.high - rotary.low)).clamp(0, 1)
    return share_d * frequency_d + (1 - share_d) * frequency_d / rotary.factor


SCALINGS: dict[str, Callable[[Rotary, Tensor], Tensor]] = {
    "default": lambda rotary, frequency_d: frequency_d,
    "linear": lambda rotary, frequency_d: frequency_d / rotary.factor,
    "llama3": _llama3,
}


@dataclass(frozen=True)
class Layer:
    """What differs between the layers of one model."""

    rotary: Rotary
    window: int | None
    """A token attends to this many tokens, itself included; None: to all before it."""


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and switches of one model."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    layers: tuple[Layer, ...]
    activation: str
    tied: bool
    """The head is the embedding."""
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    """Queries and keys of each head are normed before they are rotated."""
    norm_offset: float
    """Norms multiply by this plus their weight."""
    norm_after: bool
    """Attention and MLP have a norm behind them too."""
    embedding_scale: float
    attention_scale: float
    """Of the products of queries and keys."""
    described: Described = field(repr=False, compare=False)
    """config.json as it was read, to be written beside the weights."""

    @property
    def num_layers(self) -> int:
        return len(self.layers)


@dataclass(frozen=True)
class Family:
    """What a `model_type` fixes, and what transformers takes where config.json has no such key."""

    defaults: Described
    layer_slides: Callable[[Described, int], bool]
    """Whether a layer has the window where `layer_types` does not say."""
    fixed: Described = field(default_factory=dict)
    """What config.json cannot change: transformers does not read these keys for this family."""
    activation_key: str = "hidden_act"
    qkv_bias: bool = False
    """Always; `attention_bias` adds one to queries, keys, values and output."""
    qk_norm: bool = False
    gemma: bool = False
    """Norms of 1 + weight, before and behind; scaled embeddings; a rotary base by kind of layer; its own scale of attention."""


NO_WINDOW = {"sliding_window": None, "layer_types": None, "use_sliding_window": False}
NO_BIAS = {"attention_bias": False, "mlp_bias": False}
QWEN = {"num_key_value_heads": 32, "sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28}


def _qwen_slides(values: Described, layer: int) -> bool:
    return values["sliding_window"] is not None and layer >= values["max_window_layers"]


FAMILIES = {
    "llama": Family({}, lambda values, layer: False, fixed=NO_WINDOW),
    "mistral": Family(
        {"num_key_value_heads": 8, "sliding_window": 4096},
        lambda values, layer: values["sliding_window"] is not None,
        fixed={**NO_BIAS, "layer_types": None, "use_sliding_window": True},
    ),
    "qwen2": Family(QWEN, _qwen_slides, fixed=NO_BIAS, qkv_bias=True),
    "qwen3": Family(QWEN | {"head_dim": 128}, _qwen_slides, fixed={"mlp_bias": False}, qk_norm=True),
    "gemma3_text": Family(
        {
            "num_key_value_heads": 4,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
            "tie_word_embeddings": True,
        },
        lambda values, layer: (layer + 1) % values["sliding_window_pattern"] != 0,
        fixed={"mlp_bias": False, "use_sliding_window": True},
        activation_key="hidden_activation",
        qk_norm=True,
        gemma=True,
    ),
}
# Of every family, where neither config.json nor the family says.
DEFAULTS = {
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "layer_types": None,
    "max_position_embeddings": 2048,
}
ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
# Keys of any family that would change the numbers, and the values at which they do not.
REFUSED: dict[str, tuple[Any, ...]] = {
    "final_logit_softcapping": (None,),
    "attn_logit_softcapping": (None,),
    "use_bidirectional_attention": (None, False),
    "quantization_config": (None,),
    "per_layer_config": (None,),
    "transformers_weights": (None,),
    "pruned_heads": (None, {}),
    "partial_rotary_factor": (None, 1),
}
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
LAYER_TYPES = ("full_attention", "sliding_attention")
GEMMA_BASES: dict[str, tuple[str, float]] = {
    "full_attention": ("rope_theta", 1e6),
    "sliding_attention": ("rope_local_base_freq", 1e4),
}


def read_config(described: Described) -> DecoderConfig:
    """The model that a config.json of one of `FAMILIES` describes.

    Raises:
        UnsupportedModel: a missing size, or a value that would change the numbers and is not supported.
    """
    family = FAMILIES[described["model_type"]]
    missing = [key for key in SIZES if described.get(key) is None]
    if missing:
        raise UnsupportedModel(f"no {', '.join(missing)}")
    values = {**DEFAULTS, **family.defaults, **described, **family.fixed}
    require_harmless(described)
    activation = values[family.activation_key]
    _require(family.activation_key, activation, ACTIVATIONS)
    heads, hidden = values["num_attention_heads"], values["hidden_size"]
    kv_heads, head_dim = values["num_key_value_heads"] or heads, values["head_dim"] or hidden // heads
    if heads % kv_heads or head_dim % 2:
        raise UnsupportedModel(
            f"num_attention_heads {heads}, num_key_value_heads {kv_heads}, head_dim {head_dim}: "
            "expected heads in groups of one size, and an even head_dim"
        )
    return DecoderConfig(
        vocab_size=values["vocab_size"],
        hidden_size=hidden,
        intermediate_size=values["intermediate_size"],
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=values["rms_norm_eps"],
        layers=_layers(family, values),
        activation=activation,
        tied=values["tie_word_embeddings"],
        qkv_bias=family.qkv_bias or values["attention_bias"],
        output_bias=values["attention_bias"],
        mlp_bias=values["mlp_bias"],
        qk_norm=family.qk_norm,
        norm_offset=1.0 if family.gemma else 0.0,
        norm_after=family.gemma,
        embedding_scale=hidden**0.5 if family.gemma else 1.0,
        attention_scale=(values["query_pre_attn_scalar"] if family.gemma else head_dim) ** -0.5,
        described=dict(described),
    )


def require_harmless(described: Described) -> None:
    """Refuses (UnsupportedModel) what no family here computes."""
    for key, harmless in REFUSED.items():
        _require(key, described.get(key), harmless)


def _layers(family: Family, values: dict[str, Any]) -> tuple[Layer, ...]:
    count = values["num_hidden_layers"]
    window = values["sliding_window"] = values["sliding_window"] if values["use_sliding_window"] else None
    types = values["layer_types"] or [LAYER_TYPES[family.layer_slides(values, layer)] for layer in range(count)]
    if len(types) != count or not set(types) <= set(LAYER_TYPES):
        raise UnsupportedModel(f"layer_types {types}: expected {count} of {' and '.join(LAYER_TYPES)}")
    if "sliding_attention" in types and (window is None or window < 1):
        raise UnsupportedModel(f"sliding_window {window}: layer_types has layers that need one of at least 1")
    rotary = _gemma_rotary(values) if family.gemma else {kind: _one_rotary(values) for kind in LAYER_TYPES}
    return tuple(Layer(rotary[kind], window if kind == "sliding_attention" else None) for kind in types)


def _one_rotary(values: dict[str, Any]) -> Rotary:
    """transformers 5 writes `rope_parameters`, transformers 4 `rope_theta` and, of scaled ones, `rope_scaling`."""
    given = values.get("rope_scaling") or values.get("rope_parameters") or {}
    if any(isinstance(value, Mapping) for value in given.values()):
        raise UnsupportedModel(f"rope_parameters {given}: expected one set for all layers")
    return _rotary(values, given, "rope_theta", 1e4)


def _gemma_rotary(values: dict[str, Any]) -> dict[str, Rotary]:
    """By kind of layer; transformers 4's `rope_scaling` is of the layers that see everything."""
    given = values.get("rope_parameters") or {}
    if not set(given) <= set(LAYER_TYPES):
        raise UnsupportedModel(f"rope_parameters {given}: expected those of {' and '.join(LAYER_TYPES)}")
    parameters = {kind: dict(given.get(kind) or {}) for kind in LAYER_TYPES}
    parameters["full_attention"] |= values.get("rope_scaling") or {}
    return {kind: _rotary(values, parameters[kind], *GEMMA_BASES[kind]) for kind in LAYER_TYPES}


def _rotary(values: dict[str, Any], parameters: Described, base_key: str, base: float) -> Rotary:
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    _require("rope_type", kind, tuple(SCALINGS))
    _require("partial_rotary_factor", parameters.get("partial_rotary_factor"), (None, 1))
    base = parameters.get("rope_theta") or values.get(base_key) or base
    if kind == "default":
        return Rotary(base)
    needed = ("factor", "low_freq_factor", "high_freq_factor") if kind == "llama3" else ("factor",)
    if missing := [key for key in needed if key not in parameters]:
        raise UnsupportedModel(f"rope_type {kind} without {', '.join(missing)}")
    if kind == "linear":
        return Rotary(base, kind, parameters["factor"])
    original = values.get("original_max_position_embeddings") or parameters.get("original_max_position_embeddings")
    original = original or values["max_position_embeddings"]
    return Rotary(
        base, kind, parameters["factor"], parameters["low_freq_factor"], parameters["high_freq_factor"], original
    )


def _require(key: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        expected = " or ".join("null" if each is None else str(each) for each in allowed)
        raise UnsupportedModel(f"{key} {value}: expected {expected}")
