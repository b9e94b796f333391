"""RookWorld rows: the published ones print back byte for byte, and no text makes a parser do anything but answer or refuse."""

import os
from pathlib import Path

import chess
import pytest
from growth import require_linear
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_grpo.chess.positions.files import read_positions
from jax_grpo.chess.positions.rookworld import (
    PolicyRow,
    RowError,
    format_environment_row,
    format_policy_row,
    parse_environment_row,
    parse_policy_row,
    state_prompt,
)
from jax_grpo.chess.positions.sources import read_packaged
from jax_grpo.chess.tasks.environment import next_state

PUBLISHED = Path(os.environ.get("JAX_GRPO_SHARED", Path(__file__).parents[3] / "shared"), "data/rook_val_first250.txt")
needs_published = pytest.mark.skipif(
    not PUBLISHED.is_file(), reason="the 250 real RookWorld rows are not part of the repository; set JAX_GRPO_SHARED"
)
START = chess.STARTING_FEN
ROW = f"P: {START}    M: e2e4 a2a3    E: 0.3 -0.1    B: e2e4"
STATE = "rnbqkbnr/pppppppp/8/8/4P3/8/PPPP1PPP/RNBQKBNR b KQkq - 0 1"
STEP = f"A: {START}+e2e4+e2e4+{STATE}+0.001+0+0"


@needs_published
def test_all_250_published_rows_parse_and_print_back_byte_for_byte():
    texts = PUBLISHED.read_text().splitlines()
    assert len(texts) == 250
    for text in texts:
        row = parse_policy_row(text)
        assert format_policy_row(row, padded=True) == text
        assert parse_policy_row(format_policy_row(row)) == row
    assert len(read_positions(PUBLISHED)) == 250


@needs_published
def test_published_positions_are_best_first_for_both_colours_and_keep_their_label():
    lowest = {"w": 0, "b": 0}
    for text, position in zip(PUBLISHED.read_text().splitlines(), read_positions(PUBLISHED), strict=True):
        row = parse_policy_row(text)
        values = dict(zip(row.moves, row.evaluations, strict=True))
        ordered = [values[move] for move in position.moves]
        assert ordered == sorted(ordered, reverse=True) and position.best == row.best
        assert list(position.evaluations) == sorted(position.evaluations, reverse=True)
        assert max(map(abs, position.evaluations)) < 100, "mates are on Position's scale"
        if len(set(ordered)) == len(ordered) > 1:
            lowest[position.fen.split()[1]] += position.moves[-1] == position.best
    print("label is the lowest evaluation:", lowest)
    assert lowest["b"] > 50 and lowest["w"] < 5, "sorting by the label would teach Black the worst move"


def test_mates_are_brought_from_the_published_scale_to_ours():
    row = PolicyRow(START, ("a2a3", "b2b3", "c2c3", "d2d3"), (-999.96, 88.5, 999.98, 0.0), "a2a3")
    assert row.position().moves == ("c2c3", "b2b3", "d2d3", "a2a3")
    assert row.position().evaluations == (99.98, 88.5, 0.0, -99.96)


def test_spacing_carries_no_meaning():
    row = parse_policy_row(ROW)
    assert row == PolicyRow(START, ("e2e4", "a2a3"), (0.3, -0.1), "e2e4")
    assert parse_policy_row("  " + "   ".join(ROW.split()) + " \n") == row
    assert parse_policy_row(" ".join(ROW.split()).replace(": ", ":")) == row
    assert parse_policy_row(format_policy_row(row, padded=True)) == row


