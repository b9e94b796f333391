"""Matches of many games at once, Elo of paired games, and ratings of many players: against hand counts and simulated strengths."""

import json
import math
import random

import chess
import chess.pgn
import numpy as np
import pytest

from jax_grpo.chess.games import ILLEGAL, random_move
from jax_grpo.chess.play.arena import ADJUDICATED, HELD, ModelSide, paired_game, plain_side, play_match, to_pgn
from jax_grpo.chess.play.match import main
from jax_grpo.chess.play.ratings import elo_of_pairs, fit_ratings


def uniform(board: chess.Board, rng: random.Random) -> str:
    return random_move(board, rng)


def mating(board: chess.Board, rng: random.Random) -> str:
    for move in board.legal_moves:
        board.push(move)
        mates = board.is_checkmate()
        board.pop()
        if mates:
            return move.uci()
    return uniform(board, rng)


def match(first, second, games=6, **settings):
    return play_match(first, second, games, **({"seed": 3, "max_half_moves": 60} | settings))


def test_openings_are_paired_and_colours_exchanged_and_every_game_is_legal():
    games = match(plain_side("a", uniform, 0), plain_side("b", mating, 0))
    for number, game in enumerate(games):
        opening = paired_game(3, number).board
        assert game.board.move_stack[:4] == opening.move_stack and game.colour == (number % 2 == 0)
        replayed = chess.Board()
        for move in game.board.move_stack:
            assert move in replayed.legal_moves
            replayed.push(move)
        assert game.ended and len(game.board.move_stack) <= 60
        if replayed.is_checkmate():
            assert game.score == float(replayed.turn != game.colour)


def test_a_game_does_not_depend_on_the_others():
    sides = lambda: (plain_side("a", uniform, 0), plain_side("b", uniform, 0))  # noqa: E731
    few, many = match(*sides(), games=2), match(*sides(), games=8)
    assert [g.board.move_stack for g in few] == [g.board.move_stack for g in many[:2]]
    assert many[0].board.move_stack != many[2].board.move_stack


def test_who_plays_no_legal_move_loses_at_once():
    games = match(plain_side("a", lambda board, rng: "e9e9", 0), plain_side("b", uniform, 0))
    assert all(game.ended == ILLEGAL and game.score == 0 and list(game.illegal.values()) == ["e9e9"] for game in games)
    assert [len(game.board.move_stack) for game in games] == [4, 5] * 3
    assert str(to_pgn(games[1], "a", "b", 2)).count("1-0") == 2  # b is White: in the header and at the end
    games = match(plain_side("b", uniform, 0), plain_side("a", lambda board, rng: "", 0))
    assert all(game.score == 1 for game in games)


PAWNS = {chess.PAWN: 1, chess.KNIGHT: 3, chess.BISHOP: 3, chess.ROOK: 5, chess.QUEEN: 9, chess.KING: 0}


def white_is_ahead(board: chess.Board) -> int:
    """Counted here, piece by piece."""
    return sum(PAWNS[p.piece_type] * (1 if p.color else -1) for p in board.piece_map().values())


def greedy(board: chess.Board, rng: random.Random) -> str:
    captures = list(board.generate_legal_captures())
    return rng.choice(captures).uci() if captures else uniform(board, rng)


@pytest.mark.parametrize(
    ("first", "second", "pawns", "scores"),
    [(greedy, uniform, 5, {1.0}), (uniform, greedy, 5, {0.0}), (greedy, greedy, 1, {0.0, 1.0})],
)
def test_a_lead_that_holds_is_adjudicated_and_the_same_game_is_played_until_then(first, second, pawns, scores):
    def sides():
        return plain_side("a", first, 0), plain_side("b", second, 0)

    judged, whole = (match(*sides(), games=16, max_half_moves=200, adjudicate=limit) for limit in (pawns, None))
    assert {game.score for game in judged if game.ended == ADJUDICATED} == scores
    for one, other in zip(judged, whole, strict=True):
        moves = other.board.move_stack[: len(one.board.move_stack)]
        assert one.board.move_stack == moves and other.ended != ADJUDICATED
        board, leads = chess.Board(), []
        for move in moves:
            board.push(move)
            leads.append(white_is_ahead(board) * (1 if one.colour else -1))
        windows = [leads[n : n + HELD] for n in range(4, len(leads) - HELD + 1)]  # the opening is not played
        held = [min(window) >= pawns or max(window) <= -pawns for window in windows]
        assert not any(held[:-1])
        if one.ended == ADJUDICATED:
            assert held[-1] and one.score == float(leads[-1] > 0)
            assert 'Termination "adjudication"' in str(to_pgn(one, "a", "b", 1))
        else:
            assert (one.ended, one.score) == (other.ended, other.score)


