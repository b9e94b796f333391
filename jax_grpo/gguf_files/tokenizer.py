"""The tokenizer in a GGUF's metadata as a tokenizer.json, and what belongs to tokenizer_config.json.

Two kinds: byte-level BPE (`gpt2`), which cuts a text by the rule that `tokenizer.ggml.pre` names, and SentencePiece's BPE
(`llama`), whose merges follow from its pieces' scores. The rules are llama.cpp's and those of the models' own tokenizer.json.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from jax_grpo.gguf_files.reading import GGUFFile

PREFIX = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # `tokenizer.ggml.token_type`
SPACE = "\u2581"  # what SentencePiece writes a blank as
SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
ENDS = ("eos", "eot", "eom")  # end of text, of a turn, of a message
# Keys that this module reads, and those without any effect on how a text is cut.
READ = ("model", "pre", "tokens", "token_type", "scores", "merges")
READ += ("add_space_prefix", "add_bos_token", "add_eos_token")
READ += tuple(f"{name}_token_id" for name in {*SPECIAL.values(), *ENDS})
INERT = tuple(
    f"{name}_token_id"
    for name in ("seperator", "separator", "cls", "mask", "prefix", "suffix", "middle", "fim_pre", "fim_suf", "fim_mid")
)  # fmt: skip
INERT += ("fim_pad_token_id", "fim_rep_token_id", "fim_sep_token_id", "token_type_count")
TEMPLATE, TEMPLATES = "tokenizer.chat_template", "tokenizer.chat_templates"

GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LATER_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Cutting(NamedTuple):
    """How byte-level BPE cuts a text before it merges: by each pattern in turn, within the pieces of the one before."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False  # a piece that is a token stays whole, whatever the merges
    add_bos: bool = False  # where the file does not say
    normalise: bool = False  # to Unicode's NFC


_LLAMA3 = Cutting((_LATER_WORDS.replace("DIGITS", "{1,3}"),), ignore_merges=True, add_bos=True)
_QWEN2 = Cutting((_LATER_WORDS.replace("DIGITS", ""),), normalise=True)
CUTTINGS = {
    "default": Cutting((r"[\p{P}\$\+<=>\^~\|]+", GPT2_WORDS, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": Cutting((GPT2_WORDS,)),
    "smollm": Cutting((r"\p{N}", GPT2_WORDS)),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}


def tokenizer_of(file: GGUFFile) -> tuple[Tokenizer, dict[str, Any]]:
    """The tokenizer, and tokenizer_config.json.

    Raises:
        GGUFError: a key is unknown or missing, or names a kind of tokenizer that is not read.
    """
    given = {key.removeprefix(PREFIX): value for key, value in file.fields.items() if key.startswith(PREFIX)}
    for key, value in given.items():
        if key not in (*READ, *INERT) and value not in (0, False):
            raise file.refusal(f"{PREFIX}{key} is {value!r:.60}, which is not known")
    kinds = {"gpt2": _byte_level, "llama": _sentencepiece}
    if (kind := given.get("model")) not in kinds:
        raise file.refusal(f"{PREFIX}model is {kind!r}; expected one of {', '.join(kinds)}")
    for key in ("tokens", "token_type", "eos_token_id", "merges" if kind == "gpt2" else "scores"):
        if key not in given:
            raise file.refusal(f"{PREFIX}{key} is missing")
    tokens = given["tokens"]
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name, key in SPECIAL.items():
        if (token := given.get(f"{key}_token_id")) is not None:
            if not 0 <= token < len(tokens):
                raise file.refusal(f"{PREFIX}{key}_token_id is {token}; expected an id of its {len(tokens)} tokens")
            settings[name] = tokens[token]
    settings.setdefault("pad_token", settings["eos_token"])
    vocabulary = {token: i for i, token in enumerate(tokens) if given["token_type"][i] != UNUSED}
    made, add_bos = kinds[kind](file, given, vocabulary)
    special = (CONTROL, UNKNOWN)
    added = [
        AddedToken(token, special=kind_of in special, normalized=False)
        for token, kind_of in zip(tokens, given["token_type"], strict=True)
        if kind_of in (*special, USER_DEFINED)
    ]
    made.add_tokens(added)
    settings["add_bos_token"] = bool(given.get("add_bos_token", add_bos)) and "bos_token" in settings
    settings["add_eos_token"] = bool(given.get("add_eos_token", False))
    around = [[settings[name]] if settings[f"add_{name}"] else [] for name in ("bos_token", "eos_token")]
    if any(around):
        single = [*around[0], "$A", *around[1]]
        ids = [(token, made.token_to_id(token)) for token in {*around[0], *around[1]}]
        made.post_processor = processors.TemplateProcessing(single=single, special_tokens=ids)
    return made, settings | _templates(file)


def ends_of(file: GGUFFile) -> list[int]:
    """Every token that ends an answer, the end of text first."""
    ids = (file.fields.get(f"{PREFIX}{name}_token_id") for name in ENDS)
    return list(dict.fromkeys(token for token in ids if token is not None))


def _byte_level(file: GGUFFile, given: Mapping[str, Any], vocabulary: dict[str, int]) -> tuple[Tokenizer, bool]:
    if (rule := given.get("pre", "default")) not in CUTTINGS:
        raise file.refusal(f"{PREFIX}pre is {rule!r}; expected one of {', '.join(CUTTINGS)}")
    cutting = CUTTINGS[rule]
    merges = [tuple(merge.split(" ", 1)) for merge in given["merges"]]
    try:
        made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=cutting.ignore_merges))
    except Exception as error:  # the Rust side raises bare Exception for any malformed merge
        raise file.refusal(f"{PREFIX}merges are not those of its tokens: {error}") from error
    if cutting.normalise:
        made.normalizer = normalizers.NFC()
    prefix = bool(given.get("add_space_prefix", False))
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in cutting.patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False)
    made.pre_tokenizer, made.decoder = pre_tokenizers.Sequence([*cuts, to_bytes]), decoders.ByteLevel()
    return made, cutting.add_bos


def _sentencepiece(file: GGUFFile, given: Mapping[str, Any], vocabulary: dict[str, int]) -> tuple[Tokenizer, bool]:
    """Its BPE joins the neighbours whose piece has the best score: a merge for each way to cut each piece in two."""
    normal = {token for token, i in vocabulary.items() if given["token_type"][i] == NORMAL}
    ways = [
        (-given["scores"][vocabulary[piece]], vocabulary[piece], cut, piece)
        for piece in normal
        for cut in range(1, len(piece))
        if piece[:cut] in normal and piece[cut:] in normal
    ]
    merges = [(piece[:cut], piece[cut:]) for _, _, cut, piece in sorted(ways)]
    unknown = given["tokens"][given["unknown_token_id"]] if "unknown_token_id" in given else None
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = given.get("add_space_prefix", True)
    blanks = normalizers.Replace(" ", SPACE)
    made.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), blanks]) if prefix else blanks
    decoder = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*decoder, decoders.Strip(" ", 1, 0)] if prefix else decoder)
    return made, True


def _templates(file: GGUFFile) -> dict[str, Any]:
    """The chat template, or several by name."""
    default, others = file.fields.get(TEMPLATE), file.fields.get(TEMPLATES, [])
    if not others:
        return {} if default is None else {"chat_template": default}
    named = {name: file.fields.get(f"{TEMPLATE}.{name}") for name in others} | ({"default": default} if default else {})
    return {"chat_template": [{"name": name, "template": text} for name, text in named.items() if text is not None]}
