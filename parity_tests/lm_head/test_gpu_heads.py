"""Every LM head on the default device: against `torch_ref` in float64 on the host, and against the head that holds all logits.

On a GPU the `pallas` heads are compiled Triton kernels, elsewhere the same kernels interpreted.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from both import crafted_batch, jax_step, settings, show, torch_step, weights
from device import PRECISIONS, Precision, on_gpu, precision, wide_model
from test_lm_head import (  # noqa: F401 (tests of the definition that float64 is not needed for)
    test_a_uniform_distribution_has_the_logarithm_of_the_vocabulary_as_entropy,
    test_bfloat16_gradients_keep_their_parameters_dtype_and_are_close_to_exact,
    test_bfloat16_logits_of_gpt2s_size_are_not_rounded,
)
from test_lm_head_fused import HEADS, SETTINGS, compare, head_problem
from test_lm_head_fused import settings as head_settings

from jax_grpo.update import make_gradient
from torch_ref.compare import logp_error, scalar_errors, tensor_errors

pytestmark = pytest.mark.gpu
MATERIALISED = {"implementation": "materialised"}
# Token-level losses differentiate each tile in the forward pass; the sequence level makes each tile again in the backward.
LEVELS = ("clip, k3", "sequence level, k3")
# Of float32's 24 bits, sums in another order lose three. The logits' gradient is rounded to bfloat16's 8 bits before its two
# products; with TF32 to 11 bits, and a fourth of bfloat16's error allowed for kernels that cut bits off instead of rounding.
APART = {"float32": 1e-5, "TF32": 2.5e-3, "bfloat16": 1e-2}


def head_of(name: str) -> dict:
    """The head's settings: tiles of 64 rows, of a tiny vocabulary's columns elsewhere than on a GPU."""
    head = HEADS.get(name, MATERIALISED)
    return head | {"chunk_vocab": 4096} if on_gpu() and "chunk_vocab" in head else head


@functools.cache
def _problem():
    """Sizes, weights, a batch, and the reference's step on it; one layer, whose gradient comes through the hidden states."""
    architecture, scale = wide_model(1)
    of = weights(scale, architecture)
    batch = crafted_batch(of, architecture=architecture)
    return architecture, of, batch, torch_step(settings("float64"), of, batch, architecture)


@pytest.mark.parametrize("name", PRECISIONS)
@pytest.mark.parametrize("head", ["materialised", *HEADS])
def test_a_step_with_each_head_is_the_references_in_float64(head, name):
    how, (architecture, of, batch, reference) = precision(name), _problem()
    config = settings(how.dtype, lm_head=head_of(head))
    actual = jax_step(config, of, batch, compiled=True, architecture=architecture, matmuls=how.matmuls)
    assert reference["clip_fraction/low"] > 0 and reference["clip_fraction/high"] > 0, "both clip sides act"
    show("logp", {"logp": logp_error(actual["logp"], reference["logp"], batch["completion_mask"])}, how.allowed.logp)
    show("loss and metrics", scalar_errors(actual, reference, how.floors), how.allowed.scalars)
    show("gradients", tensor_errors(actual, reference), how.allowed.gradients)


def _gradient(head: dict, how: Precision, setting: str):
    """Loss, gradients, log-probabilities, entropies and the mask of a head alone, by `head_problem`'s hidden states.

    On a GPU 8,192 tokens of GPT-2 small's width and vocabulary; logits of standard deviation 2 or so either way.
    """
    size = {}
    if on_gpu():
        rng = np.random.default_rng(3)
        hidden, embedding = rng.normal(size=(256, 32, 768)), 0.08 * rng.normal(size=(50304, 768))
        size = {"hidden": hidden, "embedding": embedding, "vocab_size": 50257}
    with jax.default_matmul_precision("highest"):
        graphdef, params, batch = head_problem(jnp.float32, jnp.dtype(how.dtype), **size)
    if SETTINGS[setting][1].get("beta") == 0:
        batch = dataclasses.replace(batch, ref_logp_BS=None)
    with jax.default_matmul_precision(how.matmuls):
        gradient = jax.jit(make_gradient(graphdef, head_settings(setting, lm_head=head).learning()))
        actual = gradient(params, batch, jnp.float32(0.1))
    return jax.tree.map(np.asarray, (*actual, batch.mask_BS))


@functools.lru_cache(maxsize=1)
def _materialised(name: str, setting: str):
    return _gradient(MATERIALISED, PRECISIONS[name], setting)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("setting", LEVELS)
@pytest.mark.parametrize("name", PRECISIONS)
def test_a_head_in_tiles_is_the_one_that_holds_all_logits(name, setting, head):
    actual = _gradient(head_of(head), precision(name), setting)
    compare(actual, _materialised(name, setting), APART[name], name)


@pytest.mark.parametrize("setting", [setting for setting in SETTINGS if setting not in LEVELS])
def test_every_other_objective_is_differentiated_in_the_kernels(setting):
    actual = _gradient(head_of("pallas"), PRECISIONS["float32"], setting)
    compare(actual, _materialised("float32", setting), APART["float32"], "float32")
