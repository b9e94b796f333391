"""Folders as models come in: ids, texts, ends and chats are those of `transformers.AutoTokenizer`, and the files go through."""

import json
from pathlib import Path

import pytest
import tokenizers
from flax import nnx
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from jax_grpo.config.model import ModelConfig
from jax_grpo.model.architecture import Architecture
from jax_grpo.model.decoder import Decoder
from jax_grpo.model.tokenizer import Tokenizer, TokenizerError, tokenizer_of
from jax_grpo.model.weights import save_hf
from jax_grpo.prompts.chat import ChatTemplate, ChatTemplateError
from jax_grpo.rollout.generate import encode_prompts
from jax_grpo.tasks.stop import text_stop

TEXT = ["in 2023 and 2024 there were 650841823 of 2023, the cat's dogs don't", "Grün\n\n  is <b> 棋"] * 20
END, START, STOP, USER = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|user|>"
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
WITH_BOS = "{{ bos_token }}" + CHATML + "{{ pad_token }}|{{ eos_token }}"
FAST = {"tokenizer_class": "PreTrainedTokenizerFast"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def byte_level(special=(END, START, STOP), rules=None) -> tokenizers.Tokenizer:
    """A byte-level BPE that learnt by GPT-2's rules, and cuts by others where they are given."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(TEXT, trainer)
    made.pre_tokenizer = rules or made.pre_tokenizer
    return made


def begun_with(made: tokenizers.Tokenizer, token: str) -> tokenizers.Tokenizer:
    """The tokenizer that puts a token before a text."""
    ids = [(token, made.token_to_id(token))]
    made.post_processor = processors.TemplateProcessing(f"{token} $A", special_tokens=ids)
    return made


def write(folder: Path, made: tokenizers.Tokenizer | None = None, parts: tokenizers.Tokenizer | None = None, **files):
    """tokenizer.json of one, vocab.json and merges.txt of another, and files by name, JSON but for texts."""
    folder.mkdir(exist_ok=True)
    if made is not None:
        made.save(str(folder / "tokenizer.json"))
    if parts is not None:
        parts.model.save(str(folder))
    for name, content in files.items():
        file = folder / (f"{name}.jinja" if isinstance(content, str) else f"{name}.json")
        file.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")


def gpt2(folder):
    write(folder, parts=byte_level(), config={"model_type": "gpt2", "eos_token_id": 0, "bos_token_id": 0})


def gpt2_that_begins_texts(folder):
    settings = {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True, "model_max_length": 8, "pad_token": STOP}
    write(folder, parts=byte_level(), config={"model_type": "gpt2"}, tokenizer_config=settings, chat_template=WITH_BOS)


def gpt2_with_added_tokens_json(folder):
    small = byte_level([END])
    size = small.get_vocab_size()
    write(
        folder,
        parts=small,
        config={"model_type": "gpt2"},
        added_tokens={START: size, STOP: size + 1, "Wiese": size + 2},
        special_tokens_map={"eos_token": STOP, "bos_token": {"content": END}},
        tokenizer_config={
            "tokenizer_class": "GPT2Tokenizer",
            "chat_template": WITH_BOS,
            "additional_special_tokens": [START],
        },
    )


def gpt2_with_an_added_tokens_decoder(folder):
    small = byte_level([END])
    flags = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
    numbers = {START: small.get_vocab_size(), STOP: small.get_vocab_size() + 1, END: 0}
    settings = {"added_tokens_decoder": {str(i): {"content": text, **flags} for text, i in numbers.items()}}
    settings |= {"tokenizer_class": "GPT2Tokenizer", "eos_token": END, "pad_token": END, "chat_template": CHATML}
    write(folder, parts=small, config={"model_type": "gpt2"}, tokenizer_config=settings)


def tokenizer_json_alone(folder):
    settings = FAST | {"eos_token": STOP, "chat_template": WITH_BOS, "pad_token": None, "model_max_length": 1e30}
    write(folder, byte_level(), tokenizer_config=settings)


def tokenizer_json_with_other_rules_beside_vocab_json(folder):
    digits = pre_tokenizers.Digits(individual_digits=True)
    rules = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    made = byte_level(rules=rules)
    write(folder, made, parts=made, tokenizer_config=FAST | {"eos_token": END, "chat_template": CHATML})


def llama3(folder):
    made = begun_with(byte_level([END, START, STOP, USER]), USER)
    settings = FAST | {"bos_token": USER, "eos_token": STOP, "chat_template": WITH_BOS, "add_bos_token": False}
    ends = {"eos_token_id": [0, 2, 1], "bos_token_id": 3}
    write(folder, made, tokenizer_config=settings, generation_config=ends, config={"model_type": "llama"} | ends)


def qwen(folder):
    cuts = [pre_tokenizers.Split(Regex(QWEN), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    made = byte_level(rules=pre_tokenizers.Sequence(cuts))
    made.normalizer = normalizers.NFC()
    settings = {"tokenizer_class": "Qwen2Tokenizer", "bos_token": None, "eos_token": STOP, "pad_token": END}
    settings |= {"additional_special_tokens": [START, STOP], "chat_template": WITH_BOS, "model_max_length": 32768}
    model = {"model_type": "qwen2", "bos_token_id": 0, "eos_token_id": 2}
    ends = {"eos_token_id": [2, 0], "pad_token_id": 0, "temperature": 0.7, "do_sample": True}
    write(folder, made, parts=made, tokenizer_config=settings, generation_config=ends, config=model)


def sentencepiece(special, prefix: bool) -> tokenizers.Tokenizer:
    """As Gemma's and Llama 2's: BPE over blanks written as a sign, with bytes for the rest."""
    pieces = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *"▁inthec2034", "▁in", "th", "the", "▁the"]
    merges = [("▁", "in"), ("i", "n"), ("t", "h"), ("th", "e"), ("▁", "the")]
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys([*pieces, "in"]))}
    model = models.BPE(vocabulary, merges, fuse_unk=True, byte_fallback=True, unk_token="<unk>")
    made = tokenizers.Tokenizer(model)
    made.add_special_tokens(list(special))
    decoder = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        decoder.append(decoders.Strip(" ", 1, 0))
    else:
        made.normalizer = normalizers.Replace(" ", "▁")
        made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    made.decoder = decoders.Sequence(decoder)
    return made


def gemma(folder):
    made = sentencepiece(["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", START, STOP], prefix=False)
    settings = {"tokenizer_class": "GemmaTokenizer", "bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    settings |= {"unk_token": "<unk>", "add_bos_token": True, "extra_special_tokens": {"image_token": START}}
    ends = {"eos_token_id": [1, 6], "pad_token_id": 0, "bos_token_id": 2}
    model = {"model_type": "gemma3_text", "eos_token_id": 1}
    made = begun_with(made, "<bos>")
    write(folder, made, tokenizer_config=settings, generation_config=ends, config=model, chat_template=WITH_BOS)


def tinyllama(folder):
    made = begun_with(sentencepiece(["<unk>", "<s>", "</s>"], prefix=True), "<s>")
    named = {"bos_token": {"content": "<s>"}, "eos_token": {"content": "</s>"}, "unk_token": {"content": "<unk>"}}
    settings = {"tokenizer_class": "LlamaTokenizer", "chat_template": CHATML, "pad_token": "</s>", "legacy": False}
    settings |= {"bos_token": "<s>", "eos_token": "</s>"}
    model = {"model_type": "llama", "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": -1}
    write(folder, made, tokenizer_config=settings, special_tokens_map=named, config=model)
    (folder / "tokenizer.model").write_bytes(b"\x00\xffSentencePiece")


def names_in_the_map_alone(folder):
    named = {"bos_token": START, "eos_token": {"content": STOP, "lstrip": False}, "pad_token": END}
    write(folder, byte_level(), tokenizer_config=FAST, special_tokens_map=named, chat_template=WITH_BOS)


def named_templates(folder):
    templates = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": "{{ tools | tojson }}"}]
    write(folder, byte_level(), tokenizer_config=FAST | {"eos_token": STOP, "chat_template": templates})


def templates_in_files(folder):
    settings = FAST | {"eos_token": STOP, "chat_template": "another"}
    write(folder, byte_level(), tokenizer_config=settings, chat_template=WITH_BOS)
    write(folder / "additional_chat_templates", tool_use="{{ tools | tojson }}{{ eos_token }}")


def special_tokens_that_the_rules_leave_out(folder):
    made = byte_level()
    plain = json.loads(made.to_str()) | {
        "added_tokens": []
    }  # they are in the vocabulary, and nobody says that they are whole
    made = tokenizers.Tokenizer.from_str(json.dumps(plain))
    more = {"extra_special_tokens": [START], "eos_token": STOP, "mask_token": "<mask>", "pad_token": END}
    write(folder, made, tokenizer_config=FAST | more | {"chat_template": CHATML})


STYLES = {
    style.__name__: style
    for style in (
        *(gpt2, gpt2_that_begins_texts, gpt2_with_added_tokens_json, gpt2_with_an_added_tokens_decoder),
        *(tokenizer_json_alone, tokenizer_json_with_other_rules_beside_vocab_json, llama3, qwen, gemma, tinyllama),
        *(names_in_the_map_alone, named_templates, templates_in_files, special_tokens_that_the_rules_leave_out),
    )
}
TEXTS = [
    *TEXT[:2],
    "",
    " in",
    "2024",
    f"{END}Q: 2+2?",
    f"a{STOP}\n{START}system\nb{USER} ",
    "<bos>the</s><pad><mask>Wiese",
]
CHATS = [
    [{"role": "user", "content": f"hi{STOP}\n{START}system\nthe 2024"}],
    [{"role": "system", "content": "in"}, {"role": "user", "content": " the "}],
]


@pytest.fixture(params=STYLES)
def folder(request, tmp_path) -> Path:
    STYLES[request.param](tmp_path / "in")
    return tmp_path / "in"


def theirs_of(folder: Path):
    """`transformers`' tokenizer, and the ids that end a completion by its and TRL's rule."""
    theirs, ends = AutoTokenizer.from_pretrained(folder), []
    if (folder / "generation_config.json").is_file():
        ends = GenerationConfig.from_pretrained(folder).eos_token_id
    elif (folder / "config.json").is_file():
        ends = getattr(AutoConfig.from_pretrained(folder), "eos_token_id", None)
    ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
    return theirs, list(dict.fromkeys([theirs.eos_token_id, *(i for i in ends if i < len(theirs))]))


def require_same(ours: Tokenizer, theirs, ends: list[int]) -> None:
    assert ours.vocab_size == len(theirs) and list(ours.eos_ids) == ends
    assert ours.pad_id == (theirs.eos_token_id if theirs.pad_token_id is None else theirs.pad_token_id)
    for text in TEXTS:
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text) == ids, text
        assert ours.decode(ids) == theirs.decode([i for i in ids if i not in ends], skip_special_tokens=True), text
        requested = theirs(text)["input_ids"]
        twice = requested[:2] == [theirs.bos_token_id] * 2
        assert ours.encode_prompts([text]) == [requested[1:] if twice else requested], text


def test_a_folder_is_what_transformers_makes_of_it(folder):
    require_same(Tokenizer.load(str(folder)), *theirs_of(folder))


def test_chats_have_the_text_and_the_ids_of_transformers(folder):
    if folder.parent.name.startswith("test_chats") and not list(folder.glob("*.jinja")):
        settings = folder / "tokenizer_config.json"
        if not settings.is_file() or "chat_template" not in json.loads(settings.read_text()):
            (folder / "chat_template.jinja").write_text(WITH_BOS)
    ours, template, theirs = Tokenizer.load(str(folder)), ChatTemplate(str(folder)), theirs_of(folder)[0]
    for chat in CHATS:
        for tools in (None, [TOOL]):
            requested = {"tools": tools, "add_generation_prompt": True}
            text = template.render(chat, tools)
            assert text == theirs.apply_chat_template(chat, tokenize=False, **requested)
            ids = theirs.apply_chat_template(chat, return_dict=True, **requested)["input_ids"]
            assert ours.encode_prompts([text, "in", text])[::2] == [ids, ids]


def test_an_export_has_the_files_byte_for_byte_and_the_same_ids_and_ends(folder, tmp_path):
    ours = Tokenizer.load(str(folder))
    size = Architecture(ours.vocab_size, num_layers=1, num_heads=1, hidden_size=8, max_position_embeddings=8)
    save_hf(tmp_path / "out", size, nnx.state(Decoder(size, rngs=nnx.Rngs(0)), nnx.Param), ours)
    for file in folder.rglob("*.*"):
        if file.name != "config.json":
            assert (tmp_path / "out" / file.relative_to(folder)).read_bytes() == file.read_bytes()
    again, ends = theirs_of(tmp_path / "out")
    require_same(Tokenizer.load(str(tmp_path / "out")), again, ends)
    assert ends == list(ours.eos_ids) and Tokenizer.load(str(tmp_path / "out")).fingerprint() == ours.fingerprint()


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    "name, content, sentence",
    [
        ("tokenizer_config.json", f'{{"a": {DEEP}', r"tokenizer_config\.json: not JSON \(nested too deeply\)"),
        ("config.json", f'{{"a": {DEEP}', r"/config\.json: not JSON \(nested too deeply\)"),
        ("generation_config.json", DEEP, r"generation_config\.json: not JSON \(nested too deeply\)"),
        ("tokenizer.json", f'{{"a": {DEEP}', r"tokenizer\.json is not a tokenizer of the `tokenizers` library"),
        ("tokenizer_config.json", b"\xff{}", r"tokenizer_config\.json: not JSON"),
        ("tokenizer_config.json", '{"eos_token": 2}', r"tokenizer_config\.json: eos_token is 2; expected a text"),
        ("special_tokens_map.json", '{"bos_token": ["a"]}', r"special_tokens_map\.json: bos_token is \['a'\]; expected a text"),
        ("tokenizer_config.json", '{"additional_special_tokens": [7]}', r"additional_special_tokens is \[7\]; expected a list"),
        ("tokenizer_config.json", '{"added_tokens_decoder": [1]}', r"added_tokens_decoder is \[1\]; expected tokens by"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"0": 1}}', r"token '0' is 1; expected a number, and a text with"),
        (
            "tokenizer_config.json",
            '{"added_tokens_decoder": {"0": {"content": "a", "lstrip": 3}}}',
            r"token '0' is \{'content': 'a', 'lstrip': 3\}; expected a number, and a text with its flags",
        ),
        ("added_tokens.json", '{"<a>": "x"}', r"added_tokens\.json: token 'x' is '<a>'; expected a number"),
        ("added_tokens.json", '{"<a>": 9000}', r"added_tokens\.json: token '<a>' is 9000, where \d+ follows the others"),
        ("generation_config.json", '{"eos_token_id": "2"}', r"generation_config\.json: eos_token_id is \['2'\]; expected a number"),
        ("generation_config.json", '{"eos_token_id": [[2]]}', r"eos_token_id is \[\[2\]\]; expected a number, or several"),
    ],
)  # fmt: skip
def test_a_file_of_a_tokenizer_that_cannot_be_used_is_one_error(tmp_path, name, content, sentence):
    write(tmp_path, byte_level(), tokenizer_config=FAST | {"eos_token": STOP}, chat_template=CHATML)
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(TokenizerError, match=sentence) as raised:
        Tokenizer.load(str(tmp_path))
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 400
    with pytest.raises(ChatTemplateError, match=sentence):
        ChatTemplate(str(tmp_path)).render(CHATS[0])


@pytest.mark.parametrize(
    "template", [[1, 2], 7, [{"name": "default"}], [{"name": 1, "template": ""}], {"default": 1}, [["default", "x"]]]
)
def test_a_chat_template_of_another_type_is_one_error(tmp_path, template):
    write(tmp_path, byte_level(), tokenizer_config=FAST | {"eos_token": STOP, "chat_template": template})
    with pytest.raises(
        ChatTemplateError, match=r"tokenizer_config\.json: chat_template has .*; expected a text, or a list of"
    ):
        ChatTemplate(str(tmp_path)).render(CHATS[0])


def test_templates_without_a_default_and_one_that_is_not_utf8_are_named(tmp_path):
    write(tmp_path / "a", byte_level(), tokenizer_config=FAST | {"eos_token": STOP})
    write(tmp_path / "a" / "additional_chat_templates", rag="")
    with pytest.raises(ChatTemplateError, match="has the chat templates rag, and none called 'default'"):
        ChatTemplate(str(tmp_path / "a")).render(CHATS[0])
    (tmp_path / "a" / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ChatTemplateError, match=r"chat_template\.jinja: not UTF-8"):
        ChatTemplate(str(tmp_path / "a")).render(CHATS[0])


@pytest.mark.parametrize("kind", ["Qwen2Tokenizer", "RobertaTokenizerFast"])
def test_vocab_json_of_a_class_with_other_rules_is_refused(tmp_path, kind):
    write(tmp_path, parts=byte_level(), tokenizer_config={"tokenizer_class": kind, "eos_token": END})
    with pytest.raises(
        TokenizerError, match=rf"is read by GPT-2's rules, not those of '{kind}'; write one: AutoTokenizer"
    ):
        Tokenizer.load(str(tmp_path))
    (tmp_path / "vocab.json").unlink()
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(
        TokenizerError, match=r"has neither tokenizer\.json nor vocab\.json and merges\.txt\. write one: Auto"
    ):
        Tokenizer.load(str(tmp_path))


def test_every_end_of_text_stops_a_completion_and_pads_none(tmp_path):
    gemma(tmp_path)
    tokenizer = Tokenizer.load(str(tmp_path))
    rule = text_stop("zzz")
    table = rule.token_table(tokenizer)
    assert (table[:, [1, 6]] == rule.accept).all() and (table[: rule.accept, [0, 2, 5]] != rule.accept).all()
    assert (tokenizer.pad_id, tokenizer.token_bytes()[6], tokenizer.token_bytes()[1]) == (0, b"", b"")
    assert rule.text([tokenizer.encode("in")[0], 6], 0, tokenizer) == "in"
    ids_PT, mask_PT = encode_prompts(["in the", ""], tokenizer, 16)
    assert ids_PT[1, -1] == 2 and mask_PT[1].sum() == 1 and (ids_PT[1, :-1] == 0).all()


def test_the_tokenizer_of_weights_is_found_by_itself(tmp_path):
    qwen(tmp_path)
    assert tokenizer_of(ModelConfig(weights=str(tmp_path))) == str(tmp_path)
    assert tokenizer_of(ModelConfig(weights=str(tmp_path), tokenizer="chess")) == "chess"
    assert tokenizer_of(ModelConfig(weights="packaged:rook-small")).endswith("rook-small")
    sizes = {"num_layers": 1, "num_heads": 1, "hidden_size": 8, "max_position_embeddings": 8}
    assert tokenizer_of(ModelConfig(**sizes)) == ModelConfig(**sizes).tokenizer == "gpt2"
