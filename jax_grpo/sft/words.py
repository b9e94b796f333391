"""The vocabulary of a small model for instructions: a byte-level BPE, trained on text that is drawn here.

    python -m jax_grpo.sft.words --out runs/words_tokenizer

writes tokenizer.json and tokenizer_config.json, which `model.tokenizer` and `tokenizer` of a warm start take as a folder. The same
files for the same arguments and release of `tokenizers`.
"""

import argparse
import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from jax_grpo.config.files import TOKENIZER_CONFIG, TOKENIZER_FILE
from jax_grpo.prompts.tokenizer_files import END_OF_TEXT
from jax_grpo.system.whole_files import require_new
from jax_grpo.tasks.instructions.lessons import texts

TOKENS, LESSONS = 768, 8000


def vocabulary(tokens: int = TOKENS, lessons: int = LESSONS) -> tokenizers.Tokenizer:
    """A byte-level BPE of at most so many tokens, of the texts of so many lessons; any text can be written in it."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=tokens, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(texts(lessons), trainer)
    return made


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m jax_grpo.sft.words", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="folder to write into")
    parser.add_argument("--tokens", type=int, default=TOKENS, help=f"most tokens; at least 257 (default {TOKENS})")
    arguments = parser.parse_args(argv)
    if arguments.tokens < 257:
        parser.error(f"--tokens is {arguments.tokens}; expected at least 257: every byte and end-of-text")
    try:
        require_new(arguments.out / TOKENIZER_FILE, "--out")
    except FileExistsError as error:
        raise SystemExit(str(error)) from error
    arguments.out.mkdir(parents=True, exist_ok=True)
    vocabulary(arguments.tokens).save(str(arguments.out / TOKENIZER_FILE))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_TEXT}
    (arguments.out / TOKENIZER_CONFIG).write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
    print("tokenizer:", arguments.out)


if __name__ == "__main__":
    main()
