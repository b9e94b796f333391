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

from jax_grpo.evaluate.statistics import elo_difference, elo_estimate
from jax_grpo.play.arena import random_opening
from jax_grpo.play.match import Game, MatchError, main, play, stockfish, summary, to_pgn

HAS_ENGINE = shutil.which("stockfish") or shutil.which("/usr/games/stockfish")
needs_engine = pytest.mark.skipif(not HAS_ENGINE, reason="Stockfish is not installed (apt install stockfish)")


def test_elo_is_the_logistic_model():
    for difference in (-400, -120.5, 0, 35, 400):
        score = 1 / (1 + 10 ** (-difference / 400))
        assert elo_difference(score) == pytest.approx(difference)
    assert elo_difference(0) is None and elo_difference(1) is None


def test_an_even_match_is_zero_and_its_interval_symmetric_and_narrows():
    few, many = elo_estimate(5, 10, 5), elo_estimate(50, 100, 50)
    assert few.elo == pytest.approx(0) and few.elo_interval[0] == pytest.approx(-few.elo_interval[1])
    assert -200 < few.elo_interval[0] < many.elo_interval[0] < -20
    assert str(many).startswith("Elo difference +0 (95 % interval -") or str(many).startswith("Elo difference -0")


@pytest.mark.parametrize("games", [1, 4, 20, 1000])
def test_no_point_and_every_point_have_only_the_exact_one_sided_bound(games):
    lost, won = elo_estimate(0, 0, games), elo_estimate(games, 0, 0)
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
        low, high = elo_estimate(wins, 0, n - wins).score_interval
        covered += low <= p <= high
    print(f"covered {covered / trials:.1%}")
    assert 0.93 < covered / trials < 0.98
    with pytest.raises(ValueError, match="no games"):
        elo_estimate(0, 0, 0)


def test_openings_are_seeded_distinct_and_not_over():
    openings = [random_opening(0, number, 4) for number in range(30)]
    assert [o.fen() for o in openings] == [random_opening(0, n, 4).fen() for n in range(30)]
    assert len({o.epd() for o in openings}) >= 28 and all(
        len(o.move_stack) == 4 and not o.is_game_over() for o in openings
    )
    assert random_opening(1, 0, 4).fen() != openings[0].fen() and random_opening(0, 0, 0).fen() == chess.STARTING_FEN


def _game(score, white, **changes):
    return Game(chess.Board(), white, score, "checkmate", {}, 10, 0.1)._replace(**changes)


def test_scores_are_the_models_and_counted_by_colour():
    found = summary([_game(1.0, True, fallbacks={2: "x"}), _game(0.5, False), _game(0.0, False, ending="illegal move")])
    assert (found["wins"], found["draws"], found["losses"], found["score"]) == (1, 1, 1, 0.5)
    assert found["as_white"] == {"wins": 1, "draws": 0, "losses": 0}
    assert found["as_black"] == {"wins": 0, "draws": 1, "losses": 1}
    assert (found["fallbacks"], found["model_moves"], found["illegal_moves_on_the_board"]) == (1, 30, 1)


class _Scripted:
    """Stands in for an engine process: plays the given moves and says `info` with each."""

    def __init__(self, moves, info="policy"):
        self._moves, self._info = iter(moves), info

    def play(self, board, limit, **_):
        move = next(self._moves)
        if isinstance(move, Exception):
            raise move
        return chess.engine.PlayResult(chess.Move.from_uci(move), None, {"string": self._info})


def _opponent(moves):
    moves = iter(moves)
    return lambda board, game: chess.Move.from_uci(next(moves))


def test_what_the_model_had_written_for_a_fallback_stands_in_the_pgn():
    told = {"written": "it's {bad}", "played": "f2f3", "logp": -3.2, "fallbacks": 1, "moves": 1}
    engine = _Scripted(["f2f3", "g2g4"], f"fallback {json.dumps(told)}")
    game = play(engine, _opponent(["e7e5", "d8h4"]), chess.Board(), model_is_white=True)  # type: ignore[arg-type]
    assert game.fallbacks == {0: "it's {bad}", 2: "it's {bad}"}
    text = str(to_pgn(game, {"opponent": "x", "opening_plies": 0}, 1))
    read = chess.pgn.read_game(io.StringIO(text))
    assert read is not None and read.next().comment.startswith("fallback: the model wrote \"it's")  # type: ignore[union-attr]


def test_results_follow_the_rules_for_either_colour():
    mate = ["f2f3", "e7e5", "g2g4", "d8h4"]

    lost = play(_Scripted(mate[::2]), _opponent(mate[1::2]), chess.Board(), model_is_white=True)  # type: ignore[arg-type]
    won = play(_Scripted(mate[1::2]), _opponent(mate[::2]), chess.Board(), model_is_white=False)  # type: ignore[arg-type]
    assert (lost.score, won.score, lost.ending) == (0.0, 1.0, "checkmate")
    shuffle = ["g1f3", "g8f6", "f3g1", "f6g8"] * 2
    drawn = play(_Scripted(shuffle[::2]), _opponent(shuffle[1::2]), chess.Board(), model_is_white=True)  # type: ignore[arg-type]
    assert (drawn.score, drawn.ending, len(drawn.board.move_stack)) == (0.5, "threefold", 8)
    refused = _Scripted([chess.engine.EngineError("illegal uci")])
    forfeit = play(refused, _opponent([]), chess.Board(), model_is_white=True)  # type: ignore[arg-type]
    assert (forfeit.score, forfeit.ending, forfeit.board.fen()) == (0.0, "illegal move", chess.STARTING_FEN)
    dead = _Scripted([chess.engine.EngineTerminatedError("killed")])
    with pytest.raises(MatchError, match="the model's engine ended in 'rnbq"):
        play(dead, _opponent([]), chess.Board(), model_is_white=True)  # type: ignore[arg-type]


@needs_engine
def test_a_match_of_whole_games_through_real_processes(tmp_path, capsys):
    files = {name: tmp_path / f"m.{name}" for name in ("pgn", "json", "picture")}
    options = [word for name, path in files.items() for word in (f"--{name}", str(path))]
    main(["--games", "2", "--level", "0", "--nodes", "2000", *options])
    told, record = capsys.readouterr().out, json.loads(files["json"].read_text())
    print(told)
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
