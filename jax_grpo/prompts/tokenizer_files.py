"""A tokenizer's folder as Hugging Face's libraries write it: rules, special tokens, what ends a text, and the files themselves.

`transformers.AutoTokenizer` is the judge of what a folder means. Differs on purpose in one thing: where there is a tokenizer.json
all its rules hold, whichever class tokenizer_config.json names (some of `transformers`' classes have rules of their own). Knows no
models.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from jax_grpo.config.files import CHAT_TEMPLATE, TOKENIZER_CONFIG, TOKENIZER_FILE, read_settings

END_OF_TEXT = "<|endoftext|>"
GENERATION = "generation_config.json"
SPECIAL_MAP, ADDED, VOCABULARY, MERGES = "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"
FILES = (TOKENIZER_FILE, TOKENIZER_CONFIG, SPECIAL_MAP, ADDED, VOCABULARY, MERGES, CHAT_TEMPLATE, GENERATION)
FILES += ("tokenizer.model", "additional_chat_templates/*.jinja")
NAMED = tuple(f"{kind}_token" for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
LISTS = ("additional_special_tokens", "extra_special_tokens")
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


class TokenizerError(ValueError):
    """A tokenizer's name, folder or files cannot be used."""


class TokenizerFolder(NamedTuple):
    """What a folder holds."""

    backend: tokenizers.Tokenizer
    settings: Mapping[str, Any]  # of tokenizer_config.json
    special: Mapping[str, str]  # texts of special tokens by what they are called: `bos_token`, `eos_token`, ...
    eos_ids: tuple[int, ...]  # tokens that end a text, `eos_token` first
    pad_id: int  # `pad_token`, else the first of those
    files: Mapping[str, bytes]  # by name, as they are


def read_folder(path: Path) -> TokenizerFolder:
    """The tokenizer of a folder, or of a tokenizer.json in one.

    Its rules are tokenizer.json's, else GPT-2's over vocab.json and merges.txt; to them come the tokens of tokenizer_config.json,
    special_tokens_map.json and added_tokens.json. A text ends with `eos_token` and with every `eos_token_id` of
    generation_config.json, or of config.json where that file is not there.

    Raises:
        TokenizerError: names the file, the key, what it holds and what was expected.
    """
    folder, file = (path, path / TOKENIZER_FILE) if path.is_dir() else (path.parent, path)
    try:
        settings, named = _settings(folder)
        kind = settings.get("tokenizer_class") or read_settings(folder / "config.json").get("model_type")
        is_gpt2 = str(kind).removesuffix("Fast") in ("GPT2Tokenizer", "gpt2", "None")
        if own_rules := file.is_file():
            backend = _from_file(file)
        else:
            file, backend = folder / VOCABULARY, _gpt2(folder, settings, is_gpt2, kind)
        named = _from_numbers(folder, backend) | named
        if is_gpt2 and (kind is not None or not own_rules) and backend.token_to_id(END_OF_TEXT) is not None:
            named = dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT) | named
        _add_tokens(folder, file, backend, settings, named)
        special = _texts(named)
        if not own_rules:
            _put_around(backend, settings, special)
        eos_ids = _ends(folder, file, backend, special)
        pad_id = backend.token_to_id(special.get("pad_token", ""))
        pad_id = eos_ids[0] if pad_id is None else pad_id
        return TokenizerFolder(backend, settings, special, eos_ids, pad_id, _files(folder, file))
    except ValueError as error:
        raise TokenizerError(str(error)) from error


