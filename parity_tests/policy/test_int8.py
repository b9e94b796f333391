"""A base in int8: the rounding beside `qwix` and `bitsandbytes`, what reads it, what it takes, and what is refused."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from both import show
from conftest import PATIENCE_S
from flax import nnx
from test_adapters import ROOK, TIED, copies_of_base, decoding, model_config, randomised

from jax_grpo.config import ConfigError
from jax_grpo.config.model import ModelConfig
from jax_grpo.model import int8
from jax_grpo.model.families import tensors_of
from jax_grpo.model.layers import cast_matrices
from jax_grpo.model.weights import WeightsError, load_hf
from jax_grpo.policy import int8_base
from jax_grpo.policy.adapters import divided, joined
from jax_grpo.policy.named import adapter_of, base_hash, load_model, load_named, load_weights
from jax_grpo.policy.peft_files import save_adapters
from jax_grpo.rollout.generate import decoding_model, make_generate
from torch_ref.compare import TOLERANCES
from torch_ref.int8 import RoundedMap
from torch_ref.judge import CASES, judge


def matrix(rows: int = 96, columns: int = 64) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(rows, columns)).astype(np.float32)


@pytest.fixture
def folder(tmp_path):
    """transformers' folder of a Llama; tied, of two heads of keys."""
    judge(TIED, torch.float32).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def test_each_column_is_rounded_to_the_nearest_of_its_own_levels():
    weights = matrix()
    q, scale = int8.quantised(weights)
    assert q.dtype == np.int8 and scale.dtype == np.float32 and q.shape == weights.shape and scale.shape == (64,)
    assert np.array_equal(np.abs(q).max(0), np.full(64, 127)), "the largest of each column is on the last level"
    assert np.all(np.abs(q * scale - weights) <= scale * (0.5 + 1e-4)), "at most half a level off"
    by_row, same = int8.quantised(weights.T, axis=1)
    assert np.array_equal(by_row.T, q) and np.array_equal(same, scale)
    halves = np.array([[127.0], [0.5], [1.5], [-2.5], [-3.5]], np.float32)
    assert int8.quantised(halves)[0].ravel().tolist() == [127, 0, 2, -2, -4], "to even"


def test_columns_of_zeros_and_of_numbers_too_small_for_a_scale_are_zeros_of_scale_one():
    weights = matrix(8, 4)
    weights[:, 1], weights[:, 2] = 0, 190e-45  # 127 levels of the second would overflow: no number is between
    for q, scale in (
        int8.quantised(weights),
        [x.numpy().T for x in dict(RoundedMap(torch.from_numpy(weights.T), None).named_buffers()).values()][::-1],
    ):
        assert scale[1:3].tolist() == [1, 1] and not q[:, 1:3].any() and q[:, [0, 3]].any(0).all()


def test_the_whole_numbers_are_qwixs_for_the_same_scales():
    """Its own scale is max / 127.5, which cuts what would be 127.5 off; ours is max / 127, as bitsandbytes'."""
    qwix = pytest.importorskip("qwix", reason="pip install --no-deps qwix: a judge, no dependency")
    qarray = pytest.importorskip("qwix._src.core.qarray")
    weights = matrix()
    q, scale = int8.quantised(weights)
    theirs = qarray.quantize_with_scale_zero_point(jnp.asarray(weights), jnp.int8, jnp.asarray(scale)[None], None)
    assert np.array_equal(theirs.qvalue, q)
    dequantised = np.asarray(qwix.dequantize(theirs))
    of_tree = int8_base.rounded(nnx.State({"kernel": nnx.Param(jnp.asarray(weights))}))["kernel"][...]
    assert np.array_equal(dequantised, of_tree)
    own = qwix.quantize(jnp.asarray(weights), jnp.int8, channelwise_axes=[1])
    np.testing.assert_allclose(np.asarray(own.scale)[0] * (127.5 / 127), scale, rtol=3e-7)


def test_the_scales_are_those_of_bitsandbytes_and_the_whole_numbers_but_for_ties():
    """It multiplies by 127 / max instead of dividing by the scale: another number only where the product is next to a half."""
    functional = pytest.importorskip("bitsandbytes.functional", reason="pip install --no-deps bitsandbytes: a judge")
    weights = matrix(512, 64).astype(np.float16)
    q, scale = int8.quantised(weights.astype(np.float32))
    theirs, largest, _ = functional.int8_vectorwise_quant(torch.from_numpy(weights.T.copy()))
    assert np.array_equal(largest.numpy() / np.float32(127), scale)
    apart = theirs.numpy().T.astype(int) != q
    ties = np.abs(np.abs(weights.astype(np.float64) / scale) % 1 - 0.5) < 1e-4
    assert not np.any(apart & ~ties) and apart.mean() < 1e-3


