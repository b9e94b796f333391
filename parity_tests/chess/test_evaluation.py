"""The judges of an evaluation: perfect answers score perfectly, known faults cost what they must, intervals are the textbook's."""

import dataclasses
import io
import json
import math
import random
import re

import chess
import chess.pgn
import numpy as np
import pytest

from jax_grpo.chess.evaluate.__main__ import main, parse
from jax_grpo.chess.evaluate.policy import policy_rows, policy_task
from jax_grpo.chess.evaluate.puzzles import Mate, mate_rows, read_mates
from jax_grpo.chess.evaluate.selfplay import openings, pgn, play, selfplay_estimates
from jax_grpo.chess.evaluate.suites import Data, environment_prompts, run_suites
from jax_grpo.chess.evaluate.tables import (
    compare,
    compared,
    comparison_page,
    evaluation_page,
    published_figures,
    read_report,
    summary,
)
from jax_grpo.chess.lessons import policy_row
from jax_grpo.chess.positions.position import Position
from jax_grpo.chess.positions.sources import read_packaged
from jax_grpo.chess.positions.values import win_probability
from jax_grpo.chess.tasks.environment import judge, next_state
from jax_grpo.config import ConfigError
from jax_grpo.config.files import require_weights
from jax_grpo.config.model import ModelConfig
from jax_grpo.evaluate import EvaluationError
from jax_grpo.evaluate.statistics import Estimate, Z, bootstrap_mean, difference, mean, proportion, summarise
from jax_grpo.model.tokenizer import Tokenizer, TokenizerError, find_tokenizer
from jax_grpo.policy.named import load_policy
from jax_grpo.rollout.texts import Generator
from jax_grpo.system.terminal import print_tables

POSITIONS = read_packaged("heldout")[:60]


@pytest.mark.parametrize(("hits", "n"), [(0, 5), (1, 7), (30, 40), (9, 9)])
def test_wilson_bounds_are_where_the_score_test_turns(hits, n):
    actual = proportion([True] * hits + [False] * (n - hits))
    for bound in (actual.low, actual.high):
        if 0 < bound < 1:  # Wilson: |p - bound| = z sqrt(bound (1 - bound) / n)
            assert abs(hits / n - bound) == pytest.approx(Z * math.sqrt(bound * (1 - bound) / n), rel=1e-12)
    assert 0 <= actual.low <= actual.value <= actual.high <= 1


def test_the_difference_of_two_proportions_has_newcombes_published_interval():
    # Newcombe 1998, table II, method 10: 56/70 - 48/80 = 0.2, 95 % interval 0.0524 to 0.3339
    after, before = (proportion([i < hits for i in range(n)]) for hits, n in ((56, 70), (48, 80)))
    actual = difference(before, after)
    assert (round(actual.value, 4), round(actual.low, 4), round(actual.high, 4)) == (0.2, 0.0524, 0.3339)


def test_the_normal_interval_covers_the_true_mean_about_95_times_in_100():
    rng = np.random.default_rng(0)
    actual = [mean(rng.exponential(size=200).tolist()) for _ in range(1000)]
    covered = np.mean([e.low <= 1 <= e.high for e in actual])
    print("covered", covered)
    assert 0.92 < covered < 0.97


def test_the_normal_interval_of_four_values_is_the_one_by_hand():
    actual = mean([1.0, 2.0, 3.0, 4.0])  # deviation sqrt(5 / 3), of the mean half of it
    assert (actual.value, actual.count) == (2.5, 4)
    assert actual.high - 2.5 == pytest.approx(2.5 - actual.low) == pytest.approx(Z * math.sqrt(5 / 3) / 2, rel=1e-12)


def test_intervals_do_not_depend_on_the_order_of_the_values():
    values = np.random.default_rng(1).normal(size=500).tolist()
    shuffled = random.Random(2).sample(values, len(values))
    assert mean(values) == mean(shuffled)
    assert bootstrap_mean(values, 0) == bootstrap_mean(shuffled, 0)


def test_the_bootstrap_agrees_with_the_normal_interval_where_both_hold():
    values = np.random.default_rng(3).normal(size=2000).tolist()
    ours, theirs = bootstrap_mean(values, 0), mean(values)
    assert ours.low == pytest.approx(theirs.low, abs=0.005)
    assert ours.high == pytest.approx(theirs.high, abs=0.005)


