"""A decoder with RMSNorm, rotary positions, grouped queries and a gated MLP: Llama, Mistral, Qwen 2 and 3, Gemma 3 (text).

Parameters are named and laid out as in Hugging Face's models of these families. What a family does differently is a switch of its
`DecoderConfig`; no family is named here. Norms, rotations and logits are computed in float32 or wider.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_ref.families import DecoderConfig
from torch_ref.model import KVCache, LanguageModel, positions, visibility

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * (offset + weight) (Zhang & Sennrich 2019), over the last axis."""

    def __init__(self, size: int, config: DecoderConfig):
        super().__init__()
        self.eps, self.offset = config.rms_norm_eps, config.norm_offset
        self.weight = nn.Parameter(torch.full((size,), 1.0 - self.offset))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normed = wide / torch.sqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (normed * (self.offset + self.weight.to(wide.dtype))).to(x.dtype)


def rotate(x_BNTD: Tensor, position_BT: Tensor, frequency_d: Tensor) -> Tensor:
    """Turns channels i and i + D / 2 of each head, as a vector in the plane, by position * frequency_i radians.

    Angles are taken in float64: in float32 that of position 100,000 is 0.004 radians off.
    """
    wide = torch.promote_types(x_BNTD.dtype, torch.float32)
    angle_B1Td = position_BT[:, None, :, None] * frequency_d.to(position_BT.device)
    cos, sin = angle_B1Td.cos().to(wide), angle_B1Td.sin().to(wide)
    first, second = x_BNTD.to(wide).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x_BNTD.dtype)


class Attention(nn.Module):
    """Self-attention in which a group of query heads shares one head of keys and values (Ainslie et al. 2023)."""

    def __init__(self, config: DecoderConfig, layer: int):
        super().__init__()
        self.config, self.layer = config, layer
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=config.qkv_bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=config.output_bias)
        self.q_norm = RMSNorm(config.head_dim, config) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(config.head_dim, config) if config.qk_norm else nn.Identity()

    def forward(self, x_BTH: Tensor, position_BT: Tensor, visible_B1TS: Tensor | None, cache: KVCache | None) -> Tensor:
        """With no mask a token attends to itself and to all before it."""
        config, (batch, tokens, _) = self.config, x_BTH.shape
        frequency_d = config.layers[self.layer].rotary.frequencies(config.head_dim)

        def heads(x_BTK: Tensor) -> Tensor:
            return x_BTK.view(batch, tokens, -1, config.head_dim).transpose(1, 2)

        query = rotate(self.q_norm(heads(self.q_proj(x_BTH))), position_BT, frequency_d)
        key = rotate(self.k_norm(heads(self.k_proj(x_BTH))), position_BT, frequency_d)
        value = heads(self.v_proj(x_BTH))
        if cache is not None:
            key, value = cache.extend(self.layer, key, value)
        group = config.num_heads // config.num_kv_heads
        key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
        mixed_BNTD = F.scaled_dot_product_attention(
            query, key, value, attn_mask=visible_B1TS, is_causal=visible_B1TS is None, scale=config.attention_scale
        )
        return self.o_proj(mixed_BNTD.transpose(1, 2).reshape(batch, tokens, -1))


class MLP(nn.Module):
    """down(activation(gate x) * up x) (Shazeer 2020)."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        inner, bias = config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(config.hidden_size, inner, bias=bias)
        self.up_proj = nn.Linear(config.hidden_size, inner, bias=bias)
        self.down_proj = nn.Linear(inner, config.hidden_size, bias=bias)
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, x_BTH: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.gate_proj(x_BTH)) * self.up_proj(x_BTH))


class Block(nn.Module):
    """Residual block with a norm before attention and MLP, or before and behind."""

    def __init__(self, config: DecoderConfig, layer: int):
        super().__init__()
        self.norm_after = config.norm_after
        self.self_attn = Attention(config, layer)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config)
        if self.norm_after:
            self.pre_feedforward_layernorm = RMSNorm(config.hidden_size, config)
            self.post_feedforward_layernorm = RMSNorm(config.hidden_size, config)

    def forward(self, x_BTH: Tensor, position_BT: Tensor, visible_B1TS: Tensor | None, cache: KVCache | None) -> Tensor:
        mixed_BTH = self.self_attn(self.input_layernorm(x_BTH), position_BT, visible_B1TS, cache)
        if not self.norm_after:  # the second norm is named for where it stands, and is the MLP's
            x_BTH = x_BTH + mixed_BTH
            return x_BTH + self.mlp(self.post_attention_layernorm(x_BTH))
        x_BTH = x_BTH + self.post_attention_layernorm(mixed_BTH)
        return x_BTH + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x_BTH)))


class Decoder(LanguageModel):
    """The language model."""

    def __init__(self, config: DecoderConfig, *, remat: bool = False):
        super().__init__(config, remat=remat)
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(config.vocab_size, config.hidden_size),
                "layers": nn.ModuleList(Block(config, layer) for layer in range(config.num_layers)),
                "norm": RMSNorm(config.hidden_size, config),
            }
        )
        if not config.tied:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    @property
    def head_VH(self) -> Tensor:
        return (self.model["embed_tokens"] if self.config.tied else self.lm_head).weight  # pyright: ignore[reportReturnType]

    def forward(self, input_ids_BT: Tensor, attention_mask_BS: Tensor, cache: KVCache | None = None) -> Tensor:
        tokens = input_ids_BT.shape[1]
        position_BT = positions(attention_mask_BS, tokens)
        x_BTH = self.model["embed_tokens"](input_ids_BT) * self.config.embedding_scale
        masks = {
            window: visibility(attention_mask_BS, tokens, window)
            for window in {layer.window for layer in self.config.layers}
            if not self.unpadded or (window is not None and window < tokens)
        }
        blocks: nn.ModuleList = self.model["layers"]  # pyright: ignore[reportAssignmentType]
        for block, layer in zip(blocks, self.config.layers, strict=True):
            x_BTH = self.run(block, x_BTH, position_BT, masks.get(layer.window), cache)
        return self.model["norm"](x_BTH)
