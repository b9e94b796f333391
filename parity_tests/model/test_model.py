"""The model: equal to transformers', the same in every layout, with positions that ignore padding."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from conftest import TINY, grouped_tokens, relative_error, tiny_model
from flax import nnx

from jax_grpo.config import ConfigError
from jax_grpo.config.model import ModelConfig
from jax_grpo.model.architecture import Architecture
from jax_grpo.model.decoder import Decoder, position_ids
from jax_grpo.model.weights import load_hf, to_hf
from jax_grpo.policy.named import build_model


def _transformers_model(folder) -> transformers.GPT2LMHeadModel:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=131, n_layer=2, n_head=2, n_embd=32, n_positions=32, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases start at zero: a model that dropped them would pass
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model


def _jax_logits(folder, ids, mask, dtype=jnp.float32):
    config, params = load_hf(folder, dtype)
    graphdef = nnx.split(
        nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), param_dtype=dtype, compute_dtype=dtype)), nnx.Param
    )[0]

    @jax.jit
    def logits(params, ids, mask):
        model = nnx.merge(graphdef, params)
        return model(ids, mask) @ model.head_VH.T

    return np.asarray(logits(params, jnp.asarray(ids), jnp.asarray(mask)))[..., : config.vocab_size]


def test_logits_equal_transformers_in_float64(tmp_path, x64):
    theirs = _transformers_model(tmp_path).double()
    ids = np.random.default_rng(0).integers(0, 131, (3, 20))
    mask = np.ones_like(ids)
    expected = theirs(torch.tensor(ids)).logits.detach().numpy()
    error = np.abs(_jax_logits(tmp_path, ids, mask, jnp.float64) - expected).max()
    print(f"max abs error {error:.1e} (tolerance 1e-10: float64 rounding over 2 layers)")
    assert error < 1e-10


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side_changes_no_real_token(side, tmp_path, x64):
    theirs = _transformers_model(tmp_path).double()
    ids = np.random.default_rng(1).integers(0, 131, (1, 12))
    expected = theirs(torch.tensor(ids)).logits.detach().numpy()
    pad = ((0, 0), (5, 0) if side == "left" else (0, 5))
    mask = np.pad(np.ones_like(ids), pad)
    actual = _jax_logits(tmp_path, np.pad(ids, pad, constant_values=7), mask, jnp.float64)[mask.astype(bool)]
    assert np.abs(actual - expected[0]).max() < 1e-10


def test_positions_count_real_tokens_only():
    mask = jnp.array([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0]])
    assert position_ids(mask).tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 2, 2]]


@pytest.mark.parametrize("remat", [False, pytest.param("all", marks=pytest.mark.slow)])
def test_grouped_layout_equals_one_row_per_completion(x64, remat):
    graphdef, params = tiny_model(jnp.float64, remat=remat)
    tokens = grouped_tokens()
    mask = tokens.completion_mask_PGC.reshape(16, 6, 1)
    weights = jnp.asarray(np.random.default_rng(0).normal(size=(16, 6, 32))) * mask

    def grouped(params):
        return jnp.sum(tokens.predictions(nnx.merge(graphdef, params))[0] * weights)

    def flat(params):
        return jnp.sum(tokens.flat().predictions(nnx.merge(graphdef, params))[0][:, -6:] * weights)

    (a, grads_a), (b, grads_b) = (jax.jit(jax.value_and_grad(loss))(params) for loss in (grouped, flat))
    error = relative_error(grads_a, grads_b)
    print(f"value {float(abs(a - b)):.1e}, gradients {error:.1e} (tolerance 1e-12)")
    assert abs(a - b) < 1e-10 and error < 1e-12


def test_decode_with_the_shared_prompt_cache_equals_the_full_forward(x64):
    graphdef, params = tiny_model(jnp.float64)
    model = nnx.merge(graphdef, params)
    tokens = grouped_tokens()
    expected = nnx.jit(Decoder.grouped)(model, *jax.tree.leaves(tokens))
    _, prompts = nnx.jit(Decoder.prefill)(model, tokens.prompt_ids_PT, tokens.prompt_mask_PT)
    chunks: list = []
    length_P = tokens.prompt_mask_PT.sum(-1)
    for step in range(5):
        if step % 2 == 0:  # a new chunk begins; those before it are full
            chunks.append(model.empty_chunk(4, 4, 2))
        position_PG = jnp.broadcast_to((length_P + step)[:, None], (4, 4))
        hidden, chunks[-1] = nnx.jit(Decoder.decode)(
            model,
            tokens.completion_ids_PGC[..., step],
            position_PG,
            prompts,
            tokens.prompt_mask_PT,
            chunks,
            jnp.int32(step),
        )
        live = tokens.completion_mask_PGC[..., step].astype(bool)
        assert np.abs((hidden - expected[:, :, step + 1])[live]).max() < 1e-10


def test_gpt2_small_has_124439808_parameters_in_148_tensors():
    small = Architecture(50257, 12, 12, 768, 1024)
    params = nnx.split(nnx.eval_shape(lambda: Decoder(small, rngs=nnx.Rngs(0))), nnx.Param)[1]
    leaves = jax.tree.leaves(params)
    padding = (small.padded_vocab_size - small.vocab_size) * small.hidden_size
    assert len(leaves) == 148
    assert sum(leaf.size for leaf in leaves) - padding == 124_439_808
    assert small.padded_vocab_size == 50304


def test_initialisation_is_gpt2s():
    wide = Architecture(500, 8, 4, 256, 64)
    arrays = to_hf(nnx.split(Decoder(wide, rngs=nnx.Rngs(0)), nnx.Param)[1], wide)
    for name, array in arrays.items():
        std = array.std()
        if name.endswith("bias"):
            assert std == 0
        elif ".ln_" in name:
            assert (array == 1).all()
        else:  # residual projections are scaled by 1 / sqrt(2 L)
            expected = 0.02 / 4 if name.endswith("c_proj.weight") else 0.02
            assert abs(std / expected - 1) < 0.03, name


def test_impossible_sizes_are_refused():
    with pytest.raises(ValueError, match="hidden_size 30 is not a multiple of num_heads 4"):
        Architecture(10, 1, 4, 30, 8)
    assert TINY.padded_vocab_size == 256


def test_the_decode_kernel_refuses_what_it_cannot_do_before_anything_is_compiled():
    settings = ModelConfig(weights="unused", decode_attention="pallas")
    build_model(settings, TINY, seed=0, vocabulary=None)
    with pytest.raises(ConfigError, match="decode_attention pallas needs heads of a power of two columns, not 24"):
        build_model(settings, dataclasses.replace(TINY, hidden_size=48), seed=0, vocabulary=None)


@pytest.mark.parametrize("size", [24, 8, 512])
def test_the_attention_kernels_refuse_heads_that_they_cannot_cut(size):
    settings = ModelConfig(weights="unused", attention="pallas")
    build_model(settings, dataclasses.replace(TINY, head_size=64), seed=0, vocabulary=None)
    with pytest.raises(
        ConfigError, match=rf"model.attention pallas needs heads of 16, .*, not {size}: leave it at auto"
    ):
        build_model(settings, dataclasses.replace(TINY, head_size=size), seed=0, vocabulary=None)
