"""The names that a GGUF's keys and tensors have in Hugging Face's config.json and safetensors, family by family. All is data.

llama.cpp changes some tensors: it permutes the rows of Llama's queries and keys, adds Gemma's 1 to its norms, and transposes
GPT-2's matrices. Whatever is not in these tables is refused by its name: a setting that nobody read would be another model.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jax_grpo.gguf_files.reading import GGUFFile, shape_of, values_of

EMBEDDING, HEAD, ROPE_FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"
# Of every Llama 3.1 to 3.3: the rest of its scaling's settings, of which a GGUF holds the resulting factors alone.
LLAMA3_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
GEMMA_27B_LAYERS = 62  # the one Gemma 3 whose queries are not scaled by the head's size
SIZES = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
GPT2_SIZES = {
    "block_count": "n_layer",
    "context_length": "n_positions",
    "embedding_length": "n_embd",
    "feed_forward_length": "n_inner",
    "attention.head_count": "n_head",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
}
GEMMA_SIZES = SIZES | {
    "attention.sliding_window": "sliding_window",
    "rope.freq_base_swa": "rope_local_base_freq",
    "final_logit_softcapping": "final_logit_softcapping",
}
# Where a key is missing, as llama.cpp has it.
ABSENT = {"rope.freq_base": 10000.0, "rope.freq_base_swa": 10000.0, "final_logit_softcapping": None}
# Read by `_checked` and `_scaling`, and not copied.
READ = ("vocab_size", "attention.value_length", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor")
# Without any effect on the logits; and beginnings of keys that are another module's, or a note of how the file was made.
INERT = ("rope.scaling.finetuned", "rope.scaling.original_context_length")
ELSEWHERE = ("GGUF.", "general.", "quantize.", "split.", "tokenizer.")
WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
GPT2_BLOCK = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
GEMMA_BLOCK = BLOCK | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
} | QK_NORMS  # fmt: skip


class Family(NamedTuple):
    """One `general.architecture`. `whole` and `block` name tensors, without their ends; `undo` takes back llama.cpp's change."""

    fixed: Mapping[str, Any]  # of config.json
    sizes: Mapping[str, str] = SIZES
    whole: Mapping[str, str] = WHOLE
    block: Mapping[str, str] = BLOCK
    blocks: str = "model.layers"
    biased: tuple[str, ...] = ()  # have a bias beside the weight
    keys: tuple[str, ...] = ()  # read beside `sizes`
    undo: Callable[[str, np.ndarray, Mapping[str, Any]], np.ndarray] = lambda name, values, config: values


