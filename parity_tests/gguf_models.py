"""Tiny random models of every family that GGUF files are read of, and such files, written as llama.cpp's converter does.

The names of tensors are the `gguf` package's own table; what is done to values is written from llama.cpp's convert_hf_to_gguf.py.
"""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from tokenizers import pre_tokenizers

MERGES = [
    "h e",
    "Ġ t",
    "t he",
    "Ġt he",
    "1 2",
    "12 3",
    "4 5",
    "Ġ a",
    "a n",
    "an d",
    "i n",
    "in g",
    "e r",
    "l l",
    "' ll",
]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
VOCABULARY = 288  # rows of the embedding
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "vocab_size": VOCABULARY,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192}
GEMMA_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
GPT2 = {"n_embd": 64, "n_layer": 6, "n_head": 4, "n_inner": 256, "n_positions": 128, "vocab_size": VOCABULARY}
# Name: llama.cpp's architecture, the config's class, and what the model has.
MODELS: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "llama": ("llama", transformers.LlamaConfig, SIZES | {"tie_word_embeddings": False}),
    "llama3": ("llama", transformers.LlamaConfig, SIZES | {"rope_parameters": {"rope_theta": 5e5, **LLAMA3}}),
    "qwen2": ("qwen2", transformers.Qwen2Config, SIZES | {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", transformers.Qwen3Config, SIZES | {"head_dim": 32, "tie_word_embeddings": True}),
    "gemma3": (
        "gemma3",
        transformers.Gemma3TextConfig,
        SIZES | {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 4, "rope_parameters": GEMMA_ROPE},
    ),
    "gpt2": ("gpt2", transformers.GPT2Config, GPT2),
}


def model_of(name: str) -> Any:
    """The model in `transformers`, in evaluation; norms and biases are random too."""
    _, config, sizes = MODELS[name]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config(**sizes), dtype=torch.float32).eval()
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.ndim == 1:
                tensor.add_(0.2 * torch.randn_like(tensor))
    return model


def byte_level_tokens() -> list[str]:
    """A vocabulary of bytes, `MERGES` and `SPECIAL`, filled up with tokens that are none, as llama.cpp's converter does it."""
    tokens = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES)]
    return tokens + [f"[PAD{i}]" for i in range(len(tokens), VOCABULARY)]


def byte_level(pre: str) -> dict[str, Any]:
    """Metadata of a byte-level tokenizer that cuts as `pre` says."""
    tokens = byte_level_tokens()
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in SPECIAL else 5 if "PAD" in token else 1 for token in tokens],
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }


def metadata_of(name: str, model: Any) -> dict[str, Any]:
    """The keys that llama.cpp's converter writes of a model."""
    architecture, _, sizes = MODELS[name]
    config, heads = model.config, sizes.get("num_attention_heads", 4)
    if architecture == "gpt2":
        keys = {"context_length": 128, "embedding_length": 64, "feed_forward_length": 256, "block_count": 6}
        keys |= {"attention.head_count": heads, "attention.layer_norm_epsilon": config.layer_norm_epsilon}
    else:
        head = sizes.get("head_dim", sizes["hidden_size"] // heads)
        rope = config.rope_parameters
        keys = {
            "context_length": sizes["max_position_embeddings"],
            "embedding_length": sizes["hidden_size"],
            "feed_forward_length": sizes["intermediate_size"],
            "block_count": sizes["num_hidden_layers"],
            "attention.head_count": heads,
            "attention.head_count_kv": sizes["num_key_value_heads"],
            "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
            "rope.freq_base": float(rope.get("full_attention", rope)["rope_theta"]),
        }
        if architecture == "llama":
            keys |= {"rope.dimension_count": head, "vocab_size": VOCABULARY}
        else:
            keys |= {"attention.key_length": head, "attention.value_length": head}
        if architecture == "gemma3":
            keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
            keys["attention.sliding_window"] = sizes["sliding_window"]
    own = {f"{architecture}.{key}": value for key, value in keys.items()}
    return own | {"general.name": "tiny", "general.license": "mit"} | byte_level("gpt-2")


def tensors_of(name: str, model: Any) -> dict[str, np.ndarray]:
    """The model's tensors as llama.cpp's converter writes them."""
    architecture, _, sizes = MODELS[name]
    kind = next(kind for kind, text in gguf.MODEL_ARCH_NAMES.items() if text == architecture)
    names = gguf.get_tensor_name_map(kind, 6)
    tensors = {}
    for theirs, tensor in model.state_dict().items():
        module, end = theirs.rsplit(".", 1)
        if module == "lm_head" and model.config.tie_word_embeddings:
            continue
        values = tensor.numpy()
        if architecture == "llama" and ".q_proj" in theirs:
            values = permuted(values, sizes["num_attention_heads"])
        if architecture == "llama" and ".k_proj" in theirs:
            values = permuted(values, sizes["num_key_value_heads"])
        if architecture == "gemma3" and theirs.endswith("norm.weight"):
            values = values + np.float32(1)
        if architecture == "gpt2" and end == "weight" and values.ndim == 2 and ".h." in theirs:
            values = values.T
        tensors[f"{names.get_name(module)}.{end}"] = np.ascontiguousarray(values)
    if name == "llama3":
        inverse, expected = model.model.rotary_emb.inv_freq, 5e5 ** -(torch.arange(0, 16, 2) / 16)
        tensors["rope_freqs.weight"] = (expected / inverse).numpy().astype(np.float32)
    return tensors


def permuted(values: np.ndarray, heads: int) -> np.ndarray:
    """`LlamaModel.permute` of llama.cpp's converter."""
    shape = (heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return values.reshape(shape).swapaxes(1, 2).reshape(values.shape)


def write(path: Path, architecture: str, metadata: dict[str, Any], tensors: dict[str, np.ndarray], kind: str) -> Path:
    """A GGUF file, whose matrices are of the `kind`, and the rest float32."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add.get(type(value), writer.add_array)(key, value)
    number = gguf.GGMLQuantizationType[kind]
    for name, values in tensors.items():
        stored = gguf.quantize(values, number) if values.ndim == 2 else values
        writer.add_tensor(name, stored, raw_dtype=number if stored.dtype == np.uint8 else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_model(path: Path, name: str, kind: str = "F32") -> Any:
    """Writes the tiny model of that name, and returns it as `transformers` has it."""
    model = model_of(name)
    write(path, MODELS[name][0], metadata_of(name, model), tensors_of(name, model), kind)
    return model
