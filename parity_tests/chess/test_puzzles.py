"""Puzzles: Lichess's CSV as it is, whole lines judged as Lichess does, and the rating at which half are solved."""

import hashlib
import json
import math

import chess
import numpy as np
import pytest

from jax_grpo.chess.evaluate.__main__ import parse
from jax_grpo.chess.evaluate.puzzles import PACKAGED_PUZZLES, Puzzle, attempts, fitted_rating, puzzle_rows, read_puzzles
from jax_grpo.chess.evaluate.suites import SUITES, Data, Results
from jax_grpo.chess.evaluate.tables import evaluation_page
from jax_grpo.chess.positions.position import mating_keys, mating_moves, position_key
from jax_grpo.chess.positions.sources import read_packaged
from jax_grpo.evaluate import EvaluationError

HEAD = "PuzzleId,FEN,Moves,Rating,RatingDeviation,Popularity,NbPlays,Themes,GameUrl,OpeningTags"
# In the form of database.lichess.org's file: the first move is the opponent's.
LONG = (
    "00008,r6k/pp2r2p/4Rp1Q/3p4/8/1N1P2R1/PqP2bPP/7K b - - 0 24,f2g3 e6e7 b2b1 b3c1 b1c1 h6c1,1759,76,95,9113,"
    "crushing hangingPiece long middlegame,https://lichess.org/787zsVup/black#48,"
)
# Back rank: the line says e1e8, and a1a8 mates too.
TWO_MATES = (
    "00xyz,6k1/5ppp/7p/8/8/8/5PPP/R3R1K1 b - - 0 1,h6h5 e1e8,600,80,90,100,mateIn1,https://lichess.org/x,Italian_Game"
)


def written(folder, *rows, head=HEAD):
    file = folder / "puzzles.csv"
    file.write_text("\n".join([head, *rows]) + "\n")
    return file


def test_lichesss_rows_begin_after_the_opponents_move(tmp_path):
    long, mate = read_puzzles(written(tmp_path, LONG, TWO_MATES))
    assert long.line == ("e6e7", "b2b1", "b3c1", "b1c1", "h6c1") and long.rating == 1759
    board = chess.Board("r6k/pp2r2p/4Rp1Q/3p4/8/1N1P2R1/PqP2bPP/7K b - - 0 24")
    board.push_uci("f2g3")
    assert long.fen == board.fen() and mate.line == ("e1e8",)
    assert len(read_puzzles(written(tmp_path, LONG, TWO_MATES), 1)) == 1


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (LONG.replace("e6e7", "e6e9"), "'e6e9' is not legal in 'r6k"),
        (LONG.replace(" h6c1", ""), "has 5; expected the opponent's move, then the solver's"),
        (LONG.replace("1759", "17.5"), "Rating '17.5'; expected a whole number"),
        (LONG.replace("r6k/", "r6x/"), "FEN 'r6x/"),
        (LONG.replace("7K b", "8 b"), "is no position of a game"),
        ("00008,too,few", "3 fields in '00008,too,few'; expected the header's 10"),
    ],
)
def test_a_bad_row_is_one_error_with_its_line(tmp_path, row, words):
    with pytest.raises(EvaluationError, match=r"puzzles\.csv:3: ") as error:
        read_puzzles(written(tmp_path, TWO_MATES, row))
    assert words in str(error.value)


def test_a_file_without_lichesss_header_is_refused(tmp_path):
    with pytest.raises(EvaluationError, match="has no column PuzzleId; expected Lichess's header PuzzleId,FEN"):
        read_puzzles(written(tmp_path, LONG, head="fen,moves"))
    with pytest.raises(EvaluationError, match="no puzzles in it"):
        read_puzzles(written(tmp_path))
    upper = written(tmp_path, TWO_MATES).rename(tmp_path / "PUZZLES.CSV")
    assert len(read_puzzles(upper)) == 1, "an ending in capitals is the same ending"


def played(puzzle: Puzzle, *moves_by_step: list[str]) -> dict[str, int]:
    """What attempts are found to have done that answer these moves, one list a step."""
    seen = []

    def answer(positions, numbers, step):
        seen.append(positions[0].fen)
        return [moves_by_step[step]]

    actual = attempts([puzzle], answer, len(moves_by_step[0]), lambda done: None)[0]
    assert len(seen) == len(moves_by_step), "asked as long as an attempt goes on, and no longer"
    return actual