def _settings(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """tokenizer_config.json, and the special tokens that it and special_tokens_map.json name, null where there is none."""
    settings, others = read_settings(folder / TOKENIZER_CONFIG), read_settings(folder / SPECIAL_MAP)
    first, second = (others, settings) if "added_tokens_decoder" in settings else (settings, others)
    named = {**first, **second}
    for key in NAMED:
        if named.get(key) is not None and _text(named[key]) is None:
            place = folder / (TOKENIZER_CONFIG if key in settings else SPECIAL_MAP)
            raise TokenizerError(f"{place}: {key} is {named[key]!r:.60}; expected a text")
    for key in LISTS:
        tokens = named.get(key) or []
        if not isinstance(tokens, list | dict) or any(_text(token) is None for token in _values(tokens)):
            raise TokenizerError(f"{folder / TOKENIZER_CONFIG}: {key} is {tokens!r:.60}; expected a list of texts")
    special = {key for key, value in named.items() if key.endswith("_token") and (value is None or _text(value))}
    return settings, {key: value for key, value in named.items() if key in (*special, *LISTS)}


def _values(tokens: Any) -> list[Any]:
    return list(tokens.values()) if isinstance(tokens, Mapping) else list(tokens)


def _text(token: Any) -> str | None:
    """The text of a token as the files write it, alone or with its flags."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) and text else None


def _texts(named: Mapping[str, Any]) -> dict[str, str]:
    return {key: text for key, token in named.items() if key not in LISTS and (text := _text(token)) is not None}


def _from_file(file: Path) -> tokenizers.Tokenizer:
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the Rust side raises bare Exception for any malformed file
        raise TokenizerError(f"{file} is not a tokenizer of the `tokenizers` library: {error}") from error
    # The file may cut or fill up whatever is encoded, as its last user did; what is read here is read whole.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _gpt2(folder: Path, settings: Mapping[str, Any], is_gpt2: bool, kind: Any) -> tokenizers.Tokenizer:
    vocabulary, merges = folder / VOCABULARY, folder / MERGES
    convert = (
        f"write one: AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r}) of `transformers`"
    )
    if not (vocabulary.is_file() and merges.is_file()):
        hint = f" {convert}" if any(folder.glob("*.model")) or any(folder.glob("tek*.json")) else ""
        raise TokenizerError(f"{folder} has neither {TOKENIZER_FILE} nor {VOCABULARY} and {MERGES}.{hint}")
    if not is_gpt2:  # other classes cut a text by other rules, which stand in their code and in tokenizer.json
        raise TokenizerError(
            f"{folder} has no {TOKENIZER_FILE}, and {VOCABULARY} is read by GPT-2's rules, not those of {kind!r}; {convert}"
        )
    try:
        backend = tokenizers.Tokenizer(models.BPE.from_file(str(vocabulary), str(merges)))
    except Exception as error:  # as above
        raise TokenizerError(f"{vocabulary} and {MERGES} are not a GPT-2 byte-level BPE: {error}") from error
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=settings.get("add_prefix_space") is True)
    backend.decoder = decoders.ByteLevel()
    return backend


def _put_around(backend: tokenizers.Tokenizer, settings: Mapping[str, Any], special: Mapping[str, str]) -> None:
    """`add_bos_token` and `add_eos_token`."""
    bos, eos = (
        special[f"{kind}_token"] if settings.get(f"add_{kind}_token") is True else "" for kind in ("bos", "eos")
    )
    if around := [(token, backend.token_to_id(token)) for token in (bos, eos) if token]:
        backend.post_processor = processors.TemplateProcessing(f"{bos} $A {eos}".strip(), special_tokens=around)


def _add_tokens(
    folder: Path, file: Path, backend: tokenizers.Tokenizer, settings: Mapping[str, Any], named: Mapping[str, Any]
) -> None:
    """Adds what the rules leave out: tokens that have a number first, then special ones, in `transformers`' order."""
    special = [
        *_texts(named).values(),
        *(str(_text(token)) for key in LISTS for token in _values(named.get(key) or [])),
    ]
    place, numbered = folder / TOKENIZER_CONFIG, settings.get("added_tokens_decoder")
    if numbered is None:
        place, numbered = folder / ADDED, {token: text for text, token in read_settings(folder / ADDED).items()}
    there = backend.get_added_tokens_decoder()
    for number, token in sorted(_numbered(place, numbered)):
        text = str(_text(token))
        flags = {key: token[key] for key in FLAGS if key in token} if isinstance(token, Mapping) else {}
        added = AddedToken(text, **({"special": text in special, "normalized": text not in special} | flags))
        if there.get(number) != added:
            backend.add_tokens([added])
        if backend.token_to_id(text) != number:
            raise TokenizerError(
                f"{place}: token {text!r} is {number}, where {backend.token_to_id(text)} follows the others"
            )
    if (end := _text(named.get("eos_token"))) is not None and backend.token_to_id(end) is None:
        place = folder / (TOKENIZER_CONFIG if "eos_token" in settings else SPECIAL_MAP)
        raise TokenizerError(f"eos_token in {place} is {end!r}, which {file} has no token for")
    there = {added.content for added in backend.get_added_tokens_decoder().values()}
    backend.add_special_tokens([text for text in dict.fromkeys(special) if text not in there])


def _numbered(place: Path, tokens: Any) -> Iterator[tuple[int, Any]]:
    """Number and token of what the files say has one."""
    if not isinstance(tokens, Mapping):
        raise TokenizerError(f"{place}: added_tokens_decoder is {tokens!r:.60}; expected tokens by their numbers")
    for number, token in tokens.items():
        flags = {key: value for key, value in token.items() if key in FLAGS} if isinstance(token, Mapping) else {}
        if (
            not str(number).isdecimal()
            or _text(token) is None
            or not all(isinstance(flag, bool) for flag in flags.values())
        ):
            raise TokenizerError(
                f"{place}: token {number!r:.20} is {token!r:.60}; expected a number, and a text with its flags"
            )
        yield int(number), token


def _from_numbers(folder: Path, backend: tokenizers.Tokenizer) -> dict[str, str]:
    """Special tokens that a model's files say the numbers of."""
    numbers = {**read_settings(folder / "config.json"), **read_settings(folder / GENERATION)}
    first = {key: numbers.get(f"{key}_id") for key in ("bos_token", "eos_token", "pad_token")}
    first = {key: number[0] if isinstance(number, list) and number else number for key, number in first.items()}
    return {key: text for key, number in first.items() if (text := _token(backend, number)) is not None}


def _token(backend: tokenizers.Tokenizer, number: Any) -> str | None:
    return backend.id_to_token(number) if isinstance(number, int) and 0 <= number < 2**32 else None


def _ends(folder: Path, file: Path, backend: tokenizers.Tokenizer, special: Mapping[str, str]) -> tuple[int, ...]:
    """Ids of the tokens that end a text. A number that no token has, which a model's file may have by default, is passed over."""
    own = backend.token_to_id(special.get("eos_token", ""))
    ends = [] if own is None else [own]
    name = GENERATION if (folder / GENERATION).is_file() else "config.json"
    numbers = read_settings(folder / name).get("eos_token_id")
    numbers = numbers if isinstance(numbers, list) else [] if numbers is None else [numbers]
    for number in numbers:
        if not isinstance(number, int) or isinstance(number, bool):
            raise TokenizerError(f"{folder / name}: eos_token_id is {numbers!r:.60}; expected a number, or several")
        if _token(backend, number) is not None:
            ends.append(number)
    if ends:
        return tuple(dict.fromkeys(ends))
    if numbers:
        raise TokenizerError(f"eos_token_id in {folder / name} is {numbers[0]}, which {file} has no token for")
    raise TokenizerError(
        f"{file}: nothing says which token ends a text; expected eos_token in {TOKENIZER_CONFIG} beside it, or eos_token_id in "
        f"{GENERATION} or config.json"
    )


def _files(folder: Path, file: Path) -> dict[str, bytes]:
    files = {str(path.relative_to(folder)): path.read_bytes() for name in FILES for path in sorted(folder.glob(name))}
    return files | ({TOKENIZER_FILE: file.read_bytes()} if file.name not in (TOKENIZER_FILE, VOCABULARY) else {})