@pytest.mark.slow
def test_a_model_plays_the_same_games_in_any_company_and_lenient_it_never_loses_by_an_illegal_move():
    def sides(strict):
        model = ModelSide("packaged:rook-small", temperature=1.0, strict=strict, seed=1)
        return model, plain_side("random", uniform, 1)

    few, many = match(*sides(True), games=2), match(*sides(True), games=6)
    assert [str(g) for g in few] == [str(g) for g in many[:2]]
    assert any(game.ended == ILLEGAL for game in many)
    model, opponent = sides(False)
    games = match(model, opponent, games=6)
    assert not any(game.ended == ILLEGAL for game in games)
    assert 0 < model.substituted < model.played


def test_the_elo_of_paired_games_is_that_of_their_mean_and_its_interval_goes_by_pairs():
    scores = [1, 0, 1, 1, 0.5, 0.5, 1, 0.5, 0, 1, 1, 0]
    pairs = np.array([0.5, 1, 0.5, 0.75, 0.5, 0.5])
    actual = elo_of_pairs(scores)
    half = 1.959963984540054 * pairs.std(ddof=1) / math.sqrt(6)
    assert actual.score == pytest.approx(pairs.mean())
    assert actual.score_interval == pytest.approx((pairs.mean() - half, pairs.mean() + half))
    assert actual.elo == pytest.approx(400 * math.log10(actual.score / (1 - actual.score)))
    # The colours decide every game: no pair says anything, and the interval is narrower than that of twelve single games.
    even = elo_of_pairs([1, 0] * 6)
    assert even.elo == 0 and even.score_interval[1] - 0.5 < 1.96 * 0.5 / math.sqrt(12)
    with pytest.raises(ValueError, match="3 games; expected pairs"):
        elo_of_pairs([1, 0, 1])


def test_two_players_ratings_are_the_elo_of_their_score():
    scores = [1, 1, 0.5, 0.5] * 15
    fitted = fit_ratings({("b", "a"): scores}, "a")
    assert fitted["a"].value == fitted["a"].low == fitted["a"].high == 0
    assert fitted["b"].value == pytest.approx(400 * math.log10(3), rel=2e-3)  # the prior's part
    assert fitted["b"].low < fitted["b"].value < fitted["b"].high


def test_ratings_are_found_again_from_simulated_games_with_intervals_that_cover_them():
    truth = {"random": 0.0, "capture": 250.0, "model": 400.0, "two-ply": 700.0}
    rng, matches, names = np.random.default_rng(0), {}, list(truth)
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            expected = 1 / (1 + 10 ** ((truth[b] - truth[a]) / 400))
            matches[a, b] = (rng.random(400) < expected).astype(float).tolist()
    fitted = fit_ratings(matches, "random")
    for name, elo in truth.items():
        print(name, elo, fitted[name])
        assert fitted[name].low - 20 <= elo <= fitted[name].high + 20
        assert abs(fitted[name].value - elo) < 40
    assert fit_ratings({("x", "random"): [0.0] * 20}, "random")["x"].value < -400, "finite without a point"
    with pytest.raises(ValueError, match="'y' cannot be compared with 'random'"):
        fit_ratings({("x", "random"): [1, 0], ("y", "z"): [1, 0]}, "random")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--games", "3"], "--games 3: expected an even number"),
        (["--opponent", "random"], "--opponent does nothing with --against"),
        (["--games", "2", "--level", "3"], "--level does nothing with --against"),
        (["--games", "2", "--adjudicate", "0"], "--adjudicate 0: expected pawns, more than 0"),
    ],
)
def test_options_that_would_do_nothing_are_refused(words, message, capsys):
    with pytest.raises(SystemExit):
        main(["--weights", "packaged:rook-small", "--against", "random", *words])
    assert message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--weights", "packaged:rook-small", "--strict"])
    assert "--strict needs --against" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--weights", "packaged:rook-small", "--adjudicate", "9"])
    assert "--adjudicate needs --against" in capsys.readouterr().err


def test_an_opponent_that_is_nobody_is_one_error(tmp_path):
    with pytest.raises(SystemExit, match="'nobody'"):
        main(["--weights", "packaged:rook-small", "--against", "nobody", "--games", "2"])


@pytest.mark.slow
def test_a_ladder_is_written_with_every_match_and_rating(tmp_path):
    words = ["--weights", "packaged:rook-small", "--against", "random,capture,skill0-50", "--games", "4", "--strict"]
    main([*words, "--json", str(tmp_path / "l.json"), "--pgn", str(tmp_path / "l.pgn")])
    record = json.loads((tmp_path / "l.json").read_text())
    assert len(record["matches"]) == 6 and set(record["ratings"]) == {
        "packaged:rook-small",
        "random",
        "capture",
        "skill0-50",
    }
    assert record["ratings"]["random"]["elo"] == 0 and record["ratings"]["skill0-50"]["elo"] > 0
    with (tmp_path / "l.pgn").open() as file:
        games = list(iter(lambda: chess.pgn.read_game(file), None))
    assert len(games) == 24 and not any(game.errors for game in games)
    for match, four in zip(record["matches"], (games[i : i + 4] for i in range(0, 24, 4)), strict=True):
        won = sum(
            (g.headers["White"] == match["first"]) == (g.headers["Result"] == "1-0")
            for g in four
            if "1/2" not in g.headers["Result"]
        )
        assert won == match["wins"]
