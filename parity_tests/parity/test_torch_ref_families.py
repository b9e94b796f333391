"""torch_ref's families against transformers' own models, in float64 throughout: logits, every gradient, generation, files."""

import copy
import functools
import json
from typing import Any

import pytest
import torch
import transformers
from both import padded_rows, show
from safetensors.torch import load_file, save_file

from torch_ref.families import UnsupportedModel, read_config
from torch_ref.generate import end_of_text, generate
from torch_ref.judge import CASES, LLAMA3, judge, true_float64
from torch_ref.model import KVCache, LanguageModel
from torch_ref.options import OptionError, use_liger
from torch_ref.weights import build, load_hf, save_hf

LENGTHS = (11, 3, 7)  # windows are of 4 tokens
LONGEST = max(LENGTHS)
padded = functools.partial(padded_rows, LENGTHS, range(2, 131))
# Sums of a few hundred float64 products in another order; logits here reach 10 to 100.
CLOSE = 1e-12
ROTARY = [case for case in CASES if case != "gpt2"]


@functools.cache
def theirs(case: str) -> Any:
    with true_float64():
        return judge(CASES[case], torch.float64)


def ours(case: str, described: dict | None = None, remat: bool = False) -> LanguageModel:
    """torch_ref's model of a config.json, of the case unless given, with the judge's weights."""
    model = build(CASES[case] if described is None else described, remat=remat).double()
    named = dict(theirs(case).named_parameters())
    model.load_state_dict({name: named[name].detach() for name, _ in model.named_parameters()})
    return model


def logits_of_judge(model: Any, side: str) -> torch.Tensor:
    ids, mask, positions = padded(side)
    with true_float64():
        return model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("case", CASES)
