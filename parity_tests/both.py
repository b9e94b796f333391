"""One crafted batch through both implementations: what the parity tests compare, at three precisions."""

import contextlib
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import torch
from conftest import TINY, config
from flax import nnx
from worker import make_room

import torch_ref
import torch_ref.batch
import torch_ref.model
import torch_ref.replay
from jax_grpo.config import Config
from jax_grpo.model.gpt2 import GPT2, GPT2Config
from jax_grpo.model.named import Policy
from jax_grpo.model.tokenizer import Tokenizer
from jax_grpo.model.weights import hf_name
from jax_grpo.replay import replay
from torch_ref.compare import largest

Arrays = dict[str, np.ndarray]
ROWS, LENGTH = 8, 13
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
    bounds["clip_cov"] = bounds["clip"] | {"cov_share": 0.2, "cov_low": 0.0}
    bounds["kl_cov"] = {"cov_share": 0.2, "cov_penalty": 0.7}
    return {"name": name} | bounds.get(name, {}) | changes


@functools.lru_cache(maxsize=2)
def weights(scale: float = 4.0, architecture: GPT2Config = TINY) -> Arrays:
    """float64 weights under Hugging Face's names, larger than GPT-2's initial ones so that no logits are alike."""
    rng = np.random.default_rng(7)
    shapes = {name: tuple(p.shape) for name, p in _torch_model(architecture).named_parameters()}
    drawn = {name: 0.02 * scale * rng.normal(size=shape) for name, shape in shapes.items()}
    return {name: x + (".ln_" in name and name.endswith("weight")) for name, x in drawn.items()}


def _torch_model(architecture: GPT2Config) -> torch_ref.model.GPT2:
    sizes = {name: getattr(architecture, name) for name in torch_ref.model.GPT2Config.__dataclass_fields__}
    return torch_ref.model.GPT2(torch_ref.model.GPT2Config(**sizes))


def torch_model(of: Mapping[str, np.ndarray], dtype: str, architecture: GPT2Config = TINY) -> torch_ref.model.GPT2:
    model = _torch_model(architecture).to(WIDTHS[dtype])
    model.load_state_dict({name: torch.from_numpy(x) for name, x in of.items()})
    return model


def jax_policy(of: Mapping[str, np.ndarray], dtype: str, architecture: GPT2Config = TINY) -> Policy:
    """The same weights in a `jax_grpo` policy; call under x64 for float64."""
    param_dtype = jnp.float64 if dtype == "float64" else jnp.float32

    def build() -> GPT2:
        return GPT2(architecture, rngs=nnx.Rngs(0), param_dtype=param_dtype, compute_dtype=jnp.dtype(dtype))

    graphdef, empty = nnx.split(nnx.eval_shape(build), nnx.Param)

    def padded(path, leaf):
        x, shape = of[hf_name(path)], leaf.get_value().shape
        x = np.pad(x, [(0, full - size) for full, size in zip(shape, x.shape, strict=True)])
        return leaf.replace(jnp.asarray(x, param_dtype))

    params = nnx.from_flat_state([(path, padded(path, leaf)) for path, leaf in nnx.to_flat_state(empty)])
    return Policy(architecture, Tokenizer.load("chess"), graphdef, params)


def crafted_batch(
    of: Mapping[str, np.ndarray],
    temperature: float = 0.8,
    noise: float = 0.4,
    seed: int = 3,
    full_prompts: bool = False,
    architecture: GPT2Config = TINY,
) -> Arrays:
    """A recorded batch with unequal prompts and completions, whose ratios go beyond both clip bounds.

    Masked places of the log-probabilities hold garbage: neither implementation may look at it.
    """
    rng = np.random.default_rng(seed)
    attention, completion = np.zeros((2, ROWS, LENGTH), np.int32)
    for row in range(ROWS):
        prompt, new = rng.integers(1, 7), rng.integers(1, 8) if row else 1  # row 0: one token
        prompt = 6 if full_prompts else prompt
        attention[row, 6 - prompt : 6 + new] = 1
        completion[row, 6 : 6 + new] = 1
    ids = rng.integers(0, architecture.vocab_size, (ROWS, LENGTH)).astype(np.int32)
    batch = torch_ref.batch.Batch(*(torch.from_numpy(x) for x in (ids, attention, completion)), torch.zeros(ROWS))
    with torch.no_grad():
        logp, _ = torch_ref.model.score(
            torch_model(of, "float64", architecture), batch.input_ids_BT.long(), batch.attention_mask_BT.long(),
            batch.completion_mask_BT.double(), temperature,
        )  # fmt: skip
    # Rows drift as a whole too, else the sequence level's mean ratio would stay within the clip bounds.
    near = [logp.numpy() + noise * (rng.normal(size=logp.shape) + rng.normal(size=(ROWS, 1))) for _ in range(3)]
    old_logp, ref_logp, sampling_logp = (np.where(completion, x, 77.0) for x in near)
    return {
        "input_ids": ids,
        "attention_mask": attention,
        "completion_mask": completion,
        "old_logp": old_logp,
        "ref_logp": ref_logp,
        "sampling_logp": sampling_logp,
        "rewards": rng.normal(size=ROWS),
        "group_ids": np.repeat([0, 1], ROWS // 2),
        "stopped": np.arange(ROWS) % 3 != 1,
    }


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
    architecture: GPT2Config = TINY,
    matmuls: str = "highest",
) -> Arrays:
    """`jax_grpo`'s optimiser step; by default `uncompiled`. `matmuls` is the precision that JAX is asked for."""
    dtype = config.model.compute_dtype
    how = contextlib.nullcontext() if compiled else uncompiled(dtype, config.update.parts)
    with jax.enable_x64(dtype == "float64"), jax.default_matmul_precision(matmuls):
        policy = jax_policy(of, dtype, architecture)
        with how:
            return replay(config, policy, batch)


def torch_step(config: Config, of: Mapping[str, np.ndarray], batch: Arrays, architecture: GPT2Config = TINY) -> Arrays:
    """`torch_ref`'s optimiser step."""
    dtype = config.model.compute_dtype
    tensors = torch_ref.batch.from_arrays(batch, config, dtype=WIDTHS[dtype])
    return torch_ref.replay.replay(config, torch_model(of, dtype, architecture), tensors)


def show(what: str, errors: dict[str, float], tolerance: float) -> None:
    """Prints the largest error beside its tolerance, then asserts; raises where one is NaN."""
    name, error = largest(errors)
    print(f"{what}: largest of {len(errors)} errors {error:.1e} in {name} (tolerance {tolerance:.0e})")
    assert error <= tolerance, f"{what}: {name} differs by {error:.2e}, tolerance {tolerance:.0e}"
