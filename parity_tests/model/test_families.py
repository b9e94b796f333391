"""The decoder against transformers' own models of every family: each form of it, files in and out, and greedy tokens."""

import dataclasses
import functools
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from both import show
from conftest import relative_error
from flax import nnx
from safetensors.numpy import load_file, save_file

from jax_grpo.model import decode_kernel
from jax_grpo.model.architecture import Architecture
from jax_grpo.model.attention import KERNELS, KV, Blocks, EarlierTurns
from jax_grpo.model.decoder import Decoder, position_ids
from jax_grpo.model.families import UnsupportedModel, described, read_architecture
from jax_grpo.model.weights import WeightsError, from_hf, load_hf, save_hf, to_hf
from jax_grpo.rollout.decoding import LEAST_CHUNK, DecodingSettings
from jax_grpo.rollout.generate import make_generate
from jax_grpo.rollout.sampling import Sampling
from torch_ref.judge import CASES, judge, true_float64

CLOSE = 1e-10  # DESIGN's bound for logits in float64; what is seen is below 1e-12
P, G, T, C = 2, 3, 7, 6  # windows are of 4 tokens
IN_BLOCKS = {"full": None, "blocks": Blocks(2, 2, 9)}  # of attention; the last of these blocks is not full
# By default: rotary and a tied head; q/k norms, windows, and norms before and after.
some = pytest.mark.default_cases("llama_tied", "gemma3_text")
ROTARY = [case for case in CASES if case != "gpt2"]


@functools.cache
def theirs(case: str):
    with true_float64():
        return judge(CASES[case], torch.float64)


def tensors(case: str) -> dict[str, np.ndarray]:
    return {name: x.detach().numpy() for name, x in theirs(case).state_dict().items()}


def spelled_out(architecture: Architecture) -> Architecture:
    """The same with the sizes that files may leave out."""
    return dataclasses.replace(architecture, head_size=architecture.head_dim, num_kv_heads=architecture.kv_heads)


def ours(case: str, blocks: Blocks | None = None, **options) -> Decoder:
    """The decoder with the judge's weights, in float64, and such blocks of attention; call under x64."""
    architecture = read_architecture(CASES[case])
    how = {"param_dtype": jnp.float64, "compute_dtype": jnp.float64} | options
    abstract = nnx.eval_shape(lambda: Decoder(architecture, rngs=nnx.Rngs(0), **how))
    params = from_hf(tensors(case).__getitem__, architecture, jnp.float64)
    model = nnx.merge(nnx.split(abstract, nnx.Param)[0], params)
    model.blocks = blocks
    return model


def logits_of(model: Decoder, hidden: jax.Array) -> np.ndarray:
    return np.asarray(hidden @ model.head_VH.T)[..., : model.vocabulary]