def test_logits_and_every_gradient_are_those_of_transformers(case, side):
    ids, mask, _ = padded(side)
    real = mask.bool()
    weight = torch.randn(int(real.sum()), 131, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    model, peer = ours(case, remat=side == "left"), theirs(case)
    expected, got = logits_of_judge(peer, side)[real], model.logits(model(ids, mask))[real]
    assert float(expected.detach().abs().max()) > 1
    show("logits", {"logits": float((got - expected).abs().max().detach())}, CLOSE)
    wanted = dict(peer.named_parameters())
    with true_float64():
        derived = torch.autograd.grad((expected * weight).sum(), list(wanted.values()))
    derived = dict(zip(wanted, derived, strict=True))
    actual = dict(model.named_parameters())
    (got * weight).sum().backward()
    assert actual.keys() == wanted.keys()
    norms = {name: float(gradient.norm()) for name, gradient in derived.items()}
    assert all(norm > 1e-3 for norm in norms.values()), norms
    errors = {n: float((p.grad - derived[n]).norm()) / norms[n] for n, p in actual.items() if p.grad is not None}
    assert errors.keys() == wanted.keys()
    show("gradients", errors, CLOSE)


def test_transformers_alone_gives_its_padding_token_no_gradient_as_an_input():
    """`pad_token_id` is its embedding's padding_idx, and often the end of text's id too: a difference on purpose."""
    ids, mask, positions = padded("right")
    ids[0, :5] = 9
    with true_float64():
        peer = judge(CASES["llama"] | {"pad_token_id": 9}, torch.float64)
        expected = peer(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits[mask.bool()]
        expected.square().sum().backward()
    theirs_VH = peer.model.embed_tokens.weight.grad
    model = ours("llama")
    model.load_state_dict(peer.state_dict())
    model.logits(model(ids, mask))[mask.bool()].square().sum().backward()
    ours_VH = dict(model.named_parameters())["model.embed_tokens.weight"].grad
    assert ours_VH is not None and not theirs_VH[9].any() and ours_VH[9].norm() > 1
    others = torch.arange(131) != 9
    show("others", {"gradient": float((ours_VH - theirs_VH)[others].norm() / theirs_VH.norm())}, CLOSE)


@pytest.mark.parametrize("case", ROTARY)
def test_a_cache_and_padding_change_nothing(case):
    model, (ids, mask, _) = ours(case), padded("left")
    whole = model(ids, mask)
    for row, length in enumerate(LENGTHS):
        alone = model(ids[row, LONGEST - length :][None], torch.ones(1, length, dtype=torch.long))[0]
        show("alone", {f"row {row}": float((alone - whole[row, LONGEST - length :]).abs().max().detach())}, CLOSE)
    cache = KVCache(model.config.num_layers)
    model(ids[:, :6], mask[:, :6], cache)
    steps = [model(ids[:, at : at + 1], mask[:, : at + 1], cache) for at in range(6, LONGEST)]
    show("cached", {"hidden": float((torch.cat(steps, 1) - whole[:, 6:]).abs().max().detach())}, CLOSE)


@pytest.mark.parametrize("case", ROTARY)
def test_no_mask_is_needed_where_nothing_is_padded(case):
    model, (ids, mask, _) = ours(case), padded("left")
    masked = model(ids[:1], mask[:1])
    model.unpadded = True
    show("hidden", {"hidden": float((model(ids[:1], mask[:1]) - masked).abs().max().detach())}, CLOSE)


def test_a_model_without_the_norms_that_liger_exchanges_refuses_it():
    with pytest.raises(OptionError, match="no LayerNorm"):
        use_liger(ours("llama"))


@pytest.mark.parametrize("case", ROTARY)
def test_greedy_generation_is_that_of_transformers_token_by_token(case):
    ids, mask, _ = padded("left")
    with true_float64():
        expected = theirs(case).generate(
            ids, attention_mask=mask, do_sample=False, max_new_tokens=12, eos_token_id=5, pad_token_id=0
        )[:, LONGEST:]
    got = generate(ours(case), ids, mask, max_new_tokens=12, stop=end_of_text(5, 131, len(ids))).tokens_BC
    assert got.tolist() == expected.tolist()
    assert len(set(got.flatten().tolist())) > 5  # not one token for ever


@pytest.mark.parametrize("case", ROTARY)
def test_bfloat16_autocast_stays_near_float64_and_keeps_float32_logits(case):
    model, (ids, mask, _) = ours(case), padded("right")
    expected = model.logits(model(ids, mask))[mask.bool()]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = model.float().logits(model(ids, mask))[mask.bool()]
    assert got.dtype == torch.float32
    show("logits", {"logits": float(((got - expected).norm() / expected.norm()).detach())}, 5e-2)


@pytest.mark.parametrize("case", ROTARY)
def test_a_config_of_transformers_5_means_what_its_transformers_4_form_means(case):
    config = theirs(case).config.to_dict()
    assert "rope_scaling" not in config and "rope_parameters" in config
    assert read_config(json.loads(json.dumps(config))) == read_config(CASES[case])


# What a config.json may leave out, and what transformers then takes, which is not always what the tiny cases say.
LEFT_OUT = {
    "llama": {"head_dim", "num_key_value_heads", "rope_theta", "rms_norm_eps", "tie_word_embeddings", "rope_scaling"},
    "mistral": {"head_dim", "num_key_value_heads", "rope_theta", "sliding_window", "tie_word_embeddings"},
    "qwen2": {"rope_theta", "use_sliding_window", "layer_types"},
    "qwen3": {"rope_theta", "head_dim", "num_key_value_heads", "tie_word_embeddings"},
    "gemma3_text": {
        "rope_theta", "rope_local_base_freq", "head_dim", "num_key_value_heads", "query_pre_attn_scalar", "sliding_window",
        "sliding_window_pattern", "hidden_activation",
    },
}  # fmt: skip


def shortened(case: str) -> dict[str, Any]:
    """A config.json that says as little as it may, of sizes with which every default can be told."""
    short = {key: x for key, x in CASES[case].items() if key not in LEFT_OUT[case]}
    return short | {"num_attention_heads": 32, "hidden_size": 128, "num_hidden_layers": 7}


@pytest.mark.parametrize("case", LEFT_OUT)
def test_what_a_config_leaves_out_is_what_transformers_documents(case):
    """transformers' own config class fills in its defaults, which then stand written in its config.json."""
    short = shortened(case)
    filled = transformers.AutoConfig.for_model(case, **{k: x for k, x in short.items() if k != "model_type"}).to_dict()
    assert read_config(short) == read_config(json.loads(json.dumps(filled)))


LINEAR = {"rope_type": "linear", "factor": 2.0}
# Where config.json may say it, and which of two places transformers takes.
PLACES = [
    ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    ("llama", {"rope_scaling": LINEAR | {"rope_theta": 50.0}}),
    ("llama", {"rope_parameters": LINEAR | {"rope_theta": 50.0}}),
    ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}),
    ("llama", {"rope_parameters": {"rope_type": "default"}, "rope_scaling": LINEAR}),
    ("llama", {"rope_scaling": LLAMA3, "original_max_position_embeddings": 16}),
    ("llama", {"rope_scaling": {key: x for key, x in LLAMA3.items() if key != "original_max_position_embeddings"}}),
    ("gemma3_text", {"rope_scaling": LINEAR}),
    ("gemma3_text", {"rope_parameters": {"full_attention": LINEAR, "sliding_attention": {"rope_type": "default"}}}),
    ("gemma3_text", {"rope_parameters": {"sliding_attention": LINEAR | {"rope_theta": 50.0}}}),
]


@pytest.mark.parametrize(("case", "place"), PLACES)
def test_rotary_frequencies_are_those_that_transformers_reads(case, place):
    described = {key: x for key, x in CASES[case].items() if not key.startswith("rope_scaling")} | place
    actual = read_config(copy.deepcopy(described)).layers
    with true_float64():
        rotary = judge(copy.deepcopy(described), torch.float64).model.rotary_emb
    names = {"gemma3_text": {4: "sliding_attention_inv_freq", None: "full_attention_inv_freq"}}
    for layer in actual:
        expected = getattr(rotary, names.get(case, {}).get(layer.window, "inv_freq"))
        gap = layer.rotary.frequencies(read_config(described).head_dim) - expected
        show("frequencies", {str(layer.window): float(gap.abs().max())}, 1e-15)


