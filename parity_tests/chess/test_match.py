"""Matches: whole games through real processes, and an Elo difference that claims no more than the games say."""

import io
import json
import math
import random
import shutil

import chess
import chess.engine
import chess.pgn
import pytest

from jax_grpo.chess.games import Game, play
from jax_grpo.chess.play.arena import paired_game
from jax_grpo.chess.play.match import MatchError, ModelProcess, main, stockfish, summary, to_pgn
from jax_grpo.chess.play.ratings import elo_difference, elo_of_games, elo_range, signed

HAS_ENGINE = shutil.which("stockfish") or shutil.which("/usr/games/stockfish")
needs_engine = pytest.mark.skipif(not HAS_ENGINE, reason="Stockfish is not installed (apt install stockfish)")


def test_elo_is_the_logistic_model():
    for difference in (-400, -120.5, 0, 35, 400):
        score = 1 / (1 + 10 ** (-difference / 400))
        assert elo_difference(score) == pytest.approx(difference)
    assert elo_difference(0) is None and elo_difference(1) is None


def test_an_even_match_is_zero_and_its_interval_symmetric_and_narrows():
    few, many = elo_of_games(5, 10, 5), elo_of_games(50, 100, 50)
    assert few.elo == pytest.approx(0) and few.elo_interval[0] == pytest.approx(-few.elo_interval[1])
    assert -200 < few.elo_interval[0] < many.elo_interval[0] < -20
    assert str(many).startswith("Elo difference 0 (95 % interval -")
    assert math.copysign(1, elo_difference(0.5) or 0.0) == 1 and signed(-0.3) == signed(0.3) == "0"


def test_bounds_that_one_side_lacks_are_said_in_words():
    assert (elo_range((386.2, None)), elo_range((None, -386.2))) == ("above +386", "below -386")
    assert (elo_range((-310.4, 40.0)), elo_range((None, None)), signed(None)) == ("-310 to +40", "any", "-")


@pytest.mark.parametrize("games", [1, 4, 20, 1000])
def test_no_point_and_every_point_have_only_the_exact_one_sided_bound(games):
    lost, won = elo_of_games(0, 0, games), elo_of_games(games, 0, 0)
    assert lost.elo is None and lost.elo_interval[0] is None and won.elo_interval[1] is None
    bound = lost.score_interval[1]
    assert (1 - bound) ** games == pytest.approx(0.05), "at this strength such a match has a chance of 5 %"
    assert won.elo_interval[0] == pytest.approx(-(lost.elo_interval[1] or 0))
    assert "no point scored; one-sided" in str(lost) and "every point scored" in str(won)


def test_intervals_cover_the_truth_as_often_as_they_say():
    rng, covered, trials = random.Random(0), 0, 2000
    for _ in range(trials):
        p, n = rng.uniform(0.05, 0.95), 20
        wins = sum(rng.random() < p for _ in range(n))
        low, high = elo_of_games(wins, 0, n - wins).score_interval
        covered += low <= p <= high
    print(f"covered {covered / trials:.1%}")
    assert 0.93 < covered / trials < 0.98
    with pytest.raises(ValueError, match="no games"):
        elo_of_games(0, 0, 0)


def test_openings_are_seeded_distinct_and_not_over():
    openings = [paired_game(0, number).board for number in range(0, 60, 2)]
    assert [o.fen() for o in openings] == [paired_game(0, n).fen for n in range(1, 60, 2)]
    assert len({o.epd() for o in openings}) >= 28 and all(
        len(o.move_stack) == 4 and not o.is_game_over() for o in openings
    )
    assert paired_game(1, 0).fen != openings[0].fen()


def _game(winner, white, ended="checkmate", illegal=None):
    """Ten moves of each side."""
    game = Game(chess.Board(), colour=white)
    for move in (["g1f3", "g8f6", "f3g1", "f6g8"] * 5)[:20]:
        game.board.push_uci(move)
    game.ended, game.winner, game.illegal = ended, winner, illegal or {}
    return game


def test_scores_are_the_models_and_counted_by_colour():
    lost = _game(chess.WHITE, False, "illegal move", {20: "x"})
    actual = summary([_game(chess.WHITE, True, illegal={2: "x"}), _game(None, False), lost], 3.0)
    assert actual["milliseconds_a_model_move"] == pytest.approx(100)
    assert (actual["wins"], actual["draws"], actual["losses"], actual["score"]) == (1, 1, 1, 0.5)
    assert actual["as_white"] == {"wins": 1, "draws": 0, "losses": 0}
    assert actual["as_black"] == {"wins": 0, "draws": 1, "losses": 1}
    assert (actual["fallbacks"], actual["model_moves"], actual["illegal_moves_on_the_board"]) == (1, 30, 1)


class _Scripted:
    """Stands in for an engine process: plays the given moves and says `info` with each."""

    def __init__(self, moves, info="policy"):
        self._moves, self._info = iter(moves), info

    def play(self, board, limit, **_):
        move = next(self._moves)
        if isinstance(move, Exception):
            raise move
        return chess.engine.PlayResult(chess.Move.from_uci(move), None, {"string": self._info})