def judged(case: str, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """transformers' logits [B, T, V], positions counted over real tokens."""
    positions = np.maximum(np.cumsum(mask, axis=-1) - 1, 0)
    given = (torch.from_numpy(np.asarray(x)).long() for x in (ids, mask, positions))
    with torch.no_grad(), true_float64():
        ids, mask, positions = given
        return theirs(case)(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits.numpy()


def padded(side: str, rows: int, length: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    real = rng.integers(3, length + 1, rows)
    real[0] = length
    mask = np.arange(length) < real[:, None]
    return rng.integers(2, 131, mask.shape), (mask[:, ::-1] if side == "left" else mask).astype(np.int32)


@pytest.mark.slow_cases("gpt2-left", "llama-left", "qwen3-right")
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers_with_padding_on_either_side(case, side, x64):
    ids, mask = padded(side, 3, 11)
    expected = judged(case, ids, mask)
    assert np.abs(expected[mask == 1]).max() > 0.5
    for name, blocks in IN_BLOCKS.items():
        model = ours(case, blocks)
        actual = logits_of(model, model(jnp.asarray(ids), jnp.asarray(mask)))
        show("logits", {name: float(np.abs(actual - expected)[mask == 1].max())}, CLOSE)


def grouped_case(case: str):
    """Prompts padded on the left, completions on the right, and transformers' logits of each completion token [P, G, C, V]."""
    prompt_PT, prompt_mask_PT = padded("left", P, T)
    completion_RC, mask_RC = padded("right", P * G, C, seed=1)
    ids = np.concatenate([np.repeat(prompt_PT, G, 0), completion_RC], axis=1)
    mask = np.concatenate([np.repeat(prompt_mask_PT, G, 0), mask_RC], axis=1)
    expected = judged(case, ids, mask)[:, T - 1 : -1].reshape(P, G, C, -1)
    shape = (P, G, C)
    arrays = (prompt_PT, prompt_mask_PT, completion_RC.reshape(shape), mask_RC.reshape(shape))
    return [jnp.asarray(x) for x in arrays], expected, mask_RC.reshape(shape) == 1


@pytest.mark.default_cases("llama_tied")
@pytest.mark.parametrize("case", CASES)
def test_grouped_completions_have_the_logits_of_their_concatenation(case, x64):
    tokens, expected, real = grouped_case(case)
    for remat, blocks in ((False, None), ("all", None), ("all", IN_BLOCKS["blocks"])):
        model = ours(case, blocks, remat=remat)
        actual = logits_of(model, nnx.jit(Decoder.grouped)(model, *tokens))
        show("grouped", {f"{remat} {blocks}": float(np.abs(actual - expected)[real].max())}, CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "layout", "way"), list(itertools.product(CASES, ("whole", "grouped"), ("blocks", "pallas")))
)
def test_gradients_in_blocks_are_those_of_one_array_of_scores(case, layout, way, x64):
    """Of every parameter; padding on both sides, windows of 4 tokens, blocks of 2 queries; and of interpreted kernels."""
    tokens, _, real = grouped_case(case)
    ids, mask = padded("left", 3, 11)

    def loss(model):
        if layout == "grouped":
            return jnp.sum(jnp.where(real[..., None], jnp.sin(model.grouped(*tokens)), 0))
        return jnp.sum(jnp.where(mask[..., None] == 1, jnp.sin(model(jnp.asarray(ids), jnp.asarray(mask))), 0))

    gradient = {}
    for name, blocks in {"full": None, way: IN_BLOCKS.get(way, KERNELS)}.items():
        graphdef, params = nnx.split(ours(case, blocks, remat="all" if blocks else False), nnx.Param)
        gradient[name] = jax.jit(jax.grad(lambda params, graphdef=graphdef: loss(nnx.merge(graphdef, params))))(params)
    assert all(jnp.any(leaf != 0) for leaf in jax.tree.leaves(gradient["full"]["h"]))
    show(
        "gradient", {"worst": relative_error(*gradient.values())}, 1e-12
    )  # both add the same numbers, in another order


@some
@pytest.mark.parametrize("case", CASES)
def test_a_cache_of_chunks_and_of_earlier_turns_has_the_same_logits(case, x64):
    """Decoding token by token in two chunks; and the first tokens as an episode's earlier turn, read at once."""
    (prompt_PT, mask_PT, ids_PGC, mask_PGC), expected, real = grouped_case(case)
    model = ours(case)
    prefill, decode, extend = (nnx.jit(method) for method in (Decoder.prefill, Decoder.decode, Decoder.extend))
    hidden_PTH, caches = prefill(model, prompt_PT, mask_PT)
    length_P1 = jnp.sum(mask_PT, axis=-1)[:, None]
    before = logits_of(model, hidden_PTH[:, None, -1])
    errors = {"prefill": float(np.abs(before - expected[:, :, 0]).max())}
    chunks = [model.empty_chunk(P, G, 2)]
    for step in range(C - 1):
        if step == 2:
            chunks.append(model.empty_chunk(P, G, C - 3))
        position_PG = jnp.broadcast_to(length_P1 + step, (P, G))
        hidden, chunks[-1] = decode(model, ids_PGC[..., step], position_PG, caches, mask_PT, chunks, jnp.int32(step))
        error = np.abs(logits_of(model, hidden) - expected[:, :, step + 1])[real[..., step + 1]]
        errors[f"step {step}"] = float(error.max(initial=0))
    # Tokens 0 and 1 are an earlier turn, 2 and 3 are read at once, 4 is decoded.
    earlier = EarlierTurns(chunks[0], mask_PGC[..., :2].astype(bool))
    position_PGE = length_P1[..., None] + position_ids(mask_PGC)[..., 2:4]
    for name, blocks in {"extend": None, "extend in blocks": Blocks(1, 1, 9)}.items():
        model.blocks = blocks
        hidden, read = extend(model, ids_PGC[..., 2:4], mask_PGC[..., 2:4], position_PGE, caches, mask_PT, earlier)
        error = np.abs(logits_of(model, hidden) - expected[:, :, 3:5])
        errors[name] = float(error[real[..., 3:5]].max(initial=0))
    joined = [
        KV(*(jnp.concatenate(pair, axis=3) for pair in zip(a, b, strict=True)))
        for a, b in zip(chunks[0], read, strict=True)
    ]
    earlier = EarlierTurns(joined, mask_PGC[..., :4].astype(bool))
    hidden, _ = decode(
        model, ids_PGC[..., 4], length_P1 + position_ids(mask_PGC)[..., 4], caches, mask_PT, [model.empty_chunk(P, G, 1)],
        jnp.int32(0), earlier,
    )  # fmt: skip
    errors["decode behind earlier turns"] = float(
        np.abs(logits_of(model, hidden) - expected[:, :, 5])[real[..., 5]].max(initial=0)
    )
    show("cached", errors, CLOSE)


@some
@pytest.mark.parametrize("case", CASES)
def test_the_decode_kernel_has_the_same_logits(case, x64, monkeypatch):
    """Interpreted, in blocks of two keys, the last of a prompt and of a completion part full."""
    monkeypatch.setattr(decode_kernel, "BLOCK", 2)
    (prompt_PT, mask_PT, ids_PGC, _), expected, real = grouped_case(case)
    model = ours(case, decode_kernel=True)
    decode, (_, caches) = nnx.jit(Decoder.decode), model.prefill(prompt_PT, mask_PT)
    own, errors = [model.empty_chunk(P, G, C - 1)], {}
    for step in range(C - 1):
        position_PG = jnp.broadcast_to(jnp.sum(mask_PT, axis=-1)[:, None] + step, (P, G))
        hidden, own[0] = decode(model, ids_PGC[..., step], position_PG, caches, mask_PT, own, jnp.int32(step))
        error = np.abs(logits_of(model, hidden) - expected[:, :, step + 1])[real[..., step + 1]]
        errors[f"step {step}"] = float(error.max(initial=0))
    show("decoded", errors, CLOSE)


@pytest.mark.parametrize("case", CASES)
def test_files_go_in_and_out_bit_for_bit_and_transformers_reads_them(case, tmp_path):
    judge(CASES[case], torch.float32).save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")
    architecture, params = load_hf(tmp_path / "theirs")
    assert spelled_out(architecture) == spelled_out(read_architecture(CASES[case]))
    assert spelled_out(architecture) == spelled_out(read_architecture(described(architecture)))
    assert Architecture.from_json(json.loads(json.dumps(architecture.as_json()))) == architecture
    save_hf(tmp_path / "ours", architecture, params, source=tmp_path / "theirs")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    wanted = model.state_dict()
    assert {name: torch.equal(x, wanted[name]) for name, x in again.state_dict().items()} == dict.fromkeys(wanted, True)
    ids = torch.randint(2, 131, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits), "config.json says another model"
    model.to(torch.bfloat16).save_pretrained(tmp_path / "half")
    half = to_hf(load_hf(tmp_path / "half")[1], architecture)
    assert all(np.array_equal(x, model.state_dict()[name].float().numpy()) for name, x in half.items())


@pytest.mark.parametrize(
    ("case", "settings", "message"),
    [
        ("llama", {"model_type": "olmo2"}, "model_type is 'olmo2'; only 'gpt2', 'llama'"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; only 'silu'"),
        (
            "llama",
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "rope_type is 'yarn'; only 'default', 'linear'",
        ),
        ("llama", {"rope_scaling": {"rope_type": "linear"}}, "rope_type 'linear' needs a number as factor"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; only None or 1.0"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config is .*; only None"),
        ("llama", {"num_key_value_heads": 3}, "num_heads 4 is not a multiple of num_kv_heads 3"),
        ("llama", {"hidden_size": "32"}, "hidden_size is '32'; expected a number"),
        ("qwen2", {"layer_types": ["full_attention"]}, "layer_types is .*; expected one of"),
        ("qwen2", {"sliding_window": None}, "sliding_window is None; layer_types needs a whole number"),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0; only None"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ("gemma3_text", {"hidden_activation": "silu"}, "hidden_activation is 'silu'; only 'gelu_pytorch_tanh'"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True; only False"),
        ("gpt2", {"num_hidden_layers": 3}, "n_layer is 2 and num_hidden_layers 3; expected one value"),
        ("gpt2", {"pruned_heads": {"0": [1]}}, "pruned_heads is .*; only None or {}"),
        ("llama", {"sliding_window": 4}, "sliding_window is 4; only None"),
        ("mistral", {"layer_types": ["full_attention"] * 2}, "layer_types is .*; only None"),
        ("qwen3", {"per_layer_config": {"0": {"num_attention_heads": 2}}}, "per_layer_config is .*; only None"),
        ("qwen2", {"transformers_weights": "other.safetensors"}, "transformers_weights is .*; only None"),
        ("qwen2", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; only None or 1.0"),
        ("llama", {"num_hidden_layers": 2.0}, "num_layers is 2.0; expected a whole number"),
    ],
)
def test_what_this_decoder_is_not_is_refused_by_its_key(case, settings, message):
    with pytest.raises((UnsupportedModel, ValueError), match=message):
        read_architecture(CASES[case] | settings)


@pytest.mark.parametrize("case", ROTARY)
def test_what_config_json_leaves_out_is_what_transformers_takes(case):
    """Only the sizes are given: everything else is the default of transformers' own class, which writes it out."""
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    bare = {key: CASES[case][key] for key in sizes}
    bare |= {"hidden_size": 64, "num_attention_heads": 32, "num_hidden_layers": 7}
    written = transformers.AutoConfig.for_model(CASES[case]["model_type"], **bare).to_dict()
    left_out = read_architecture(bare | {"model_type": CASES[case]["model_type"]})
    spelled_out = read_architecture(json.loads(json.dumps(written)))
    assert dataclasses.replace(
        left_out, head_size=left_out.head_dim, num_kv_heads=left_out.kv_heads
    ) == dataclasses.replace(spelled_out, head_size=spelled_out.head_dim, num_kv_heads=spelled_out.kv_heads)


def test_an_untied_head_is_not_the_embedding(tmp_path):
    judge(CASES["mistral"], torch.float32).save_pretrained(tmp_path)
    architecture, params = load_hf(tmp_path)
    assert not architecture.tied and params["head"]["embedding"].get_value().shape == (256, 32)
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"tie_word_embeddings": True}))
    with pytest.raises(WeightsError, match=r"'lm_head.weight' differs from 'model.embed_tokens.weight'"):
        load_hf(tmp_path)


