"""What every model shares, and GPT-2: hidden states, logits, and the log-probabilities of given tokens.

Parameters are named and laid out as in Hugging Face's GPT2LMHeadModel (148 tensors for GPT-2 small, tied embedding); the other
families are in `decoder`. Knows nothing of objectives, batches or devices. Dropout is left out: a policy ratio needs the same
network twice.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class GPT2Config:
    """Sizes of a GPT-2 (Radford et al. 2019)."""

    vocab_size: int
    num_layers: int
    num_heads: int
    hidden_size: int
    max_position_embeddings: int
    layer_norm_epsilon: float = 1e-5
    inner_size: int | None = None
    """Of the MLP; None: four times the hidden size."""


class KVCache:
    """Keys and values of the tokens seen so far, one [B, N, S, D] pair a layer; grows by concatenation."""

    def __init__(self, num_layers: int):
        self.layers: list[tuple[Tensor, Tensor] | None] = [None] * num_layers

    def extend(self, layer: int, key_BNTD: Tensor, value_BNTD: Tensor) -> tuple[Tensor, Tensor]:
        """Appends along the tokens; returns everything seen by this layer."""
        past = self.layers[layer]
        if past is not None:
            key_BNTD, value_BNTD = torch.cat([past[0], key_BNTD], 2), torch.cat([past[1], value_BNTD], 2)
        self.layers[layer] = key_BNTD, value_BNTD
        return key_BNTD, value_BNTD


class Conv1D(nn.Module):
    """`x @ weight + bias` with weight [in, out]: GPT-2's layout, the transpose of nn.Linear's."""

    def __init__(self, size_in: int, size_out: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size_in, size_out))
        self.bias = nn.Parameter(torch.zeros(size_out))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.T, self.bias)


class Attention(nn.Module):
    """Multi-head self-attention; softmax(q k^T / sqrt(D)) v."""

    def __init__(self, config: GPT2Config, layer: int):
        super().__init__()
        self.num_heads, self.layer = config.num_heads, layer
        self.c_attn = Conv1D(config.hidden_size, 3 * config.hidden_size)
        self.c_proj = Conv1D(config.hidden_size, config.hidden_size)

    def forward(self, x_BTH: Tensor, visible_B1TS: Tensor | None, cache: KVCache | None) -> Tensor:
        """With no mask a token attends to itself and to all before it."""
        batch, tokens, width = x_BTH.shape
        heads = (batch, tokens, self.num_heads, width // self.num_heads)
        query, key, value = (part.view(heads).transpose(1, 2) for part in self.c_attn(x_BTH).split(width, dim=-1))
        if cache is not None:
            key, value = cache.extend(self.layer, key, value)
        causal = visible_B1TS is None
        mixed_BNTD = F.scaled_dot_product_attention(query, key, value, attn_mask=visible_B1TS, is_causal=causal)
        return self.c_proj(mixed_BNTD.transpose(1, 2).reshape(batch, tokens, width))


class MLP(nn.Module):
    """Four times as wide inside unless the config says otherwise, tanh-approximated GELU (`gelu_new`)."""

    def __init__(self, config: GPT2Config):
        super().__init__()
        inner = config.inner_size or 4 * config.hidden_size
        self.c_fc = Conv1D(config.hidden_size, inner)
        self.c_proj = Conv1D(inner, config.hidden_size)

    def forward(self, x_BTH: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x_BTH), approximate="tanh"))


class Block(nn.Module):
    """Pre-norm residual block."""

    def __init__(self, config: GPT2Config, layer: int):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.attn = Attention(config, layer)
        self.ln_2 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.mlp = MLP(config)

    def forward(self, x_BTH: Tensor, visible_B1TS: Tensor | None, cache: KVCache | None) -> Tensor:
        x_BTH = x_BTH + self.attn(self.ln_1(x_BTH), visible_B1TS, cache)
        return x_BTH + self.mlp(self.ln_2(x_BTH))


class LanguageModel(nn.Module):
    """A model that reads tokens and gives the logits of the next ones. `remat` recomputes each block in the backward pass.

    `unpadded` may be set where no sequence has padding and there is no cache: attention is then given no mask, which a GPU's flash
    kernels do not take.

    `vocabulary`, the number of tokens there are, is all of `config.vocab_size` unless somebody sets it lower: the embedding may
    have been padded, and a column that no token stands for takes no part in any softmax.
    """

    def __init__(self, config: Any, *, remat: bool = False):
        super().__init__()
        self.config, self.remat, self.vocabulary = config, remat, config.vocab_size
        self.unpadded = False

    @property
    def head_VH(self) -> Tensor:
        """The matrix of the logits, a row a token."""
        raise NotImplementedError

    def forward(self, input_ids_BT: Tensor, attention_mask_BS: Tensor, cache: KVCache | None = None) -> Tensor:
        """Hidden states after the last norm, [B, T, H].

        Args:
            input_ids_BT: the tokens; with a cache, those that follow what the cache holds.
            attention_mask_BS: 1 on real tokens, 0 on padding on either side; S = T, or cached + T.
            cache: extended in place.

        A token's position is the number of real tokens before it, so padding on the left does not move a text.
        """
        raise NotImplementedError

    def run(self, block: nn.Module, *inputs: object) -> Tensor:
        """A block's output, recomputed in the backward pass where `remat` asks for it."""
        if self.remat and torch.is_grad_enabled():
            return checkpoint(block, *inputs, use_reentrant=False)  # pyright: ignore[reportReturnType]
        return block(*inputs)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of hidden states [..., H], V = `vocabulary`; at least float32.

        Under bfloat16 autocast the operands are rounded to bfloat16 but the product is kept in float32: GPT-2's logits
        reach -100, where bfloat16 numbers lie 0.5 apart.
        """
        weight_VH = self.head_VH[: self.vocabulary]
        device = hidden.device.type
        if torch.is_autocast_enabled(device):
            compute = torch.get_autocast_dtype(device)
            hidden, weight_VH = hidden.to(compute), weight_VH.to(compute)
        with torch.autocast(device, enabled=False):
            wide = torch.promote_types(hidden.dtype, torch.float32)
            return F.linear(hidden.to(wide), weight_VH.to(wide))


class GPT2(LanguageModel):
    """The language model of Radford et al. 2019."""

    def __init__(self, config: GPT2Config, *, remat: bool = False):
        super().__init__(config, remat=remat)
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, config.hidden_size),
                "wpe": nn.Embedding(config.max_position_embeddings, config.hidden_size),
                "h": nn.ModuleList(Block(config, layer) for layer in range(config.num_layers)),
                "ln_f": nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon),
            }
        )

    @property
    def head_VH(self) -> Tensor:
        return self.transformer["wte"].weight  # pyright: ignore[reportReturnType]

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> "GPT2":
        """GPT-2's initialisation: N(0, 0.02), the two projections onto the residual stream over sqrt(2 L); in place."""
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                shrink = math.sqrt(2 * self.config.num_layers) if name.endswith("c_proj.weight") else 1.0
                parameter.normal_(0.0, 0.02 / shrink, generator=generator)
        return self

    def forward(self, input_ids_BT: Tensor, attention_mask_BS: Tensor, cache: KVCache | None = None) -> Tensor:
        tokens = input_ids_BT.shape[1]
        position_BT = positions(attention_mask_BS, tokens)
        visible_B1TS = None if self.unpadded else visibility(attention_mask_BS, tokens)
        x_BTH = self.transformer["wte"](input_ids_BT) + self.transformer["wpe"](position_BT)
        for block in self.transformer["h"]:  # pyright: ignore[reportGeneralTypeIssues]
            x_BTH = self.run(block, x_BTH, visible_B1TS, cache)
        return self.transformer["ln_f"](x_BTH)