def _played(engine, opponents_moves, *, model_is_white):
    game, moves = Game(chess.Board(), colour=model_is_white), iter(opponents_moves)
    play([game], ModelProcess(engine), lambda games: [next(moves)])
    return game


def test_what_the_model_had_written_for_a_fallback_stands_in_the_pgn():
    reported = {"written": "it's {bad}", "played": "f2f3", "logp": -3.2, "fallbacks": 1, "moves": 1}
    engine = _Scripted(["f2f3", "g2g4"], f"fallback {json.dumps(reported)}")
    game = _played(engine, ["e7e5", "d8h4"], model_is_white=True)
    assert game.illegal == {0: "it's {bad}", 2: "it's {bad}"}
    text = str(to_pgn(game, {"opponent": "x", "opening_plies": 0}, 1))
    read = chess.pgn.read_game(io.StringIO(text))
    assert read is not None and read.next().comment.startswith("fallback: the model wrote \"it's")  # type: ignore[union-attr]


def test_results_follow_the_rules_for_either_colour():
    mate = ["f2f3", "e7e5", "g2g4", "d8h4"]

    lost = _played(_Scripted(mate[::2]), mate[1::2], model_is_white=True)
    won = _played(_Scripted(mate[1::2]), mate[::2], model_is_white=False)
    assert (lost.score, won.score, lost.ended) == (0.0, 1.0, "checkmate")
    shuffle = ["g1f3", "g8f6", "f3g1", "f6g8"] * 2
    sampled = _played(_Scripted(shuffle[::2]), shuffle[1::2], model_is_white=True)
    assert (sampled.score, sampled.ended, len(sampled.board.move_stack)) == (0.5, "threefold", 8)
    refused = _Scripted([chess.engine.EngineError("illegal uci")])
    forfeit = _played(refused, [], model_is_white=True)
    assert (forfeit.score, forfeit.ended, forfeit.board.fen()) == (0.0, "illegal move", chess.STARTING_FEN)
    dead = _Scripted([chess.engine.EngineTerminatedError("killed")])
    with pytest.raises(MatchError, match="the model's engine ended in 'rnbq"):
        _played(dead, [], model_is_white=True)


@pytest.mark.slow
@needs_engine
def test_a_match_of_whole_games_through_real_processes(tmp_path, capsys):
    files = {name: tmp_path / f"m.{name}" for name in ("pgn", "json", "picture")}
    options = [word for name, path in files.items() for word in (f"--{name}", str(path))]
    main(["--games", "2", "--level", "0", "--nodes", "2000", *options])
    reported, record = capsys.readouterr().out, json.loads(files["json"].read_text())
    print(reported)
    assert record["games"] == 2 == record["wins"] + record["draws"] + record["losses"]
    assert record["illegal_moves_on_the_board"] == 0 and record["versions"]["chess"]
    with files["pgn"].open() as file:
        games = [game for _ in range(2) if (game := chess.pgn.read_game(file))]
    assert [game.headers["White"] == "jax_grpo" for game in games] == [True, False], "colours alternate"
    openings = []
    for game in games:
        assert not game.errors
        board = game.board()
        for ply, move in enumerate(game.mainline_moves()):
            if ply == 4:
                openings.append(board.fen())
            assert board.is_legal(move)
            board.push(move)
        outcome = board.outcome(claim_draw=True)
        assert outcome is not None and outcome.result() == game.headers["Result"], "every game is whole"
    assert openings[0] == openings[1], "each opening is played twice"
    comments = sum("fallback" in node.comment for game in games for node in game.mainline())
    assert comments == record["fallbacks"] and files["picture"].read_text().startswith("<svg")


@needs_engine
@pytest.mark.parametrize(
    ("level", "elo", "message"), [(21, None, "--level 21: Stockfish .* 0 to 20"), (0, 100, "--elo 100")]
)
def test_a_level_that_stockfish_does_not_have_is_refused(level, elo, message):
    with pytest.raises(MatchError, match=message), stockfish(None, level, elo, 100):
        pass


def test_bad_options_are_one_clear_error():
    with pytest.raises(SystemExit, match="Did you mean packaged:rook-small"):
        main(["--weights", "packaged:rook-smal"])
    with pytest.raises(SystemExit, match=r"--engine is '/no/such': no such executable"):
        main(["--engine", "/no/such"])


def test_committed_results_agree_with_their_games(request):
    folder = request.config.rootpath / "docs" / "results" / "match"
    for path in sorted(folder.glob("*.json")):
        record = json.loads(path.read_text())
        scores = []
        with path.with_suffix(".pgn").open() as file:
            while game := chess.pgn.read_game(file):
                assert not game.errors
                white = {"1-0": 1.0, "0-1": 0.0, "1/2-1/2": 0.5}[game.headers["Result"]]
                scores.append(white if game.headers["White"] == "jax_grpo" else 1 - white)
        assert len(scores) == record["games"] >= 20 and record["illegal_moves_on_the_board"] == 0, path
        assert math.isclose(sum(scores) / len(scores), record["score"]), path