def test_the_whole_line_must_be_played(tmp_path):
    long, _ = read_puzzles(written(tmp_path, LONG, TWO_MATES))
    right = [["e6e7"], ["b3c1"], ["h6c1"]]
    assert played(long, *right) == {"solved": 1, "first": 1, "legal": 1}
    assert played(long, *right[:2], ["h6h7"]) == {"solved": 0, "first": 1, "legal": 1}
    assert played(long, ["e6e1"]) == {"solved": 0, "first": 0, "legal": 1}
    assert played(long, ["a1a9"]) == {"solved": 0, "first": 0, "legal": 0}


def test_any_mate_solves_as_on_lichess_and_no_other_move_does(tmp_path):
    _, mate = read_puzzles(written(tmp_path, LONG, TWO_MATES))
    assert [played(mate, [move])["solved"] for move in ("e1e8", "a1a8", "a1a7")] == [1, 1, 0]


def test_attempts_go_their_own_ways(tmp_path):
    long, _ = read_puzzles(written(tmp_path, LONG, TWO_MATES))
    # The second falls out at the first move, the third at the second; what they say later does not matter.
    actual = played(long, ["e6e7", "e6e1", "e6e7"], ["b3c1", "b3c1", "h6h7"], ["h6c1", "h6c1", "h6c1"])
    assert actual == {"solved": 1, "first": 2, "legal": 3}
    (row,) = puzzle_rows([actual], 3)
    assert row == pytest.approx({"first": 2 / 3, "legal": 1, "pass_1": 1 / 3, "pass_3": True})


def test_the_rating_is_the_greatest_likelihoods_and_its_interval_where_that_has_fallen_by_half_of_chi_square():
    rng = np.random.default_rng(0)
    ratings = rng.uniform(600, 2400, 400)
    solved = rng.uniform(size=400) < 1 / (1 + 10 ** ((ratings - 1500) / 400))
    actual = fitted_rating(ratings.tolist(), solved.astype(float).tolist())

    def likelihood(rating):
        p_N = 1 / (1 + 10 ** ((ratings - rating) / 400))
        return np.where(solved, np.log(p_N), np.log(1 - p_N)).sum()

    grid = np.arange(1200.0, 1800.0, 0.5)
    values = np.array([likelihood(rating) for rating in grid])
    assert abs(actual.value - grid[values.argmax()]) <= 0.5
    inside = grid[values.max() - values <= 1.92073]
    assert actual.low == pytest.approx(inside[0], abs=0.6) and actual.high == pytest.approx(inside[-1], abs=0.6)
    assert actual.low < 1500 < actual.high and actual.high - actual.low < 120


def test_a_rating_that_nothing_bounds_is_said_by_its_bound():
    none, every = fitted_rating([1000.0] * 10, [0.0] * 10), fitted_rating([1000.0] * 10, [1.0] * 10)
    assert none.value is None and none.low is None and every.value is None and every.high is None
    # (1 - p)^10 = exp(-1.92) at the bound
    p = 1 - math.exp(-1.920729 / 10)
    assert none.high == pytest.approx(1000 + 400 * math.log10(p / (1 - p)), abs=0.01)
    assert every.low == pytest.approx(2000 - none.high, abs=0.01)


class Solver:
    """Answers the puzzles' own moves greedily, and nothing when sampled."""

    def __init__(self, asked):
        self.moves = {}
        for puzzle in asked:
            board = chess.Board(puzzle.fen)
            for uci in puzzle.line:
                self.moves[board.fen()] = uci
                board.push_uci(uci)

    def __call__(self, kind, mode):
        assert kind == "best_move"
        count = {"greedy": 1, "samples": 16}[mode]

        def choose(prompts, *, numbers, step):
            output = [f" {self.moves[prompt.row.fen]}" if mode == "greedy" else "x" for prompt in prompts]
            return [text for text in output for _ in range(count)]

        return choose