def test_what_could_not_be_measured_is_not_counted():
    rows = [{"a": True, "b": 2.0}, {"a": False, "b": None}, {"a": None, "b": 4.0}]
    actual = summarise(rows, {"first": [True, False, False], "none": [False] * 3})
    assert (actual["all/a"].value, actual["all/a"].count) == (0.5, 2)
    assert (actual["all/b"].value, actual["all/b"].count) == (3.0, 2)
    assert (actual["first/b"].value, actual["first/b"].low) == (2.0, None)
    assert actual["none/a"].value is None
    empty = Estimate(None, None, None, 0, "wilson")
    assert proportion([]) == empty and mean([]) == dataclasses.replace(empty, method="normal")


def test_the_engines_own_rows_are_perfect_for_both_colours():
    completions = [policy_row(position, random.Random(i)).completion for i, position in enumerate(POSITIONS)]
    full = policy_rows("full", POSITIONS, completions, None)
    one = policy_rows("best_move", POSITIONS, [f" {p.moves[0]}" for p in POSITIONS], None)
    for row in (*full, *one):
        assert all(row[name] for name in ("format", "legal", "best_move", "top_five", "scored"))
        assert row["win_loss"] == row["centipawn_loss"] == 0
    assert all(row["candidates_legal"] == row["candidates_top_five"] == 1 for row in full)
    assert max(row["evaluation_error"] for row in full) < 0.006  # rounded to centipawns


def test_a_worse_move_costs_the_difference_of_its_label():
    position = next(p for p in POSITIONS if len(p.moves) > 1 and -8 < p.evaluations[-1] < p.evaluations[0] < 8)
    (row,) = policy_rows("best_move", [position], [f" {position.moves[-1]}"], None)
    first, last = position.evaluations[0], position.evaluations[-1]
    assert row["best_move"] is False
    assert row["centipawn_loss"] == pytest.approx(100 * (first - last))
    assert row["win_loss"] == pytest.approx(win_probability(first) - win_probability(last))


def test_a_better_move_than_the_labels_first_costs_nothing():
    """Labels come from searches that were cut short: the second may stand above the first."""
    position = Position(chess.STARTING_FEN, (), ("e2e4", "d2d4"), (0.1, 0.5))
    (row,) = policy_rows("best_move", [position], [" d2d4"], None)
    assert row["scored"] and row["win_loss"] == row["centipawn_loss"] == 0


def test_an_illegal_or_unlabelled_move_has_no_cost_without_an_engine():
    position = next(p for p in POSITIONS if len(list(chess.Board(p.fen).legal_moves)) > 5)
    other = next(m.uci() for m in chess.Board(position.fen).legal_moves if m.uci() not in position.moves)
    rows = policy_rows("best_move", [position] * 3, [f" {other}", " a1a1", " nonsense"], None)
    assert [row["win_loss"] for row in rows] == [None] * 3
    assert [row["legal"] for row in rows] == [True, False, False]
    assert [row["format"] for row in rows] == [True, True, False]


def test_a_whole_row_with_a_missing_candidate_has_not_the_right_format():
    position = next(p for p in POSITIONS if len(p.moves) == 5)
    text = f" {' '.join(position.moves[:4])}    E: 0.1 0.2 0.3 0.4    B: {position.moves[0]}"
    (row,) = policy_rows("full", [position], [text], None)
    assert (row["format"], row["legal"], row["candidates_top_five"]) == (False, True, 0.8)


def test_the_rules_own_next_states_are_perfect_and_each_fault_is_found():
    prompts = environment_prompts(POSITIONS)
    for row in (judge(p, p.answer) for p in prompts):
        assert all(row[n] for n in ("format", "next_state", "reward", "terminated", "truncated"))
        assert (row["similarity"], row["reward_error"]) == (1.0, 0.0)
    fen, reward, terminated, truncated = prompts[0].answer.split("+")
    faults = {
        f"{fen}1+{reward}+{terminated}+{truncated}": {"next_state"},
        f"{fen}+0.25+{terminated}+{truncated}": {"reward"},
        f"{fen}+{reward}+{1 - int(terminated)}+{truncated}": {"terminated"},
        f"{fen}+{reward}": {"format", "terminated", "truncated"},
        "": {"format", "next_state", "reward", "terminated", "truncated"},
    }
    for text, wrong in faults.items():
        assert {name for name, value in judge(prompts[0], text).items() if value is False} == wrong, text
    assert judge(prompts[0], f"{fen}+0.25+0+0")["reward_error"] == pytest.approx(abs(0.25 - float(reward)))


