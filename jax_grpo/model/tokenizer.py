"""Text to token ids and back: any folder of Hugging Face's `tokenizers`, GPT-2's, and a chess vocabulary for small models.

Ids and texts are those of `transformers`. Knows nothing of tasks or models.
"""

import copy
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from jax_grpo.config.files import (
    TOKENIZER_CONFIG,
    TOKENIZER_FILE,
    base_of,
    is_adapter,
    is_checkpoint,
    read_settings,
    tokenizer_path,
    weights_directory,
)
from jax_grpo.config.model import ModelConfig
from jax_grpo.model.token_bytes import token_bytes
from jax_grpo.names import TOKENIZERS, by_name
from jax_grpo.prompts.chat import Rendered
from jax_grpo.prompts.tokenizer_files import (
    END_OF_TEXT,
    VOCABULARY,
    TokenizerError,
    TokenizerFolder,
    read_folder,
)
from jax_grpo.run.files import read_manifest

GPT2 = Path(__file__).parents[1] / "assets" / "tokenizers" / "gpt2"
GPT2_VOCABULARY = 50257
MARKER_FILE = "jax_grpo_tokenizer.json"  # of a folder whose tokenizer is "chess"


class Tokenizer:
    """A vocabulary and its rules; `eos_ids` end a text, `eos_id` (the first) is what a text is ended with, `pad_id` fills up.

    Padding may be an end-of-text token: masks, not ids, say what is padding.
    """

    def __init__(self, name: str, folder: TokenizerFolder):
        self.name, self.file, self._backend = name, folder, folder.backend
        self.vocab_size = 1 + max(self._backend.get_vocab(with_added_tokens=True).values())  # ids may have gaps
        self.eos_ids, self.pad_id, self._bytes = folder.eos_ids, folder.pad_id, None
        self.eos_id: int = self.eos_ids[0]
        self.bos_id = self._backend.token_to_id(folder.special.get("bos_token", ""))

    @classmethod
    def load(cls, name_or_dir: str) -> "Tokenizer":
        """`"chess"`, `"gpt2"`, a folder that `read_folder` reads, a tokenizer.json, or a folder with our marker file.

        Raises:
            TokenizerError: neither a known name nor such a file or folder, or the files cannot be used; see `read_folder`.
        """
        path = GPT2 if name_or_dir == "gpt2" else tokenizer_path(name_or_dir)
        if name_or_dir == "chess" or (path / MARKER_FILE).is_file():
            ends = {f"{kind}_token": END_OF_TEXT for kind in ("bos", "eos", "unk", "pad")}
            return cls("chess", TokenizerFolder(copy.deepcopy(by_name(TOKENIZERS["chess"])()), {}, ends, (0,), 0, {}))
        if not path.exists():
            raise TokenizerError(
                f"model.tokenizer is {name_or_dir!r}; expected 'chess', 'gpt2', or a folder with {TOKENIZER_FILE}, or with "
                "vocab.json and merges.txt (GPT-2 byte-level BPE), or that file itself"
            )
        folder = read_folder(path)
        sizes = folder.backend.get_vocab_size(), folder.eos_ids[0]
        return cls("gpt2" if sizes == (GPT2_VOCABULARY, GPT2_VOCABULARY - 1) else TOKENIZER_FILE, folder)

    def save(self, directory: str | Path) -> None:
        """Writes the files that it came with as they were, and of tokenizer.json and tokenizer_config.json what is not among them.

        Both `load(directory)` and `transformers.AutoTokenizer` read the folder.
        """
        folder = Path(directory)
        for name, content in self.file.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        folder.mkdir(parents=True, exist_ok=True)
        if self.name == "chess":
            (folder / MARKER_FILE).write_text(json.dumps({"name": "chess", "vocab_size": self.vocab_size}) + "\n")
        if TOKENIZER_FILE not in self.file.files:
            self._backend.save(str(folder / TOKENIZER_FILE))
        if TOKENIZER_CONFIG not in self.file.files:
            settings = {
                "tokenizer_class": "GPT2TokenizerFast" if self.name == "gpt2" else "PreTrainedTokenizerFast",
                **self.file.special,
                "padding_side": "left",  # generation continues the right end
                "clean_up_tokenization_spaces": False,
            }
            (folder / TOKENIZER_CONFIG).write_text(json.dumps(settings, indent=1, ensure_ascii=False) + "\n", "utf-8")

    @property
    def names_its_class(self) -> bool:
        """Whether tokenizer_config.json says which of `transformers`' classes reads it."""
        return TOKENIZER_CONFIG not in self.file.files or "tokenizer_class" in self.file.settings

    def special_ids(self) -> dict[str, int | list[int]]:
        """What a model's config.json and generation_config.json say of its tokens, as `transformers` calls it."""
        ends = self.eos_id if len(self.eos_ids) == 1 else list(self.eos_ids)
        bos = {} if self.bos_id is None else {"bos_token_id": self.bos_id}
        return {**bos, "eos_token_id": ends, "pad_token_id": self.pad_id}

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, as `transformers` with `add_special_tokens=False`: special tokens that it spells out are tokens, and
        none is put around it. The rules decide whether `decode` gives the same text back.

        Lone surrogates, which no UTF-8 has, become `?`.
        """
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` for many texts, in parallel."""
        encodings = self._backend.encode_batch_fast([_utf8(text) for text in texts], add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def encode_prompts(self, texts: Sequence[str]) -> list[list[int]]:
        """The same for what a model is asked, with the tokens that the rules put around a text (as a rule a first one, BOS).

        None are put around what a chat template made, which has its own, and no second BOS before one that is written out.
        """
        encodings = self._backend.encode_batch_fast([_utf8(text) for text in texts], add_special_tokens=True)
        whole = [e.ids[1:] if e.ids[:2] == [self.bos_id] * 2 else e.ids for e in encodings]
        rendered = [i for i, text in enumerate(texts) if isinstance(text, Rendered)]
        for i, ids in zip(rendered, self.encode_batch([texts[i] for i in rendered]), strict=True):
            whole[i] = ids
        return whole

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids, without end-of-text and special tokens; bytes that are not UTF-8 become U+FFFD.

        Raises:
            TokenizerError: an id is outside the vocabulary.
        """
        tokens = [int(i) for i in ids if i not in self.eos_ids]
        if any(not 0 <= i < self.vocab_size for i in tokens):
            raise TokenizerError(f"token ids must be in [0, {self.vocab_size}); found {min(tokens)} to {max(tokens)}")
        return self._backend.decode(tokens, skip_special_tokens=True)

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
        """Bytes each id adds to the text, of end-of-text none; see `token_bytes.token_bytes`."""
        if self._bytes is None:
            self._bytes = [
                b"" if token in self.eos_ids else piece for token, piece in enumerate(token_bytes(self._backend))
            ]
        return self._bytes

    def fingerprint(self) -> str:
        """SHA-256 of the vocabulary, its rules and its ends: two tokenizers with the same one cut every text alike."""
        return hashlib.sha256(f"{self._backend.to_str()}\n{self.bos_id}\n{self.eos_ids}".encode()).hexdigest()


def tokenizer_of(config: ModelConfig) -> str:
    """The tokenizer that the config names, or else its weights' own (see `find_tokenizer`)."""
    return config.tokenizer or find_tokenizer(str(config.weights))


def find_tokenizer(weights: str) -> str:
    """The tokenizer that weights which are there were trained with: `chess`, `gpt2`, or their own folder, by what it holds.

    Raises:
        TokenizerError: nothing in the folder says which.
    """
    folder = weights_directory(weights)
    if is_checkpoint(folder):
        model = read_manifest(folder)["config"]["model"]
        return model["tokenizer"] or find_tokenizer(str(model["weights"]))
    if any((folder / file).is_file() for file in (MARKER_FILE, VOCABULARY, TOKENIZER_FILE)):
        return str(folder)
    if is_adapter(folder):
        return find_tokenizer(base_of(folder))
    try:
        vocabulary = read_settings(folder / "config.json").get("vocab_size")
    except ValueError as error:
        raise TokenizerError(str(error)) from error
    if vocabulary == GPT2_VOCABULARY:
        return "gpt2"
    raise TokenizerError(
        f"{folder} has no tokenizer ({TOKENIZER_FILE}, {VOCABULARY} and merges.txt, or {MARKER_FILE}), and its vocabulary of "
        f"{vocabulary} is not GPT-2's {GPT2_VOCABULARY}; put the tokenizer's files beside the weights, or give model.tokenizer"
    )


def _utf8(text: str) -> str:
    return text.encode("utf-8", errors="replace").decode("utf-8")