@pytest.mark.parametrize("case", ["gpt2", "llama", "qwen3"])
def test_files_are_rounded_along_the_axis_of_their_own_layout(case, tmp_path):
    """Conv1D [in, out] and Linear [out, in]; the parts of a joined matrix each by itself, which is the same by column."""
    judge(CASES[case], torch.float32).save_pretrained(tmp_path)
    architecture, whole = load_hf(tmp_path)
    actual = {path: leaf.get_value() for path, leaf in nnx.to_flat_state(load_hf(tmp_path, jnp.int8)[1])}
    expected = {path: leaf.get_value() for path, leaf in nnx.to_flat_state(int8_base.held(whole))}
    assert actual.keys() == expected.keys()
    for path, value in expected.items():
        assert actual[path].dtype == value.dtype and np.array_equal(actual[path], value), path
    path = ("h", 0, "attn", "c_attn", "kernel")
    one, *_ = tensors_of(architecture, path, actual[path].shape)
    stored = dict(judge(CASES[case], torch.float32).named_parameters())[one.name].detach().numpy()
    columns = (stored.T if one.transposed else stored).astype(np.float64)
    scale = np.asarray(actual[*path[:-1], "kernel_scale"][one.columns], np.float64)
    np.testing.assert_allclose(scale, np.abs(columns).max(0) / 127, rtol=1e-7)
    assert np.abs(actual[path][:, one.columns] * scale - columns).max() <= scale.max() * 0.5001


def test_no_gradient_and_no_cast_reaches_the_base_and_one_reaches_the_inputs(folder):
    model = load_model(model_config(folder, rank=2, base_dtype="int8"), 0, 1)
    adapters, base = divided(model.params)
    assert {str(x.dtype) for x in jax.tree.leaves(base)} == {"int8", "float32", "bfloat16"}
    assert {str(x.dtype) for x in jax.tree.leaves(adapters)} == {"float32"}
    cast = cast_matrices(base, jnp.bfloat16)
    assert [x.dtype for x in jax.tree.leaves(cast)] == [x.dtype for x in jax.tree.leaves(base)]
    linear = nnx.merge(model.graphdef, randomised(model.params)).h[0].mlp.c_fc
    plain = (linear.kernel[...] * linear.kernel_scale[...]).astype(jnp.float32)
    x = jnp.asarray(matrix(3, linear.in_features))
    linear.adapters = None
    actual, pull = jax.vjp(linear.product, x)
    np.testing.assert_allclose(actual, x @ plain, atol=1e-5)
    np.testing.assert_allclose(pull(actual)[0], (x @ plain) @ plain.T, rtol=1e-4, atol=1e-4)


def test_a_base_in_int8_is_one_base_in_whatever_it_is_read_later_and_a_name_means_what_was_trained(folder, tmp_path):
    how = model_config(folder, rank=2, base_dtype="int8")
    model, adapter = load_model(how, 0, 1), adapter_of(how.adapter)
    params = randomised(model.params)
    adapters, base = divided(params)
    assert adapter is not None and base_hash(base) == base_hash(load_hf(folder)[1], jnp.dtype("int8"))
    given = {"base": str(folder), "base_hash": base_hash(base), "base_dtype": "int8"}
    save_adapters(tmp_path / "a", model.architecture, adapter, adapters, **given)
    whole = load_named(str(tmp_path / "a"), tokenizer="chess")  # in float32, the adapters added into what the base held
    ids, mask = jnp.arange(2, 14).reshape(2, 6), jnp.ones((2, 6), jnp.int32)
    applied = nnx.merge(model.graphdef, params)(ids, mask)
    actual = nnx.merge(whole.graphdef, whole.params)(ids, mask)
    unrounded = nnx.merge(whole.graphdef, load_named(str(folder), tokenizer="chess").params)(ids, mask)
    assert float(jnp.abs(actual - unrounded).max()) > 0.1
    error, largest = float(jnp.abs(actual - applied).max()), float(jnp.abs(applied).max())
    show(
        "hidden states", {"merged": error / largest}, 1e-5
    )  # float32's 1e-7 in each of a hundred sums, in another order
    # As the base of another run in int8: the sum is rounded.
    again = load_weights(str(tmp_path / "a"), jnp.dtype("int8"))[1]
    assert base_hash(again) == base_hash(int8_base.held(load_weights(str(tmp_path / "a"), jnp.float32)[1]))
    # The next run begins with them where its base is held alike, and is refused where it is not.
    assert load_model(model_config(folder, weights=str(tmp_path / "a"), base_dtype="int8"), 0, 1)
    floats = {"base": str(folder), "base_hash": base_hash(load_hf(folder)[1]), "base_dtype": "float32"}
    save_adapters(tmp_path / "b", model.architecture, adapter, adapters, **floats)
    with pytest.raises(WeightsError, match=r"an adapter is of its base alone, as it was held then \(in float32\)"):
        load_model(model_config(folder, weights=str(tmp_path / "b"), base_dtype="int8"), 0, 1)