@pytest.mark.parametrize("case", ["qwen2", "qwen3"])
def test_the_first_layers_of_qwen_see_everything(case):
    described = CASES[case] | {
        "use_sliding_window": True,
        "sliding_window": 4,
        "max_window_layers": 1,
        "layer_types": None,
        "num_hidden_layers": 3,
    }
    assert [layer.window for layer in read_config(described).layers] == [None, 4, 4]
    without = described | {"use_sliding_window": False}
    assert [layer.window for layer in read_config(without).layers] == [None, None, None]


REFUSALS = [
    ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type yarn"),
    ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "rope_type dynamic"),
    ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "without low_freq_factor, high_freq_factor"),
    ("llama", {"hidden_act": "relu"}, "hidden_act relu"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
    ("llama", {"num_key_value_heads": 3}, "num_key_value_heads 3"),
    ("llama", {"intermediate_size": None}, "no intermediate_size"),
    ("qwen2", {"layer_types": ["full_attention"]}, "expected 2 of full_attention and sliding_attention"),
    ("qwen2", {"layer_types": ["full_attention", "chunked_attention"]}, "layer_types"),
    ("qwen2", {"use_sliding_window": False}, "sliding_window None"),
    ("gemma3_text", {"sliding_window": None}, "sliding_window None"),
    ("gemma3_text", {"final_logit_softcapping": 30.0}, r"final_logit_softcapping 30\.0"),
    ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention True: expected null or False"),
    ("gemma3_text", {"hidden_activation": "gelu"}, "hidden_activation gelu"),
    ("llama", {"per_layer_config": {"0": {}}}, "per_layer_config"),
    ("gpt2", {"pruned_heads": {"0": [1]}}, "pruned_heads"),
    ("gpt2", {"quantization_config": {"bits": 4}}, "quantization_config"),
    ("gpt2", {"model_type": "phi3"}, "model_type phi3: expected one of gpt2, llama, mistral"),
    ("gpt2", {"activation_function": "relu"}, "activation_function relu: expected gelu_new"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx True"),
    ("gpt2", {"tie_word_embeddings": False}, "tie_word_embeddings False"),
]


@pytest.mark.parametrize(("case", "change", "message"), REFUSALS)
def test_a_key_that_would_change_the_numbers_is_refused_by_its_name(case, change, message):
    with pytest.raises(UnsupportedModel, match=message):
        build(CASES[case] | change)


@pytest.mark.parametrize("case", ROTARY)
def test_weights_travel_to_transformers_and_back(case, tmp_path):
    save_hf(tmp_path / "ours", ours(case))
    with true_float64():
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float64)
    for side in ("left", "right"):
        real = padded(side)[1].bool()
        gap = (logits_of_judge(again, side) - logits_of_judge(theirs(case), side))[real].abs().max()
        show("logits", {"again": float(gap.detach())}, 1e-13)
    copy.deepcopy(theirs(case)).save_pretrained(tmp_path / "theirs")
    back = load_hf(tmp_path / "theirs", dtype=torch.float64)
    assert all(torch.equal(p, theirs(case).state_dict()[name]) for name, p in back.named_parameters())
    assert back.config == read_config(CASES[case])


def test_the_single_file_wins_over_an_index_beside_it(tmp_path):
    save_hf(tmp_path, ours("qwen3"))
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({name: x + 1 for name, x in tensors.items()}, tmp_path / "model-00001-of-00001.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "model-00001-of-00001.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    embedding = "model.embed_tokens.weight"

    def agree(expected: torch.Tensor) -> None:
        peer = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
        for model in (peer, load_hf(tmp_path, dtype=torch.float64)):
            assert torch.equal(dict(model.named_parameters())[embedding], expected)

    agree(tensors[embedding])
    (tmp_path / "model.safetensors").unlink()
    agree(tensors[embedding] + 1)


def test_a_head_is_the_embedding_only_where_the_config_says_so(tmp_path):
    save_hf(tmp_path, ours("qwen3"))
    tied = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in tied
    save_file(tied | {"lm_head.weight": tied["model.embed_tokens.weight"] + 1}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="head is its embedding"):
        load_hf(tmp_path)
    embedding = tied.pop("model.embed_tokens.weight")
    save_file(tied | {"lm_head.weight": embedding}, tmp_path / "model.safetensors")  # one name of the two
    peer = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert torch.equal(peer.model.embed_tokens.weight, embedding)
    assert torch.equal(load_hf(tmp_path, dtype=torch.float64).head_VH, embedding)
    tied["model.embed_tokens.weight"] = embedding
    save_file(tied | {"lm_head.weight": embedding + 1}, tmp_path / "model.safetensors")
    described = json.loads((tmp_path / "config.json").read_text()) | {"tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(described))
    assert not torch.equal(
        *(load_hf(tmp_path).state_dict()[n] for n in ("lm_head.weight", "model.embed_tokens.weight"))
    )
    save_file(tied, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"lm_head\.weight missing"):
        load_hf(tmp_path)
