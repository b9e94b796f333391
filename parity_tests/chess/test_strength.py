"""Strength by tables: what players lose is what hands compute, yardsticks play as they are described, order changes no number."""

import itertools
import json
import math
import random
import shutil
from pathlib import Path

import chess
import matplotlib.pyplot as plt
import numpy as np
import pyarrow.parquet as pq
import pytest
import scipy.stats

from jax_grpo.chess.evaluate import strength
from jax_grpo.chess.evaluate.__main__ import _tables as tables_of
from jax_grpo.chess.evaluate.__main__ import main, parse
from jax_grpo.chess.evaluate.policy import policy_task
from jax_grpo.chess.evaluate.strength import yardsticks
from jax_grpo.chess.evaluate.suites import Data, OurModel, run_suites
from jax_grpo.chess.evaluate.tables import compare, comparison_page, read_report
from jax_grpo.chess.games import choose, greedy_capture, random_positions, two_ply, uniform
from jax_grpo.chess.positions.endings import won_position
from jax_grpo.chess.positions.position import Position, mirrored
from jax_grpo.chess.positions.table import to_columns
from jax_grpo.chess.positions.values import NotATable, move_table, moves_lost, win_probability
from jax_grpo.chess.tasks.engine import skill_zero
from jax_grpo.chess.tasks.policy import PolicyTask
from jax_grpo.config import load_config
from jax_grpo.config.model import ModelConfig
from jax_grpo.config.tasks import task_of
from jax_grpo.evaluate.statistics import cluster_bootstrap_mean, mean
from jax_grpo.model.weights import save_hf
from jax_grpo.policy.named import load_policy
from jax_grpo.report.console import Console
from jax_grpo.report.curves import curves
from jax_grpo.tasks import make_task

CONFIGS = Path(__file__).parents[2] / "configs"
HAS_ENGINE = shutil.which("stockfish") or shutil.which("/usr/games/stockfish")
# Black's king in the corner: three moves, worth +1, 0 and -2 pawns.
CORNER = Position("k7/8/8/8/8/8/6R1/K7 b - - 0 1", moves=("a8a7", "a8b7", "a8b8"), evaluations=(1.0, -2.0, 0.0))
ONE_MOVE = Position("k7/2R5/1K6/8/8/8/8/8 b - - 0 1", moves=("a8b8",), evaluations=(-90.0,))


