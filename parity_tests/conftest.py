"""Shared small models and configs. Everything runs on the CPU in float32 unless a test asks for more (see `worker`)."""

import functools
import importlib
import sys
from pathlib import Path
from typing import Any

# A room's tests and the modules beside this file may import one another, whichever is collected first.
sys.path += [str(room) for room in Path(__file__).parent.iterdir() if room.is_dir()]

# pytest finds its hooks and its fixture here. Before JAX and PyTorch, which read what it sets.
from budget import pytest_collection_modifyitems, pytest_runtest_setup  # noqa: F401
from worker import (  # noqa: F401
    caches_end_with_their_file,
    pytest_configure,
    pytest_runtest_protocol,
    pytest_sessionfinish,
    pytest_terminal_summary,
    pytest_testnodedown,
    pytest_unconfigure,
)

# isort: split
import jax
import jax.numpy as jnp
import numpy as np
import pyarrow.parquet as pq
import pytest
from flax import nnx
from hypothesis import HealthCheck, settings

from jax_grpo.batch import Batch, FlatTokens, GroupedTokens
from jax_grpo.config import Config
from jax_grpo.model.architecture import Architecture
from jax_grpo.model.decoder import Decoder, Remat
from jax_grpo.rollout.generate import Rollout
from torch_ref.compare import REFERENCE, TESTED, finite, relative_l2

_allclose = np.testing.assert_allclose


def _allclose_and_finite(actual, desired, *arguments, **options) -> None:
    """NumPy's comparison calls NaN equal to NaN and an infinity to itself: what both sides share could break unseen."""
    finite("allclose", TESTED, actual)
    finite("allclose", REFERENCE, desired)
    _allclose(actual, desired, *arguments, **options)


np.testing.assert_allclose = _allclose_and_finite

PATIENCE_S = 900.0  # seconds after which a process counts as hanging: no machine is so busy
# No bound on the time of an example: another process on the machine is no fault of the code.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")
TINY = Architecture(vocab_size=131, num_layers=2, num_heads=2, hidden_size=32, max_position_embeddings=32)


@pytest.fixture
def x64():
    """float64 for the duration of a test."""
    with jax.enable_x64(True):
        yield


def tiny_model(dtype=jnp.float32, seed: int = 0, scale: float = 4.0, remat: Remat = False, decode_kernel=False):
    """(graphdef, params) of a tiny GPT-2 whose weights are `scale` times GPT-2's, so that logits are not all alike."""
    model = Decoder(
        TINY, rngs=nnx.Rngs(seed), param_dtype=dtype, compute_dtype=dtype, remat=remat, decode_kernel=decode_kernel
    )
    graphdef, params = nnx.split(model, nnx.Param)
    return graphdef, jax.tree.map(lambda x: x * scale if x.ndim >= 2 else x, params)


def experiment(name: str) -> Any:
    """A script of docs/experiments as a module."""
    sys.path.append(str(Path(__file__).parents[1] / "docs" / "experiments"))
    return importlib.import_module(name)


def config(**sections) -> Config:
    """A valid config for tiny shapes: 4 prompts x 4 completions of 6 tokens; keyword = section or top-level value."""
    base: dict = {
        "iterations": 2,
        "run_dir": "unused",
        "model": {"num_layers": 2, "num_heads": 2, "hidden_size": 32, "max_position_embeddings": 32},
        "prompts": {"per_iteration": 4, "max_prompt_tokens": 8},
        "rollout": {"group_size": 4, "max_new_tokens": 6},
        "update": {"learning_rate": 1e-3},
    }
    for name, value in sections.items():
        base[name] = base.get(name, {}) | value if isinstance(value, dict) else value
    return Config.model_validate(base)


def grouped_tokens(seed: int = 0, prompts: int = 4, group: int = 4, length: int = 8, new: int = 6) -> GroupedTokens:
    """Random tokens with unequal prompt lengths (left padding) and completion lengths (right padding)."""
    rng = np.random.default_rng(seed)
    prompt_mask = np.arange(length) >= rng.integers(0, length - 1, (prompts, 1))
    completion_mask = np.arange(new) < rng.integers(1, new + 1, (prompts, group, 1))
    return GroupedTokens(
        jnp.asarray(rng.integers(0, TINY.vocab_size, (prompts, length)), jnp.int32),
        jnp.asarray(prompt_mask, jnp.int32),
        jnp.asarray(rng.integers(0, TINY.vocab_size, (prompts, group, new)), jnp.int32),
        jnp.asarray(completion_mask, jnp.int32),
    )


def training_batch(graphdef, params, seed: int = 0, noise: float = 0.3, dtype=jnp.float32) -> Batch:
    """A grouped batch whose old log-probabilities are the model's plus noise, so that both clip sides are active."""
    rng = np.random.default_rng(seed + 100)
    tokens = grouped_tokens(seed)
    mask = tokens.completion_mask_PGC.reshape(16, 6)
    logp = model_logp(graphdef, params, tokens)
    perturbed = [jnp.asarray(logp + noise * rng.normal(size=mask.shape), dtype) for _ in range(3)]
    advantages = rng.normal(size=(4, 4))
    advantages -= advantages.mean(1, keepdims=True)
    return Batch(tokens, mask, jnp.asarray(advantages.reshape(16), dtype), jnp.ones(16, bool), *perturbed)


def model_logp(graphdef, params, tokens: GroupedTokens | FlatTokens) -> np.ndarray:
    """log softmax at the targets, computed with the full logits."""
    return np.asarray(_model_logp(graphdef, params, tokens))


@functools.partial(jax.jit, static_argnums=0)
def _model_logp(graphdef, params, tokens):
    model = nnx.merge(graphdef, params)
    hidden, targets = tokens.predictions(model)
    logits = hidden @ model.head_VH[: TINY.vocab_size].T
    return jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)[..., 0]


def relative_error(tree, reference) -> float:
    """Largest relative L2 error over the leaves; 0 for a leaf that is zero in both.

    Raises:
        NotFinite: a leaf of either tree holds NaN or an infinity.
    """
    ours_found, expected = (jax.tree_util.tree_leaves_with_path(part) for part in (tree, reference))
    pairs = zip(ours_found, expected, strict=True)
    errors = ((jax.tree_util.keystr(path), x, y) for (path, x), (_, y) in pairs)
    return max(relative_l2(name, x, y) for name, x, y in errors)


def set_rows(folder, split: str = "train") -> list[dict]:
    """The rows of a data set's split."""
    return [row for path in sorted(Path(folder).glob(f"{split}-*.parquet")) for row in pq.read_table(path).to_pylist()]


def shapes_given(trainer: Any, *programs: str) -> dict[str, list]:
    """What these programs of a trainer will be given, by name: a list a call, of each array's shape and type."""
    seen: dict[str, list] = {}
    for name in programs:
        program = getattr(trainer, name)

        def spy(*arguments, name=name, program=program):
            shapes = [(np.shape(x), jnp.asarray(x).dtype.name) for x in jax.tree.leaves(arguments)]
            seen.setdefault(name, []).append(shapes)
            return program(*arguments)

        setattr(trainer, name, spy)
    return seen


def arrays_of(rollout: Rollout) -> dict[str, np.ndarray]:
    """The arrays that a rollout has, by name."""
    return {name: np.asarray(x) for name, x in rollout._asdict().items() if name != "episodes" and x is not None}
