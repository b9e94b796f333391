"""The policy task's parser and counts: what a perfect answer earns, and what degenerate text costs to parse."""

import dataclasses
import re

import chess
import pytest
from growth import require_linear
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_grpo.chess.evaluate.policy import policy_rows
from jax_grpo.chess.positions.position import Position
from jax_grpo.chess.positions.sources import read_packaged
from jax_grpo.chess.tasks.policy import PolicyTask, legal_moves, parse_answer
from jax_grpo.config.tasks import task_of

# The definition the parser must agree with, written as one pattern; cubic in runs of blanks, so only for short texts.
ROW = re.compile(r"\s*(?P<moves>[^:]*?)\s+E:\s*(?P<evaluations>[^:]*?)\s+B:\s*(?P<best>\S*)\s*")
COUNTED = ("structure", "parseable", "legal_moves", "top_five", "evaluation", "best_move", "legal")
START = chess.STARTING_FEN
ONE_LEGAL_MOVE = Position("k7/8/8/8/8/8/1R6/K7 b - - 0 1", moves=("a8a7",), evaluations=(0.0,))


def _task() -> PolicyTask:
    return PolicyTask(task_of())


def _perfect(position: Position) -> str:
    evaluations = " ".join(str(round(e, 2)) for e in position.evaluations)
    return f" {' '.join(position.moves)}    E: {evaluations}    B: {position.moves[0]}"


@settings(max_examples=400, deadline=None)
@given(
    st.one_of(
        st.text(" \n\tEBM:x1", max_size=24),
        st.lists(st.sampled_from([" ", "  ", "E:", "B:", " E:", " B:", "e2e4", "-0.3", ":", "\u00a0"]), max_size=9).map(
            "".join
        ),
    )
)
def test_fields_are_those_of_the_row_pattern(text):
    match, answer = ROW.fullmatch(text), parse_answer("full", text, START)
    if match is None:
        assert answer == ([], [], "", False)
    else:
        assert answer == (match["moves"].split(), match["evaluations"].split(), match["best"], True)


@pytest.mark.parametrize("blank", [" ", "\u00a0", "\n"])
@pytest.mark.parametrize("head", ["", " x E: ", " x E: 1 B: "])
def test_parsing_degenerate_text_takes_time_in_proportion_to_its_length(head, blank):
    # A collapsed policy writes 144 of GPT-2's longest blank tokens (16 spaces), one row after the other.
    def parsed(length):
        text = head + blank * length
        return lambda: parse_answer("full", text, START)

    require_linear(parsed)


def test_a_perfect_answer_earns_every_counted_component_in_every_packaged_position():
    task, positions = _task(), read_packaged("heldout")
    few = sum(len(legal_moves(p.fen)) < 5 for p in positions)
    assert few > 50, f"{few} positions with fewer than five legal moves; the property needs some"
    scores = task.score([task.prompt(p, 0) for p in positions], [_perfect(p) for p in positions])
    for name in COUNTED:
        worst = int(scores[name].argmin())
        # labels are rounded to the two decimals of the format, so `evaluation` is 1 to rounding
        assert scores[name][worst] == pytest.approx(1, abs=1e-2), (
            f"{name} {scores[name][worst]} in {positions[worst].fen}"
        )
    assert not scores["malformed"].any()


def test_more_candidates_than_the_position_has_moves_is_not_a_right_count():
    assert legal_moves(ONE_LEGAL_MOVE.fen) == {"a8a7"}
    task = _task()
    padded = " a8a7 a8b8 a8b7 a8a7 a8b8    E: 0.0 1 1 0 1    B: a8a7"
    scores = task.score([task.prompt(ONE_LEGAL_MOVE, 0)] * 2, [_perfect(ONE_LEGAL_MOVE), padded])
    assert scores["structure"].tolist() == [1, 0]
    assert scores["legal_moves"].tolist() == pytest.approx([1, 1 / 5])


def test_numbers_are_written_with_ascii_digits():
    task = _task()
    arabic = _perfect(ONE_LEGAL_MOVE).replace("0.0", "\u0660.\u0660")
    scores = task.score([task.prompt(ONE_LEGAL_MOVE, 0)] * 2, [_perfect(ONE_LEGAL_MOVE), arabic])
    assert scores["parseable"].tolist() == [1, 0.5]


def test_a_finished_game_is_scored_without_a_crash():
    mated = Position("R5k1/5ppp/8/8/8/8/8/6K1 b - - 1 1")
    task = _task()
    scores = task.score([task.prompt(mated, 0)], [" g8h8    E: 0    B: g8h8"])
    assert scores["legal"].tolist() == [0] and scores["structure"].tolist() == [0]


WHITE_TO_MOVE = "r3k2r/pppq1ppp/2npbn2/2b1p3/2B1P3/2NPBN2/PPPQ1PPP/R3K2R w KQkq - 0 9"
SEVEN = Position(
    WHITE_TO_MOVE,
    moves=tuple(sorted(legal_moves(WHITE_TO_MOVE))[:7]),
    evaluations=tuple(-0.1 * rank for rank in range(7)),
)


@pytest.mark.parametrize("style", ["best_move", "full"])
def test_the_engines_five_are_five_however_many_moves_are_labelled(style):
    """Files, and task.engine.multipv, may have more: the sixth is not among the first five, and is not Black's published one."""
    config = task_of(prompt_style=style, best_for_black="last")
    task, moves = PolicyTask(config), SEVEN.moves
    rest = "E: 0.0 -0.1 -0.2 -0.3 -0.6    B:"
    texts = [
        f" {move}" if style == "best_move" else f" {' '.join([*moves[:4], move])}    {rest} {move}" for move in moves
    ]
    black = dataclasses.replace(SEVEN, fen=SEVEN.fen.replace(" w ", " b "))
    for position in (SEVEN, black):
        scores = task.score([task.prompt(position, 0)] * 7, texts)
        expected = [1, 1, 1, 1, 1, 0, 0] if style == "best_move" else [0.8, 0.8, 0.8, 0.8, 1, 0.8, 0.8]
        assert scores["top_five"].tolist() == pytest.approx(expected)
        best = moves[0] if position is SEVEN else moves[4]
        assert scores["best_move"].tolist() == [float(move == best) for move in moves]
    judged = policy_rows(style, [SEVEN] * 7, texts, None)
    assert [row["top_five"] for row in judged] == [True] * 5 + [False] * 2
    if style == "full":
        assert [row["candidates_top_five"] for row in judged] == pytest.approx([0.8, 0.8, 0.8, 0.8, 1, 0.8, 0.8])


@pytest.mark.parametrize("best_for_black", ["first", "last"])
@pytest.mark.parametrize("fen", [START, START.replace(" w ", " b ")])
def test_a_file_s_best_move_counts_where_it_is_the_only_label(fen, best_for_black):
    move, other = ("e2e4", "d2d4") if " w " in fen else ("e7e5", "d7d5")
    task = PolicyTask(task_of(prompt_style="best_move", best_for_black=best_for_black))
    prompt = task.prompt(Position(fen, best=move), 0)
    scores = task.score([prompt, prompt], [f" {move}", f" {other}"])
    for name in ("best_move", "top_five"):
        assert scores[name].tolist() == [1, 0], name
