"""Hugging Face folders in and out: exact, and every broken folder one clear error."""

import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from conftest import TINY, tiny_model
from flax import nnx
from safetensors.numpy import load_file, save_file

from jax_grpo.config import load_config
from jax_grpo.config.files import PACKAGED_MODELS
from jax_grpo.model.decoder import Decoder
from jax_grpo.model.tokenizer import Tokenizer
from jax_grpo.model.weights import WeightsError, load_hf, save_hf, to_hf
from jax_grpo.policy.named import load_policy
from jax_grpo.replay import replay
from jax_grpo.rollout.decoding import DecodingSettings
from jax_grpo.rollout.generate import make_generate
from jax_grpo.rollout.sampling import Sampling


@pytest.fixture
def folder(tmp_path):
    save_hf(tmp_path / "hf", TINY, tiny_model()[1])
    return tmp_path / "hf"


def _rewrite(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_round_trip_is_bit_exact_and_unpads_the_vocabulary(folder):
    _, params = tiny_model()
    config, loaded = load_hf(folder)
    assert config == TINY
    for name, array in to_hf(params, TINY).items():
        np.testing.assert_array_equal(to_hf(loaded, TINY)[name], array)
    assert load_file(folder / "model.safetensors")["transformer.wte.weight"].shape == (131, 32)
    assert (np.asarray(loaded["wte"]["embedding"].get_value())[131:] == 0).all()


def test_original_names_buffers_shards_and_half_precision_are_read(folder, tmp_path):
    expected = to_hf(load_hf(folder)[1], TINY)

    def original(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.0.attn.bias"] = np.ones((1, 1, 32, 32), np.float32)
        tensors["lm_head.weight"] = tensors["wte.weight"].copy()

    _rewrite(folder, original)
    for name, array in to_hf(load_hf(folder)[1], TINY).items():
        np.testing.assert_array_equal(array, expected[name])

    model = transformers.GPT2LMHeadModel.from_pretrained(folder)
    model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    for name, array in to_hf(load_hf(tmp_path / "shards")[1], TINY).items():
        np.testing.assert_array_equal(array, expected[name])

    model.to(torch.bfloat16).save_pretrained(tmp_path / "half")
    half = to_hf(load_hf(tmp_path / "half")[1], TINY)["transformer.wte.weight"]
    np.testing.assert_array_equal(half, model.transformer.wte.weight.detach().float().numpy())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("transformer.h.1.mlp.c_fc.bias"), r"'transformer.h.1.mlp.c_fc.bias' \(128,\) is missing"),
        (
            lambda t: t.update({"transformer.h.9.x": np.ones(2, np.float32)}),
            r"'transformer.h.9.x' \(2,\) is not part of a 2-layer",
        ),
        (
            lambda t: t.update({"transformer.ln_f.bias": np.ones(3, np.float32)}),
            r"ln_f.bias' has shape \(3,\); expected \(32,\)",
        ),
        (
            lambda t: t.update({"transformer.ln_f.bias": np.ones(32, np.int32)}),
            r"ln_f.bias' has dtype I32; expected one of F64",
        ),
        (lambda t: t.update({"lm_head.weight": np.ones((131, 32), np.float32)}), r"'lm_head.weight' differs from"),
    ],
)
def test_wrong_tensors_are_named(folder, change, message):
    _rewrite(folder, change)
    with pytest.raises(WeightsError, match=message):
        load_hf(folder)


def test_truncated_and_missing_files_are_named(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(WeightsError, match=r"model.safetensors is not a complete safetensors file"):
        load_hf(folder)
    path.unlink()
    with pytest.raises(WeightsError, match=r"model.safetensors does not exist"):
        load_hf(folder)
    shutil.rmtree(folder)
    with pytest.raises(WeightsError, match=r"config.json does not exist; expected a Hugging Face folder"):
        load_hf(folder)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model_type": "mamba"}, "model_type is 'mamba'; only 'gpt2', 'llama'"),
        ({"model_type": ["gpt2"]}, "model_type is .*; only 'gpt2', 'llama'"),
        ({"activation_function": "relu"}, "activation_function is 'relu'; only 'gelu_new'"),
        ({"n_layer": None}, "'n_layer' is missing"),
        ({"n_head": 5}, "hidden_size 32 is not a multiple of num_heads 5"),
    ],
)
def test_other_architectures_are_refused(folder, settings, message):
    actual = json.loads((folder / "config.json").read_text()) | settings
    (folder / "config.json").write_text(json.dumps({k: v for k, v in actual.items() if v is not None}))
    with pytest.raises(WeightsError, match=message):
        load_hf(folder)


