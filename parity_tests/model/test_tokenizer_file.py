"""Any tokenizer.json: the ids and texts of `transformers`, the bytes of tokens, end-of-text, the files through an export."""

import json
import random
from pathlib import Path

import pytest
import tokenizers
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from jax_grpo.config import ConfigError
from jax_grpo.config.model import ModelConfig
from jax_grpo.config.tasks import task_of
from jax_grpo.export.__main__ import export_hf
from jax_grpo.model.tokenizer import Tokenizer, TokenizerError, find_tokenizer
from jax_grpo.model.weights import save_hf
from jax_grpo.policy.named import load_model, load_named
from jax_grpo.tasks import make_task
from jax_grpo.tasks.stop import text_stop
from torch_ref import train as torch_train

TEXT = ["The cat sees the dog, and the dog sees a cat.", "Grün ist die Wiese.\n\nNo!", "<a> 1 + 2 = 3 & 棋"] * 20
SPECIAL = ["</s>", "<unk>", "<|user|>"]
END = "</s>"
KINDS = ("bytes", "unigram", "words", "wordpiece", "fallback")


def trained(kind: str) -> tokenizers.Tokenizer:
    """A tokenizer of each kind, of some hundred tokens; one puts tokens around a text and cuts it, where nobody says not to."""
    if kind == "bytes":
        made = tokenizers.Tokenizer(models.BPE())
        made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        made.train_from_iterator(
            TEXT, trainers.BpeTrainer(vocab_size=320, special_tokens=SPECIAL, initial_alphabet=alphabet)
        )
        made.post_processor = processors.TemplateProcessing(
            "<|user|> $A </s>", special_tokens=[("<|user|>", 2), (END, 0)]
        )
        made.enable_truncation(8)
        made.enable_padding(length=12, pad_id=0, pad_token=END)
        made.add_tokens([AddedToken("Wiese", special=False)])
    elif kind == "unigram":
        made = tokenizers.Tokenizer(models.Unigram())
        made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
        made.train_from_iterator(
            TEXT, trainers.UnigramTrainer(vocab_size=80, special_tokens=SPECIAL, unk_token="<unk>")
        )
    elif kind == "fallback":  # as Llama's
        vocabulary = {
            name: i for i, name in enumerate([*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a"])
        }
        made = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[("▁", "a")], byte_fallback=True))
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        made.decoder = decoders.Sequence(parts)
        made.add_special_tokens(SPECIAL)
    elif kind == "wordpiece":  # as GPT-2s with BERT's vocabulary
        made = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
        made.pre_tokenizer, made.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece(cleanup=False)
        made.train_from_iterator(TEXT, trainers.WordPieceTrainer(vocab_size=150, special_tokens=SPECIAL))
    else:
        made = tokenizers.Tokenizer(models.WordLevel(unk_token="<unk>"))
        made.pre_tokenizer = pre_tokenizers.Whitespace()
        made.train_from_iterator(TEXT, trainers.WordLevelTrainer(special_tokens=SPECIAL))
    return made


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """A folder of each kind: tokenizer.json, and a tokenizer_config.json that names end-of-text."""
    made = {kind: tmp_path_factory.mktemp(kind) for kind in KINDS}
    for kind, folder in made.items():
        trained(kind).save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(
            json.dumps({"eos_token": {"__type": "AddedToken", "content": END}, "kept": "ü"})
        )
    return made


@pytest.fixture(scope="module")
def pairs(folders) -> dict[str, tuple[Tokenizer, PreTrainedTokenizerFast]]:
    """Ours and `transformers`' of each kind."""
    return {
        kind: (
            Tokenizer.load(str(folder)),
            PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), eos_token=END),
        )
        for kind, folder in folders.items()
    }


def test_any_text_has_the_ids_of_transformers_and_they_its_text(pairs):
    @given(
        st.text(max_size=60)
        | st.lists(st.sampled_from([*SPECIAL, "the", " ", "cat", "\n", "ü", "Wiese", "."])).map("".join)
    )
    def same(text):
        text = text.encode("utf-8", errors="replace").decode()
        for kind, (ours, theirs) in pairs.items():
            ids = theirs(text, add_special_tokens=False)["input_ids"]
            assert ours.encode(text) == ids, (kind, text)
            assert ours.encode_batch([text, "The cat"])[0] == ids, (kind, text)
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), (kind, text)

    same()


def test_any_ids_have_the_text_of_transformers(pairs):
    rng = random.Random(0)
    for kind, (ours, theirs) in pairs.items():
        assert ours.vocab_size == len(theirs)
        for _ in range(300):
            ids = [rng.randrange(ours.vocab_size) for _ in range(rng.randint(0, 12))]
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), (kind, ids)


def test_the_bytes_of_tokens_make_up_the_text(pairs):
    rng = random.Random(1)
    for kind, (ours, _) in pairs.items():
        pieces, begins = ours.token_bytes(), ours.encode("a")[0]
        assert len(pieces) == ours.vocab_size
        for _ in range(300):
            ids = [begins, *(rng.randrange(ours.vocab_size) for _ in range(rng.randint(0, 12)))]
            text, output = ours.decode(ids), b"".join(pieces[i] for i in ids).decode("utf-8", errors="replace")
            # A run of byte tokens that is no text as a whole is none in any part to the fallback's decoder.
            assert text.lstrip() == output.lstrip() or (kind == "fallback" and "\ufffd" in text), (kind, ids)


