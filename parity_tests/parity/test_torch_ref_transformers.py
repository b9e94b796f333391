"""torch_ref's GPT-2 against transformers' GPT2LMHeadModel, in float64: logits, every gradient, generation, files."""

import functools
import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from both import padded_rows
from safetensors.torch import load_file, save_file
from transformers import GPT2Config as HFConfig
from transformers import GPT2LMHeadModel
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from torch_ref.compare import largest
from torch_ref.generate import StopTable, end_of_text, generate
from torch_ref.model import GPT2, GPT2Config, score
from torch_ref.sampling import Sampling, allowed_distribution
from torch_ref.weights import load_hf, save_hf

TINY = GPT2Config(vocab_size=61, num_layers=3, num_heads=4, hidden_size=32, max_position_embeddings=24)
LENGTHS = (9, 3, 6)
LONGEST = max(LENGTHS)
padded = functools.partial(padded_rows, LENGTHS, range(61))


def peer(dtype=torch.float64, **sizes) -> GPT2LMHeadModel:
    """transformers' model with weights large enough for attention and softmax to be far from uniform."""
    given = {"vocab_size": 61, "n_layer": 3, "n_head": 4, "n_embd": 32, "n_positions": 24} | sizes
    config = HFConfig(**given, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def ours(model: GPT2LMHeadModel, remat: bool = False) -> GPT2:
    copy = GPT2(TINY, remat=remat).to(next(model.parameters()).dtype)
    copy.load_state_dict({name: p for name, p in model.state_dict().items() if name != "lm_head.weight"})
    return copy


def worst(error: dict[str, float], tolerance: float) -> None:
    name, size = largest(error)
    print(f"largest of {len(error)}: {name} {size:.2e} (tolerance {tolerance:.0e})")
    assert size < tolerance


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("side", ["left", "right"])
def test_logits_and_every_gradient_are_those_of_transformers(side, remat):
    theirs = peer()
    model = ours(theirs, remat)
    ids, mask, positions = padded(side)
    weight = torch.randn(*ids.shape, 61, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    weight = weight * mask[:, :, None]  # padding's outputs are nobody's business
    expected = theirs(ids, attention_mask=mask, position_ids=positions).logits
    got = model.logits(model(ids, mask))
    real = mask.bool()
    worst({"logits": float((got - expected)[real].abs().max().detach())}, 1e-10)
    (expected * weight).sum().backward()
    (got * weight).sum().backward()
    wanted = dict(theirs.named_parameters())
    actual = dict(model.named_parameters())
    assert actual.keys() == wanted.keys()
    norms = {name: float(p.grad.norm()) for name, p in wanted.items()}
    # A key's bias moves every score of a query alike, so its gradient is 0 but for rounding: judge c_attn.bias as a whole.
    assert all(norm > 1e-6 for norm in norms.values()), norms
    worst({name: float((p.grad - wanted[name].grad).norm()) / norms[name] for name, p in actual.items()}, 1e-10)


def test_logp_and_entropy_are_those_of_shifted_logits_over_temperature():
    theirs, temperature = peer(), 0.7
    ids, mask, positions = padded("left")
    completion = mask.clone()
    completion[:, : LONGEST - 2] = 0
    logits = theirs(ids, attention_mask=mask, position_ids=positions).logits / temperature
    distribution = torch.distributions.Categorical(logits=logits[:, :-1])
    logp, entropy = score(ours(theirs), ids, mask, completion, temperature)
    there = completion[:, 1:].bool()
    worst(
        {
            "logp": float((logp[:, 1:] - distribution.log_prob(ids[:, 1:]))[there].abs().max().detach()),
            "entropy": float((entropy[:, 1:] - distribution.entropy())[there].abs().max().detach()),
        },
        1e-10,
    )
    assert not logp[completion == 0].any()
    assert not entropy.requires_grad
    cross_entropy = F.cross_entropy(logits[:, :-1][there], ids[:, 1:][there], reduction="sum")
    assert float((logp.sum() + cross_entropy).abs()) < 1e-10


def test_padding_moves_no_text_and_its_tokens_are_never_seen():
    model = ours(peer())
    results = {}
    for side in ("left", "right"):
        ids, mask, _ = padded(side)
        ids = torch.where(mask.bool(), ids, 7)
        for row, length in enumerate(LENGTHS):
            alone = model(ids[row][mask[row].bool()][None], torch.ones(1, length, dtype=torch.long))[0]
            inside = model(ids, mask)[row][mask[row].bool()]
            results[f"{side}/{row}"] = float((alone - inside).abs().max().detach())
    worst(results, 1e-10)


def test_bfloat16_autocast_stays_near_float32_and_keeps_float32_logits_and_gradients():
    theirs = peer(torch.float32)
    model = ours(theirs)
    ids, mask, positions = padded("right")
    expected = theirs(ids, attention_mask=mask, position_ids=positions).logits
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model.logits(model(ids, mask))
    assert logits.dtype == torch.float32
    logits.sum().backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    error = (logits - expected)[mask.bool()].abs().max() / expected.abs().max()
    worst({"logits": float(error.detach())}, 2e-2)


def test_greedy_generation_is_that_of_transformers_token_by_token():
    theirs = peer()
    ids, mask, _ = padded("left")
    expected = theirs.generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=12, eos_token_id=5, pad_token_id=0, bos_token_id=0
    )[:, LONGEST:]
    got = generate(ours(theirs), ids, mask, max_new_tokens=12, stop=end_of_text(5, 61, len(ids)))
    assert got.tokens_BC.tolist() == expected.tolist()
    assert len(set(got.tokens_BC.flatten().tolist())) > 5  # not one token for ever


def test_sampled_logp_is_that_of_scoring_the_whole_text_again():
    model = ours(peer())
    ids, mask, _ = padded("left")
    ids, mask = ids.repeat_interleave(20, 0), mask.repeat_interleave(20, 0)
    stop = end_of_text(5, 61, len(ids))
    sampled = generate(model, ids, mask, max_new_tokens=10, sampling=Sampling(1.7), stop=stop, generator=_generator())
    whole = torch.cat([mask, sampled.mask_BC], 1)
    completion = torch.cat([torch.zeros_like(mask), sampled.mask_BC], 1)
    logp, _ = score(model, torch.cat([ids, sampled.tokens_BC], 1), whole, completion, 1.7)
    worst({"logp": float((logp[:, LONGEST:] - sampled.logp_BC).abs().max().detach())}, 1e-10)
    ends = sampled.mask_BC.sum(1) - 1
    last = sampled.tokens_BC.gather(1, ends[:, None])[:, 0]
    assert torch.equal(last == 5, sampled.stopped_B)
    assert 0 < int(sampled.stopped_B.sum()) < len(ids)


def test_sampling_follows_the_tempered_distribution():
    model = ours(peer())
    ids, mask = torch.tensor([[3, 4, 5]]).repeat(4000, 1), torch.ones(4000, 3, dtype=torch.long)
    once = generate(
        model,
        ids,
        mask,
        max_new_tokens=1,
        sampling=Sampling(2.0),
        stop=end_of_text(0, 61, 4000),
        generator=_generator(),
    )
    expected = torch.softmax(model.logits(model(ids[:1], mask[:1])[:, -1]) / 2.0, -1)[0]
    counts = torch.bincount(once.tokens_BC[:, 0], minlength=61)
    spread = (4000 * expected * (1 - expected)).sqrt()
    assert float(((counts - 4000 * expected).abs() / spread.clamp(min=1)).max()) < 5  # standard deviations


@pytest.mark.parametrize(
    "settings",
    [
        Sampling(0.7, top_k=5),
        Sampling(1.3, top_p=0.6),
        Sampling(1.0, min_p=0.2),
        Sampling(0.8, repetition_penalty=1.5),
        Sampling(1.1, top_k=20, top_p=0.9, min_p=0.05, repetition_penalty=0.8),
    ],
)
def test_every_sampling_setting_allows_what_transformers_allows(settings):
    """The distribution after transformers' own processors, in the order its `generate` applies them."""
    generator = _generator()
    logits = 3 * torch.randn(50, 61, dtype=torch.float64, generator=generator)
    texts = torch.randint(0, 61, (50, 9), generator=generator)
    processors = [RepetitionPenaltyLogitsProcessor(settings.repetition_penalty)]
    processors += [TemperatureLogitsWarper(settings.temperature)]
    processors += [TopKLogitsWarper(settings.top_k)] if settings.top_k else []
    processors += [TopPLogitsWarper(settings.top_p)] if settings.top_p < 1 else []
    processors += [MinPLogitsWarper(settings.min_p)] if settings.min_p else []
    expected = logits
    for processor in processors:
        expected = processor(texts, expected)
    seen = torch.zeros(50, 61, dtype=torch.bool).scatter(1, texts, True)
    actual = allowed_distribution(logits, settings, seen if settings.repetition_penalty != 1 else None)
    worst({"probability": float((actual - expected.softmax(-1)).abs().max())}, 1e-12)
    assert (actual == 0).any() or settings.repetition_penalty != 1


def test_a_row_stops_where_its_automaton_accepts():
    model = ours(peer())
    next_SV = torch.tensor([[1] * 61, [2] * 61, [3] * 61, [3] * 61])  # any token is a step; 3 accepts
    ids, mask, _ = padded("left")
    got = generate(model, ids, mask, max_new_tokens=5, stop=StopTable(next_SV, 3, torch.tensor([0, 1, 2])))
    assert got.mask_BC.sum(1).tolist() == [3, 2, 1]
    assert got.tokens_BC.shape == (3, 3)
    with pytest.raises(ValueError, match="padded on the left"):
        generate(model, ids, padded("right")[1], max_new_tokens=1, stop=end_of_text(0, 61, 3))


def test_weights_travel_to_transformers_and_back(tmp_path):
    theirs = peer()
    save_hf(tmp_path / "ours", ours(theirs))
    again = GPT2LMHeadModel.from_pretrained(tmp_path / "ours", dtype=torch.float64)
    assert all(torch.equal(p, again.state_dict()[name]) for name, p in theirs.state_dict().items())
    theirs.save_pretrained(tmp_path / "theirs")
    back = load_hf(tmp_path / "theirs", dtype=torch.float64)
    assert all(torch.equal(p, theirs.state_dict()[name]) for name, p in back.named_parameters())
    assert back.config == TINY


def test_an_mlp_of_its_own_width_is_read_and_written(tmp_path):
    theirs, (ids, mask, positions) = peer(n_inner=40), padded("left")
    theirs.save_pretrained(tmp_path / "theirs")
    save_hf(tmp_path / "ours", load_hf(tmp_path / "theirs", dtype=torch.float64))
    again = load_hf(tmp_path / "ours", dtype=torch.float64)
    expected = theirs(ids, attention_mask=mask, position_ids=positions).logits
    error = (again.logits(again(ids, mask)) - expected)[mask.bool()].abs().max()
    worst({"logits": float(error.detach())}, 1e-10)


def test_weights_without_prefix_are_read_and_wrong_ones_refused(tmp_path):
    save_hf(tmp_path, ours(peer()))
    good = load_file(tmp_path / "model.safetensors")

    def write(tensors):
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")

    write(
        {name.removeprefix("transformer."): tensor for name, tensor in good.items()} | {"h.0.attn.bias": torch.ones(1)}
    )
    assert torch.equal(load_hf(tmp_path, dtype=torch.float64).head_VH, good["transformer.wte.weight"])
    write(good | {"lm_head.weight": good["transformer.wte.weight"] + 1})
    with pytest.raises(ValueError, match="head is its embedding"):
        load_hf(tmp_path)
    write({name: tensor for name, tensor in good.items() if not name.endswith("ln_f.bias")})
    with pytest.raises(ValueError, match=r"ln_f\.bias missing"):
        load_hf(tmp_path)
    described = json.loads((tmp_path / "config.json").read_text()) | {"n_positions": 25}
    (tmp_path / "config.json").write_text(json.dumps(described))
    with pytest.raises(ValueError, match=r"config\.json means"):
        write(good)
        load_hf(tmp_path)


def test_gpt2_small_has_148_tensors_and_124439808_parameters():
    with torch.device("meta"):
        model = GPT2(GPT2Config(50257, 12, 12, 768, 1024))
    sizes = [p.numel() for p in model.parameters()]
    assert (len(sizes), sum(sizes)) == (148, 124_439_808)


def test_initialisation_is_gpt2s():
    model = GPT2(TINY).initialise(_generator())
    stds = {name: float(p.detach().std()) for name, p in model.named_parameters() if p.ndim == 2}
    for name, std in stds.items():
        expected = 0.02 / np.sqrt(6) if name.endswith("c_proj.weight") else 0.02
        assert std == pytest.approx(expected, rel=0.1), name
    assert not any(p.any() for name, p in model.named_parameters() if name.endswith("bias"))


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)
