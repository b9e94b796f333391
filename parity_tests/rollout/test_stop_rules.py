"""Stop rules: the lift to tokens agrees with the byte automaton on random vocabularies, wherever a stop straddles a token."""

import dataclasses
import random

import numpy as np
import pytest

from jax_grpo.chess.tasks.environment import environment_stop
from jax_grpo.chess.tasks.policy import SEEKING, SPACES, policy_stop
from jax_grpo.model.tokenizer import Tokenizer
from jax_grpo.tasks.stop import StopRule, word_stop

RULES = {"policy": policy_stop(), "environment": environment_stop(), "word": word_stop()}
ALPHABET = b" abcdefgh12345678qrbnBEM:+.-\n\xc3\xa9"  # what the rules look at, and bytes that are not characters


@dataclasses.dataclass
class ByteVocabulary:
    """Random multi-byte tokens over every single byte, like a byte-level BPE's; the last id is end-of-text."""

    pieces: list[bytes]

    def __post_init__(self):
        self.vocab_size, self.eos_ids = len(self.pieces), (len(self.pieces) - 1,)

    def token_bytes(self) -> list[bytes]:
        return self.pieces


def _vocabulary(rng: random.Random) -> ByteVocabulary:
    joined = [bytes(rng.choices(ALPHABET, k=rng.randint(2, 9))) for _ in range(300)]
    return ByteVocabulary([bytes([b]) for b in range(256)] + joined + [b"    B:", b" B: e2e", b"e7e8q", b"+0+0+", b""])


def _states(rule: StopRule, raw: bytes, state: int) -> int:
    for byte in raw:
        state = int(rule.transitions_SB[state, byte])
    return state


@pytest.mark.parametrize("name", RULES)
def test_reading_tokens_is_reading_their_bytes(name):
    """2,000 random streams a rule, each over one of 8 random vocabularies, from every state."""
    rule, rng, stopped = RULES[name], random.Random(0), 0
    for _ in range(8):
        vocabulary = _vocabulary(rng)
        table = rule.token_table(vocabulary)
        assert table.shape == (len(rule.transitions_SB), vocabulary.vocab_size) and table.dtype == np.int32
        for _ in range(250):
            token_state = byte_state = rng.randrange(len(table))
            for token in rng.choices(range(256, vocabulary.vocab_size - 1), k=8) + rng.choices(range(256), k=4):
                token_state = int(table[token_state, token])
                byte_state = _states(rule, vocabulary.pieces[token], byte_state)
                assert token_state == byte_state, f"{vocabulary.pieces[token]!r} from {byte_state}"
            stopped += token_state == rule.accept
        assert (table[:, vocabulary.eos_ids[0]] == rule.accept).all(), "end-of-text ends a completion from anywhere"
        assert (table[rule.accept] == rule.accept).all(), "nothing leaves the accept state"
    assert stopped > 100, f"only {stopped} streams reached a stop: the test looked at too little"


@pytest.mark.parametrize("start", [SEEKING, SPACES])
def test_the_text_is_cut_at_the_same_byte_however_it_is_cut_into_tokens(start):
    """The decoded text up to the stopping token, truncated, is the whole text truncated: a token's tail never counts."""
    rule, rng, straddled = RULES["policy"], random.Random(1), 0
    for _ in range(2000):
        squares = [f"{rng.choice('abcdefgh')}{rng.choice('12345678')}" for _ in range(2)]
        move = "".join(squares) + rng.choice(["", "q", "n", " ", "x", "."])
        text = (
            (" a2a3    E: 1.0    B: " if start == SEEKING else "  ") + move + rng.choice(["", "tail", " B: a1a2", "\n"])
        )
        state, read = start, ""
        while len(read) < len(text) and state != rule.accept:
            piece = text[len(read) : len(read) + rng.randint(1, 7)]
            state, read = _states(rule, piece.encode(), state), read + piece
        cut, stopped = rule.truncate(read, start)
        assert (cut, stopped) == rule.truncate(text, start)
        assert stopped == (state == rule.accept)
        straddled += len(read) > len(cut) + 1
    assert straddled > 200, f"{straddled} stops inside a token"


@pytest.mark.parametrize(
    ("after_b", "kept", "stops"),
    [
        (" e2e4", " e2e4", True),  # an inner rank ends at once
        (" e7e8", " e7e8", False),  # the last rank may promote: one more character decides
        (" e7e8q", " e7e8q", True),
        (" e7e8 ", " e7e8", True),
        (" e7e8k", " e7e8", True),
        (" e2e1n", " e2e1n", True),
        ("\n", "", True),  # a character that cannot be a move's ends at once
        (" e9", " e", True),
        ("    e2e4", "    e2e4", True),
        ("é", "", True),
        ("", "", False),
    ],
)
def test_a_move_ends_where_it_cannot_go_on(after_b, kept, stops):
    assert RULES["policy"].truncate(after_b, SPACES) == (kept, stops)
    full = " a2a3    E: 1.0    B:"
    assert RULES["policy"].truncate(full + after_b, SEEKING) == (full + kept, stops)


def test_a_b_before_the_marker_does_not_hide_it():
    assert policy_stop().truncate("M: BB: e2e4 rest", SEEKING) == ("M: BB: e2e4", True)


def test_truncation_keeps_what_was_truncated():
    rng = random.Random(2)
    for rule in RULES.values():
        for _ in range(500):
            text = bytes(rng.choices(ALPHABET, k=30)).decode("utf-8", errors="replace")
            cut, _ = rule.truncate(text, 0)
            assert text.startswith(cut) or "\ufffd" in cut
            assert rule.truncate(cut, 0)[0] == cut


@pytest.mark.parametrize("rule", [policy_stop(), environment_stop()], ids=["policy", "environment"])
def test_gpt2s_table_reads_each_byte_of_each_token_once_and_all_tokens_together(rule):
    """By one look-up for each byte of the longest token, 128; what is done for all 50,257 tokens is done once, not at each byte."""
    tokenizer, read, measured = Tokenizer.load("gpt2"), [], []

    class Piece(bytes):
        def __len__(self):
            measured.append(1)
            return super().__len__()

    class Counted(np.ndarray):
        def __getitem__(self, index):
            read.append(index[1].size)
            return np.asarray(self)[index]

    counted = dataclasses.replace(rule, transitions_SB=rule.transitions_SB.view(Counted))
    vocabulary = ByteVocabulary([Piece(piece) for piece in tokenizer.token_bytes()])
    vocabulary.eos_ids = tokenizer.eos_ids
    table = counted.token_table(vocabulary)
    assert table.shape[1] == 50257 and np.array_equal(table, rule.token_table(tokenizer))
    lengths = [len(piece) for piece in tokenizer.token_bytes()]
    print(f"{len(read)} look-ups of {sum(read)} bytes, {len(measured)} lengths asked for")
    assert len(read) == max(lengths) and sum(read) == sum(lengths)
    assert len(measured) <= 2 * len(lengths)
