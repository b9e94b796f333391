"""Text to token ids and back: GPT-2's byte-level BPE, a small chess vocabulary for small models, and any tokenizer.json.

All are Hugging Face `tokenizers` behind one class. The chess vocabulary gives every board square one token: the board
field of a FEN (`rnbqkbnr/pppppppp/8/...`) becomes 64 tokens, so that a model sees a fixed grid, and any other text falls
back to bytes. Knows nothing of tasks or models.
"""

import hashlib
import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from jax_grpo.config.files import CHAT_TEMPLATE, TOKENIZER_CONFIG, TOKENIZER_FILE, read_settings, tokenizer_path
from jax_grpo.model.tokenizer_file import (
    TokenizerError,
    TokenizerFile,
    gpt2_byte_of_char,
    read_tokenizer,
    token_bytes,
)

ASSETS = Path(__file__).parents[1] / "assets" / "tokenizers"
END_OF_TEXT = "<|endoftext|>"
MARKER_FILE = "jax_grpo_tokenizer.json"

# A board square as a character outside the 0-255 range that bytes occupy (they are mapped one to one to U+0000-U+00FF).
_PIECES = ".PNBRQKpnbrqk"
_SQUARE_OF_PIECE = {piece: chr(0x100 + i) for i, piece in enumerate(_PIECES)}
PIECE_OF_SQUARE = {square: piece for piece, square in _SQUARE_OF_PIECE.items()}
_BOARD = re.compile(r"(?<![\w/])[pnbrqkPNBRQK1-8]+(?:/[pnbrqkPNBRQK1-8]+){7}(?![\w/])")
_SQUARE_RUN = re.compile(f"[{chr(0x100)}-{chr(0x100 + len(_PIECES) - 1)}]+")


def _expand_board(match: re.Match[str]) -> str:
    """Board field to 64 square characters, or unchanged when collapsing would not give the same text back."""
    squares = "".join(
        _SQUARE_OF_PIECE["."] * int(c) if c.isdigit() else _SQUARE_OF_PIECE.get(c, "") for c in match[0] if c != "/"
    )
    return squares if _collapse_board(squares) == match[0] else match[0]


def _collapse_board(squares: str) -> str:
    """Square characters to FEN board text, eight to a rank; a model's partial board gives a partial field."""
    ranks = []
    for start in range(0, len(squares), 8):
        rank = "".join(PIECE_OF_SQUARE[c] for c in squares[start : start + 8])
        ranks.append(re.sub(r"\.+", lambda run: str(len(run[0])), rank))
    return "/".join(ranks)