def test_merged_rollouts_are_refused_by_their_key():
    adapter = {"base_dtype": "int8", "merged_rollouts": True}
    with pytest.raises(
        ValueError, match=r"model.adapter.merged_rollouts true with model.adapter.base_dtype int8: .*expected false"
    ):
        ModelConfig.model_validate({"weights": ROOK, "adapter": adapter})
    with pytest.raises(ValueError, match=r"'parameters', 'bfloat16' or 'int8'"):
        ModelConfig.model_validate({"weights": ROOK, "adapter": {"base_dtype": "int4"}})


@pytest.mark.slow
def test_what_samples_is_what_is_scored(folder, x64):
    """The program of a rollout: its log-probabilities are those of the whole sequence, and no matrix becomes floats before it."""
    wide = {"param_dtype": "float64", "compute_dtype": "float64"}
    model = load_model(model_config(folder, rank=4, base_dtype="int8").model_copy(update=wide), 0, 1)
    params = randomised(model.params)
    generate = make_generate(model.graphdef, decoding(640), group_size=2, max_new_tokens=12)
    ids, mask, each = np.arange(2, 34).reshape(2, 16), np.ones((2, 16), np.int32), np.arange(2)
    given = params, ids, mask, each * 0, each, 0, jnp.int32(0), each * 0 + 12
    done = jax.device_get(generate(*given))
    of = nnx.merge(model.graphdef, params)
    hidden = of.grouped(
        jnp.asarray(ids), jnp.asarray(mask), jnp.asarray(done.completion_ids_PGC), done.completion_mask_PGC
    )
    logp = jax.nn.log_softmax((hidden @ of.head_VH.T.astype(jnp.float64))[..., :640])
    taken = np.take_along_axis(np.asarray(logp), done.completion_ids_PGC[..., None], axis=-1)[..., 0]
    gap = np.abs(taken - done.sampling_logp_PGC) * done.completion_mask_PGC
    show("log-probabilities", {"rollout": float(gap.max())}, TOLERANCES["float64"].logp)
    assert decoding_model(model.graphdef, params).h[0].mlp.c_fc.kernel[...].dtype == jnp.int8
    assert copies_of_base(generate.lower(*given).compile().as_text(), joined(*divided(params)), (4, 8, 12)) == []


SHARDS = r"""
import json, re, sys
from pathlib import Path
import jax, jax.numpy as jnp
from jax_grpo.model.weights import load_hf
def high():  # of this process: getrusage's begins with the parent's
    return 1024 * int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text()).group(1))
load_hf(sys.argv[2], jnp.int8)  # what the first arrays of any model load
before = high()
_, params = load_hf(sys.argv[1], jnp.int8)
print(json.dumps([before, high(), sum(x.nbytes for x in jax.tree.leaves(params))]))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="resident pages are counted in kilobytes there")
def test_a_model_of_several_files_is_never_in_memory_but_for_one_of_them(folder, tmp_path):
    """Files of 560 MB in float32, 60 MB each, whose pages stay until the file is closed; a tensor of 4 MB is rounded at a time."""
    sizes = {"hidden_size": 640, "intermediate_size": 1728, "num_hidden_layers": 28, "num_attention_heads": 8}
    big = judge(TIED | sizes | {"vocab_size": 640, "num_key_value_heads": 8}, torch.float32)
    big.save_pretrained(tmp_path / "big", max_shard_size="60MB")
    files = sorted((tmp_path / "big").glob("*.safetensors"))
    largest, total = max(file.stat().st_size for file in files), sum(file.stat().st_size for file in files)
    words = [sys.executable, "-c", SHARDS, str(tmp_path / "big"), str(folder)]
    # As of a large model, whose tensors have over 32 MB: what is freed goes back, and glibc keeps none of it.
    blocks = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(2**20)}
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=PATIENCE_S, env=blocks)
    before, after, result = json.loads(done.stdout.splitlines()[-1])
    print(f"{len(files)} files, {total / 1e6:.0f} MB, the largest {largest / 1e6:.0f}; in int8 {result / 1e6:.0f} MB; ")
    print(
        f"at most {(after - before) / 1e6:.0f} MB more than before, {(after - before - result) / 1e6:.0f} above the result"
    )
    assert len(files) > 5 and result < total / 3.5
    tensor = 4 * sizes["hidden_size"] * sizes["intermediate_size"]  # two of them: as read, and divided by its scale
    assert after - before < result + largest + 2 * tensor


def test_a_folder_of_other_integers_is_refused_as_before(folder):
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(described | {"quantization_config": {"load_in_8bit": True}}))
    with pytest.raises((WeightsError, ConfigError), match="quantization_config is"):
        load_model(model_config(folder, base_dtype="int8"), 0, 1)
