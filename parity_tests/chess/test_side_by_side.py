"""Two evaluations in pictures: the same positions and the same ending, drawn from what the evaluations kept."""

import json

import chess
import matplotlib.pyplot as plt
import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import FancyArrowPatch, Rectangle

from jax_grpo.chess.boards import ENGINE, draw_board, draw_distribution
from jax_grpo.chess.evaluate import endgame, side_by_side
from jax_grpo.chess.evaluate.__main__ import parse, run
from jax_grpo.chess.games import Game
from jax_grpo.chess.positions.position import Position
from jax_grpo.chess.positions.values import win_probability

# White's king in the corner has three moves: worth 0, 1 and -2 pawns.
CORNER = Position("8/8/8/8/8/2k5/8/K7 w - - 0 1", (), ("a1a2", "a1b1"), (1.0, -2.0))
START = "8/8/8/8/8/1k6/7r/K7 b - - 0 1"  # mate in one: h2h1


def test_the_loss_of_a_distribution_counts_what_is_illegal_as_the_worst_move():
    actual = side_by_side.distribution(CORNER, {"a1a2": -0.5, "a1b1": -2.0})
    good, bad = win_probability(1.0), win_probability(-2.0)
    p = [0.6065306597, 0.1353352832]
    assert actual["legal"] == pytest.approx(sum(p)) and actual["best"] == ["a1a2"]
    assert actual["loss"] == pytest.approx((1 - p[0]) * (good - bad))
    assert actual["probability"]["a1b1"] == pytest.approx(p[1])


def test_positions_are_drawn_by_their_checksum_among_the_undecided_ones():
    decided = Position("8/8/8/8/8/2k5/8/K7 w - - 9 9", (), ("a1a2", "a1b1"), (20.0, 20.0))
    others = [Position(f"8/8/8/8/8/2k5/8/K7 w - - {n} 9", (), CORNER.moves, CORNER.evaluations) for n in range(9)]
    rows = [decided, *others]
    fens = {rows[i].fen for i in side_by_side.chosen(rows)}
    assert len(fens) == side_by_side.BOARDS and decided.fen not in fens
    assert {rows[::-1][i].fen for i in side_by_side.chosen(rows[::-1])} == fens
    assert fens != {row.fen for row in others[: side_by_side.BOARDS]}


@pytest.mark.parametrize("seen_from", [chess.WHITE, chess.BLACK])
def test_boards_have_coordinates_and_say_what_the_move_loses(seen_from):
    figure, axis = plt.subplots()
    draw_board(axis, chess.Board(CORNER.fen), "a1b1", "a1a2", seen_from=seen_from, lost=0.268)
    at = {text.get_text(): text.get_position() for text in axis.texts if text.get_text() in "abcdefgh12345678"}
    plt.close(figure)
    files, ranks = [int(at[name][0]) for name in "abcdefgh"], [int(at[name][1]) for name in "12345678"]
    assert files == ranks == (list(range(8)) if seen_from else list(range(7, -1, -1)))
    assert axis.get_title() == "White to move\nmodel a1b1 (legal, loses 26.8%), engine a1a2"


def test_likely_moves_have_wider_arrows_and_the_best_ones_a_frame():
    figure, axis = plt.subplots()
    draw_distribution(axis, chess.Board(), {"e2e4": 0.5, "d2d4": 0.1, "a2a3": 0.01}, ["g1f3"])
    arrows = [patch for patch in axis.patches if isinstance(patch, FancyArrowPatch)]
    frames = [p for p in axis.patches if isinstance(p, Rectangle) and to_hex(p.get_edgecolor()) == ENGINE]
    plt.close(figure)
    assert len(arrows) == 2, "one of a hundredth is not drawn"
    rare, likely = arrows
    assert likely.get_linewidth() > rare.get_linewidth() and likely.get_alpha() > rare.get_alpha()
    assert {frame.get_center().round(2).tolist()[0] for frame in frames} == {6.5, 5.5} and len(frames) == 2


def evaluated(folder, name: str, moves: list[str], ended: str, likely: float) -> None:
    """A folder as an evaluation leaves it: a game of King and rook, and one position."""
    folder.mkdir()
    game = Game(chess.Board(START), colour=chess.BLACK)
    for uci in moves:
        game.push(uci)
    game.ended = ended
    (folder / "endgame.pgn").write_text(endgame.pgn({"KRK, greedy": [game]}, name))
    thought = side_by_side.distribution(CORNER, {"a1a2": likely, "a1b1": -3.0})
    estimate = {"value": 0.5, "low": 0.4, "high": 0.6, "count": 9, "method": "wilson"}
    report = {
        "format": 1, "model": {"name": name, "sha256": name * 8}, "data": {}, "seed": 0, "temperature": 1.0,
        "estimates": {"mates/full/greedy/all/mate": estimate}, "boards": [thought],
    }  # fmt: skip
    (folder / "evaluation.json").write_text(json.dumps(report))


def test_a_comparison_shows_the_same_positions_and_the_game_that_was_won_after(tmp_path):
    before, after = tmp_path / "a", tmp_path / "b"
    evaluated(before, "old", ["h2b2"], "stalemate", -2.5)
    evaluated(after, "new", ["h2h1"], "checkmate", -0.1)
    files = run(parse(["--compare", str(before), str(after)]))
    pictures = {after / side_by_side.DISTRIBUTIONS, after / side_by_side.REPLAY}
    assert pictures < set(files) and all(path.stat().st_size > 10_000 for path in pictures)
    page = (after / "comparison.md").read_text()
    assert f"({side_by_side.DISTRIBUTIONS})" in page and f"({side_by_side.REPLAY})" in page


def test_a_game_won_only_after_goes_before_others_and_starts_must_be_the_same(tmp_path):
    evaluated(tmp_path / "a", "old", ["h2b2"], "stalemate", -1.0)
    evaluated(tmp_path / "b", "new", ["h2h1"], "checkmate", -1.0)
    lost, won = (side_by_side._games(tmp_path / name / "endgame.pgn") for name in "ab")
    (key,) = won
    both = {"first": lost[key], key: lost[key]}, {"first": lost[key], key: won[key]}
    assert side_by_side._same_game(*both) == (lost[key], won[key])
    assert side_by_side._same_game({"another start": lost[key]}, won) is None
    assert side_by_side._games(tmp_path / "none.pgn") == {}


def test_evaluations_of_an_earlier_version_are_compared_without_pictures(tmp_path):
    for name in "ab":
        evaluated(tmp_path / name, name, ["h2h1"], "checkmate", -1.0)
        (tmp_path / name / "endgame.pgn").unlink()
        report = json.loads((tmp_path / name / "evaluation.json").read_text())
        del report["boards"]
        (tmp_path / name / "evaluation.json").write_text(json.dumps(report))
    files = run(parse(["--compare", str(tmp_path / "a"), str(tmp_path / "b")]))
    assert sorted(path.name for path in files) == ["comparison.json", "comparison.md"]