def chess_vocabulary() -> list[str]:
    """Multi-character tokens of the chess vocabulary. The order is part of every checkpoint: only ever append."""
    names = [f"{file}{rank}" for rank in range(1, 9) for file in "abcdefgh"]
    castling = ["".join(itertools.compress("KQkq", bits)) for bits in itertools.product((1, 0), repeat=4) if any(bits)]
    return [
        *PIECE_OF_SQUARE,
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


def _byte_tokenizer() -> tokenizers.Tokenizer:
    vocab = {END_OF_TEXT: 0} | {chr(byte): 1 + byte for byte in range(256)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokens = [AddedToken(text, normalized=False, special=False) for text in chess_vocabulary()]
    added = backend.add_tokens(tokens)
    assert added == len(tokens), "the chess vocabulary lists a token twice"
    return backend


def _gpt2_backend(vocab: Path, merges: Path) -> tokenizers.Tokenizer:
    # The end-of-text marker is not registered as a special token: a prompt that spells it out stays plain text.
    backend = tokenizers.Tokenizer(models.BPE.from_file(str(vocab), str(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def _is_plain_gpt2(folder: Path) -> bool:
    """Whether vocab.json and merges.txt say all that the folder's tokenizer does."""
    vocab, file = folder / "vocab.json", folder / TOKENIZER_FILE
    if not (vocab.is_file() and (folder / "merges.txt").is_file()):
        return False
    if not file.is_file():
        return True
    # A template puts special tokens into its texts, and added ones are in tokenizer.json alone.
    if (folder / CHAT_TEMPLATE).is_file() or "chat_template" in read_settings(folder / TOKENIZER_CONFIG):
        return False
    try:
        return tokenizers.Tokenizer.from_file(str(file)).get_vocab() == json.loads(vocab.read_text(encoding="utf-8"))
    except Exception:  # one of them is damaged: who reads it says so
        return True


class Tokenizer:
    """One interface over the vocabularies "gpt2", "chess" and those of files, "tokenizer.json".

    End-of-text is also padding: masks, not ids, say what is padding. `file` is what a tokenizer.json and its neighbours hold.
    """

    def __init__(
        self,
        name: str,
        backend: tokenizers.Tokenizer,
        file: TokenizerFile | None = None,
        eos_id: int | None = None,
    ):
        self.name, self.file, self._backend = name, file, backend
        self.vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values())  # ids may have gaps
        eos_id = backend.token_to_id(END_OF_TEXT) if eos_id is None else eos_id
        if eos_id is None:
            raise TokenizerError(f"tokenizer {name!r} has no {END_OF_TEXT!r} entry in its vocabulary")
        self.eos_id: int = eos_id
        self.pad_id: int = eos_id

    @classmethod
    def load(cls, name_or_dir: str) -> "Tokenizer":
        """`"chess"`, `"gpt2"`, a tokenizer.json, or a folder with one, with GPT-2's vocab.json and merges.txt, or our marker file.

        A folder that has both is read from vocab.json and merges.txt, unless tokenizer.json has other tokens or there is a chat
        template: then from tokenizer.json.

        Raises:
            TokenizerError: neither a known name nor such a file or folder, or the files cannot be used; see `read_tokenizer`.
        """
        if name_or_dir == "chess":
            return cls("chess", _byte_tokenizer())
        folder = ASSETS / "gpt2" if name_or_dir == "gpt2" else tokenizer_path(name_or_dir)
        if (folder / MARKER_FILE).is_file():
            return cls.load(json.loads((folder / MARKER_FILE).read_text())["name"])
        file = folder if folder.suffix == ".json" else folder / TOKENIZER_FILE
        if file.is_file() and not _is_plain_gpt2(folder):
            kept, backend, eos_id = read_tokenizer(file)
            return cls(TOKENIZER_FILE, backend, kept, eos_id)
        vocab, merges = folder / "vocab.json", folder / "merges.txt"
        if not (vocab.is_file() and merges.is_file()):
            raise TokenizerError(
                f"model.tokenizer is {name_or_dir!r}; expected 'chess', 'gpt2', or a folder with vocab.json and "
                f"merges.txt (GPT-2 byte-level BPE) or with {TOKENIZER_FILE}, or that file itself"
            )
        try:
            return cls("gpt2", _gpt2_backend(vocab, merges))
        except Exception as error:  # the Rust side raises bare Exception for any malformed file
            raise TokenizerError(f"{vocab} and {merges.name} are not a GPT-2 byte-level BPE: {error}") from error

    def save(self, directory: str | Path) -> None:
        """Writes what `load(directory)` needs; but for chess also what `transformers` reads."""
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        if self.file is not None:
            self.file.save(folder)
            return
        if self.name == "chess":
            (folder / MARKER_FILE).write_text(json.dumps({"name": "chess", "vocab_size": self.vocab_size}) + "\n")
            return
        self._backend.model.save(str(folder))
        self._backend.save(str(folder / "tokenizer.json"))
        settings = {"tokenizer_class": "GPT2TokenizerFast", "eos_token": END_OF_TEXT, "bos_token": END_OF_TEXT}
        settings |= {"unk_token": END_OF_TEXT, "add_prefix_space": False, "model_max_length": 1024}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; `decode` gives the same text back (lone surrogates, which no UTF-8 has, become `?`).

        A tokenizer.json's are `transformers`' with `add_special_tokens=False`: special tokens that the text spells out are tokens,
        none is put around it, and the file decides whether the text comes back.
        """
        return self._backend.encode(self._to_backend(text), add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` for many texts, in parallel."""
        encodings = self._backend.encode_batch_fast([self._to_backend(t) for t in texts], add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids, without end-of-text, and without a tokenizer.json's special tokens; bytes not UTF-8 become U+FFFD.

        Raises:
            TokenizerError: an id is outside the vocabulary.
        """
        tokens = [int(i) for i in ids if i != self.eos_id]
        if any(not 0 <= i < self.vocab_size for i in tokens):
            raise TokenizerError(f"token ids must be in [0, {self.vocab_size}); found {min(tokens)} to {max(tokens)}")
        if self.name != "chess":
            return self._backend.decode(tokens, skip_special_tokens=self.file is not None)
        chars = "".join(self._backend.id_to_token(i) or "" for i in tokens)
        chars = _SQUARE_RUN.sub(lambda run: _collapse_board(run[0]), chars)
        return chars.encode("latin-1").decode("utf-8", errors="replace")

    def token_id(self, token: str | int) -> int:
        """The id of what a config names as a single token, by the text that is it, as the vocabulary writes it, or by its id.

        Raises:
            TokenizerError: it is no token, or several.
        """
        if isinstance(token, int):
            if self._backend.id_to_token(token) is not None:
                return token
            raise TokenizerError(f"token {token} is not in the vocabulary; expected an id in [0, {self.vocab_size})")
        ids = self.encode(token)
        if len(ids) == 1 and token.lstrip(" ") in (self.decode(ids).lstrip(" "), self._backend.id_to_token(ids[0])):
            return ids[0]
        if (written := self._backend.token_to_id(token)) is not None:
            return written
        raise TokenizerError(
            f"{token!r} is not one token of model.tokenizer, which reads it as {len(ids)}; expected a single one in "
            "task.stop_tokens (a text is given as task.stop)"
        )

    def require_writable(self, texts: Sequence[str], task: str) -> None:
        """Refuses, with a TokenizerError, a vocabulary that an answer to a task cannot be written in, blanks aside."""
        for text in texts:
            if (written := self.decode(self.encode(text))).split() != text.split():
                raise TokenizerError(
                    f"task {task!r} is answered with texts such as {text!r}, which model.tokenizer writes as {written!r}: use "
                    "another tokenizer, or another task"
                )

    def token_bytes(self) -> list[bytes]:
        """Bytes each id adds to the text; of end-of-text b"", of a board square, whose text depends on its neighbours, b"\\x00".

        For a tokenizer.json see `tokenizer_file.token_bytes`.
        """
        if self.file is not None:
            pieces = token_bytes(self._backend)
            return [b"" if token == self.eos_id else piece for token, piece in enumerate(pieces)]
        strings = [self._backend.id_to_token(i) or "" for i in range(self.vocab_size)]
        strings[self.eos_id] = ""
        if self.name == "gpt2":
            byte_of = gpt2_byte_of_char()
            return [bytes(byte_of[c] for c in string) for string in strings]
        return [b"\x00" if s in PIECE_OF_SQUARE else s.encode("latin-1") for s in strings]

    def fingerprint(self) -> str:
        """SHA-256 of the vocabulary and its rules: two tokenizers with the same one cut every text alike."""
        ends = "" if self.file is None else f"\n{self.eos_id}"  # of a file, said beside it
        return hashlib.sha256(f"{self.name}\n{self._backend.to_str()}{ends}".encode()).hexdigest()

    def _to_backend(self, text: str) -> str:
        raw = text.encode("utf-8", errors="replace")
        if self.name != "chess":
            return raw.decode("utf-8")
        return _BOARD.sub(_expand_board, raw.decode("latin-1"))
