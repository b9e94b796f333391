"""Any `tokenizer.json` of Hugging Face's `tokenizers`: which token ends a text, what each token adds to it, the files to keep.

What the vocabulary and its rules are is the file's own affair; `Tokenizer` is the class over it. Knows nothing of models.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from jax_grpo.config.files import CHAT_TEMPLATE, TOKENIZER_CONFIG, TOKENIZER_FILE, read_settings

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenizerError(ValueError):
    """A tokenizer's name, folder or files cannot be used."""


class TokenizerFile(NamedTuple):
    """A tokenizer.json and what lies beside it, kept to be written again as it was."""

    text: str  # of tokenizer.json
    settings: Mapping[str, Any]  # of tokenizer_config.json, with the end-of-text token
    template: str | None  # of chat_template.jinja

    def save(self, folder: Path) -> None:
        """Writes the files into a folder that is there."""
        (folder / TOKENIZER_FILE).write_text(self.text, encoding="utf-8")
        (folder / TOKENIZER_CONFIG).write_text(json.dumps(self.settings, indent=1, ensure_ascii=False) + "\n", "utf-8")
        if self.template is not None:
            (folder / CHAT_TEMPLATE).write_text(self.template, encoding="utf-8")


def read_tokenizer(path: Path) -> tuple[TokenizerFile, tokenizers.Tokenizer, int]:
    """What a tokenizer.json holds, the tokenizer, and the id of its end-of-text token.

    That is `eos_token` of the tokenizer_config.json beside it, else `eos_token_id` of generation_config.json, else of config.json;
    of several the first.

    Raises:
        TokenizerError: the file is no tokenizer, or nothing says which token ends a text, or that token is not in it.
    """
    try:
        text = path.read_text(encoding="utf-8")
        backend = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the Rust side raises bare Exception for any malformed file
        raise TokenizerError(f"{path} is not a tokenizer of the `tokenizers` library: {error}") from error
    # The file may cut or fill up whatever is encoded, as its last user did; what is read here is read whole.
    backend.no_truncation()
    backend.no_padding()
    settings = _settings(path.parent / TOKENIZER_CONFIG)
    eos_id = _end_of_text(path, settings, backend)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **settings, "eos_token": backend.id_to_token(eos_id)}
    template = path.parent / CHAT_TEMPLATE
    kept = TokenizerFile(text, settings, template.read_text(encoding="utf-8") if template.is_file() else None)
    return kept, backend, eos_id


def _settings(path: Path) -> dict[str, Any]:
    try:
        return read_settings(path)
    except ValueError as error:
        raise TokenizerError(str(error)) from error


def _end_of_text(path: Path, settings: Mapping[str, Any], backend: tokenizers.Tokenizer) -> int:
    for place, said in _said_to_end(path.parent, settings):
        token = said if isinstance(said, int) else backend.token_to_id(str(said))
        if token is None or backend.id_to_token(token) is None:
            raise TokenizerError(f"{place} is {said!r}, which {path} has no token for")
        return token
    raise TokenizerError(
        f"{path}: nothing says which token ends a text; expected eos_token in {TOKENIZER_CONFIG} beside it, or eos_token_id in "
        "generation_config.json or config.json"
    )


def _said_to_end(folder: Path, settings: Mapping[str, Any]) -> Iterator[tuple[str, str | int]]:
    """Where an end-of-text token is named, and the token or its id."""
    token = settings.get("eos_token")
    token = token.get("content") if isinstance(token, Mapping) else token
    if token is not None:
        yield f"eos_token in {folder / TOKENIZER_CONFIG}", token
    for name in ("generation_config.json", "config.json"):
        ids = _settings(folder / name).get("eos_token_id")
        if ids := ids if isinstance(ids, list) else [ids] if ids is not None else []:
            yield f"eos_token_id in {folder / name}", ids[0]


def gpt2_byte_of_char() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes (Radford et al. 2019, `bytes_to_unicode`)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def token_bytes(backend: tokenizers.Tokenizer) -> list[bytes]:
    """Bytes that each id adds to a text in its middle; none of special tokens, which no text has, and of ids without a token.

    What a decoder does at a text's beginning alone (it leaves out a blank), or by looking at several tokens (some of WordPiece's
    clean up blanks before punctuation), no token's own bytes can say: there the decoded text decides.
    """
    size = 1 + max(backend.get_vocab(with_added_tokens=True).values())
    strings = [backend.id_to_token(token) or "" for token in range(size)]
    special = {token for token, added in backend.get_added_tokens_decoder().items() if added.special}
    kinds = set(_decoder_types(json.loads(backend.to_str())["decoder"]))
    if "ByteLevel" in kinds:
        byte_of = gpt2_byte_of_char()
        pieces = [
            bytes(byte_of[c] for c in string) if byte_of.keys() >= set(string) else string.encode()
            for string in strings
        ]
    else:
        pieces = _decoded_in_the_middle(backend, strings, special)
        if "ByteFallback" in kinds:
            found = [_BYTE_TOKEN.fullmatch(string) for string in strings]
            pieces = [bytes([int(m[1], 16)]) if m else piece for m, piece in zip(found, pieces, strict=True)]
    return [b"" if token in special or not strings[token] else piece for token, piece in enumerate(pieces)]


def _decoder_types(decoder: Mapping[str, Any] | None) -> Iterator[str]:
    if decoder is not None:
        yield decoder["type"]
        for inner in decoder.get("decoders", ()):
            yield from _decoder_types(inner)


def _decoded_in_the_middle(backend: tokenizers.Tokenizer, strings: list[str], special: set[int]) -> list[bytes]:
    """What each token adds between two ordinary ones, by the decoder's own word."""
    ordinary = (token for token, string in enumerate(strings) if string.isalpha() and token not in special)
    if (beside := next(ordinary, None)) is None:
        beside = next(token for token, string in enumerate(strings) if string and token not in special)
    alone, both = backend.decode([beside]), backend.decode([beside, beside])
    after = both.removeprefix(alone)
    texts = backend.decode_batch([[beside, token, beside] for token in range(len(strings))])
    return [text.removeprefix(alone).removesuffix(after).encode() for text in texts]