BACK_RANK = "6k1/5ppp/8/8/8/8/8/R6K w - - 0 1"


def test_mates_are_read_from_both_formats_and_checked(tmp_path):
    ours = tmp_path / "mates.jsonl"
    ours.write_text(json.dumps({"fen": BACK_RANK, "mate": "a1a8"}) + "\n")
    bigbench = tmp_path / "task.json"
    moves = "1. f3 e5 2. g4"
    bigbench.write_text(json.dumps({"examples": [{"input": moves, "target_scores": {"Qh4#": 1, "Qe7": 0}}]}))
    assert [mate.move for mate in read_mates(ours)] == ["a1a8"]
    assert [mate.move for mate in read_mates(bigbench)] == ["d8h4"]
    rows = mate_rows(read_mates(ours) * 3, ["a1a8", "a1a7", "a1b8"])
    assert [(row["legal"], row["mate"], row["listed"]) for row in rows] == [
        (True, True, True),
        (True, False, False),
        (False, False, False),
    ]


def test_a_mate_that_is_not_the_listed_one_counts_as_a_mate():
    position = Position("6k1/5ppp/8/8/8/8/8/RR5K w - - 0 1")
    (row,) = mate_rows([Mate(position, "a1a8")], ["b1b8"])
    assert row == {"legal": True, "mate": True, "listed": False}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"fen": BACK_RANK, "mate": "a1a7"}, r"mates.jsonl:1: a1a7 does not give checkmate"),
        ({"fen": BACK_RANK, "mate": "a1b7"}, r"mates.jsonl:1: 'a1b7' is not a legal move"),
        (
            {"fen": "6k1/5ppp/8/8/8/8/8/RR5K w - - 0 1", "mate": "a1a8"},
            r"mates.jsonl:1: a1a8 is not the one mate in .*; found a1a8, b1b8",
        ),
        ({"fen": BACK_RANK}, r"mates.jsonl:1: .*expected an object with 'fen' and 'mate'"),
        ([1], r"mates.jsonl:1: .\[1\]. .*expected an object"),
        ({"fen": "8/8/8/8/8/8/8/8 w - - 0 1", "mate": "a1a2"}, r"mates.jsonl:1: .a1a2. is not a legal move"),
    ],
)
def test_a_wrong_mate_is_one_clear_error(tmp_path, row, words):
    file = tmp_path / "mates.jsonl"
    file.write_text(json.dumps(row))
    with pytest.raises(EvaluationError, match=words):
        read_mates(file)


class RandomPlayer:
    """A policy that knows the rules, with a fault at will: what it completes `P:` prompts with."""

    def __init__(self, illegal_at: int | None = None):
        self.illegal_at = illegal_at

    def __call__(self, prompts, *, numbers=None, step=0, tick=None):
        if step == self.illegal_at:
            return [" a1a1"] * len(prompts)
        boards = [chess.Board(prompt.row.fen) for prompt in prompts]
        return [f" {random.Random(step).choice(sorted(map(str, board.legal_moves)))}" for board in boards]


class Rules:
    """An environment that knows the rules, and loses a pawn at will."""

    def __init__(self, wrong_at: int | None = None):
        self.wrong_at = wrong_at

    def __call__(self, prompts, *, numbers=None, step=0, tick=None):
        out = []
        for prompt in prompts:
            fen, uci, _, _ = prompt.text.removeprefix("A: ").split("+")
            board = chess.Board(fen)
            after, *rest = next_state(board, chess.Move.from_uci(uci)).split("+")
            if step == self.wrong_at:
                wrong = chess.Board(after)
                wrong.remove_piece_at(wrong.pieces(chess.PAWN, chess.WHITE).pop())
                after = wrong.fen()
            out.append("+".join([after, *rest]))
        return out


def played(choose, simulate, half_moves=12):
    games = openings(5, seed=0)
    play(games, policy_task("best_move"), choose, simulate, half_moves, lambda done: None)
    return games