def test_the_packaged_model_loads_with_its_tokenizer_and_its_provenance():
    folder = PACKAGED_MODELS / "rook-small"
    config, _ = load_hf(folder)
    assert config.vocab_size == Tokenizer.load(str(folder)).vocab_size
    provenance = json.loads((folder / "provenance.json").read_text())
    assert {"command", "config", "rows", "data"} <= set(provenance)


def _check_life_of_a_model(config: transformers.GPT2Config, folder, tokenizer: Tokenizer, tolerance: float) -> None:
    """Made by transformers -> same logits -> same greedy tokens -> one training step -> exported -> same logits there."""
    torch.manual_seed(0)
    theirs = transformers.GPT2LMHeadModel(config).eval()
    theirs.save_pretrained(folder / "made")
    architecture, params = load_hf(folder / "made")
    graphdef = nnx.split(nnx.eval_shape(lambda: Decoder(architecture, rngs=nnx.Rngs(0))), nnx.Param)[0]

    def logits(params, ids):
        model = nnx.merge(graphdef, params)
        hidden = model(jnp.asarray(ids), jnp.ones_like(ids))
        return np.asarray(hidden @ model.head_VH.T)[..., : architecture.vocab_size]

    ids = np.random.default_rng(0).integers(0, architecture.vocab_size, (2, 24)).astype(np.int32)
    with torch.no_grad():
        error = np.abs(logits(params, ids) - theirs(torch.tensor(ids, dtype=torch.long)).logits.numpy()).max()
    print(f"logits: max abs error {error:.1e} (tolerance {tolerance:.0e}: float32 rounding)")
    assert error < tolerance

    never = np.repeat(np.arange(2)[:, None], architecture.vocab_size, axis=1)
    settings = DecodingSettings(
        vocab_size=architecture.vocab_size, pad_id=0, sampling=Sampling(temperature=0.0), stop_table_SV=never, accept_state=1
    )  # fmt: skip
    generate = make_generate(graphdef, settings, group_size=1, max_new_tokens=10)
    ours = generate(params, ids, np.ones_like(ids), np.zeros(2, np.int32), np.arange(2), 0, 0).completion_ids_PGC[:, 0]
    with torch.no_grad():
        prompt = torch.tensor(ids, dtype=torch.long)
        out = theirs.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=10, min_new_tokens=10, do_sample=False,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
    np.testing.assert_array_equal(ours, out[:, 24:])

    (folder / "c.yaml").write_text(
        f"iterations: 1\nrun_dir: x\nmodel: {{weights: {folder / 'made'}, tokenizer: {tokenizer.name}}}\n"
        "update: {learning_rate: 1.0e-3}\nkl: {beta: 0.0}\n"
    )
    arrays = {
        "input_ids": ids,
        "attention_mask": np.ones_like(ids),
        "completion_mask": (np.arange(24) >= 20).astype(np.int32) * np.ones_like(ids),
        "advantages": np.array([1.0, -1.0]),
    }
    settings = load_config(str(folder / "c.yaml"))
    stepped = replay(settings.learning(), load_policy(settings.model, settings.seed, 1), arrays)
    assert stepped["grad_norm"] > 1e-3
    trained = {name.removeprefix("param/"): x for name, x in stepped.items() if name.startswith("param/")}
    save_file(trained, folder / "made" / "model.safetensors", {"format": "pt"})
    architecture, moved = load_hf(folder / "made")
    save_hf(folder / "out", architecture, moved, tokenizer)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder / "out").eval()
    reference = transformers.GPT2LMHeadModel.from_pretrained(folder / "made").eval()
    with torch.no_grad():
        x = torch.tensor(ids, dtype=torch.long)
        assert torch.equal(loaded(x).logits, reference(x).logits), "exported weights are bit for bit those of the step"
        assert np.abs(loaded(x).logits.numpy() - logits(moved, ids)).max() < tolerance
        assert not torch.equal(loaded(x).logits, theirs(x).logits), "the step changed them"


@pytest.mark.slow
def test_life_of_a_small_transformers_model(tmp_path):
    tokenizer = Tokenizer.load("chess")
    config = transformers.GPT2Config(
        vocab_size=585, n_layer=2, n_head=2, n_embd=32, n_positions=64, bos_token_id=0, eos_token_id=0,
        layer_norm_epsilon=1e-2,  # that of config.json counts
    )  # fmt: skip
    _check_life_of_a_model(config, tmp_path, tokenizer, 1e-5)


@pytest.mark.slow
def test_life_of_gpt2_small(tmp_path):
    _check_life_of_a_model(transformers.GPT2Config(), tmp_path, Tokenizer.load("gpt2"), 1e-4)