def test_the_suite_reports_bands_and_ratings_and_the_page_shows_a_bound(tmp_path):
    asked, results = read_puzzles(written(tmp_path, LONG, TWO_MATES)), Results()
    data = Data([], [], 1, 1, 0, puzzles=asked)
    SUITES["puzzles"](Solver(asked), data, lambda what, total: lambda done: None, results)
    actual = results.estimates
    assert (
        actual["puzzles/lines/greedy/all/solved"].value == 1 and actual["puzzles/lines/sampled/all/pass_16"].value == 0
    )
    assert actual["puzzles/lines/greedy/1400_to_1799/solved"].count == 1
    assert actual["puzzles/lines/greedy/below_1000/solved"].count == 1
    model = {"name": "m", "parameters": 1, "sha256": "0" * 64}
    estimates = {path: vars(estimate) for path, estimate in actual.items()}
    page = evaluation_page({"model": model, "estimates": estimates, "seed": 0, "temperature": 1.0, "data": {}})
    line = next(line for line in page.splitlines() if line.startswith("| puzzle rating"))
    assert f"above {actual['puzzles/lines/greedy/all/rating'].low:.0f}" in line
    assert f"below {actual['puzzles/lines/sampled/all/rating'].high:.0f}" in line


def test_data_is_the_puzzles_where_they_are_asked_for_by_name(capsys):
    common = ["--weights", "w", "--out", "o"]
    assert str(parse([*common, "--suite", "puzzles", "--data", "p.csv"]).puzzles) == "p.csv"
    assert parse([*common, "--data", "p.csv"]).puzzles == PACKAGED_PUZZLES, "`all` asks its data's positions"
    with pytest.raises(SystemExit):
        parse([*common, "--suite", "puzzles,policy", "--data", "p.csv"])
    assert "puzzles and policy read other files" in capsys.readouterr().err


def packaged() -> list[dict]:
    return [json.loads(line) for line in PACKAGED_PUZZLES.read_text().splitlines()]


def has_one_key(row: dict) -> bool:
    """No move mates, the line's first is the one key, and its last mates."""
    board = chess.Board(row["fen"])
    keys = mating_keys(board)
    if mating_moves(board) or keys != [row["line"][0]] or len(row["line"]) != 3:
        return False
    for uci in row["line"]:
        board.push_uci(uci)
    return board.is_checkmate()


def test_packaged_puzzles_have_one_key_after_which_every_defence_is_mated():
    assert all(map(has_one_key, packaged()[::15]))


@pytest.mark.slow
def test_all_packaged_puzzles_have_one_key_after_which_every_defence_is_mated():
    assert [row["fen"] for row in packaged() if not has_one_key(row)] == []


def test_packaged_puzzles_are_distinct_even_between_colours_and_those_of_the_record():
    keys = {position_key(row["fen"]) for row in packaged()}
    record = json.loads(PACKAGED_PUZZLES.with_suffix(".provenance.json").read_text())
    assert record["sha256"] == hashlib.sha256(PACKAGED_PUZZLES.read_bytes()).hexdigest()
    assert len(keys) == len(packaged()) == len(read_puzzles()) == record["positions"] == 300
    assert sum(" w " in key for key in keys) == 150


@pytest.mark.slow
def test_packaged_puzzles_are_apart_from_what_is_trained_on():
    keys = {position_key(row["fen"]) for row in packaged()}
    for split, source in (("train", "packaged"), ("heldout", "packaged"), ("train", "packaged:tables")):
        assert not keys & {position_key(position.fen) for position in read_packaged(split, source)}, (split, source)


def test_a_mate_in_two_is_one_against_every_defence_and_stalemate_is_none():
    # Rooks a1 and b2 against a king on g8: either may take the seventh rank first.
    board = chess.Board("6k1/8/8/8/8/8/1R6/R5K1 w - - 0 1")
    assert mating_keys(board) == ["a1a7", "b2b7"]
    # After g1f1 the king may go into the corner and be mated, but h7h6 lets him out.
    assert "g1f1" not in mating_keys(chess.Board("6k1/5ppp/8/8/8/8/8/R5K1 w - - 0 1"))
    # The defender has no move after the queen goes to g6: not every way of none is an answer.
    assert "f7g6" not in mating_keys(chess.Board("7k/5Q2/8/6K1/8/8/8/8 w - - 0 1"))
