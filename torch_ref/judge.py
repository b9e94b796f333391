"""transformers' own models as judges, from a tiny config of each family: in float64 without a float32 step inside.

Needs the package `transformers`, which nothing else of `torch_ref` does.
"""

import importlib
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from torch_ref.model import KVCache, LanguageModel, positions

MODULES = [f"transformers.models.{name}.modeling_{name}" for name in ("llama", "mistral", "qwen2", "qwen3", "gemma3")]
MODULES.append("transformers.modeling_rope_utils")
# 2 layers: with a window in layer 0 alone of Gemma 3, and in layer 1 alone of Qwen. Texts here are longer than its 4 tokens.
# No token is padding: transformers gives the embedding of `pad_token_id` no gradient as an input.
SIZES: dict[str, Any] = {
    "vocab_size": 131, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 100.0,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
TYPES = ["full_attention", "sliding_attention"]
GEMMA = {
    "head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 4, "sliding_window_pattern": 2,
    "rope_local_base_freq": 10.0, "hidden_activation": "gelu_pytorch_tanh",
}  # fmt: skip
# config.json of each case as transformers 4 writes it, with what its family has and others have not.
CASES: dict[str, dict[str, Any]] = {
    "gpt2": {
        "model_type": "gpt2", "vocab_size": 131, "n_layer": 2, "n_head": 4, "n_embd": 32, "n_positions": 64,
        "bos_token_id": 0, "eos_token_id": 1, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    },
    "llama": SIZES | {"model_type": "llama", "rope_scaling": LLAMA3, "attention_bias": True, "mlp_bias": True},
    "llama_tied": SIZES
    | {"model_type": "llama", "tie_word_embeddings": True, "rope_scaling": {"type": "linear", "factor": 3.0}},
    "mistral": SIZES | {"model_type": "mistral", "sliding_window": 4, "head_dim": 12},
    "qwen2": SIZES | {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4, "layer_types": TYPES},
    "qwen3": SIZES | {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True},
    "gemma3_text": SIZES | GEMMA | {"model_type": "gemma3_text"},
}  # fmt: skip


class _Float64(types.ModuleType):
    """The module `torch`, whose float32 is float64."""

    def __getattr__(self, name: str) -> Any:
        return torch.float64 if name in ("float32", "float") else getattr(torch, name)


@contextmanager
def true_float64() -> Iterator[None]:
    """Within it, transformers' models of these families compute in float64; build them within it too.

    Their norms, rotary angles and scales are written in float32 even after `.double()`: 1e-7 off, which no comparison to
    1e-10 forgives. So float32 means float64 to the modules that hold their code, `.float()` widens, and new tensors are float64.
    """
    before = torch.get_default_dtype()
    with ExitStack() as stack:
        stack.callback(torch.set_default_dtype, before)
        torch.set_default_dtype(torch.float64)
        stack.enter_context(mock.patch.object(torch.Tensor, "float", torch.Tensor.double))
        for name in MODULES:
            stack.enter_context(mock.patch.object(importlib.import_module(name), "torch", _Float64("torch")))
        yield


def judge(described: dict[str, Any], dtype: torch.dtype, spread: float = 0.2) -> Any:
    """transformers' model of a config.json; its weights' deviation is so large that attention and softmax are far from uniform."""
    import transformers

    kind = described["model_type"]
    config = transformers.AutoConfig.for_model(kind, **{key: x for key, x in described.items() if key != "model_type"})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Gemma multiplies its embeddings, and a head that is such an embedding knows little but the token before.
            scaled = kind == "gemma3_text" and "embed_tokens" in name
            size = spread / 2 if scaled else spread
            parameter.add_(size * torch.randn(parameter.shape, dtype=dtype, generator=generator))
    return model


class Judged(LanguageModel):
    """A model of transformers in the place of one of `torch_ref`: with its loss and optimiser."""

    def __init__(self, peer: Any):
        super().__init__(peer.config)
        self.peer = peer

    @property
    def head_VH(self) -> Tensor:
        return self.peer.lm_head.weight

    def forward(self, input_ids_BT: Tensor, attention_mask_BS: Tensor, cache: KVCache | None = None) -> Tensor:
        assert cache is None, "transformers has a cache of its own"
        position_BT = positions(attention_mask_BS, input_ids_BT.shape[1])
        given = {"attention_mask": attention_mask_BS, "position_ids": position_BT, "use_cache": False}
        return self.peer.base_model(input_ids_BT, **given).last_hidden_state

    def named_parameters(self, *arguments: Any, **options: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Under transformers' own names."""
        return self.peer.named_parameters(*arguments, **options)
