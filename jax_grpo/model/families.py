"""Families of decoders as Hugging Face writes them: config.json to `Architecture` and back, and the tensors of a parameter.

A family is data: names, what all its models have, and what `transformers` takes where config.json says nothing. A setting that
would change the numbers and is not implemented is refused by its name.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jax_grpo.model.architecture import Architecture, Rope


class UnsupportedModel(ValueError):
    """A config.json describes a model that this decoder is not; names the key, its value and what was expected."""


class Family(NamedTuple):
    """One `model_type` of config.json."""

    architectures: str  # the class that `transformers` loads it with
    sizes: Mapping[str, str]  # names of config.json's keys, by ours
    fixed: Mapping[str, Any]  # settings of `Architecture` that all of the family have
    defaults: Mapping[str, Any]  # of keys of config.json that are not there
    needed: Mapping[str, tuple[Any, ...]]  # values of other keys that mean what this decoder computes
    names: Mapping[str, tuple[str, ...]]  # a module's, where they are not ours; several are joined along the last axis
    prefix: str  # of every tensor but the head's
    blocks: str  # what holds the layers, behind the prefix
    transposed: bool  # whether linear maps are stored [out, in]
    written: Mapping[str, Any] = {}  # further keys of a new config.json
    biases: Mapping[str, str] = {}  # keys that say whether there are biases, by our switch
    aliases: Mapping[str, str] = {}  # other keys that `transformers` takes for one of `sizes`, by our name
    windows: str | None = None  # how layers have windows: see `_windows`


HEAD = "lm_head.weight"
ADAPTERS = "adapters"  # of a linear map: the name of what holds them, by the part of its columns that each is of
GPT2 = Family(
    architectures="GPT2LMHeadModel",
    sizes={"vocab_size": "vocab_size", "num_layers": "n_layer", "num_heads": "n_head", "hidden_size": "n_embd"}
    | {"max_position_embeddings": "n_positions", "norm_epsilon": "layer_norm_epsilon", "inner_size": "n_inner"},
    fixed={},
    defaults={"layer_norm_epsilon": 1e-5, "n_inner": None},
    needed={
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
        "tie_word_embeddings": (True,),
    },
    names={},
    prefix="transformer.",
    blocks="h",
    transposed=False,
    written=dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    aliases={name: name for name in ("hidden_size", "max_position_embeddings")}
    | {"num_layers": "num_hidden_layers", "num_heads": "num_attention_heads"},
)  # fmt: skip
LLAMA = Family(
    architectures="LlamaForCausalLM",
    sizes={name: name for name in ("vocab_size", "hidden_size", "max_position_embeddings")}
    | {"num_layers": "num_hidden_layers", "num_heads": "num_attention_heads", "norm_epsilon": "rms_norm_eps"}
    | {"num_kv_heads": "num_key_value_heads", "head_size": "head_dim", "inner_size": "intermediate_size"}
    | {"tied": "tie_word_embeddings"},
    fixed={"rms_norm": True, "activation": "silu", "gated": True}
    | dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias"), False),
    defaults={"rms_norm_eps": 1e-6, "num_key_value_heads": None, "head_dim": None, "tie_word_embeddings": False}
    | {"max_position_embeddings": 2048, "attention_bias": False, "mlp_bias": False},
    needed={"hidden_act": ("silu",), "sliding_window": (None,), "layer_types": (None,)},
    names={
        "wte": ("embed_tokens",),
        "ln_f": ("norm",),
        "ln_1": ("input_layernorm",),
        "ln_2": ("post_attention_layernorm",),
        "attn.c_attn": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attn.c_proj": ("self_attn.o_proj",),
        "attn.q_norm": ("self_attn.q_norm",),
        "attn.k_norm": ("self_attn.k_norm",),
        "mlp.c_fc": ("mlp.gate_proj", "mlp.up_proj"),
        "mlp.c_proj": ("mlp.down_proj",),
    },
    prefix="model.",
    blocks="layers",
    transposed=True,
    biases={"qkv_bias": "attention_bias", "output_bias": "attention_bias", "mlp_bias": "mlp_bias"},
)
_QWEN_WINDOW = {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28, "layer_types": None}
FAMILIES: dict[str, Family] = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "mistral": LLAMA._replace(
        architectures="MistralForCausalLM",
        needed={"hidden_act": ("silu",), "layer_types": (None,)},
        defaults={**LLAMA.defaults, "num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
        biases={},
        windows="every",
    ),
    "qwen2": LLAMA._replace(
        architectures="Qwen2ForCausalLM",
        needed={"hidden_act": ("silu",)},
        fixed={**LLAMA.fixed, "qkv_bias": True},
        defaults={**LLAMA.defaults, "num_key_value_heads": 32, "max_position_embeddings": 32768, **_QWEN_WINDOW},
        biases={},
        windows="later",
    ),
    "qwen3": LLAMA._replace(
        architectures="Qwen3ForCausalLM",
        needed={"hidden_act": ("silu",)},
        fixed={**LLAMA.fixed, "qk_norm": True},
        defaults={**LLAMA.defaults, "num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768}
        | _QWEN_WINDOW,
        biases={"qkv_bias": "attention_bias", "output_bias": "attention_bias"},
        windows="later",
    ),
    "gemma3_text": LLAMA._replace(
        architectures="Gemma3ForCausalLM",
        sizes={**LLAMA.sizes, "query_scale": "query_pre_attn_scalar"},
        fixed={**LLAMA.fixed, "activation": "gelu_tanh", "norm_offset": 1.0, "post_norms": True, "qk_norm": True}
        | {"embedding_scaled": True},
        defaults={**LLAMA.defaults, "num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True}
        | {"max_position_embeddings": 131072, "sliding_window": 4096, "sliding_window_pattern": 6, "layer_types": None}
        | {"query_pre_attn_scalar": 256},
        needed={
            "hidden_activation": ("gelu_pytorch_tanh",),
            "final_logit_softcapping": (None,),
            "attn_logit_softcapping": (None,),
            "use_bidirectional_attention": (None, False),
        },
        names={**LLAMA.names, "ln_2": ("pre_feedforward_layernorm",)}
        | {"post_1": ("post_attention_layernorm",), "post_2": ("post_feedforward_layernorm",)},
        biases={"qkv_bias": "attention_bias", "output_bias": "attention_bias"},
        windows="pattern",
    ),
}  # fmt: skip
# As `Family.needed`, of all families.
ANY_FAMILY: dict[str, tuple[Any, ...]] = {"quantization_config": (None,), "per_layer_config": (None,)}
ANY_FAMILY |= {"transformers_weights": (None,), "pruned_heads": (None, {}), "partial_rotary_factor": (None, 1.0)}
SLIDING, FULL = "sliding_attention", "full_attention"
# By kind of layer, the key of the rotary base outside `rope_parameters`, and what it is without one. Gemma has one of each kind.
_BASES = {FULL: ("rope_theta", 1e4), SLIDING: ("rope_theta", 1e4)}
_BASES_BY_LAYER = {FULL: ("rope_theta", 1e6), SLIDING: ("rope_local_base_freq", 1e4)}
# What each kind of scaling is given.
_SCALINGS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def read_architecture(settings: Mapping[str, Any]) -> Architecture:
    """Of a config.json, with the defaults of `transformers` for keys that are not there.

    Raises:
        UnsupportedModel: see there.
    """
    name = settings.get("model_type", "gpt2")
    if not isinstance(name, str) or (family := FAMILIES.get(name)) is None:
        raise UnsupportedModel(f"model_type is {name!r}; only {', '.join(map(repr, FAMILIES))} are supported")
    for key, allowed in {**family.needed, **ANY_FAMILY}.items():
        if (value := settings.get(key, allowed[0])) not in allowed:
            expected = " or ".join(map(repr, allowed))
            raise UnsupportedModel(f"{key} is {value!r}; only {expected} is supported")
    values = {**family.defaults, **settings}
    sizes = [theirs for theirs in family.sizes.values() if theirs not in family.defaults]
    if missing := [theirs for theirs in sizes if values.get(theirs) is None]:
        raise UnsupportedModel(f"{missing[0]!r} is missing")
    given = {ours: values[theirs] for ours, theirs in family.sizes.items()}
    if wrong := [theirs for theirs in family.sizes.values() if not isinstance(values[theirs], int | float | None)]:
        raise UnsupportedModel(f"{wrong[0]} is {values[wrong[0]]!r:.60}; expected a number")
    for ours, other in family.aliases.items():
        if settings.get(other) not in (None, given[ours]):
            raise UnsupportedModel(
                f"{family.sizes[ours]} is {given[ours]!r} and {other} {settings[other]!r}; expected one value"
            )
    given |= {**family.fixed, **{switch: bool(values[key]) for switch, key in family.biases.items()}}
    given |= {} if family.windows is None else _windows(family, values)
    if family.fixed:
        bases = _BASES_BY_LAYER if family.windows == "pattern" else _BASES
        ropes = {kind: _rope(values, kind, *bases[kind], bases is _BASES_BY_LAYER) for kind in bases}
        given |= {"rope": ropes[FULL], "window_rope": None if ropes[SLIDING] == ropes[FULL] else ropes[SLIDING]}
    return Architecture(family=name, **given)


def _windows(family: Family, values: Mapping[str, Any]) -> dict[str, Any]:
    """`window` and `window_layers`."""
    count, window = values["num_hidden_layers"], values["sliding_window"]
    if not values.get("use_sliding_window", True):
        window = None
    slides = {
        "every": lambda layer: window is not None,
        "later": lambda layer: window is not None and layer >= values["max_window_layers"],
        "pattern": lambda layer: (layer + 1) % values["sliding_window_pattern"] != 0,
    }[family.windows or ""]
    kinds = values.get("layer_types") if family.windows != "every" else None
    if kinds is None:
        kinds = [SLIDING if slides(layer) else FULL for layer in range(count)]
    if not isinstance(kinds, list) or len(kinds) != count or not set(map(str, kinds)) <= {SLIDING, FULL}:
        raise UnsupportedModel(
            f"layer_types is {kinds!r:.80}; expected one of {SLIDING!r}, {FULL!r} for each of {count} layers"
        )
    if SLIDING not in kinds:
        return {}
    if type(window) is not int or window < 1:
        raise UnsupportedModel(f"sliding_window is {window!r}; layer_types needs a whole number of at least 1")
    layers = tuple(kind == SLIDING for kind in kinds)
    return {"window": window, "window_layers": None if all(layers) else layers}


def _rope(values: Mapping[str, Any], kind: str, key: str, base: float, by_layer: bool) -> Rope:
    """Of one kind of layer: `rope_parameters` of transformers 5, or `rope_theta` and `rope_scaling` of 4."""
    scaling = values.get("rope_scaling")
    parameters = values.get("rope_parameters") or {}
    if by_layer and any(isinstance(value, Mapping) for value in parameters.values()):
        parameters = parameters.get(kind) or {}
    if scaling and not (by_layer and kind == SLIDING):  # transformers 4 scales the layers that see everything
        parameters = {**parameters, **scaling}
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise UnsupportedModel(f"rope_parameters is {parameters!r:.80}; expected those of all layers")
    name = parameters.get("rope_type", parameters.get("type", "default"))
    if name not in _SCALINGS:
        raise UnsupportedModel(f"rope_type is {name!r}; only {', '.join(map(repr, _SCALINGS))} are supported")
    if parameters.get("partial_rotary_factor") not in (None, 1):
        raise UnsupportedModel(f"partial_rotary_factor is {parameters['partial_rotary_factor']!r}; only 1 is supported")
    original = "original_max_position_embeddings"
    given = {"rope_theta": values.get(key) or base, original: values["max_position_embeddings"], **parameters}
    given |= {original: values[original]} if values.get(original) else {}
    needed = ("rope_theta", *_SCALINGS[name])
    if missing := [each for each in needed if type(given.get(each)) not in (int, float)]:
        raise UnsupportedModel(f"rope_type {name!r} needs a number as {missing[0]}, which is {given.get(missing[0])!r}")
    return Rope(rope_type=name, **{each: given[each] for each in needed})


def described(architecture: Architecture) -> dict[str, Any]:
    """Keys of a config.json, which `transformers` 4 and 5 and `read_architecture` read as this architecture."""
    family = FAMILIES[architecture.family]
    out: dict[str, Any] = {"model_type": architecture.family, "architectures": [family.architectures]}
    out |= {key: allowed[0] for key, allowed in family.needed.items()}
    out |= {theirs: getattr(architecture, ours) for ours, theirs in family.sizes.items()}
    out |= {key: getattr(architecture, switch) for switch, key in family.biases.items()}
    for theirs, value in (("num_key_value_heads", architecture.kv_heads), ("head_dim", architecture.head_dim)):
        out |= {theirs: value} if theirs in out else {}
    if family.windows is not None:
        slides = [window is not None for window in architecture.windows]
        out["sliding_window"] = architecture.window
        if family.windows != "every":
            out["layer_types"] = [SLIDING if each else FULL for each in slides]
        if "use_sliding_window" in family.defaults:
            out["use_sliding_window"] = any(slides)
    if architecture.rope is not None:
        by_layer = {FULL: architecture.rope, SLIDING: architecture.window_rope or architecture.rope}
        parameters = {kind: _rope_parameters(rope) for kind, rope in by_layer.items()}
        nested = family.windows == "pattern"
        out["rope_parameters"] = parameters if nested else parameters[FULL]
        bases = _BASES_BY_LAYER if nested else {FULL: _BASES[FULL]}
        out |= {key: by_layer[kind].rope_theta for kind, (key, _) in bases.items()}
        if architecture.rope.rope_type != "default":
            out["rope_scaling"] = {key: value for key, value in parameters[FULL].items() if key != "rope_theta"}
    return {**out, **family.written}


def _rope_parameters(rope: Rope) -> dict[str, Any]:
    return {key: value for key, value in dataclasses.asdict(rope).items() if value is not None}


class Tensor(NamedTuple):
    """One tensor of a file: part of a parameter."""

    name: str
    shape: tuple[int, ...]  # in the file
    columns: slice  # of the parameter's last axis
    transposed: bool

    def of(self, parameter: np.ndarray) -> np.ndarray:
        """The tensor's values, from the parameter's; embeddings without their padding rows."""
        part = parameter[..., self.columns]
        return part.T if self.transposed else part[: self.shape[0]]


def parts_of(architecture: Architecture, module: str, columns: int) -> list[tuple[str, int]]:
    """Names in files of what one of our modules is made of, such as `attn.c_attn`, and columns, in the order of its last axis."""
    names = FAMILIES[architecture.family].names.get(module, (module,))
    widths = architecture.qkv if len(names) == 3 else [columns // len(names)] * len(names)
    return list(zip(names, widths, strict=True))


def place_of(architecture: Architecture, layer: Any) -> str:
    """What stands before a module's name in files: of a layer's, or (None) of those outside."""
    family = FAMILIES[architecture.family]
    return family.prefix if layer is None else f"{family.prefix}{family.blocks}.{layer}."


def tensors_of(architecture: Architecture, path: Sequence[Any], shape: tuple[int, ...]) -> Iterator[Tensor]:
    """The tensors that the parameter at a path, of a shape, is made of, in the order of its last axis.

    Of an adapter (see `adapters`) it is one tensor, under PEFT's name of it.
    """
    *module, kind = map(str, path)
    place = place_of(architecture, module[1] if module[0] == "h" else None)
    module = module[2:] if module[0] == "h" else module
    if ADAPTERS in module:
        *module, _, own = module
        part = next(name for name, _ in parts_of(architecture, ".".join(module), 0) if name.endswith(own))
        yield Tensor(f"{place}{part}.lora_{kind.upper()}.weight", shape[::-1], slice(None), True)
        return
    name, end = ".".join(module), "bias" if kind == "bias" else "weight"
    if kind == "embedding" and name != "wpe":
        shape = (architecture.vocab_size, *shape[1:])
    transposed, begin = kind == "kernel" and FAMILIES[architecture.family].transposed, 0
    for part, width in parts_of(architecture, name, shape[-1]):
        own, end_ = HEAD if name == "head" else f"{place}{part}.{end}", begin + width
        stored = (*shape[:-1], width)
        yield Tensor(own, stored[::-1] if transposed else stored, slice(begin, end_), transposed)
        begin = end_