def tables(count: int = 12) -> list[Position]:
    """Positions of random games, three a game, with random values for all legal moves."""
    rng, boards = random.Random(4), random_positions(random.Random(3))
    out = []
    for i in range(count):
        board = next(itertools.islice(boards, 11, None))
        moves = tuple(uniform(board))
        out.append(Position(board.fen(), (), moves, tuple(rng.gauss(0, 1.5) for _ in moves), game=i // 3))
    return out


TABLES = tables()
STALEMATING = "7k/8/8/8/8/8/5Q2/K7 w - - 0 1"  # by f2f7; there is no mate


PAID = {"value": 1.0}
NOT_PAID = [
    {"prompt_style": "best_move"},
    {"prompt_style": "full", "rewards": PAID},
    {"prompt_style": "best_move", "rewards": {"value": 0.0}},
]


# Beside a training ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", ["best_move", "own_side"])
def test_plain_players_beside_a_training_get_the_mean_over_the_moves_they_draw_from(style):
    # By other functions than the reward's; the same positions with colours changed are as many more.
    positions = [*TABLES, *(mirrored(position) for position in TABLES[:5])]
    task = PolicyTask(task_of(name="policy", prompt_style=style, rewards=PAID))
    prompts = [task.prompt(position, 0) for position in positions]
    players = {"uniform": uniform, "greedy_capture": greedy_capture, "two_ply": two_ply}
    expected = {
        f"yardstick/{name}/value": -np.mean(
            [strength.judged(position, player(chess.Board(position.fen)))["loss"] for position in positions]
        )
        for name, player in players.items()
    }
    assert yardsticks(task, prompts) == pytest.approx(expected, abs=1e-6)  # rewards are float32
    assert len({round(value, 6) for value in expected.values()}) == 3


def test_in_won_endings_plain_players_get_what_their_moves_keep():
    task = PolicyTask(task_of(name="policy", prompt_style="own_side", rewards={"technique": 1.0}))
    position = won_position("KRK", (chess.B6, chess.H7, chess.A8), chess.BLACK)
    retained = sum(0.7**lost for lost in moves_lost(position).values() if lost is not None)
    actual = yardsticks(task, [task.prompt(position, 0)])
    assert actual["yardstick/uniform/technique"] == pytest.approx(
        retained / len(position.moves), abs=1e-6
    )  # rewards are float32
    assert actual["yardstick/greedy_capture/technique"] == 1, "it mates in one"


@pytest.mark.parametrize("settings", NOT_PAID, ids=["no-value", "whole-row", "value-unpaid"])
def test_runs_that_are_not_paid_for_a_moves_worth_have_no_plain_players(settings):
    task = PolicyTask(task_of(name="policy", **settings))
    assert yardsticks(task, [task.prompt(position, 0) for position in TABLES]) == {}


def test_the_run_shows_its_plain_players_once_and_draws_them(tmp_path, capsys):
    values = {"yardstick/uniform/value": -0.21, "yardstick/two_ply/value": -0.11}
    records = [
        {"iteration": 0, "eval/greedy/value": -0.18, "eval/sampled/value": -0.23} | values,
        *({"iteration": i, "reward/value/mean": -0.2 + i / 100} for i in range(5)),
        {"iteration": 5, "eval/greedy/value": -0.15, "eval/sampled/value": -0.19} | values,
    ]
    console = Console(config := load_config(str(CONFIGS / "quickstart.yaml")), make_task(config.task))
    for record in (records[0], records[-1]):
        console.evaluation(record["iteration"], record)
    output = capsys.readouterr().out
    assert output.count("beside plain players: uniform value -0.210, two ply value -0.110") == 1
    sizes = []
    for name, shown in (
        ("with", records),
        ("without", [{k: v for k, v in r.items() if k not in values} for r in records]),
    ):
        curves(shown, tmp_path / f"{name}.png", PolicyTask.headlines)
        sizes.append(plt.imread(tmp_path / f"{name}.png").shape[1])
    assert sizes[0] > sizes[1], "a panel more"


# The numbers ---------------------------------------------------------------------------------------------------------


def test_answers_of_a_position_cost_what_hands_compute():
    best, middle, worst = 1 / (1 + math.exp(-0.368208)), 0.5, 1 / (1 + math.exp(2 * 0.368208))
    assert strength.judged(CORNER, ["a8a7"]) == pytest.approx(
        dict.fromkeys(["loss", "loss_legal", "blunder"], 0)
        | dict.fromkeys(["legal", "within", "best"], 1)
        | {"accuracy": 1},
        abs=1e-5,
    )
    actual = strength.judged(CORNER, ["a8b8", "a8b7", "a8c8", "a8a7"])
    assert actual["loss"] == pytest.approx((best - middle + 2 * (best - worst)) / 4)
    assert actual["loss_legal"] == pytest.approx((best - middle + best - worst) / 3)
    assert (actual["legal"], actual["within"], actual["best"]) == (0.75, 0.25, 0.25)
    assert actual["blunder"] == 0.5, "9 % is no blunder, 27 % is one, and what is not legal costs 27 %"
    assert strength.judged(CORNER, ["a8c8"])["loss_legal"] is None


def test_what_is_no_legal_move_is_neither_best_nor_good_where_all_moves_are_alike():
    actual = strength.judged(ONE_MOVE, ["a8a7"])
    assert (actual["loss"], actual["best"], actual["within"], actual["legal"]) == (0, 0, 0, 0)
    assert strength.passes(ONE_MOVE, ["a8a7", "a8b8"]) == {"pass_1": 0.5, "pass_2": 1.0}


@pytest.mark.parametrize(
    ("loss", "percent"), [(0.0, 99.9999), (0.02, 91.3938), (0.1, 63.5828), (0.5, 8.5287), (1.0, 0.0)]
)
def test_accuracy_is_lichess_s(loss, percent):
    # by hand from https://lichess.org/page/accuracy
    assert 100 * strength.accuracy(loss) == pytest.approx(percent, abs=5e-3)


def test_pass_at_k_is_the_share_of_draws_of_k_in_which_one_passes():
    for n, passed in itertools.product((1, 4, 6), range(5)):
        if passed <= n:
            for k in range(1, n + 1):
                draws = list(itertools.combinations([i < passed for i in range(n)], k))
                assert strength.pass_at_k(n, passed, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_tau_is_one_in_order_minus_one_in_reverse_and_scipys_with_ties():
    order = {"a8b8": -3.0, "a8a7": -1.0, "a8b7": -9.0}  # in another order than the table
    assert strength.rank(CORNER, order) == {"tau": 1.0}
    assert strength.rank(CORNER, {move: -value for move, value in order.items()}) == {"tau": -1.0}
    assert strength.kendall_tau([1, 1, 1], [1, 2, 3]) is strength.kendall_tau([1], [2]) is None
    rng = np.random.default_rng(0)
    for size in (2, 5, 40):
        x, y = rng.integers(0, size, (2, size)) if size > 2 else ([0, 1], [3, 1])
        assert strength.kendall_tau(list(x), list(y)) == pytest.approx(
            scipy.stats.kendalltau(x, y).statistic, abs=1e-12
        )


def test_intervals_are_of_clusters_and_of_weights_and_of_no_order():
    singles = np.random.default_rng(0).normal(size=300).tolist()
    nine_fold = [value for value in singles for _ in range(9)]
    clusters = [i // 9 for i in range(len(nine_fold))]
    alone, copies = (
        cluster_bootstrap_mean(singles, range(300), 0),
        cluster_bootstrap_mean(nine_fold, clusters, 0),
    )
    assert (copies.low, copies.high) == pytest.approx((alone.low, alone.high), rel=1e-9), (
        "copies in a game tell nothing"
    )
    normal = mean(singles)
    assert alone.low == pytest.approx(normal.low, abs=0.01) and alone.high == pytest.approx(normal.high, abs=0.01)
    order = random.Random(1).sample(range(len(nine_fold)), len(nine_fold))
    shuffled = [nine_fold[i] for i in order], [f"game {clusters[i]}" for i in order]
    assert cluster_bootstrap_mean(*shuffled, 0) == copies
    weighted = cluster_bootstrap_mean([1.0, 4.0, 100.0], "aab", 0, [3.0, 1.0, 0.0])
    assert (weighted.value, weighted.low, weighted.count) == (1.75, None, 2), "one cluster is left: no interval"
    ratio = cluster_bootstrap_mean([1.0, 0.0], "ab", 0, [3.0, 1.0])
    assert (ratio.value, ratio.low, ratio.high) == (0.75, 0.0, 1.0)


# The players ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fen", "greedy", "deep"),
    [
        ("6k1/5ppp/8/8/8/8/3n4/R2R3K w - - 0 1", ["a1a8"], ["a1a8"]),  # mate before the knight
        ("7k/8/8/3q4/2P5/8/3R4/K7 w - - 0 1", ["c4d5"], ["c4d5", "d2d5"]),  # the pawn takes before the rook
        ("7k/4p3/3p4/8/8/8/3R4/K7 w - - 0 1", ["d2d6"], None),  # a guarded pawn: two plies see the reply
        ("7k/8/8/3pP3/8/8/8/K7 w - d6 0 1", ["e5d6"], ["e5d6"]),  # en passant
    ],
)
def test_greedy_capture_and_two_plies_play_as_they_are_described(fen, greedy, deep):
    board = chess.Board(fen)
    assert greedy_capture(board) == greedy
    if deep is None:
        assert greedy[0] not in two_ply(board)
    else:
        assert two_ply(board) == deep
    assert board.fen() == fen, "the board is left as it was"


def test_two_plies_are_those_of_an_obvious_search():
    def balance(board, side):
        worth = dict(zip(range(1, 7), (1, 3, 3, 5, 9, 0), strict=True))
        return sum(worth[p.piece_type] * (1 if p.color == side else -1) for p in board.piece_map().values())

    def value(board, side):
        if board.is_checkmate():
            return 1000
        after = []
        for reply in list(board.legal_moves):
            board.push(reply)
            after.append(balance(board, side))
            board.pop()
        return min(after, default=0)

    boards = [chess.Board(p.fen) for p in TABLES]
    boards += [chess.Board(fen) for fen in (STALEMATING, "8/P6k/8/8/8/8/1p6/K7 w - - 0 1")]
    for board in boards:
        values = {}
        for move in list(board.legal_moves):
            board.push(move)
            values[move.uci()] = value(board, not board.turn)
            board.pop()
        best = max(values.values())
        actual = two_ply(board)
        assert actual == sorted(uci for uci, v in values.items() if v == best), board.fen()
        assert choose(two_ply, board, random.Random(0)) in actual


def test_two_plies_do_not_give_stalemate_when_ahead():
    board = chess.Board(STALEMATING)
    board.push_uci("f2f7")
    assert board.is_stalemate()
    board.pop()
    assert "f2f7" not in two_ply(board)


@pytest.mark.skipif(not HAS_ENGINE, reason="Stockfish is not installed (apt install stockfish)")
def test_skill_zero_plays_legal_moves_and_not_always_the_best():
    with skill_zero(HAS_ENGINE) as player:
        actual = [player(chess.Board(p.fen)) for p in TABLES]
    assert all(len(moves) == 1 and moves[0] in p.moves for moves, p in zip(actual, TABLES, strict=True))


# The suite -----------------------------------------------------------------------------------------------------------


class Always:
    """A model that writes what it is told, and thinks likely what is good."""

    def __init__(self, pick):
        self.pick = pick

    def __call__(self, kind, mode):
        times = strength.SAMPLES if mode == "samples" else 1
        return lambda prompts, tick: [f" {self.pick(p.row)}" for p in prompts for _ in range(times)]

    def move_logps(self, positions, tick):
        return [dict(zip(p.moves, p.evaluations, strict=True)) for p in positions]


def measured(ask, positions):
    data = Data([], [], 0, 0, 0, tables=positions)
    return run_suites(["strength"], ask, data, lambda what, total: lambda done: None).estimates


def test_the_best_the_worst_and_no_move_lose_nothing_the_spread_and_the_spread():
    spread = [move_table(p).best - move_table(p).worst for p in TABLES]
    picks = {
        "best": lambda p: p.moves[int(np.argmax(p.evaluations))],
        "worst": lambda p: p.moves[int(np.argmin(p.evaluations))],
        "none": lambda p: "a1a1",
    }
    actual = {name: measured(Always(pick), TABLES) for name, pick in picks.items()}
    for mode in ("greedy", "sampled"):
        loss = {name: each[f"strength/tables/{mode}/all/loss"].value for name, each in actual.items()}
        assert loss == pytest.approx({"best": 0, "worst": np.mean(spread), "none": np.mean(spread)}, abs=1e-12)
    best, worst, none = (actual[name] for name in picks)
    assert [each["strength/tables/greedy/all/legal"].value for each in (best, worst, none)] == [1, 1, 0]
    assert none["strength/tables/greedy/all/loss_legal"].value is None
    assert best["strength/tables/greedy/all/tau"].value == pytest.approx(1)
    assert (best["strength/tables/sampled/all/pass_16"].value, none["strength/tables/sampled/all/pass_16"].value) == (
        1,
        0,
    )
    expected = np.mean([np.mean([move_table(p).loss(m) for m in p.moves]) for p in TABLES])
    assert best["strength/tables/uniform/all/loss"].value == pytest.approx(expected), "exact: no draw"
    white, black = (best[f"strength/tables/uniform/{side}/loss"] for side in ("white", "black"))
    assert (white.count, black.count) == (sum(" w " in p.fen for p in TABLES), sum(" b " in p.fen for p in TABLES))


def test_decided_positions_stand_apart_where_there_are_both():
    positions = [CORNER, ONE_MOVE]
    actual = strength.estimates(positions, [strength.judged(p, ["a8b8"]) for p in positions], 0)
    assert actual["undecided/loss"].value == pytest.approx(win_probability(1) - 0.5)
    assert actual["decided/loss"].value == 0 and actual["decided/loss"].count == 1
    assert not any(path.startswith("decided") for path in strength.estimates([CORNER], [{"loss": 0.0}], 0))


@pytest.fixture(scope="module")
def small():
    sizes = {"num_layers": 1, "num_heads": 2, "hidden_size": 32, "max_position_embeddings": 128}
    return load_policy(ModelConfig(tokenizer="chess", **sizes), 0, 96)


def test_the_order_of_the_rows_changes_no_number_and_samples_begin_with_the_sampled_one(small):
    model = OurModel(small, 1.0, 0)
    first, again = (measured(model, rows) for rows in (TABLES, random.Random(5).sample(TABLES, len(TABLES))))
    assert first == again
    prompts = [policy_task("best_move").prompt(position, 0) for position in TABLES]
    samples = model("best_move", "samples")(prompts)
    assert samples[:: strength.SAMPLES] == model("best_move", "sampled")(prompts) and len(set(samples)) > 10


def test_the_command_line_ranks_the_model_among_its_yardsticks(small, tmp_path):
    save_hf(tmp_path / "small", small.architecture, small.params, small.tokenizer)
    pq.write_table(to_columns(TABLES, keyed=False), tmp_path / "tables.parquet")
    given = ["--weights", str(tmp_path / "small"), "--suite", "strength", "--tables", str(tmp_path / "tables.parquet")]
    main([*given, "--out", str(tmp_path / "out"), "--positions", "9"])
    report = read_report(tmp_path / "out")
    assert report["data"]["tables"].startswith("9 (checksum") and report["data"]["tables"].endswith(
        "a file, of 3 games"
    )
    lines = (tmp_path / "out" / "evaluation.md").read_text().splitlines()
    start = lines.index(next(line for line in lines if line.startswith("| ---"))) + 1
    rows = [line.split("|")[1:3] for line in lines[start : start + 5]]
    losses = [float(row[1].split("%")[0]) for row in rows]
    assert losses == sorted(losses, reverse=True) and len(rows) == 5
    assert {"**the model, greedy**", "two-ply material search"} < {row[0].strip() for row in rows}
    assert (tmp_path / "out" / "strength.png").stat().st_size > 5000
    page = comparison_page(report, report)
    assert "Strength" in page and "greedy" in page and page.count("win probability lost") == 2
    assert compare(report, report)["strength/tables/two_ply/all/loss"]["difference"]["value"] == 0
    assert json.loads((tmp_path / "out" / "evaluation.json").read_text()) == report


def test_a_set_is_asked_its_test_split_unless_another_is_named(tmp_path):
    (tmp_path / "provenance.json").write_text(json.dumps({"settings": {}, "finished": True}))
    for split, rows in {"train": TABLES[:3], "heldout": TABLES[3:5], "test": TABLES[5:]}.items():
        pq.write_table(to_columns(rows, keyed=False), tmp_path / f"{split}-00000.parquet")
    given = ["--weights", "w", "--out", "o", "--tables", str(tmp_path)]
    assert tables_of(parse(given)) == {"tables": TABLES[5:], "tables_of": "the test split"}
    assert tables_of(parse([*given, "--split", "heldout"])) == {"tables": TABLES[3:5], "tables_of": "the heldout split"}
    assert tables_of(parse([*given, "--positions", "4"]))["tables"] == TABLES[5:9]


def test_what_is_no_table_is_refused_before_the_model_is_loaded(tmp_path):
    partial = Position(CORNER.fen, moves=CORNER.moves[:2], evaluations=CORNER.evaluations[:2])
    pq.write_table(to_columns([partial], keyed=False), tmp_path / "partial.parquet")
    given = ["--weights", "packaged:rook-small", "--suite", "strength", "--out", str(tmp_path / "out")]
    with pytest.raises(SystemExit, match=r"--tables .*partial.parquet: .* none for a8b8.*jax_grpo.data tables"):
        main([*given, "--tables", str(tmp_path / "partial.parquet")])
    with pytest.raises(SystemExit, match=r"--split heldout: .*partial.parquet is a file, which has no splits"):
        main([*given, "--tables", str(tmp_path / "partial.parquet"), "--split", "heldout"])
    with pytest.raises(NotATable):
        strength.judged(partial, ["a8a7"])
