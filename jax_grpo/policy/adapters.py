"""Low-rank adapters (LoRA, Hu et al. 2021): what is trained beside a decoder's weights, which stay as they are.

A linear map x W becomes x W + scale (x A) B, with A [in, rank] and B [rank, out], one pair for each tensor that its weights are of
in files: queries, keys and values have their own. B begins at 0, so that nothing is changed. Knows no files: see `peft_files`.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jax_grpo.config import ConfigError
from jax_grpo.model.decoder import Decoder
from jax_grpo.model.families import ADAPTERS, parts_of, place_of
from jax_grpo.model.layers import Linear

LINEAR_MAPS = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")  # of a block


@dataclasses.dataclass(frozen=True)
class Adapter:
    """Sizes of adapters, and where they are; names as in `config.model.AdapterConfig`."""

    rank: int
    alpha: float
    targets: tuple[str, ...] | None = (
        None  # ends of the names that files have for linear maps; None: all of every block
    )
    rank_stabilised: bool = False

    @property
    def scale(self) -> float:
        """alpha / rank; rank-stabilised alpha / sqrt(rank) (Kalajdzievski 2023)."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilised else self.rank)

    def hits(self, name: str) -> bool:
        """Whether the linear map that files call so has an adapter."""
        return self.targets is None or any(f".{name}".endswith(f".{target}") for target in self.targets)


class LowRank(nnx.Module):
    """scale (x A) B, for the columns of a linear map from `begin` on."""

    def __init__(self, linear: Linear, begin: int, columns: int, adapter: Adapter, *, rngs: nnx.Rngs, param_dtype: Any):
        self.begin, self.columns, self.scale, self.dtype = begin, columns, adapter.scale, linear.dtype
        # PEFT's: Kaiming's uniform with a = sqrt(5), whose bound is sqrt(6 / ((1 + a^2) in)).
        bound, shape = linear.in_features**-0.5, (linear.in_features, adapter.rank)
        self.a = nnx.LoRAParam(jax.random.uniform(rngs.params(), shape, param_dtype, -bound, bound))
        self.b = nnx.LoRAParam(jnp.zeros((adapter.rank, columns), param_dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., in] to [..., columns], both in the compute dtype."""
        return (self.scale * (x @ self.a[...].astype(self.dtype))) @ self.b[...].astype(self.dtype)

    def product(self) -> jax.Array:
        """scale A B [in, columns], in the parameters' dtype."""
        return self.scale * (self.a[...] @ self.b[...])


def linear_maps(model: Decoder) -> Iterator[tuple[int, str, Linear]]:
    """Every linear map of every block: the number of the layer, our name within it, and the map."""
    for layer, block in enumerate(model.h):
        for name in LINEAR_MAPS:
            yield layer, name, functools.reduce(getattr, name.split("."), block)


def attach(model: Decoder, adapter: Adapter, *, seed: int, param_dtype: Any) -> Decoder:
    """Gives the model adapters, in place, as a new run begins with them.

    Raises:
        ConfigError: a target is the name of no linear map.
    """
    rngs, names = nnx.Rngs(seed), []
    for layer, module, linear in linear_maps(model):
        own, begin = {}, 0
        for part, columns in parts_of(model.config, module, linear.out_features):
            names.append(place_of(model.config, layer) + part)
            if adapter.hits(names[-1]):
                key = part.rpartition(".")[2]
                own[key] = LowRank(linear, begin, columns, adapter, rngs=rngs, param_dtype=param_dtype)
            begin += columns
        if own:
            setattr(linear, ADAPTERS, nnx.Dict(own))
    for target in adapter.targets or ():
        if not any(dataclasses.replace(adapter, targets=(target,)).hits(name) for name in names):
            known = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in names))
            raise ConfigError(
                f"model.adapter.targets: no linear map of this {model.config.family} is named {target!r}; expected some of "
                f"{known}, or longer ends of names such as {names[0]}"
            )
    return model


def divided(params: nnx.State) -> tuple[nnx.State, nnx.State | None]:
    """What is trained, and what stays as it is: the adapters and the rest, or, without adapters, everything and None."""
    adapters, base = nnx.split_state(params, nnx.LoRAParam, ...)
    return (adapters, base) if jax.tree.leaves(adapters) else (params, None)


def joined(trained: Any, base: Any) -> Any:
    """The inverse of `divided`: what a model reads. No array is copied."""
    return trained if base is None else nnx.merge_state(base, trained)


def merge(model: Decoder) -> Decoder:
    """Adds every adapter into its linear map's weights, W + scale A B, and takes it away; in place."""
    for _, _, linear in linear_maps(model):
        if linear.adapters is None:
            continue
        kernel = linear.kernel[...]
        for one in linear.adapters.values():
            columns = slice(one.begin, one.begin + one.columns)
            kernel = kernel.at[:, columns].set((kernel[:, columns] + one.product()).astype(kernel.dtype))
        linear.kernel = nnx.Param(kernel)
        del linear.adapters
    return model


def merged(graphdef: Any, params: nnx.State) -> nnx.State:
    """The parameters of the model without adapters that computes the same, up to rounding."""
    return nnx.state(merge(nnx.merge(graphdef, params)), nnx.Param)