def test_padded_fields_stay_apart_when_they_outgrow_their_columns():
    board = chess.Board("4k3/8/8/8/8/8/8/4K2R w K - 0 1")
    moves = tuple(move.uci() for move in board.legal_moves)[:10]
    row = PolicyRow(board.fen(), moves, tuple(-99.25 - i for i in range(10)), moves[0])
    text = format_policy_row(row, padded=True)
    assert parse_policy_row(text) == row and all(marker in text.split() for marker in ("M:", "E:", "B:"))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("", "found the fields none"),
        ("hello " + ROW, "expected `P: <FEN> M: "),
        (ROW.replace("E:", ""), "found the fields P, M, B"),
        (f"P: {START} E: 1 M: e2e4 B: e2e4", "found the fields P, E, M, B"),
        (ROW.replace(" 0 1", ""), "has 4 fields; expected 6"),
        (ROW.replace("KQkq", "KQkx"), "cannot be read"),
        (ROW.replace("RNBQKBNR", "RNBQ1BNR"), "is not a legal position"),
        (ROW.replace("-0.1", ""), "2 moves but 1 evaluations"),
        (ROW.replace("a2a3", "a2a5"), "move 'a2a5' is not legal"),
        (ROW.replace("B: e2e4", "B: e2e5"), "move 'e2e5' is not legal"),
        (ROW.replace("B: e2e4", "B:"), "field B: .* is ''; expected one move"),
        (ROW + " d2d4", "field B: .* is 'e2e4 d2d4'; expected one move"),
        (ROW.replace("0.3", "good"), "evaluations 'good -0.1'; expected numbers in pawns"),
        (ROW.replace("0.3", "inf"), "evaluations 'inf -0.1'; expected finite numbers"),
    ],
)
def test_bad_policy_rows_say_why(row, message):
    with pytest.raises(RowError, match=message):
        parse_policy_row(row)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("A: x+y", "has 2 fields; expected 7"),
        (STEP.removeprefix("A: "), "environment row"),
        (STEP.replace("+e2e4+e2e4", "+e2-e4+e2e4"), "move 'e2-e4' .* is not UCI"),
        (STEP.replace("+0.001", "+much"), "reward 'much'; expected number"),
        (STEP.replace("+0.001", "+nan"), "reward 'nan'; expected finite number"),
        (STEP.replace("+0+0", "+0+2"), "flags '0' and '2'"),
        (STEP.replace(STATE, "8/8"), "FEN '8/8' cannot be read"),
    ],
)
def test_bad_environment_rows_say_why(row, message):
    with pytest.raises(RowError, match=message):
        parse_environment_row(row)


def test_environment_rows_round_trip():
    assert format_environment_row(parse_environment_row(STEP)) == STEP
    for position in read_packaged("heldout")[:50]:
        board = chess.Board(position.fen)
        for move in (chess.Move.from_uci(position.moves[0]), chess.Move.from_uci("a1b4")):
            text = state_prompt(board.fen(), move.uci(), position.history) + next_state(board, move)
            row = parse_environment_row(text)
            assert format_environment_row(row) == text and parse_environment_row(f"{text}+") == row
            assert row.truncated == (move.uci() == "a1b4")
            assert row.position().fen == position.fen and row.position().history == position.history[-9:]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_text_is_parsed_or_refused(data):
    for whole, parse, write in (
        (ROW, parse_policy_row, format_policy_row),
        (STEP, parse_environment_row, format_environment_row),
    ):
        start, end = sorted(data.draw(st.integers(0, len(whole))) for _ in range(2))
        text = data.draw(st.one_of(st.text(), st.text().map(lambda x: whole[:start] + x + whole[end:])))  # noqa: B023
        try:
            row = parse(text)
        except RowError:  # any other exception fails the test
            continue
        assert parse(write(row)) == row


def test_parsing_time_does_not_explode_on_spaces():
    """A single pattern for the row backtracks: 2.3 s of CPU for 2,000 spaces here, eight times that for twice as many."""

    def refused(spaces):
        text = ROW.replace("M: e2e4", "M:" + " " * spaces).replace("E:", "")

        def parse():
            with pytest.raises(RowError, match="found the fields P, M, B"):
                parse_policy_row(text)

        return parse

    require_linear(refused)
