"""One crafted batch through both implementations: what the parity tests compare, at three precisions."""

import contextlib
import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import torch
from conftest import TINY, config
from flax import nnx
from worker import make_room

import torch_ref
import torch_ref.batch
import torch_ref.crafted
import torch_ref.model
import torch_ref.replay
from jax_grpo.config import Config
from jax_grpo.config.objectives import OBJECTIVES
from jax_grpo.model.architecture import Architecture
from jax_grpo.model.decoder import Decoder
from jax_grpo.model.tokenizer import Tokenizer
from jax_grpo.model.weights import from_hf
from jax_grpo.policy.named import Policy
from jax_grpo.replay import replay
from torch_ref.compare import largest

Arrays = dict[str, np.ndarray]
WIDTHS = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.float32}  # of the masters


def settings(dtype: str = "float64", **sections) -> Config:
    """2 groups of 4, every knob of the objective away from the value at which it does nothing."""
    base = {
        "prompts": {"per_iteration": 2},
        "rollout": {"group_size": 4, "max_new_tokens": 7, "temperature": 0.8},
        "kl": {"beta": 0.3},
        "update": {"learning_rate": 1e-3, "micro_batches": 2, "weight_decay": 0.1, "max_grad_norm": 0.5},
        "model": {"compute_dtype": dtype, "param_dtype": "float64" if dtype == "float64" else "float32"},
    }
    for name, value in sections.items():
        base[name] = base.get(name, {}) | value if isinstance(value, dict) else value
    return config(**base)


def objective(name: str, **changes) -> dict:
    """Settings of an objective with asymmetric clipping; for `cispo`, `epsilon_high` is the bound itself."""
    bounds = {"clip": {"epsilon_low": 0.15, "epsilon_high": 0.25}, "cispo": {"epsilon_high": 1.25}}
    bounds |= {"gmpo": bounds["clip"], "dppo_tv": {"epsilon_low": 0.002, "epsilon_high": 0.003}}
    bounds["dppo_kl"] = {"epsilon_low": 2e-4, "epsilon_high": 3e-4}
    bounds["clip_cov"] = bounds["clip"] | {"cov_share": 0.2, "cov_bounds": [0.0, 5.0]}
    bounds["kl_cov"] = {"cov_share": 0.2, "cov_penalty": 0.7}
    if changes.get("importance_level") == "token" and "importance_level" not in OBJECTIVES[name].model_fields:
        del changes["importance_level"]  # the only level that it has
    return {"name": name} | bounds.get(name, {}) | changes


@functools.lru_cache(maxsize=2)
def weights(scale: float = 4.0, architecture: Architecture = TINY) -> Arrays:
    """float64 weights under Hugging Face's names, larger than GPT-2's initial ones so that no logits are alike."""
    rng = np.random.default_rng(7)
    shapes = {name: tuple(p.shape) for name, p in _torch_model(architecture).named_parameters()}
    sampled = {name: 0.02 * scale * rng.normal(size=shape) for name, shape in shapes.items()}
    return {name: x + (".ln_" in name and name.endswith("weight")) for name, x in sampled.items()}


def _torch_model(architecture: Architecture) -> torch_ref.model.GPT2:
    given = {"layer_norm_epsilon": architecture.norm_epsilon} | vars(architecture)
    sizes = {name: given[name] for name in torch_ref.model.GPT2Config.__dataclass_fields__}
    return torch_ref.model.GPT2(torch_ref.model.GPT2Config(**sizes))


def torch_model(of: Mapping[str, np.ndarray], dtype: str, architecture: Architecture = TINY) -> torch_ref.model.GPT2:
    model = _torch_model(architecture).to(WIDTHS[dtype])
    model.load_state_dict({name: torch.from_numpy(x) for name, x in of.items()})
    return model


def jax_policy(of: Mapping[str, np.ndarray], dtype: str, architecture: Architecture = TINY) -> Policy:
    """The same weights in a `jax_grpo` policy; call under x64 for float64."""
    param_dtype = jnp.float64 if dtype == "float64" else jnp.float32

    def build() -> Decoder:
        return Decoder(architecture, rngs=nnx.Rngs(0), param_dtype=param_dtype, compute_dtype=jnp.dtype(dtype))

    graphdef, _ = nnx.split(nnx.eval_shape(build), nnx.Param)

    return Policy(architecture, Tokenizer.load("chess"), graphdef, from_hf(of.__getitem__, architecture, param_dtype))


def crafted_batch(of: Mapping[str, np.ndarray], architecture: Architecture = TINY, **choices) -> Arrays:
    """See `torch_ref.crafted`; of a GPT-2 with these weights."""
    return torch_ref.crafted.crafted_batch(torch_model(of, "float64", architecture), **choices)


@functools.lru_cache(maxsize=1)
def _drop_programs_of_other_shapes(*shape: object) -> None:
    """Hundreds of operations are compiled one by one for a shape, 0.7 GB, and few of them serve another shape or width."""
    make_room()


def uncompiled(*shape: object) -> contextlib.AbstractContextManager:
    """`jax.disable_jit` with room for its operations: many settings can be tried in the time that compiling one takes.

    Args:
        shape: whatever the operations' shapes and dtypes depend on.
    """
    _drop_programs_of_other_shapes(*shape)
    return jax.disable_jit()


def jax_step(
    config: Config,
    of: Mapping[str, np.ndarray],
    batch: Arrays,
    *,
    compiled: bool = False,
    architecture: Architecture = TINY,
    matmuls: str = "highest",
) -> Arrays:
    """`jax_grpo`'s optimiser step; by default `uncompiled`. `matmuls` is the precision that JAX is asked for."""
    dtype = config.model.compute_dtype
    how = contextlib.nullcontext() if compiled else uncompiled(dtype, config.update.parts)
    with jax.enable_x64(dtype == "float64"), jax.default_matmul_precision(matmuls):
        policy = jax_policy(of, dtype, architecture)
        with how:
            return replay(config.learning(), policy, batch)


def torch_step(
    config: Config, of: Mapping[str, np.ndarray], batch: Arrays, architecture: Architecture = TINY
) -> Arrays:
    """`torch_ref`'s optimiser step."""
    dtype = config.model.compute_dtype
    tensors = torch_ref.batch.from_arrays(batch, config.learning(), dtype=WIDTHS[dtype])
    return torch_ref.replay.replay(config.learning(), torch_model(of, dtype, architecture), tensors)


def padded_rows(lengths: Sequence[int], tokens: range, side: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random tokens of rows of these lengths, their mask, padded on the side, and the position ids that transformers needs."""
    longest = max(lengths)
    mask = torch.zeros(len(lengths), longest, dtype=torch.long)
    for row, length in enumerate(lengths):
        mask[row, slice(longest - length, None) if side == "left" else slice(length)] = 1
    ids = torch.randint(tokens.start, tokens.stop, mask.shape, generator=torch.Generator().manual_seed(1))
    return ids, mask, (mask.cumsum(1) - 1).clamp(min=0)


def show(what: str, errors: dict[str, float], tolerance: float) -> None:
    """Prints the largest error beside its tolerance, then asserts; raises where one is NaN."""
    name, error = largest(errors)
    print(f"{what}: largest of {len(errors)} errors {error:.1e} in {name} (tolerance {tolerance:.0e})")
    assert error <= tolerance, f"{what}: {name} differs by {error:.2e}, tolerance {tolerance:.0e}"
