"""Both tokenizers: exact round trips, fixed ids, bytes of tokens, clear errors."""

import os
import random
import re
from pathlib import Path

import chess
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, GPT2TokenizerFast

from jax_grpo.chess.games import random_positions
from jax_grpo.chess.vocabulary import chess_vocabulary
from jax_grpo.model.tokenizer import Tokenizer, TokenizerError

SHARED = Path(os.environ.get("JAX_GRPO_SHARED", Path(__file__).parents[3] / "shared"))
START = f"P: {chess.STARTING_FEN}    M:"
TOKENIZERS = {name: Tokenizer.load(name) for name in ("gpt2", "chess")}


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request) -> Tokenizer:
    return TOKENIZERS[request.param]


def test_the_start_position_prompt_has_46_gpt2_tokens():
    ids = TOKENIZERS["gpt2"].encode(START)
    assert len(ids) == 46
    assert {46803, 32819, 10246} <= set(ids)  # `nb`, `NB`, `PP`: published ids of this prompt


def test_gpt2_ids_equal_those_of_transformers(tmp_path):
    TOKENIZERS["gpt2"].save(tmp_path)
    theirs = GPT2TokenizerFast.from_pretrained(tmp_path)
    rng = random.Random(0)
    texts = [
        START,
        "Hello, Wörld!\n\n  tabs\tand  spaces",
        "棋 ♞ e2e4",
        *(b.fen() for b, _ in zip(random_positions(rng), range(200), strict=False)),
    ]
    for text in texts:
        assert TOKENIZERS["gpt2"].encode(text) == theirs(text)["input_ids"], text


@pytest.mark.slow
def test_thousands_of_real_positions_round_trip(tokenizer):
    rng = random.Random(1)
    boards = random_positions(rng)
    for _ in range(3000):
        board = next(boards)
        move = rng.choice(list(board.legal_moves)) if any(board.legal_moves) else chess.Move.null()
        text = f"P: {board.fen()}    M: {move.uci()}    E: -3.06 {rng.random():.2f}    B: {move.uci()}"
        assert tokenizer.decode(tokenizer.encode(text)) == text
        text = f"A: {board.fen()}+{move.uci()}+{move.uci()} {move.uci()}+{board.fen()}+0.001+0+1"
        assert tokenizer.decode(tokenizer.encode(text)) == text


SQUARES = [chr(0x100 + i) for i in range(13)]  # of pieces in this order: .PNBRQKpnbrqk
BOARD = re.compile(r"(?<![\w/])[pnbrqkPNBRQK1-8]+(?:/[pnbrqkPNBRQK1-8]+){7}(?![\w/])")
NUMBERS = {text: 257 + i for i, text in enumerate([*SQUARES, *chess_vocabulary()[13:]])}


def collapsed(squares: str) -> str:
    """Squares as the board field of a FEN, eight to a rank."""
    pieces = "".join(".PNBRQKpnbrqk"[SQUARES.index(c)] for c in squares)
    ranks = [pieces[start : start + 8] for start in range(0, len(pieces), 8)]
    return "/".join(re.sub(r"\.+", lambda run: str(len(run[0])), rank) for rank in ranks)


def chess_ids(text: str) -> list[int]:
    """The definition of the chess vocabulary: boards that come back whole as 64 squares, then the longest token, else bytes."""

    def expanded(found: re.Match) -> str:
        pieces = re.sub(r"\d", lambda digit: "." * int(digit[0]), found[0].replace("/", ""))
        squares = "".join(SQUARES[".PNBRQKpnbrqk".index(piece)] for piece in pieces)
        return squares if collapsed(squares) == found[0] else found[0]

    rest, ids = BOARD.sub(expanded, text.encode().decode("latin-1")), []
    while rest:
        longest = next((text for text in sorted(NUMBERS, key=len, reverse=True) if rest.startswith(text)), rest[0])
        ids.append(NUMBERS.get(longest, 1 + ord(longest[0])))
        rest = rest[len(longest) :]
    return ids


def chess_text(ids: list[int]) -> str:
    """The text that the ids stand for; end-of-text, 0, is none of it."""
    texts = {number: text for text, number in NUMBERS.items()} | {1 + byte: chr(byte) for byte in range(256)}
    text = "".join(texts[i] for i in ids if i)
    return re.sub("[\u0100-\u010c]+", lambda run: collapsed(run[0]), text).encode("latin-1").decode()


@pytest.mark.parametrize(
    "text",
    [
        "8/8/8/8/8/8/8/8 and 8/8/8/8/8/8/8/7p+e2e4",
        "no board: 44/8/8/8/8/8/8/8 p/p/p 9 8/8/8/8/8/8/8 pppp 12345678",
        "x8/8/8/8/8/8/8/8 8/8/8/8/8/8/8/8/8 8/8/8/8/8/8/8/8x ppppp1pp/8/8/8/8/8/8/8",
        "pppppppp/8/8/8/8/8/8/8",
        "é 棋 ♞ \x00\x7f\t\n",
        "",
    ],
)
def test_chess_ids_are_those_of_the_definition(text):
    ids = TOKENIZERS["chess"].encode(text)
    assert ids == chess_ids(text) and TOKENIZERS["chess"].decode(ids) == chess_text(ids) == text


