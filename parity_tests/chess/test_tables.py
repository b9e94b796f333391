"""Tables of all legal moves: what a move costs, the reward that comes of it, and the sets of them, made by the real engine."""

import json
import shutil

import chess
import pyarrow.parquet as pq
import pytest
from short_runs import write_inputs

from jax_grpo.chess.data.__main__ import main as make_set
from jax_grpo.chess.data.selfplay import SPREAD, UNDECIDED, TableOptions, tabled_game
from jax_grpo.chess.positions.files import read_positions
from jax_grpo.chess.positions.position import Position, position_key
from jax_grpo.chess.positions.sources import load_positions, read_packaged
from jax_grpo.chess.positions.values import NotATable, move_table, win_probability
from jax_grpo.chess.settings import EngineConfig
from jax_grpo.chess.tasks.policy import PolicyTask, legal_moves
from jax_grpo.config import ConfigError, load_config
from jax_grpo.config.sections import PromptsConfig
from jax_grpo.config.tasks import task_of
from jax_grpo.trainer import Trainer

HAS_ENGINE = shutil.which("stockfish") or shutil.which("/usr/games/stockfish")
needs_engine = pytest.mark.skipif(not HAS_ENGINE, reason="Stockfish is not installed (apt install stockfish)")
# Black's king in the corner: three moves, worth +1, 0 and -2 pawns.
CORNER = Position("k7/8/8/8/8/8/6R1/K7 b - - 0 1", moves=("a8a7", "a8b7", "a8b8"), evaluations=(1.0, -2.0, 0.0))


def task(**settings) -> PolicyTask:
    return PolicyTask(task_of(prompt_style="best_move", **settings))


def test_a_move_costs_the_win_probability_it_gives_away_and_no_legal_move_costs_the_worst():
    table = move_table(CORNER)
    assert table.best == pytest.approx(1 / (1 + 2.718281828459045**-0.368208))
    costs = {move: table.loss(move) for move in (*CORNER.moves, "a8a1", "", "a8b8q", "O-O")}
    assert costs["a8a7"] == 0
    assert costs["a8b8"] == pytest.approx(win_probability(1) - 0.5)
    assert costs["a8b7"] == costs["a8a1"] == costs[""] == costs["a8b8q"] == costs["O-O"]
    assert costs["a8b7"] == pytest.approx(win_probability(1) - win_probability(-2))


def test_the_value_component_is_that_cost_and_a_position_without_a_table_is_named_before_anything_is_generated():
    own = task(rewards={"value": 2.0, "legal": 0.5})
    prompt = own.prompt(CORNER, 0)
    scores = own.score([prompt] * 3, [" a8b8", " a8a7", " a8a1"])
    table = move_table(CORNER)
    assert scores["value"] == pytest.approx([-table.loss("a8b8"), 0, -table.loss("a8b7")])
    assert list(scores["legal"]) == [1, 1, 0]
    partial = Position(CORNER.fen, moves=CORNER.moves[:2], evaluations=CORNER.evaluations[:2])
    with pytest.raises(NotATable, match=r"6R1/K7 b - - 0 1' has values for 2 moves and none for a8b8"):
        own.prompt(partial, 0)
    assert "value" not in task().component_weights, "runs that do not ask for it have the components they had"


def test_a_run_on_positions_without_tables_names_where_they_are_from(tmp_path):
    write_inputs(tmp_path)
    words = ["--task.rewards", "{value: 1.0}", "--run_dir", str(tmp_path / "run")]
    with pytest.raises(NotATable, match=r"prompts.source '.*positions.jsonl': '.* has values for 0 moves and none for"):
        Trainer(load_config(str(tmp_path / "c.yaml"), words))


@needs_engine
def test_an_engine_gives_the_table_of_a_position_without_one():
    partial = Position(CORNER.fen, moves=("a8a7",), evaluations=(-5.0,))
    own = task(rewards={"value": 1.0}, engine=EngineConfig(nodes=300, multipv=218))
    try:
        scores = own.score([own.prompt(partial, 0)] * 4, [" a8a7", " a8b7", " a8b8", " a8a1"])
    finally:
        own.close()
    assert max(scores["value"][:3]) == 0 and scores["value"][3] == min(scores["value"][:3])