def test_a_tied_head_without_the_embedding_beside_it_is_the_embedding(tmp_path):
    """As `transformers` takes it."""
    model = judge(CASES["llama_tied"], torch.float32)
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    stored["lm_head.weight"] = stored.pop("model.embed_tokens.weight")
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    actual = to_hf(load_hf(tmp_path)[1], read_architecture(CASES["llama_tied"]))
    assert all(np.array_equal(x, again[name].numpy()) for name, x in actual.items())


def test_gemmas_embeddings_are_scaled_by_what_bfloat16_makes_of_the_factor():
    """sqrt(32) = 5.657 is 5.656 to bfloat16, and that is what the model was trained with, whatever its weights are stored in."""
    architecture = read_architecture(CASES["gemma3_text"])
    for dtype in ("bfloat16", "float32"):
        model = Decoder(architecture, rngs=nnx.Rngs(0), compute_dtype=jnp.dtype(dtype))
        rows = model.wte.embedding[...][:5]
        with torch.no_grad():
            factor = torch.tensor(32**0.5).to(getattr(torch, dtype)).double().item()
        expected = (rows * jnp.float32(factor)).astype(dtype)
        assert jnp.array_equal(model._embed(jnp.arange(5), jnp.arange(5)), expected)


@pytest.mark.default_cases("gemma3_text")
@pytest.mark.parametrize("case", CASES)
def test_greedy_rollouts_are_those_of_generate(case):
    """Prompts padded on the left, float32, longer than the window; two chunks of the cache."""
    peer = judge(CASES[case], torch.float32)
    architecture = read_architecture(CASES[case])
    abstract = nnx.eval_shape(lambda: Decoder(architecture, rngs=nnx.Rngs(0)))
    params = from_hf({name: x.detach().numpy() for name, x in peer.state_dict().items()}.__getitem__, architecture)
    ids, mask = padded("left", 4, 9)
    never = np.repeat(np.arange(2)[:, None], 131, axis=1)
    settings = DecodingSettings(
        vocab_size=131, pad_id=0, sampling=Sampling(temperature=0.0), stop_table_SV=never, accept_state=1
    )  # fmt: skip
    new = LEAST_CHUNK + 6
    generate = make_generate(nnx.split(abstract, nnx.Param)[0], settings, group_size=2, max_new_tokens=new)
    actual = generate(params, ids, mask, np.zeros(4, np.int32), np.arange(4), 0, 0).completion_ids_PGC
    with torch.no_grad():
        wanted = peer.generate(
            torch.from_numpy(ids), attention_mask=torch.from_numpy(mask), max_new_tokens=new, min_new_tokens=new,
            do_sample=False, eos_token_id=None, pad_token_id=0,
        )[:, ids.shape[1] :]  # fmt: skip
    assert len(np.unique(np.asarray(wanted))) > 8
    np.testing.assert_array_equal(actual[:, 0], wanted)
    np.testing.assert_array_equal(actual[:, 1], wanted)