def test_a_model_that_knows_the_rules_plays_to_the_limit_in_both_worlds():
    inside, outside = played(RandomPlayer(), Rules()), played(RandomPlayer(), None)
    assert [game.half_moves for game in inside] == [game.exact for game in inside] == [12] * 5
    assert [game.board.fen() for game in inside] == [game.board.fen() for game in outside]
    assert {game.ended for game in inside} == {"length"}


def test_half_moves_are_counted_up_to_the_first_illegal_one():
    games = played(RandomPlayer(illegal_at=7), None)
    assert [(game.half_moves, game.end) for game in games] == [(7, "illegal_move")] * 5
    actual = selfplay_estimates(games, own_environment=False, seed=0)
    assert (actual["all/half_moves"].value, actual["all/half_moves"].low) == (7, 7)
    assert actual["white/legal"].count + actual["black/legal"].count == 5 * 8
    assert actual["black/legal"].value == pytest.approx(15 / 20)  # the eighth half-move is Black's in all games


def test_exact_states_stop_counting_at_the_first_wrong_one():
    games = played(RandomPlayer(), Rules(wrong_at=4), half_moves=5)
    assert {game.exact for game in games} == {4}
    assert {game.half_moves for game in games} == {5}


def test_states_after_a_wrong_one_do_not_count_even_where_they_are_right_again():
    games = openings(3, seed=0)

    def simulate(prompts, *, numbers=None, step=0, tick=None):
        fens = [games[number - len(games)].board.fen() for number in numbers]  # true ones: the moves are made by now
        return [f"{fen}0+0.001+0+0" if step == 2 else f"{fen}+0.001+0+0" for fen in fens]

    play(games, policy_task("best_move"), RandomPlayer(), simulate, 6, lambda done: None)
    assert [(game.half_moves, game.exact) for game in games] == [(6, 2)] * 3


def test_a_model_that_plays_another_board_than_the_true_one_is_judged_on_the_true_one():
    """From the half-move after the fault on, the player sees a board without the pawn and moves through its square."""
    games = [game for game in played(RandomPlayer(), Rules(wrong_at=0), half_moves=40) if game.end == "illegal_move"]
    assert games
    for game in games:
        tried = chess.Move.from_uci(game.last_text)
        assert tried in chess.Board(game.state).legal_moves
        assert tried not in game.board.legal_moves


def test_published_figures_stand_only_beside_rookworlds_own_weights():
    shape = {"n_layer": 12, "n_head": 12, "n_embd": 768, "vocab_size": 50257}
    assert published_figures("models/RookWorld-LM-124M", shape)
    assert published_figures("weights", shape | {"_name_or_path": "jrahn/RookWorld-LM-124M"})
    assert not published_figures("gpt2", shape)
    assert not published_figures("RookWorld-tiny", shape | {"n_layer": 2})


def report_of(estimates, name="m"):
    return {
        "format": 1,
        "model": {"name": name, "sha256": name * 64},
        "data": {},
        "seed": 0,
        "temperature": 1.0,
        "estimates": {path: dataclasses.asdict(estimate) for path, estimate in estimates.items()},
    }


def test_a_comparison_tells_apart_what_is_and_not_what_is_not(tmp_path):
    path = "policy/best_move/greedy/all/legal"
    reports = [
        report_of({path: proportion([i < hits for i in range(100)])}, name) for name, hits in (("a", 50), ("b", 90))
    ]
    assert compare(*reports)[path]["apart"] is True
    assert compare(reports[0], reports[0])[path]["apart"] is False
    assert "+40.0 %" in comparison_page(*reports)
    for name, report in zip("ab", reports, strict=True):
        (tmp_path / name).mkdir()
        (tmp_path / name / "evaluation.json").write_text(json.dumps(report))
    assert read_report(tmp_path / "a") == reports[0]
    with pytest.raises(EvaluationError, match=r"evaluation.json does not exist; make it with"):
        read_report(tmp_path)
    (tmp_path / "a" / "evaluation.json").write_text("{")
    with pytest.raises(EvaluationError, match="is not an evaluation"):
        read_report(tmp_path / "a")