def _unpermuted(name: str, values: np.ndarray, config: Mapping[str, Any]) -> np.ndarray:
    """llama.cpp rotates neighbouring rows of a head, Hugging Face rows half a head apart."""
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(name)
    if heads is None:
        return values
    return values.reshape(config[heads], -1, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def _without_one(name: str, values: np.ndarray, config: Mapping[str, Any]) -> np.ndarray:
    return values.astype(np.float32) - 1 if name.endswith("_norm") else values


def _transposed(name: str, values: np.ndarray, config: Mapping[str, Any]) -> np.ndarray:
    return values.T if values.ndim == 2 and name in GPT2_BLOCK else values


LLAMA_LIKE = {"hidden_act": "silu"}
FAMILIES = {
    "llama": Family(
        {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "attention_bias": False, "mlp_bias": False} | LLAMA_LIKE,
        undo=_unpermuted,
    ),
    "qwen2": Family(
        {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False} | LLAMA_LIKE,
        biased=("attn_q", "attn_k", "attn_v"),
    ),
    "qwen3": Family(
        {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "use_sliding_window": False, "attention_bias": False}
        | LLAMA_LIKE,
        block=BLOCK | QK_NORMS,
    ),
    "gemma3": Family(
        {
            "model_type": "gemma3_text",
            "architectures": ["Gemma3ForCausalLM"],
            "hidden_activation": "gelu_pytorch_tanh",
            "attention_bias": False,
            "attn_logit_softcapping": None,
        },
        sizes=GEMMA_SIZES,
        block=GEMMA_BLOCK,
        keys=("attention.sliding_window_pattern",),
        undo=_without_one,
    ),
    "gpt2": Family(
        {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "activation_function": "gelu_new"}
        | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        sizes=GPT2_SIZES,
        whole={
            "token_embd": "transformer.wte",
            "position_embd": "transformer.wpe",
            "output_norm": "transformer.ln_f",
            "output": "lm_head",
        },
        block=GPT2_BLOCK,
        blocks="transformer.h",
        biased=("output_norm", *GPT2_BLOCK),
        undo=_transposed,
    ),
}  # fmt: skip


def family_of(file: GGUFFile) -> Family:
    """The family of a file; a GGUFError names an unknown architecture."""
    name = file.fields.get("general.architecture")
    if name not in FAMILIES:
        raise file.refusal(f"general.architecture is {name!r}; expected one of {', '.join(FAMILIES)}")
    return FAMILIES[name]


def config_of(file: GGUFFile) -> dict[str, Any]:
    """config.json, without the ids of special tokens.

    Raises:
        GGUFError: an unknown architecture, or a key of it that is unknown, missing, or another model's.
    """
    family, name = family_of(file), file.fields["general.architecture"]
    given = {key.removeprefix(f"{name}."): value for key, value in file.fields.items() if key.startswith(f"{name}.")}
    known = {f"{name}.{key}" for key in (*family.sizes, *family.keys, *READ, *INERT)}
    for key, value in file.fields.items():
        if key not in known and not key.startswith(ELSEWHERE) and value not in (0, False):
            raise file.refusal(f"{key} is {value!r:.60}, which is not known of this family")
    if EMBEDDING not in file.tensors:
        raise file.refusal(f"tensor {EMBEDDING!r} is missing")
    given |= {key: _same_in_all(file, f"{name}.{key}", given[key]) for key in family.sizes if key in given}
    given.setdefault("attention.head_count_kv", given.get("attention.head_count"))
    if "attention.key_length" not in given and given.get("attention.head_count"):
        given["attention.key_length"] = given.get("embedding_length", 0) // given["attention.head_count"]
    config = dict(family.fixed)
    for key, theirs in family.sizes.items():
        if key not in given and key not in ABSENT:
            raise file.refusal(f"{name}.{key} is missing")
        value = given.get(key, ABSENT.get(key))
        # The shortest decimal of a float32: 1e-5 and not 9.999999747378752e-06.
        config[theirs] = float(str(np.float32(value))) if isinstance(value, float) else value
    config["vocab_size"] = shape_of(file.tensors[EMBEDDING])[0]
    config["tie_word_embeddings"] = not _has_own_head(file)
    _checked(file, name, given, config["vocab_size"])
    if scaling := _scaling(file, name, given, config):
        config["rope_scaling"] = scaling
    if "sliding_window" in config:
        config |= _gemma(file, f"{name}.attention.sliding_window_pattern", given, config)
    return config


def _same_in_all(file: GGUFFile, key: str, value: Any) -> Any:
    """A size that some files give layer by layer."""
    if not isinstance(value, list):
        return value
    if len(set(value)) != 1:
        raise file.refusal(f"{key} is {value!r:.60}; only layers of one size are read")
    return value[0]


def _has_own_head(file: GGUFFile) -> bool:
    """Some converters write a tied head a second time."""
    if HEAD not in file.tensors:
        return False
    head, embedding = file.tensors[HEAD], file.tensors[EMBEDDING]
    same = head.tensor_type == embedding.tensor_type and head.data.shape == embedding.data.shape
    return not (same and np.array_equal(head.data, embedding.data))


def _checked(file: GGUFFile, name: str, given: Mapping[str, Any], rows: int) -> None:
    """Refuses sizes that contradict others: heads whose values or rotated parts are of another size, and a second vocabulary."""
    head = given["attention.key_length"]
    for key, needed in (("vocab_size", rows), ("attention.value_length", head), ("rope.dimension_count", head)):
        if given.get(key, needed) != needed:
            raise file.refusal(f"{name}.{key} is {given[key]}; expected {needed}")


def _scaling(file: GGUFFile, name: str, given: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any] | None:
    """`rope_scaling` of config.json: linear by its keys, Llama 3's by the factors that it gives each frequency."""
    kind = given.get("rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        raise file.refusal(f"{name}.rope.scaling.type is {kind!r}; expected 'none' or 'linear'")
    if kind == "linear":
        return {"rope_type": "linear", "factor": float(given.get("rope.scaling.factor", 1.0))}
    if ROPE_FACTORS not in file.tensors:
        return None
    factors = values_of(file, file.tensors[ROPE_FACTORS]).astype(np.float64)
    scaling = {"rope_type": "llama3", "factor": float(factors.max()), **LLAMA3_SCALING}
    expected = _llama3_factors(scaling, config["rope_theta"], config["head_dim"])
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4):
        raise file.refusal(f"tensor {ROPE_FACTORS!r} has other factors than Llama 3's scaling by {scaling['factor']:g}")
    return scaling


def _llama3_factors(scaling: Mapping[str, Any], base: float, head: int) -> np.ndarray:
    """By which each rotary frequency is divided [head / 2]; Meta's `apply_scaling`."""
    wavelength = 2 * np.pi * base ** (np.arange(0, head, 2) / head)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    smooth = (scaling["original_max_position_embeddings"] / wavelength - low) / (high - low)
    smooth = np.clip(smooth, 0, 1)  # beyond the two wavelengths: all of the factor, or none
    return 1 / ((1 - smooth) / scaling["factor"] + smooth)


def _gemma(file: GGUFFile, key: str, given: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Which layers see a window only (five of six), and by what queries are scaled."""
    layers = config["num_hidden_layers"]
    pattern = given.get("attention.sliding_window_pattern", 6)
    windowed = pattern if isinstance(pattern, list) else [bool((layer + 1) % pattern) for layer in range(layers)]
    if len(windowed) != layers:
        raise file.refusal(f"{key} has {len(windowed)} layers; expected {layers}")
    heads = config["num_attention_heads"]
    return {
        "layer_types": ["sliding_attention" if window else "full_attention" for window in windowed],
        "query_pre_attn_scalar": config["hidden_size"] // heads if layers == GEMMA_27B_LAYERS else config["head_dim"],
    }


def names_of(file: GGUFFile, config: Mapping[str, Any]) -> dict[str, str]:
    """Every tensor's name in Hugging Face's files, in the file's order.

    Raises:
        GGUFError: a tensor is unknown, or one is missing.
    """
    family = family_of(file)
    layers = config.get("num_hidden_layers", config.get("n_layer"))
    known = {}
    for parts, place, theirs in [
        (family.whole, "", ""),
        *((family.block, f"blk.{layer}.", f"{family.blocks}.{layer}.") for layer in range(layers)),
    ]:
        for ours, end in parts.items():
            known[f"{place}{ours}.weight"] = f"{theirs}{end}.weight"
            if ours in family.biased:
                known[f"{place}{ours}.bias"] = f"{theirs}{end}.bias"
    if config["tie_word_embeddings"]:
        del known[HEAD]
    read = [name for name in file.tensors if name != ROPE_FACTORS and (name != HEAD or HEAD in known)]
    for name in read:
        if name not in known:
            what = f"tensor {name!r} {shape_of(file.tensors[name])}"
            raise file.refusal(f"{what} is not part of a {file.fields['general.architecture']} of {layers} layers")
    if missing := [name for name in known if name not in file.tensors]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise file.refusal(f"tensor {missing[0]!r} is missing{more}")
    return {name: known[name] for name in read}


def values_in_hf(file: GGUFFile, name: str, config: Mapping[str, Any]) -> np.ndarray:
    """A tensor's values as Hugging Face's files have them."""
    part = name.rsplit(".", 1)[0].rsplit(".", 1)[-1]
    return np.ascontiguousarray(family_of(file).undo(part, values_of(file, file.tensors[name]), config))