def test_an_engine_of_too_few_lines_is_refused(tmp_path):
    config = tmp_path / "c.yaml"
    config.write_text(
        "model: {weights: packaged:rook-small, tokenizer: chess}\n"
        "task: {prompt_style: best_move, rewards: {value: 1}, engine: {multipv: 5}}\n"
        "iterations: 1\nrun_dir: r\nupdate: {learning_rate: 1.0e-3}\n"
    )
    with pytest.raises(ConfigError, match=r"c.yaml:2: .*multipv is 5 .*`value`.*218"):
        load_config(str(config))


@pytest.mark.slow  # an engine plays games and looks at every move of theirs
@needs_engine
def test_a_set_of_tables_has_every_legal_move_and_whole_games_in_one_split(tmp_path):
    options = "--count 24 --heldout 8 --test 8 --nodes 150 --test-nodes 600 --processes 1"
    make_set(["tables", "--out", str(tmp_path), *options.split()])
    rows = {
        split: pq.read_table(tmp_path / f"{split}-00000.parquet").to_pylist() for split in ("train", "heldout", "test")
    }
    assert {split: len(each) for split, each in rows.items()} == {"train": 24, "heldout": 8, "test": 8}
    games = [{row["game"] for row in each} for each in rows.values()]
    assert all(not a & b for i, a in enumerate(games) for b in games[i + 1 :])
    for row in (row for each in rows.values() for row in each):
        assert set(row["moves"]) == legal_moves(row["fen"])
        assert row["evaluations"] == sorted(row["evaluations"], reverse=True)
        wins = [win_probability(pawns) for pawns in row["evaluations"]]
        assert row in rows["test"] or (UNDECIDED[0] <= wins[0] <= UNDECIDED[1] and wins[0] - wins[-1] > SPREAD)
    settings = json.loads((tmp_path / "provenance.json").read_text())["settings"]
    assert (settings["nodes"], settings["test_nodes"]) == (150, 600)
    read = load_positions(PromptsConfig(source=str(tmp_path), split="train"), 0)
    assert [p.game for p in read] == [row["game"] for row in rows["train"]]
    assert move_table(read[0]).loss(read[0].moves[0]) == 0


def test_games_have_numbers_or_names_or_none(tmp_path):
    fens = [chess.Board().fen()] * 5
    games = [7, "World Cup, 3", "World Cup, 4", "World Cup, 3", None]
    rows = [{"fen": fen, "game": game} for fen, game in zip(fens, games, strict=True)]
    (tmp_path / "games.jsonl").write_text("\n".join(map(json.dumps, rows)))
    number, third, fourth, again, none = (p.game for p in read_positions(tmp_path / "games.jsonl"))
    assert number == 7 and none is None
    assert third == again != fourth and {type(third), type(fourth)} == {int}


@pytest.mark.slow
def test_packaged_tables_are_whole_and_their_splits_share_no_position_and_no_game():
    splits = {split: read_packaged(split, "packaged:tables") for split in ("train", "heldout", "test")}
    keys = {split: {position_key(p.fen) for p in positions} for split, positions in splits.items()}
    games = {split: {p.game for p in positions} for split, positions in splits.items()}
    for a, b in (("train", "heldout"), ("train", "test"), ("heldout", "test")):
        assert not keys[a] & keys[b] and not games[a] & games[b]
    for position in splits["test"]:
        assert len(position.moves) == len(set(position.moves)) == chess.Board(position.fen).legal_moves.count()
        move_table(position)


def test_a_game_that_its_random_opening_ends_has_no_rows():
    """Fool's mate after four of five half-moves: it ended the making of a set after 22,000 positions."""
    options = TableOptions(seed=1, nodes=1, test_nodes=1, random=0.1, splits={"train": 1})
    assert tabled_game(1682, None, options) == []  # type: ignore[arg-type]
