"""Adapters of a decoder: their files beside `peft`, what they are merged into, what is compiled, and what is refused."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
import transformers
from both import show
from conftest import config as tiny_config
from flax import nnx

from jax_grpo import train as training
from jax_grpo.config import Config, ConfigError
from jax_grpo.config.model import AdapterConfig, ModelConfig
from jax_grpo.memory.hlo import Module
from jax_grpo.model.architecture import Architecture
from jax_grpo.model.decoder import Decoder
from jax_grpo.model.weights import WeightsError
from jax_grpo.policy.adapters import Adapter, attach, divided, joined, linear_maps, merged
from jax_grpo.policy.named import adapter_of, base_hash, load_model, load_named, load_policy, load_weights
from jax_grpo.policy.peft_files import load_adapters, read_adapter, save_adapters
from jax_grpo.rollout.decoding import DecodingSettings
from jax_grpo.rollout.generate import make_generate
from jax_grpo.rollout.sampling import Sampling
from torch_ref.judge import CASES, judge

ROOK = "packaged:rook-small"
TIED = CASES["llama_tied"] | {"vocab_size": 640}


def model_config(folder, **adapter) -> ModelConfig:
    return ModelConfig(weights=str(folder), tokenizer="chess", adapter=AdapterConfig(**adapter))


def randomised(params: nnx.State, seed: int = 0) -> nnx.State:
    """The parameters with adapters that do something."""
    adapters, base = divided(params)
    leaves, tree = jax.tree.flatten(adapters)
    rng = np.random.default_rng(seed)
    return joined(
        jax.tree.unflatten(tree, [jnp.asarray(0.2 * rng.normal(size=x.shape), x.dtype) for x in leaves]), base
    )


@pytest.fixture
def folder(tmp_path):
    """transformers' folder of a Llama; tied, of two heads of keys."""
    judge(TIED, torch.float32).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.mark.default_cases("gpt2", "qwen3")
