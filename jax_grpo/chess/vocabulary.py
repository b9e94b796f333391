"""A small chess vocabulary for small models, as rules of Hugging Face's `tokenizers`: a token for each square of a board.

The board field of a FEN (`rnbqkbnr/pppppppp/8/...`) becomes 64 tokens, so that a model sees a fixed grid; whole moves, castling
rights and numbers are tokens too, and any other text falls back to bytes. Knows nothing of tasks or models.
"""

import functools
import itertools

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers

END_OF_TEXT = "<|endoftext|>"
# Board squares as characters that no text holds (a private plane), and the mark of where a board begins.
PIECES = ".PNBRQKpnbrqk"
_SQUARE = {piece: chr(0xF0000 + i) for i, piece in enumerate(PIECES)}
_START = chr(0xF0100)
_SQUARES = f"[{_SQUARE['.']}-{chr(0xF0000 + len(_SQUARE) - 1)}]"
_EMPTY = _SQUARE["."]


def chess_vocabulary() -> list[str]:
    """Multi-character tokens, and the squares. The order is part of every checkpoint: only ever append."""
    names = [f"{file}{rank}" for rank in range(1, 9) for file in "abcdefgh"]
    castling = ["".join(itertools.compress("KQkq", bits)) for bits in itertools.product((1, 0), repeat=4) if any(bits)]
    return [
        *_SQUARE.values(),
        *[f" {name}" for name in names],
        *names,
        *[f" {rights}" for rights in castling],
        " -",
        " w",
        *[f" {number}" for number in range(151)],
        *["P: ", "A: ", "    M:", "    E:", "    B:", "M:", "E:", "B:"],
        *[" " * width for width in (2, 4, 8, 16, 32)],
        *["+0.001", "+1.0", "+0.5", "+-1.0", "+0", "+1"],
    ]


@functools.cache
def _rank(squares: int, after_digit: bool = False) -> str:
    """Pattern of the rest of a rank: pieces and digits that fill `squares` squares, no two digits side by side."""
    if squares == 0:
        return ""
    rest = [f"[{PIECES[1:]}]{_rank(squares - 1)}"]
    if not after_digit:
        rest += [f"{digit}{_rank(squares - digit, True)}" for digit in range(1, squares + 1)]
    return f"(?:{'|'.join(rest)})"


def _normaliser() -> normalizers.Normalizer:
    """Marks where a whole board field begins, then replaces its characters, one kind after another.

    `\\G` is where the last replacement ended, so each rule runs on from the mark through one field and no further; `\\K` leaves
    what was run over as it is.
    """
    field = rf"(?<![\w/])(?=(?<rank>{_rank(8)})(?:/\g<rank>){{7}}(?![\w/]))"
    within = rf"(?:{_START}|(?!\A)\G)(?:{_SQUARES}|[/{PIECES[1:]}1-8])*?\K"
    rules = [normalizers.Replace(Regex(field), _START)]
    rules += [normalizers.Replace(Regex(within + piece), _SQUARE[piece]) for piece in PIECES[1:]]
    rules += [normalizers.Replace(Regex(f"{within}{n}"), _EMPTY * n) for n in range(8, 0, -1)]
    rules += [normalizers.Replace(Regex(f"{within}/"), ""), normalizers.Replace(_START, "")]
    return normalizers.Sequence(rules)


def _decoder() -> decoders.Decoder:
    """Bytes to text, a slash after every eighth square of a run, runs of empty squares to digits, squares to pieces."""
    slash = decoders.Replace(Regex(rf"{_SQUARES}{{8}}\K(?={_SQUARES})"), "/")
    digits = [decoders.Replace(_EMPTY * n, str(n)) for n in range(8, 0, -1)]  # a longer run is not two shorter ones
    pieces = [decoders.Replace(_SQUARE[piece], piece) for piece in PIECES[1:]]
    return decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), slash, *digits, *pieces])


@functools.cache
def chess_backend() -> tokenizers.Tokenizer:
    """The vocabulary and its rules."""
    names = [chr(byte) if byte < 128 else f"<0x{byte:02X}>" for byte in range(256)]
    vocab = {END_OF_TEXT: 0} | {name: 1 + byte for byte, name in enumerate(names)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    backend.normalizer, backend.decoder = _normaliser(), _decoder()
    backend.add_special_tokens([END_OF_TEXT])
    texts = chess_vocabulary()
    added = backend.add_tokens([AddedToken(text, normalized=True, special=False) for text in texts])
    assert added == len(texts), "the chess vocabulary lists a token twice"
    return backend
