"""Every vocabulary as the files that `transformers.AutoTokenizer` reads, with the same ids and the same texts as `tokenizer`.

Our chess vocabulary expands a board's digits in Python; tokenizer.json holds rules only, so here the same is said in regular
expressions. Differs on purpose in one text: `<|endoftext|>` spelled out is the special token there and plain text in "gpt2" and
"chess". A tokenizer.json of the user's is written as it was read.
"""

import functools
import json
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers

from jax_grpo.config.files import TOKENIZER_CONFIG, TOKENIZER_FILE
from jax_grpo.model.tokenizer import END_OF_TEXT, PIECE_OF_SQUARE, Tokenizer, chess_vocabulary

# Board squares as characters that no text holds (a private plane), and the mark of where a board begins.
_SQUARE = {piece: chr(0xF0000 + i) for i, piece in enumerate(PIECE_OF_SQUARE.values())}
_START = chr(0xF0100)
_SQUARES = f"[{_SQUARE['.']}-{chr(0xF0000 + len(_SQUARE) - 1)}]"
_EMPTY, _PIECES = _SQUARE["."], [piece for piece in _SQUARE if piece != "."]


@functools.cache
def _rank(squares: int, after_digit: bool = False) -> str:
    """Pattern of the rest of a rank: pieces and digits that fill `squares` squares, no two digits side by side."""
    if squares == 0:
        return ""
    rest = [f"[{''.join(_PIECES)}]{_rank(squares - 1)}"]
    if not after_digit:
        rest += [f"{digit}{_rank(squares - digit, True)}" for digit in range(1, squares + 1)]
    return f"(?:{'|'.join(rest)})"


def _normaliser() -> normalizers.Normalizer:
    """Marks where a whole board field begins, then replaces its characters, one kind after another.

    `\\G` is where the last replacement ended, so each rule runs on from the mark through one field and no further; `\\K` leaves
    what was run over as it is.
    """
    field = rf"(?<![\w/])(?=(?<rank>{_rank(8)})(?:/\g<rank>){{7}}(?![\w/]))"
    within = rf"(?:{_START}|(?!\A)\G)(?:{_SQUARES}|[/{''.join(_PIECES)}1-8])*?\K"
    rules = [normalizers.Replace(Regex(field), _START)]
    rules += [normalizers.Replace(Regex(within + piece), _SQUARE[piece]) for piece in _PIECES]
    rules += [normalizers.Replace(Regex(f"{within}{n}"), _EMPTY * n) for n in range(8, 0, -1)]
    rules += [normalizers.Replace(Regex(f"{within}/"), ""), normalizers.Replace(_START, "")]
    return normalizers.Sequence(rules)


def _decoder() -> decoders.Decoder:
    """Bytes to text, a slash after every eighth square of a run, runs of empty squares to digits, squares to pieces."""
    slash = decoders.Replace(Regex(rf"{_SQUARES}{{8}}\K(?={_SQUARES})"), "/")
    digits = [decoders.Replace(_EMPTY * n, str(n)) for n in range(8, 0, -1)]  # a longer run is not two shorter ones
    pieces = [decoders.Replace(_SQUARE[piece], piece) for piece in _PIECES]
    return decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), slash, *digits, *pieces])


def chess_backend() -> tokenizers.Tokenizer:
    """The chess vocabulary as one `tokenizers.Tokenizer`: same ids, and decoding gives text."""
    names = [chr(byte) if byte < 128 else f"<0x{byte:02X}>" for byte in range(256)]
    vocab = {END_OF_TEXT: 0} | {name: 1 + byte for byte, name in enumerate(names)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    backend.normalizer, backend.decoder = _normaliser(), _decoder()
    texts = [_SQUARE[PIECE_OF_SQUARE[text]] if text in PIECE_OF_SQUARE else text for text in chess_vocabulary()]
    backend.add_tokens([AddedToken(text, normalized=True, special=False) for text in texts])
    return backend


def save_for_transformers(tokenizer: Tokenizer, folder: Path, positions: int) -> None:
    """Writes tokenizer.json and tokenizer_config.json of a model of so many positions beside what `Tokenizer.save` writes."""
    tokenizer.save(folder)
    if tokenizer.name == "chess":
        chess_backend().save(str(folder / TOKENIZER_FILE))
    if tokenizer.file is None:
        ends = {f"{kind}_token": END_OF_TEXT for kind in ("bos", "eos", "unk", "pad")}
        own = ends | {"add_prefix_space": False}
    else:  # what the file came with; another class may build other rules than the file's
        own = {"pad_token": tokenizer.file.settings["eos_token"]} | dict(tokenizer.file.settings)
    settings = {
        **own,
        "tokenizer_class": "GPT2TokenizerFast" if tokenizer.name == "gpt2" else "PreTrainedTokenizerFast",
        "padding_side": "left",  # generation continues the right end
        "clean_up_tokenization_spaces": False,
        "model_max_length": positions,
    }
    (folder / TOKENIZER_CONFIG).write_text(json.dumps(settings, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