@pytest.mark.slow
def test_chess_ids_of_real_rows_are_those_of_the_definition():
    rng = random.Random(3)
    for board, _ in zip(random_positions(rng), range(200), strict=False):
        text = f"A: {board.fen()}+e2e4+a7a8q b1c3+{board.fen()}+0.001+0+1    B: {board.board_fen()}"
        assert TOKENIZERS["chess"].encode(text) == chess_ids(text)


def test_whatever_a_model_writes_is_the_text_of_the_definition():
    """Partial boards, boards that run on, squares between words; ids of any kind, bytes of ASCII only."""
    rng = random.Random(0)
    for _ in range(1000):
        squares, words = (
            (lambda: rng.randrange(257, 270)),
            (lambda: rng.choice([rng.randrange(1, 129), rng.randrange(257, 585)])),
        )
        ids = [rng.choice([squares, squares, words])() for _ in range(rng.randrange(1, 100))]
        assert TOKENIZERS["chess"].decode(ids) == chess_text(ids)


def test_a_board_is_64_tokens_one_per_square():
    tokenizer = TOKENIZERS["chess"]
    for board, _ in zip(random_positions(random.Random(2)), range(300), strict=False):
        assert len(tokenizer.encode(board.board_fen())) == 64
    same_square = [
        tokenizer.encode(f"P: {chess.Board(fen).fen()}")[1 + 4]
        for fen in (chess.STARTING_FEN, "4k3/8/8/8/8/8/8/4K3 w - - 0 1")
    ]
    assert same_square[0] == same_square[1], "the black king on e8 is the same token at the same place in both"


@given(st.text(max_size=80))
def test_any_text_round_trips(text):
    expected = text.encode("utf-8", errors="replace").decode("utf-8")
    for tokenizer in TOKENIZERS.values():
        assert tokenizer.decode(tokenizer.encode(text)) == expected


@given(st.binary(max_size=80))
def test_any_bytes_round_trip_as_latin1_text(raw):
    text = raw.decode("latin-1")
    for tokenizer in TOKENIZERS.values():
        assert tokenizer.decode(tokenizer.encode(text)).encode("latin-1") == raw


@given(st.text(alphabet="pnbrqkPNBRQK12345678/ +-", max_size=120))
def test_texts_that_almost_look_like_boards_round_trip(text):
    tokenizer = TOKENIZERS["chess"]
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(st.lists(st.integers(0, TOKENIZERS["chess"].vocab_size - 1), max_size=150))
def test_any_ids_a_model_may_emit_decode(ids):
    assert isinstance(TOKENIZERS["chess"].decode(ids), str)


def test_token_bytes_concatenate_to_the_text(tokenizer):
    pieces = tokenizer.token_bytes()
    text = " e2e4 e7e8q    E: -0.5+0.001+1 Wörld"
    assert b"".join(pieces[i] for i in tokenizer.encode(text)) == text.encode()
    assert pieces[tokenizer.eos_id] == b""


def test_end_of_text_that_is_spelled_out_is_its_token(tokenizer):
    ids = tokenizer.encode("<|endoftext|>a<|endoftext|>b")
    assert ids == [tokenizer.eos_id, *tokenizer.encode("a"), tokenizer.eos_id, *tokenizer.encode("b")]
    assert tokenizer.decode(ids) == "ab"


def test_saved_tokenizer_loads_with_the_same_ids(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    assert Tokenizer.load(str(tmp_path)).encode(START) == tokenizer.encode(START)


def test_what_is_saved_is_read_by_transformers_with_the_same_ids_and_texts(tokenizer, tmp_path):
    """A run's weights are such a folder."""
    tokenizer.save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in (START, "<|endoftext|>Wörld e2e4", " 8/8/8/8/8/8/8/8 "):
        ids = theirs(text)["input_ids"]
        assert ids == tokenizer.encode(text) and ids
        assert theirs.decode(ids, skip_special_tokens=True) == tokenizer.decode(ids)
    assert (theirs.eos_token_id, theirs.bos_token_id) == (tokenizer.eos_id, tokenizer.bos_id)


def test_unusable_tokenizers_are_refused_by_name(tmp_path):
    with pytest.raises(TokenizerError, match=r"'gpt3'; expected 'chess', 'gpt2', or a folder"):
        Tokenizer.load("gpt3")
    (tmp_path / "vocab.json").write_text("{")
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    with pytest.raises(TokenizerError, match=r"vocab\.json .* not a GPT-2 byte-level BPE"):
        Tokenizer.load(str(tmp_path))
    with pytest.raises(TokenizerError, match=r"\[0, 585\)"):
        TOKENIZERS["chess"].decode([600])


@pytest.mark.skipif(not (SHARED / "data").is_dir(), reason="the 250 real RookWorld rows are not part of the repository")
def test_real_rookworld_rows_round_trip(tokenizer):
    rows = (SHARED / "data" / "rook_val_first250.txt").read_text().splitlines()
    assert len(rows) == 250
    for row in rows:
        assert tokenizer.decode(tokenizer.encode(row)) == row
