"""The bytes that each token adds to a text, which stop rules are lifted to tokens by. Knows nothing of models."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _gpt2_byte_of_char() -> dict[str, int]:
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
        byte_of = _gpt2_byte_of_char()
        pieces = [
            bytes(byte_of[c] for c in string) if byte_of.keys() >= set(string) else string.encode()
            for string in strings
        ]
    else:
        pieces = _decoded_in_the_middle(backend, strings, special)
        if "ByteFallback" in kinds:
            matches = [_BYTE_TOKEN.fullmatch(string) for string in strings]
            pieces = [bytes([int(m[1], 16)]) if m else piece for m, piece in zip(matches, pieces, strict=True)]
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