def test_what_was_measured_is_printed_as_tables_of_80_columns(capsys):
    shares = {"policy/best_move/greedy/all/legal": 90, "policy/best_move/sampled/all/legal": 70}
    shares |= {"policy/best_move/greedy/black/legal": 10, "mates/full/greedy/all/mate": 5}
    shares |= {f"strength/tables/{who}/all/{name}": 40 for who in ("greedy", "uniform") for name in ("loss", "best")}
    one, other = (
        report_of({path: proportion([i < n + more for i in range(100)]) for path, n in shares.items()}, name)
        for name, more in (("a", 0), ("b", 5))
    )
    print_tables(summary(one))
    print_tables(compared(one, other, brief=True))
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert re.search(r"legal moves +90.0 % \[82.6, 94.5\] +70.0 % \[60.4, 78.1\]", out), out
    assert re.search(r"the model, greedy +40.0 % \[30.9, 49.8\] +– +40.0 % +–", out), "strength: one line a player"
    assert re.search(r"legal moves, greedy +90.0 % +95.0 % +\+5.0 % \[-2.6, \+13.0\]", out), out


def test_the_table_names_the_method_of_what_was_measured_not_of_an_empty_column():
    empty, actual = (summarise([{"evaluation_error": value}], {}) for value in (None, 1.5))
    estimates = {
        f"policy/full/{mode}/{path}": dataclasses.asdict(estimate)
        for mode, rows in {"greedy": empty, "sampled": actual}.items()
        for path, estimate in rows.items()
    }
    report = report_of({}) | {"estimates": estimates}
    report["model"]["parameters"] = 1
    assert "| evaluation error, pawns (normal) | – | 1.50 |" in evaluation_page(report)


def test_suites_ask_every_prompt_in_every_mode_and_give_white_and_black_apart():
    requested = []

    def ask(kind, mode):
        def complete(prompts, *, numbers=None, step=0, tick=None):
            requested.append((kind, mode, len(prompts)))
            return [prompt.answer or "" for prompt in prompts]

        return complete

    results = run_suites(["policy", "environment"], ask, Data(POSITIONS, [], 0, 0, 0), lambda what, total: None)
    assert requested == [
        *[(style, mode, 60) for style in ("full", "best_move") for mode in ("greedy", "sampled")],
        *[("environment", mode, 60) for mode in ("greedy", "sampled")],
    ]
    actual = results.estimates
    white, black = (actual[f"environment/next_state/greedy/{side}/next_state"] for side in ("white", "black"))
    assert (white.value, black.value) == (1.0, 1.0)
    assert white.count + black.count == 60
    assert white.count == sum(chess.Board(position.fen).turn for position in POSITIONS)


def test_self_play_games_are_pgn_that_reads_back_move_by_move():
    games = played(RandomPlayer(illegal_at=7), None)
    file = io.StringIO(pgn({"python chess, greedy": games}, "a model"))
    for game in games:
        read = chess.pgn.read_game(file)
        assert read is not None and not read.errors
        assert list(read.mainline_moves()) == game.board.move_stack
        assert read.headers["Termination"] == "the model's move is not legal, or not a move"
        assert "a1a1" in read.end().comment
    assert chess.pgn.read_game(file) is None


def test_names_of_weights_that_cannot_be_used_are_one_clear_error(tmp_path):
    with pytest.raises(
        ConfigError, match="the packaged models are packaged:rook-deep, packaged:rook-endings, packaged:rook-small"
    ):
        require_weights("packaged:rook-smal")
    with pytest.raises(ConfigError, match=r"config.json does not exist; expected a Hugging Face folder"):
        require_weights(str(tmp_path))
    (tmp_path / "config.yaml").write_text("")
    with pytest.raises(ConfigError, match=r"a run that has not exported its weights .* --resume auto"):
        require_weights(str(tmp_path))


@pytest.mark.default_cases("{name: prompts}-True")
@pytest.mark.parametrize(
    ("task", "refused"),
    [
        ("{name: prompts}", True),
        ("{name: mixed, mixture: {sums: {task: prompts}, guess: {share: 1.0}}}", True),
        ("{name: mixed, mixture: {sums: {task: prompts}, policy: {share: 1.0}}}", False),
        ("{name: 'mine.py:Task'}", False),
        ("{}", False),
    ],
)
def test_all_suites_are_refused_to_a_run_that_trained_no_chess(task, refused, tmp_path):
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "config.json").write_text("{}")
    (tmp_path / "config.yaml").write_text(f"task: {task}\n")
    unreadable = re.escape(f"{tmp_path / 'weights'}")  # the error of such a config.json
    words = "its run trained prompts.*, and all suites are of chess" if refused else unreadable
    with pytest.raises(SystemExit, match=words):
        main(["--weights", str(tmp_path), "--out", str(tmp_path / "out"), "--games", "1"])
    with pytest.raises(SystemExit, match=unreadable):
        main(["--weights", str(tmp_path), "--out", str(tmp_path / "out"), "--suite", "mates"])