def test_a_stop_text_within_tokens_ends_a_completion_where_the_text_has_it(pairs):
    rule = text_stop(" dog")
    for kind in ("bytes", "unigram", "words"):
        tokenizer, _ = pairs[kind]
        table, state = rule.token_table(tokenizer), 0
        ids = tokenizer.encode("The cat sees the dog and")
        read = [state := int(table[state, token]) for token in ids]
        text = tokenizer.decode(ids[: read.index(rule.accept) + 1])
        assert rule.truncate(text, 0) == ("The cat sees the", True), kind
        assert table[0, tokenizer.eos_id] == rule.accept


def test_a_gap_in_the_ids_is_a_token_that_nothing_says(tmp_path):
    model = models.WordLevel({"a": 0, END: 1, "b": 4}, unk_token="a")
    tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"eos_token_id": 1}')
    made = Tokenizer.load(str(tmp_path))
    assert (made.vocab_size, made.decode([0, 3, 4]), made.token_bytes()[2:]) == (5, "a b", [b"", b"", b" b"])


@pytest.mark.parametrize(
    "files, end",
    [
        ({"tokenizer_config.json": {"eos_token": "<unk>"}, "config.json": {"eos_token_id": 0}}, "<unk>"),
        (
            {"tokenizer_config.json": {"eos_token": None}, "generation_config.json": {"eos_token_id": [2, 0]}},
            "<|user|>",
        ),
        ({"generation_config.json": {}, "config.json": {"eos_token_id": 0}}, END),
    ],
)
def test_end_of_text_is_what_the_files_beside_it_say(tmp_path, folders, files, end):
    (tmp_path / "tokenizer.json").write_bytes((folders["bytes"] / "tokenizer.json").read_bytes())
    for name, settings in files.items():
        (tmp_path / name).write_text(json.dumps(settings))
    made = Tokenizer.load(str(tmp_path))
    assert made.eos_id == made.pad_id == SPECIAL.index(end)
    made.save(tmp_path / "again")
    again = Tokenizer.load(str(tmp_path / "again"))
    assert again.eos_id == made.eos_id
    assert (tmp_path / "again" / "tokenizer.json").read_bytes() == (tmp_path / "tokenizer.json").read_bytes()


@pytest.mark.parametrize(
    "files, sentence",
    [
        ({}, r"tokenizer\.json: nothing says which token ends a text; expected eos_token in tokenizer_config\.json"),
        (
            {"tokenizer_config.json": '{"eos_token": "<end>"}'},
            r"eos_token in .*tokenizer_config\.json is '<end>', which .* no token",
        ),
        ({"config.json": '{"eos_token_id": 50256}'}, r"eos_token_id in .*config\.json is 50256, which .* no token for"),
        ({"tokenizer_config.json": "{"}, r"tokenizer_config\.json: not JSON"),
        ({"config.json": "[1]"}, r"config\.json: \[1\]; expected an object"),
        ({"tokenizer.json": "{}"}, r"tokenizer\.json is not a tokenizer of the `tokenizers` library"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path, folders, files, sentence):
    (tmp_path / "tokenizer.json").write_bytes((folders["words"] / "tokenizer.json").read_bytes())
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(TokenizerError, match=sentence):
        Tokenizer.load(str(tmp_path))


def model_config(tokenizer: Path, **sizes) -> ModelConfig:
    sizes = {"num_layers": 1, "num_heads": 2, "hidden_size": 16, "max_position_embeddings": 64} | sizes
    return ModelConfig(tokenizer=str(tokenizer), **sizes)


def test_an_export_has_the_tokenizer_as_it_came_and_transformers_reads_it(tmp_path, folders, pairs):
    folder = folders["bytes"]
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    ours, theirs = Tokenizer.load(str(folder)), pairs["bytes"][1]
    architecture, _, params = load_model(model_config(folder, vocab_size=ours.vocab_size + 7), 0, 64, ours.vocab_size)
    save_hf(tmp_path / "made", architecture, params, ours)
    assert find_tokenizer(str(tmp_path / "made")) == str(tmp_path / "made")
    export_hf(str(tmp_path / "made"), tmp_path / "out")
    again = AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in [*TEXT[:3], "<|user|>the cat</s>"]:
        ids = again(text, add_special_tokens=False)["input_ids"]
        assert ids == ours.encode(text) == theirs(text, add_special_tokens=False)["input_ids"]
    assert (again.eos_token, again.chat_template, again.init_kwargs["kept"]) == (END, "{{ messages[0].content }}", "ü")
    assert load_named(str(tmp_path / "out")).tokenizer.fingerprint() == ours.fingerprint()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.generation_config.eos_token_id == ours.eos_id
    assert torch.isfinite(model(torch.tensor([ours.encode("The cat")])).logits).all()


def test_a_model_with_fewer_rows_than_the_tokenizer_has_tokens_is_refused_in_both(folders):
    tokenizer = Tokenizer.load(str(folders["bytes"]))
    model = model_config(folders["bytes"], vocab_size=tokenizer.vocab_size - 1)
    sentence = rf"has {tokenizer.vocab_size} tokens but the model's vocabulary has {tokenizer.vocab_size - 1}"
    with pytest.raises(ConfigError, match=sentence):
        load_model(model, 0, 8, tokenizer.vocab_size)
    with pytest.raises(ConfigError, match=sentence):
        torch_train.load_model(model, 0, tokenizer)


@pytest.mark.parametrize("task", ["policy", "environment", "guess"])
def test_a_task_whose_answers_cannot_be_written_is_refused(pairs, task):
    made = make_task(task_of(name=task))
    for name in ("gpt2", "chess"):
        Tokenizer.load(name).require_writable(made.answers, task)
    pairs["bytes"][0].require_writable(made.answers, task)
    with pytest.raises(TokenizerError, match=rf"task '{task}' is answered with texts such as .* writes as '"):
        pairs["unigram"][0].require_writable(made.answers, task)
