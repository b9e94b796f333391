"""PGN is read strictly: the positions of each game's own tags and moves, or one error that names the game."""

import chess
import pytest

from jax_grpo.chess.positions.files import PositionFileError, read_games, read_positions

ODDS = "rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/R1BQKBNR w KQkq - 0 1"
BLACK_MOVES = "4k3/8/8/8/8/8/4P3/4K3 b - - 5 30"
FILE = f"""[Event "Odds game"]
[Site "Paris"]
[SetUp "1"]
[FEN "{ODDS}"]
[Result "1-0"]

1. e4 {{ best by
test }} e5 $1 (1... c5 2. Bc4 (2. d4 {{)}}) 2... d6) 2. Bc4 Nc6
3. Qh5! ; ( threatens
3... Nf6?? 4. Qxf7# 1-0

[Event "From the start"]
[Result "*"]

1. d4 d5 2. c4 *
"""


def _positions(path, text):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return [(position.fen, position.history) for position in read_positions(path)]


@pytest.fixture
def right():
    """What `FILE` holds, made from its moves alone."""
    out = []
    for fen, moves in ((ODDS, "e4 e5 Bc4 Nc6 Qh5 Nf6 Qxf7#"), (chess.STARTING_FEN, "d4 d5 c4")):
        board = chess.Board(fen)
        for san in moves.split():
            out.append((board.fen(), tuple(move.uci() for move in board.move_stack)))
            board.push_san(san)
    return out


REWRITTEN = {
    "as it is": lambda text: text,
    "two blank lines": lambda text: text.replace("\n\n", "\n\n\n"),
    "three blank lines, of spaces": lambda text: text.replace("\n\n", "\n \n\n \t\n"),
    "no blank line": lambda text: text.replace("\n\n", "\n"),
    "blank lines between tags": lambda text: text.replace("]\n[", "]\n\n\n["),
    "blank lines between moves": lambda text: text.replace("\n3. Qh5", "\n\n3. Qh5"),
    "Windows": lambda text: text.replace("\n", "\r\n"),
    "byte order marks": lambda text: "\ufeff" + text.replace('[Event "From', '\ufeff[Event "From'),
    "Latin 1": lambda text: text.replace("Paris", "Orl\xe9ans").encode("latin-1"),
    "comments before tags": lambda text: text.replace("[Event", "{ a\n\nb }\n; c\n[Event"),
    "a comment in the tags' line": lambda text: text.replace("[FEN", "{ c } [FEN"),
    "comments between tags and moves": lambda text: text.replace("\n1.", "\n{ c }\n\n1."),
    "escaped lines": lambda text: text.replace("\n", "\n% e4\n").replace("{ best by\n% e4\n", "{ best by\n"),
    "tags in one line": lambda text: text.replace("]\n[", "] ["),
    "moves in the tags' line": lambda text: text.replace("]\n\n1.", "] 1."),
    "indented": lambda text: text.replace("\n", "\n  "),
    "lower case": lambda text: text.replace("[FEN", "[fen").replace("[SetUp", "[setup"),
    "no SetUp": lambda text: text.replace('[SetUp "1"]\n', ""),
    "another tag that cannot be read": lambda text: text.replace('"Paris"', '"Paris'),
    "quotation marks in a tag": lambda text: text.replace('"Paris"', '"the "Paris" of Texas"'),
    "no results": lambda text: text.replace(" 1-0", "").replace(" *", ""),
    "no move numbers": lambda text: text.replace("1. ", "").replace("2. ", "").replace("3. ", "").replace("4. ", ""),
    "numbers at the moves": lambda text: text.replace(". ", "."),
    "castled long ago": lambda text: text.replace("1. d4 d5", "1.d2-d4 d7-d5!?"),
    "a game without moves before": lambda text: f'[Event "x"]\n[FEN "{BLACK_MOVES}"]\n\n*\n\n{text}',
    "a game without moves or result before": lambda text: f'[Event "x"]\n[FEN "{BLACK_MOVES}"]\n\n{text}',
    "standard": lambda text: text.replace("[SetUp", '[Variant "Standard"]\n[SetUp'),
    "from a position": lambda text: text.replace("[SetUp", '[Variant "From Position"]\n[SetUp'),
}


@pytest.mark.parametrize("rewrite", REWRITTEN.values(), ids=REWRITTEN)
def test_each_games_positions_are_those_of_its_own_tags_and_moves(rewrite, right, tmp_path):
    assert _positions(tmp_path / "a.pgn", rewrite(FILE)) == right


def test_a_file_cut_anywhere_gives_its_first_positions_or_an_error(right, tmp_path):
    path = tmp_path / "a.pgn"
    for cut in range(len(FILE)):
        try:
            got = _positions(path, FILE[:cut])
        except PositionFileError:
            continue
        assert got == right[: len(got)], FILE[:cut][-60:]


def test_a_file_without_one_of_its_lines_gives_right_positions_or_an_error_that_names_the_game(right, tmp_path):
    lines = FILE.splitlines(keepends=True)
    for number, line in enumerate(lines):
        text = "".join(lines[:number] + lines[number + 1 :])
        try:
            got = _positions(tmp_path / "a.pgn", text)
        except PositionFileError as error:
            assert "a.pgn: game " in str(error)
        else:
            assert set(got) <= set(right), line