@pytest.mark.parametrize("case", ["gpt2", "llama", "qwen3", "gemma3_text"])
def test_what_is_written_here_peft_loads_to_the_same_logits_and_writes_to_the_same_files(case, tmp_path):
    judge(CASES[case], torch.float32).save_pretrained(tmp_path / "base")
    how = model_config(tmp_path / "base", rank=4, alpha=7.0)
    model = load_model(how, 0, 1)
    params = randomised(model.params)
    adapters, base = divided(params)
    adapter = adapter_of(how.adapter)
    assert adapter is not None
    reported = {"base": str(tmp_path / "base"), "base_hash": base_hash(base), "base_dtype": "float32"}
    save_adapters(tmp_path / "ours", model.architecture, adapter, adapters, **reported)
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    theirs = peft.PeftModel.from_pretrained(plain, tmp_path / "ours").eval()
    ids = torch.randint(2, 131, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = jnp.ones(ids.shape, jnp.int32)

    def logits(graphdef, params) -> np.ndarray:
        of = nnx.merge(graphdef, params)
        with jax.default_matmul_precision("highest"):
            return np.asarray((of(jnp.asarray(ids.numpy()), mask) @ of.head_VH.T)[..., :131])

    with torch.no_grad():
        expected = theirs(ids).logits.numpy()
    actual = logits(model.graphdef, params)
    assert np.abs(actual - logits(model.graphdef, model.params)).max() > 0.05
    show("logits", {"logits": float(np.abs(actual - expected).max())}, 2e-4)
    theirs.save_pretrained(tmp_path / "theirs")
    assert dataclasses.replace(read_adapter(tmp_path / "theirs"), targets=None) == adapter
    again = load_adapters(tmp_path / "theirs", model.architecture, adapters)
    for one, other in zip(jax.tree.leaves(again), jax.tree.leaves(adapters), strict=True):
        assert np.array_equal(one, other)


def test_a_folder_of_adapters_is_a_model_and_what_it_was_merged_into_the_same_one(folder, tmp_path):
    how = model_config(folder, rank=4, targets=["q_proj", "v_proj", "o_proj", "up_proj"])
    policy = load_policy(how, 0, 1)
    params, adapter = randomised(policy.params), adapter_of(how.adapter)
    adapters, base = divided(params)
    assert adapter is not None
    reported = {"base": str(folder), "base_hash": base_hash(base), "base_dtype": "float32"}
    save_adapters(tmp_path / "a", policy.architecture, adapter, adapters, **reported, tokenizer=policy.tokenizer)
    whole = load_named(str(tmp_path / "a"), tokenizer="chess")
    ids, mask = jnp.arange(2, 14).reshape(2, 6), jnp.ones((2, 6), jnp.int32)
    applied = nnx.merge(policy.graphdef, params)(ids, mask)
    actual = nnx.merge(whole.graphdef, whole.params)(ids, mask)
    plain = nnx.merge(policy.graphdef, policy.params)(ids, mask)
    assert float(jnp.abs(applied - plain).max()) > 0.1
    show("hidden states", {"merged": float(jnp.abs(actual - applied).max())}, 5e-5)
    assert divided(whole.params)[1] is None
    assert jax.tree.structure(whole.params) == jax.tree.structure(merged(policy.graphdef, params))


def test_adapters_of_another_base_are_refused(folder, tmp_path):
    how = model_config(folder, rank=2)
    model, adapter = load_model(how, 0, 1), adapter_of(how.adapter)
    adapters, base = divided(model.params)
    assert adapter is not None
    reported = {"base": str(folder), "base_hash": base_hash(base), "base_dtype": "float32"}
    save_adapters(tmp_path / "a", model.architecture, adapter, adapters, **reported)
    began = model_config(folder, weights=str(tmp_path / "a"))
    assert base_hash(divided(load_model(began, 0, 1).params)[1]) == reported["base_hash"]
    other = judge(TIED, torch.float32, spread=0.21)
    other.save_pretrained(folder)
    for load in (lambda: load_model(began, 0, 1), lambda: load_named(str(tmp_path / "a"), tokenizer="chess")):
        with pytest.raises(
            WeightsError, match=r"a has adapters that were trained on other weights: their hash was \w{12}"
        ):
            load()


def test_a_base_in_bfloat16_is_one_base_in_whatever_it_is_held_later(folder, tmp_path):
    how = model_config(folder, rank=2, base_dtype="bfloat16")
    model, adapter = load_model(how, 0, 1), adapter_of(how.adapter)
    adapters, base = divided(model.params)
    assert {str(x.dtype) for x in jax.tree.leaves(base)} == {"bfloat16"}
    assert {str(x.dtype) for x in jax.tree.leaves(adapters)} == {"float32"}
    assert adapter is not None
    reported = {"base": str(folder), "base_hash": base_hash(base), "base_dtype": "bfloat16"}
    save_adapters(tmp_path / "a", model.architecture, adapter, adapters, **reported)
    whole = load_named(str(tmp_path / "a"), tokenizer="chess")  # in float32, B is 0
    for one, other in zip(jax.tree.leaves(whole.params), jax.tree.leaves(base), strict=True):
        assert np.array_equal(one, np.asarray(other, np.float32))


def test_adapters_are_read_into_bfloat16_on_a_base_of_any_dtype(folder, tmp_path):
    """Their base's hash is of what its files hold, and the sum is rounded once."""
    model = load_model(model_config(folder, rank=2), 0, 1)
    adapters, base = divided(randomised(model.params))
    given = {"base": str(folder), "base_hash": base_hash(base), "base_dtype": "float32"}
    save_adapters(tmp_path / "a", model.architecture, Adapter(2, 32.0), adapters, **given)
    wide, narrow = (load_weights(str(tmp_path / "a"), dtype)[1] for dtype in (jnp.float32, jnp.bfloat16))
    assert base_hash(narrow, jnp.bfloat16) == base_hash(wide, jnp.bfloat16)


@pytest.mark.default_cases("change1-bias is 'all'; only 'none'", "change3-rank_pattern is .*; only {} or None")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_dora": True}, "use_dora is True; only False or None"),
        ({"bias": "all"}, "bias is 'all'; only 'none'"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; only 'LORA'"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern is .*; only {} or None"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is .*; only None"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"target_modules": ".*q_proj"}, "target_modules is .*; expected a list of names, or 'all-linear'"),
        ({"r": 0}, "r is 0 and lora_alpha 8; expected a whole number and a number above 0"),
        (
            {"r": 5},
            r"tensor 'base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight' has shape \(4, 32\); expected",
        ),
        (
            {"target_modules": ["q_proj"]},
            "tensor 'base_model.model.model.layers.0.mlp.down_proj.lora_A.weight' is no adapter",
        ),
        ({"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "gate_proj", "lm_head"]}, "lm_head"),
    ],
)
def test_what_peft_can_say_and_this_decoder_cannot_compute_is_refused_by_its_key(folder, tmp_path, change, message):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    how = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    peft.get_peft_model(model, how).save_pretrained(tmp_path / "a")
    file = tmp_path / "a" / "adapter_config.json"
    assert load_model(model_config(folder, weights=str(tmp_path / "a")), 0, 1)
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises((WeightsError, ConfigError), match=message):
        load_model(model_config(folder, weights=str(tmp_path / "a")), 0, 1)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"weights": ROOK, "adapter": {"weights": "a", "rank": 8}}, "model.adapter.rank 8 would do nothing beside"),
        ({"architecture": "a.json", "adapter": {}}, "model.weights is null: random ones; give weights"),
        ({"weights": ROOK, "param_dtype": "bfloat16", "adapter": {"base_dtype": "bfloat16"}}, "does nothing beside"),
    ],
)
def test_settings_of_adapters_that_cannot_be_are_refused(model, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.model_validate(model)


def test_settings_beside_adapters_that_would_do_something_else_are_refused():
    for kl, message in (
        ({"reference_every": 2, "reference_mix": 0.5}, "would mix the two matrices of each adapter"),
        ({"reference_dtype": "bfloat16"}, "has nothing but adapters to make smaller"),
        ({"offload_reference": True}, "kl.offload_reference true with model.adapter"),
    ):
        values = tiny_config().model_dump()
        sizes = dict.fromkeys(("num_layers", "num_heads", "hidden_size", "max_position_embeddings", "tokenizer"))
        values["model"] |= sizes | {"weights": ROOK, "adapter": {}}
        values["kl"] |= kl
        with pytest.raises(ValueError, match=message):
            Config.model_validate(values)


def test_a_target_that_is_no_linear_map_is_refused_with_those_there_are():
    with pytest.raises(
        ConfigError, match=r"of this gpt2 is named 'q_proj'; expected some of c_attn, c_proj, c_fc, or longer"
    ):
        load_model(ModelConfig(weights=ROOK, adapter=AdapterConfig(targets=["c_fc", "q_proj"])), 0, 1)


def test_an_error_inside_of_what_jax_traces_is_one_line_of_the_command(tmp_path):
    yaml = {**json.loads(tiny_config().model_dump_json()), "run_dir": str(tmp_path / "run")}
    (tmp_path / "run.yaml").write_text(
        json.dumps(yaml | {"model": {"weights": ROOK, "adapter": {"targets": ["q_proj"]}}})
    )
    with pytest.raises(SystemExit, match="is named 'q_proj'") as ended:
        training.main(["--config", str(tmp_path / "run.yaml")])
    assert "\n" not in str(ended.value)


def test_adapters_begin_as_pefts_do_and_two_seeds_differ():
    def made(seed: int) -> Decoder:
        sizes = Architecture(vocab_size=8, num_layers=1, num_heads=2, hidden_size=64, max_position_embeddings=8)
        return attach(Decoder(sizes, rngs=nnx.Rngs(0)), Adapter(32, 64.0), seed=seed, param_dtype=jnp.float32)

    one = {name: linear.adapters for _, name, linear in linear_maps(made(0)) if linear.adapters}
    assert one.keys() == {"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"}
    for name, adapters in one.items():
        (only,) = adapters.values()
        bound = only.a.shape[0] ** -0.5
        assert not np.any(only.b[...])
        assert 0.95 * bound < float(jnp.abs(only.a[...]).max()) <= bound, name
        assert abs(float(only.a[...].std()) / (bound / 3**0.5) - 1) < 0.05, name
    linear = torch.nn.Linear(64, 64)
    low = peft.tuners.lora.Linear(linear, "default", peft.LoraConfig(r=32, lora_alpha=64), r=32, lora_alpha=64)
    theirs = low.lora_A["default"].weight.detach().numpy()
    assert abs(np.abs(theirs).max() / 64**-0.5 - 1) < 0.05 and low.scaling["default"] == Adapter(32, 64.0).scale
    assert Adapter(16, 8.0, rank_stabilised=True).scale == 2.0
    other = next(iter(next(linear for _, _, linear in linear_maps(made(1))).adapters.values()))
    assert not np.array_equal(other.a[...], one["attn.c_attn"]["c_attn"].a[...])


def decoding(vocabulary: int) -> DecodingSettings:
    stops = np.zeros((2, vocabulary), np.int32)
    stops[0, 1] = stops[1] = 1
    return DecodingSettings(
        vocab_size=vocabulary, pad_id=0, sampling=Sampling(temperature=0.0), stop_table_SV=stops, accept_state=1
    )


def rollout_of(how: ModelConfig, params=None):
    model = load_model(how, 0, 1)
    params = randomised(model.params) if params is None else params
    generate = make_generate(model.graphdef, decoding(640), group_size=2, max_new_tokens=12)
    ids, mask, each = np.arange(2, 34).reshape(2, 16), np.ones((2, 16), np.int32), np.arange(2)
    given = params, ids, mask, each * 0, each, 0, jnp.int32(0), each * 0 + 12
    return generate, given


@pytest.mark.slow
def test_rollouts_merged_and_applied_are_equal_up_to_rounding(folder, x64):
    wide = {"param_dtype": "float64", "compute_dtype": "float64"}
    actual = []
    for merges in (False, True):
        generate, given = rollout_of(model_config(folder, rank=4, merged_rollouts=merges).model_copy(update=wide))
        actual.append(jax.device_get(generate(*given)))
    assert np.array_equal(actual[0].completion_ids_PGC, actual[1].completion_ids_PGC)
    gap = np.abs(actual[0].sampling_logp_PGC - actual[1].sampling_logp_PGC)
    show("log-probabilities", {"merged": float(gap.max())}, 1e-10)
    plain = load_model(ModelConfig(weights=str(folder), tokenizer="chess", **wide), 0, 1)
    generate = make_generate(plain.graphdef, decoding(640), group_size=2, max_new_tokens=12)
    without = jax.device_get(generate(plain.params, *given[1:]))
    assert not np.array_equal(without.completion_ids_PGC, actual[0].completion_ids_PGC), "the adapters do something"


FREE = ("parameter", "get-tuple-element", "tuple", "bitcast", "while", "conditional", "opt-barrier", "call")


def written_in_loops(hlo: str) -> list[tuple[str, tuple[int, ...]]]:
    """Opcode and sizes of every array of two axes or more that a loop's body writes; what a fusion keeps to itself is none."""
    module = Module(hlo)
    bodies = [re.search(r"body=%?([\w.-]+)", one.line) for one in module.instructions.values() if one.opcode == "while"]
    todo, seen, actual = [body.group(1) for body in bodies if body], set(), []
    while todo:
        if (name := todo.pop()) in seen:
            continue
        seen.add(name)
        for one in module.computations[name]:
            if one.opcode in ("while", "conditional", "call"):
                todo += one.called
            if one.opcode not in FREE:
                actual += [(one.opcode, array.sizes) for array in one.arrays if len(array.sizes) > 1]
    return actual


def copies_of_base(hlo: str, params: nnx.State, ranks: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
    """What a loop writes that is as large as a block's matrix, or as one with A's columns beside it."""
    shapes = [linear.shape for path, linear in flat_kernels(params)]
    wide = {tuple(sorted((a, b + more))) for a, b in shapes for more in (0, *ranks)}
    return [(opcode, sizes) for opcode, sizes in written_in_loops(hlo) if tuple(sorted(sizes)) in wide]


def flat_kernels(params: nnx.State):
    return [(path, leaf.get_value()) for path, leaf in nnx.to_flat_state(params) if path[-1] == "kernel"]


@pytest.mark.slow_cases("True")
@pytest.mark.parametrize("merges", [False, True])
def test_no_copy_of_a_matrix_of_the_base_is_made_in_a_decode_loop(folder, merges):
    generate, given = rollout_of(model_config(folder, rank=4, merged_rollouts=merges))
    hlo = generate.lower(*given).compile().as_text()
    assert len(written_in_loops(hlo)) > 20, "there are loops"
    assert copies_of_base(hlo, given[0], (4, 8, 12)) == []