def positions(attention_mask_BS: Tensor, tokens: int) -> Tensor:
    """[B, T]: how many real tokens stand before each of the last T; of padding on the left, 0."""
    return (attention_mask_BS.long().cumsum(1) - 1).clamp(min=0)[:, attention_mask_BS.shape[1] - tokens :]


def visibility(attention_mask_BS: Tensor, tokens: int, window: int | None = None) -> Tensor:
    """Bool [B, 1, T, S]: which of S keys each of the last T tokens attends to: itself and the real tokens before it.

    With a window these are that many in all: a token and the `window - 1` real ones before it.

    Padding attends to itself too, which nothing sees: a row of the softmax without any key would be NaN.
    """
    seen = attention_mask_BS.shape[1]
    own_TS = torch.eye(seen, dtype=torch.bool, device=attention_mask_BS.device)[seen - tokens :]
    before_TS = torch.ones(seen, seen, dtype=torch.bool, device=attention_mask_BS.device).tril()[seen - tokens :]
    visible_B1TS = (before_TS & attention_mask_BS.bool()[:, None, None, :]) | own_TS
    if window is not None:
        query_BT, key_BS = positions(attention_mask_BS, tokens), positions(attention_mask_BS, seen)
        visible_B1TS &= (query_BT[:, :, None] - key_BS[:, None, :] < window)[:, None]
    return visible_B1TS


def score(
    model: LanguageModel,
    input_ids_BT: Tensor,
    attention_mask_BT: Tensor,
    mask_BT: Tensor,
    temperature: float,
    *,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each token where mask is 1, and the entropy of the distribution it was drawn from.

    logp[b, t] = log softmax(logits[b, t - 1] / temperature)[input_ids[b, t]], entropy in nats, both [B, T], at least
    float32, and 0 where mask is 0. Only masked positions go through the head.
    """
    hidden_BTH = model(input_ids_BT, attention_mask_BT)
    chosen = mask_BT[:, 1:].bool()
    logp_KV = F.log_softmax(model.logits(hidden_BTH[:, :-1][chosen]) / temperature, dim=-1)
    logp_K = logp_KV.gather(1, input_ids_BT[:, 1:][chosen].long()[:, None])[:, 0]
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy_K = -(logp_KV.exp() * logp_KV).sum(-1)
    return _scatter(logp_K, chosen), _scatter(entropy_K, chosen)


def _scatter(values_K: Tensor, chosen: Tensor) -> Tensor:
    """Values back at their [B, T] places, behind an unused position 0."""
    return F.pad(values_K.new_zeros(chosen.shape).masked_scatter(chosen, values_K), (1, 0))