def test_games_without_tags_are_told_apart_by_results_and_by_numbers(tmp_path):
    for text in ("1. f3 e5 *\n\n1. e4 e5 *\n", "1. f3 e5\n\n1. e4 e5\n", "1. f3 e5 1-0 1. e4 e5 1-0"):
        (tmp_path / "a.pgn").write_text(text)
        games = [" ".join(map(str, moves)) for _, moves in read_games(tmp_path / "a.pgn")]
        assert games == ["f2f3 e7e5", "e2e4 e7e5"], text


def test_a_game_that_black_begins_has_its_own_numbers(tmp_path):
    for first in ("30... Kd7 31. Kd2", "1... Kd7 2. Kd2", "Kd7 Kd2"):
        assert len(_positions(tmp_path / "a.pgn", f'[FEN "{BLACK_MOVES}"]\n\n{first} *\n')) == 2


REFUSED = {
    "a null move": ("1. e4 e5 2. Bc4 -- 3. Qh5 *", r"the null move '--'; expected moves of chess \(line 1\)"),
    "ChessBase's null move": ("1. e4 Z0 2. d4 *", r"the null move 'Z0'"),
    "UCI's null move": ("1. e4 0000 2. d4 *", r"the null move '0000'"),
    "a null move while in check": ("1. e4 d6 2. Bb5+ -- 3. Bc4 *", r"the null move '--'"),
    "German": ("1. e4 e5 2. Sf3 *", r"'Sf3' is no move; expected English notation"),
    "French": ("1. e4 e5 2. Cf3 Cc6 *", r"'Cf3' is no move"),
    "figurines": ("1. e4 e5 2. ♘f3 *", r"'♘f3' is no move"),
    "figurines apart": ("1. e4 e5 2. ♘ f3 *", r"'♘' is no move"),
    "lower case": ("1. e4 e5 2. nf3 *", r"'nf3' is no move"),
    "a word left over of nested comments": ("1. e4 { a { b } d5 } e5 *", r"'}' is no move"),
    "half a move": ("1. e4 d5 2. exd *", r"'exd' is no move"),
    "UTF-16": ("1. e4 e5 *".encode("utf-16"), r"is no move"),
    "its beginning is lost": ("2. Nf3 Nc6 *", r"move number '2\.'; expected '1\.'"),
    "moves lost in between": ("1. e4 e5 3. Nc3 *", r"move number '3\.'; expected '2\.'"),
    "a half-move lost": ("1. e4 1... e5 1... d5 *", r"move number '1\.\.\.'; expected '2\.'"),
    "no FEN": ('[SetUp "1"]\n\n1. e4 *', r"SetUp '1' without a tag FEN"),
    "SetUp 0": (f'[SetUp "0"]\n[FEN "{ODDS}"]\n\n1. e4 *', r"SetUp '0' beside FEN 'rnbq"),
    "two FENs": (f'[FEN "{ODDS}"]\n[FEN "{BLACK_MOVES}"]\n\n1. e4 *', r"two tags FEN, 'rnbq.* and '4k3"),
    "a FEN's quotation mark is lost": (f'[FEN "{ODDS}]\n\n1. e4 *', r"\[FEN .*; expected a tag such as"),
    "a FEN's bracket is lost": (f'[FEN "{ODDS}"\n\n1. e4 *', r"\[FEN .*; expected a tag such as"),
    "a FEN behind a broken tag": (f'[Site "x] [FEN "{ODDS}"]\n\n1. e4 *', r"expected a tag such as"),
    "a FEN among moves": (f'1. e4 [FEN "{ODDS}"] e5 *', r"'\[FEN' is no move"),
    "moves without tags behind tags without moves": (
        f'[FEN "{ODDS}"]\n\n*\n\n1. e4 *',
        r"but no moves, and moves with",
    ),
    "a comment into the next game": (
        f'1. e4 {{ good e5 1-0\n\n[Event "b"]\n[FEN "{ODDS}"]\n\n1. d4 {{ x }} d5 *',
        r"no } closes the comment before the next game's tags \(line 1\)",
    ),
    "a comment without an end": ("1. e4 { good e5 *", r"no } closes the comment \(line 1\)"),
    "a variation into the next game": (
        '1. e4 (1. d4\n\n[Event "b"]\n\n1. d4 *',
        r"brackets of variations do not match",
    ),
    "a variation without an end": ("1. e4 (1. d4 d5 *", r"brackets of variations do not match"),
    "Chess960": ('[Variant "Chess960"]\n\n1. e4 *', r"variant 'Chess960'; expected standard chess"),
}


@pytest.mark.parametrize(("text", "message"), REFUSED.values(), ids=REFUSED)
def test_what_would_give_positions_of_another_game_is_one_error(text, message, tmp_path):
    with pytest.raises(PositionFileError, match=rf"a\.pgn: game 1: .*{message}|a\.pgn: game 1: {message}"):
        _positions(tmp_path / "a.pgn", text)