def test_the_tokenizer_is_found_beside_the_weights_or_by_gpt2s_vocabulary(tmp_path):
    shape = {"n_layer": 1, "n_head": 1, "n_embd": 8, "n_positions": 16}
    (tmp_path / "config.json").write_text(json.dumps(shape | {"vocab_size": 50257}))
    assert find_tokenizer(str(tmp_path)) == "gpt2"
    (tmp_path / "config.json").write_text(json.dumps(shape | {"vocab_size": 99}))
    with pytest.raises(TokenizerError, match=r"has no tokenizer .* vocabulary of 99 is not GPT-2's 50257"):
        find_tokenizer(str(tmp_path))
    Tokenizer.load("chess").save(tmp_path)
    assert Tokenizer.load(find_tokenizer(str(tmp_path))).name == "chess"
    assert Tokenizer.load(find_tokenizer("packaged:rook-small")).name == "chess"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--weights", "w"], "give --weights W and --out DIR, or --compare"),
        (["--weights", "w", "--out", "d", "--suite", "policy,mate"], "--suite 'mate': expected all, or of policy"),
        (["--weights", "w", "--out", "d", "--positions", "0"], "'0'; expected a whole number of at least 1"),
        (["--weights", "w", "--out", "d", "--temperature", "0"], r"expected a number above 0 \(greedy is always"),
        (["--weights", "w", "--out", "d", "--seed", "-1"], "--seed -1: expected 0 to 2147483647"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_loaded(arguments, words, capsys):
    with pytest.raises(SystemExit):
        parse(arguments)
    assert re.search(words, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--weights", "nowhere"], "ConfigError: model.weights is 'nowhere', but .*config.json does not exist"),
        (["--engine", "/nowhere"], "EngineError: --engine is '/nowhere': no such executable; install Stockfish"),
        (["--suite", "mates", "--mates", "none.jsonl"], "EvaluationError: --mates none.jsonl: no such file"),
        (["--suite", "policy", "--data", "none.csv"], "PositionFileError: none.csv: no such file"),
    ],
)
def test_what_is_missing_is_one_clear_error_before_the_model_is_loaded(tmp_path, arguments, words):
    with pytest.raises(SystemExit, match=words):
        main(["--weights", "packaged:rook-small", "--out", str(tmp_path), *arguments])


class Recording:
    """A player or environment that keeps what its samples are drawn under: (step, number); seed and kind of key are shared."""

    def __init__(self, generator, keys):
        self.generator, self.keys = generator, keys

    def __call__(self, prompts, *, numbers=None, step=0, tick=None):
        self.keys |= {(step, number) for number in numbers}
        return self.generator(prompts, numbers=numbers, step=step)


def test_a_state_is_not_drawn_with_the_random_numbers_of_the_move_before_it():
    """Both are sampled under one seed: an unlikely move would come with an unlikely state."""
    moves, states = set(), set()
    games = openings(4, seed=0)
    choose, simulate = Recording(RandomPlayer(), moves), Recording(Rules(), states)
    play(games, policy_task("best_move"), choose, simulate, 6, lambda done: None)
    assert len(moves) == len(states) == 24 and not moves & states


@pytest.mark.slow
def test_a_prompt_that_is_asked_again_gets_other_samples_and_the_first_keeps_its_own():
    policy = load_policy(ModelConfig(weights="packaged:rook-small", tokenizer="chess"), 0, 96)
    task = policy_task("best_move")
    generator = Generator(policy, task.stop_rule, 12, 3.0, 0)
    prompts = [task.prompt(position, 0) for position in POSITIONS[:3]]
    alone = generator(prompts)
    repeated = generator([prompts[0], *prompts, prompts[0], prompts[1]])
    assert [repeated[0], repeated[2], repeated[3]] == alone
    assert len({repeated[i] for i in (0, 1, 4)}) == 3 and repeated[2] != repeated[5]
