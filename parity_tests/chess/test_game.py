"""`game`: results, rewards and prompts are those of the rules; opponents play what their seeds say; what cannot be is refused."""

import dataclasses
import itertools
import math
import random
import re
import shutil
from collections import Counter

import chess
import numpy as np
import pydantic
import pytest
from conftest import config as tiny_config
from short_runs import cut_and_whole, lines_without_times

import torch_ref.options
import torch_ref.train
from jax_grpo.chess.evaluate import strength
from jax_grpo.chess.evaluate.policy import random_legal
from jax_grpo.chess.evaluate.suites import OPPONENTS, short_games
from jax_grpo.chess.games import uniform
from jax_grpo.chess.positions.position import Position
from jax_grpo.chess.positions.sources import read_packaged
from jax_grpo.chess.settings import EngineConfig
from jax_grpo.chess.tasks.engine import Analysis, EnginePool
from jax_grpo.chess.tasks.game import GameTask
from jax_grpo.chess.tasks.opponents import PolicyOpponent, Stockfish, skilled
from jax_grpo.chess.tasks.policy import PolicyTask
from jax_grpo.config import Config, ConfigError
from jax_grpo.config.tasks import task_of
from jax_grpo.model.weights import WeightsError
from jax_grpo.prompts.dataset import heldout_rows
from jax_grpo.rollout.episodes import ObservationTooLong
from jax_grpo.tasks.base import RewardError
from jax_grpo.tasks.checked import checked_score
from jax_grpo.tasks.episodes import Episode, checked_reset, checked_steps
from jax_grpo.train import make_evaluator
from jax_grpo.trainer import Trainer

HAS_ENGINE = shutil.which("stockfish") or shutil.which("/usr/games/stockfish")
needs_engine = pytest.mark.skipif(not HAS_ENGINE, reason="Stockfish is not installed (apt install stockfish)")
HELDOUT = read_packaged("heldout")[:200]
AFTER_F3 = "rnbqkbnr/pppp1ppp/8/4p3/8/5P2/PPPPP1PP/RNBQKBNR w KQkq - 0 2"  # g2g4 is mated by d8h4
AFTER_G4 = "rnbqkbnr/pppp1ppp/8/4p3/6P1/5P2/PPPPP2P/RNBQKBNR b KQkq - 0 2"
STALEMATING = "7k/8/8/8/8/8/5Q2/K7 w - - 0 1"  # by f2f7
LONE_PAWN = "7k/8/8/8/8/8/P7/K7 {} - - 0 1"


def game_task(turns: int = 3, **settings) -> GameTask:
    given = {"name": "game", "prompt_style": "best_move", "opponent": "capture", "episode": {"turns": turns}}
    return GameTask(task_of(**(given | settings)))


def played(task: GameTask, fen: str, moves: list[str], draw: tuple[int, ...] = ()) -> tuple[Episode, dict[str, float]]:
    """The episode in which the model writes these, and its components that are not 0."""
    prompt = dataclasses.replace(task.prompt(Position(fen), 0), draw=draw)
    (episode,) = checked_reset(task, [prompt])
    for text in moves:
        assert not episode.done
        ((observation, done),) = checked_steps(task, [prompt], {0: episode}, [text])
        episode.turns.append((text, observation))  # pyright: ignore[reportArgumentType]
        episode.done = done
    scores = {name: float(x.values_B[0]) for name, x in checked_score(task, [prompt], [episode]).items()}
    return episode, {name: value for name, value in scores.items() if value}


# Rules and rewards -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fen", "moves", "expected"),
    [
        (AFTER_F3, ["g2g4"], {"legal_moves": 1.0, "lost": 1.0}),
        (AFTER_G4, [" d8h4"], {"outcome": 1.0, "legal_moves": 1.0, "won": 1.0}),
        (STALEMATING, ["f2f7"], {"outcome": 0.5, "legal_moves": 1.0, "drawn": 1.0}),
        (AFTER_F3, ["e2e5"], {"forfeited": 1.0}),
        (AFTER_F3, ["what"], {"forfeited": 1.0}),
        (AFTER_F3, ["a2a3", "e1e3"], {"legal_moves": pytest.approx(1 / 3), "forfeited": 1.0}),
        # one bare king: a claimed draw as soon as the pawn is lost
        ("7k/8/8/8/8/8/p7/K7 w - - 0 1", ["a1a2"], {"outcome": 0.5, "legal_moves": 1.0, "drawn": 1.0}),
    ],
    ids=["mated", "mates_as_Black", "stalemate", "illegal", "malformed", "illegal_later", "bare_kings"],
)
def test_a_game_that_ends_is_worth_its_result_and_an_illegal_move_nothing(fen, moves, expected):
    episode, actual = played(game_task(), fen, moves)
    assert episode.done and actual == expected


@pytest.mark.parametrize(("side", "sign"), [("w", 1), ("b", -1)])
def test_a_game_that_is_not_over_is_worth_its_material_for_the_side_the_model_plays(side, sign):
    fen = LONE_PAWN.format(side)
    moves = {"w": ["a1b1", "b1c1", "c1d1"], "b": ["h8h7", "h7h6", "h6h5"]}[side]
    episode, actual = played(game_task(opponent="random"), fen, moves)
    (board,) = [episode.environment.board]  # pyright: ignore[reportAttributeAccessIssue]
    worth = 1 / (1 + math.exp(-0.00368208 * sign * 100))
    assert actual == {"outcome": pytest.approx(worth, abs=1e-6), "legal_moves": 1.0, "unfinished": 1.0}
    assert len(board.move_stack) == 6, "three moves of each side"


def test_an_observation_is_the_policy_tasks_prompt_of_the_position_after_the_answer():
    for style in ("best_move", "full"):
        task, policy = game_task(prompt_style=style), PolicyTask(task_of(name="policy", prompt_style=style))
        prompt = task.prompt(Position(AFTER_F3), 0)
        assert prompt == policy.prompt(Position(AFTER_F3), 0)
        game = task.reset(prompt)
        text = "b1c3" if style == "best_move" else " b1c3 a2a3    E: 0.1 0.0    B: b1c3"
        observation, done = game.step(text)
        assert [game.board.move_stack[0].uci(), done] == ["b1c3", False] and len(game.board.move_stack) == 2
        assert observation == "\n" + policy.prompt(Position(game.board.fen()), 0).text


def test_the_log_has_results_and_moves():
    task = game_task()
    moves = [["d8h4"], ["d8h4"], ["a7a5", "a8b8"], ["b8c6", "c6b8", "b8c6"]]
    prompts = [task.prompt(Position(AFTER_G4), 0)] * 4
    episodes = [played(task, AFTER_G4, each)[0] for each in moves]
    scores = task.score(prompts, episodes)
    assert [scores[name].sum() for name in ("won", "drawn", "lost", "forfeited", "unfinished")] == [2, 0, 0, 1, 1]
    assert task.logged().metrics == {"moves": [1.0, 1.0, 1.0, 3.0]}


def test_a_position_without_a_legal_move_is_refused_by_name():
    fen = "7k/5Q2/8/8/8/8/8/K7 b - - 0 1"
    with pytest.raises(ValueError, match=re.escape(f"task game: the game is over in '{fen}'; expected positions with")):
        game_task().prompt(Position(fen), 0)


# Opponents -------------------------------------------------------------------------------------------------------------


def _answer(task: GameTask, draw: tuple[int, ...]) -> str:
    return played(task, AFTER_F3, ["a2a3"], draw)[0].environment.board.move_stack[1].uci()  # pyright: ignore[reportAttributeAccessIssue]


def test_what_an_opponent_draws_follows_from_the_episodes_numbers_each_of_which_matters():
    task = game_task(opponent="random")
    draws = list(itertools.product((0, 1), (0, 1), (0, 1), (0, 1)))
    answers = [_answer(task, draw) for draw in draws]
    assert answers == [_answer(game_task(opponent="random"), draw) for draw in draws]
    for axis in range(4):
        pairs = [(draw, (*draw[:axis], 1, *draw[axis + 1 :])) for draw in draws if draw[axis] == 0]
        assert any(answers[draws.index(one)] != answers[draws.index(other)] for one, other in pairs), axis
    knights = Counter(
        tuple(m.uci() for m in played(task, AFTER_F3, ["b1c3", "c3b1"], (draw,))[0].environment.board.move_stack[1::2])  # pyright: ignore[reportAttributeAccessIssue]
        for draw in range(60)
    )
    assert len(knights) > 50, "the second answer does not repeat the first one's draw"


def test_the_capturing_opponent_takes_what_hangs():
    fen = "rnb1kbnr/pppp1ppp/8/4p1q1/8/3P4/PPP1PPPP/RNBQKBNR b KQkq - 0 2"  # White's c1 attacks the queen
    assert played(game_task(), fen, ["a7a6"])[0].environment.board.move_stack[1].uci() == "c1g5"  # pyright: ignore[reportAttributeAccessIssue]


LINES = Analysis(("a", "b", "c", "d"), (0.5, 0.45, 0.1, -2.0), 0.5)


@pytest.mark.parametrize("level", [0, 7, 19])
def test_a_skill_levels_move_is_that_of_stockfishs_formula(level):
    """Skill::pick_best of Stockfish 15 in the obvious loop, with the same numbers."""
    weakness = 120 - 2 * level
    seen = Counter()
    for seed in range(200):
        draw, best, highest = random.Random(seed), "", -math.inf
        for move, score in zip("abcd", (50, 45, 10, -200), strict=True):
            push = (weakness * (50 - score) + 100 * draw.randrange(weakness)) // 128
            if score + push >= highest:
                highest, best = score + push, move
        assert skilled(LINES, level, random.Random(seed)) == best
        seen[best] += 1
    print(level, dict(seen))
    assert len(seen) > 1
    assert skilled(LINES, 20, random.Random(0)) == "a"


@needs_engine
def test_stockfish_at_a_level_plays_the_same_in_any_process_and_order_and_stronger_levels_take_more():
    engine, boards = EngineConfig(nodes=300, processes=1), [chess.Board(p.fen) for p in HELDOUT[:12]]
    played_by = {}
    for name, level in (("once", 0), ("again", 0), ("full", 20)):
        opponent = Stockfish(engine, level)
        order = range(12) if name != "again" else range(11, -1, -1)
        moves = opponent.moves([boards[i] for i in order], [random.Random(i) for i in order])
        opponent.close()
        played_by[name] = dict(zip(order, moves, strict=True))
    assert played_by["once"] == played_by["again"] != played_by["full"]
    with EnginePool(engine.model_copy(update={"multipv": 4})) as pool:
        best = pool.by_fen(board.fen() for board in boards)
    assert played_by["full"] == {i: best[board.fen()].moves[0] for i, board in enumerate(boards)}


@needs_engine
def test_the_engine_judges_for_the_side_the_model_plays():
    engine = {"nodes": 500, "processes": 1}
    task = game_task(turns=1, opponent="random", judge="engine", engine=engine)
    worth = {
        side: played(task, f"4k3/8/8/8/8/8/8/QQ2K3 {side} - - 0 1", [move])[1]["outcome"]
        for side, move in (("w", "e1e2"), ("b", "e8e7"))
    }
    task.close()
    assert worth["w"] > 0.99 and worth["b"] < 0.01


def test_a_policy_that_writes_no_legal_move_has_a_random_one_played_and_told():
    opponent = PolicyOpponent("best_move", "self")
    boards = [chess.Board(AFTER_F3), chess.Board(AFTER_F3)]
    opponent.write = lambda prompts, numbers: [" a2a3", " a7a5"]
    moves = opponent.moves(boards, [random.Random(0), random.Random(1)])
    assert moves[0] == "a2a3" and moves[1] in uniform(boards[1])
    assert (opponent.written, opponent.replaced) == (2, 1)


# Settings --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"name": "policy", "opponent": "capture"}, "task.opponent is 'capture', which does nothing unless task.name is game"),
        ({"name": "guess", "judge": "engine"}, "task.judge is 'engine', which does nothing unless task.name is game; it is guess"),
        ({"name": "game", "opponent": "stockfish:21"}, "task.opponent is 'stockfish:21'; expected random, capture, two_ply, "),
        ({"name": "game", "opponent": "stockfish"}, "or stockfish:0 to stockfish:20"),
        ({"name": "game", "opponent": "stockfish:3"}, "task.opponent stockfish:3 needs task.engine, such as {nodes: 2000}"),
        ({"name": "game", "judge": "engine"}, "task.judge engine needs task.engine, such as {nodes: 2000}; it is null"),
        ({"name": "game", "engine": {}}, "task.engine does nothing with task.opponent random and task.judge material"),
        ({"name": "game", "opponent": "reference"}, "task.opponent reference needs kl.beta > 0"),
        ({"name": "game", "rewards": {"legal": 1.0}}, None),
    ],
)  # fmt: skip
def test_settings_that_make_no_game_are_refused_before_anything_is_read(task, message):
    if message is None:
        with pytest.raises(
            ValueError, match=r"task\.rewards\.legal: the game task has no such component.* legal_moves"
        ):
            GameTask(task_of(**task))
        return
    with pytest.raises(pydantic.ValidationError, match=re.escape(message)):
        tiny_config(task=task, kl={"beta": 0.0})


def game_config(run_dir, turns: int = 2, observed: int = 76, task=(), **sections) -> Config:
    """Of a tiny model and packaged positions."""
    given = {"name": "game", "prompt_style": "best_move", "opponent": "capture"} | dict(task)
    base: dict = {"task": given | {"episode": {"turns": turns, "max_observation_tokens": observed}}}
    sizes = {"tokenizer": "chess", "num_layers": 1, "hidden_size": 16, "max_position_embeddings": 176}
    base |= {"model": sizes, "prompts": {"per_iteration": 2, "max_prompt_tokens": 80}, "rollout": {"max_new_tokens": 4}}
    return tiny_config(**{**base, **sections}, run_dir=str(run_dir))


def test_observations_that_will_not_fit_are_refused_with_the_number_before_anything_is_compiled(tmp_path):
    such = r"task 'game': an observation such as '\\nP: .* has (7\d) tokens; "
    expected = such + r"task.episode.max_observation_tokens is 16, expected at least \1"
    with pytest.raises(ObservationTooLong, match=expected):
        Trainer(game_config(tmp_path, observed=16))


def test_moves_that_do_not_fit_the_models_positions_are_refused_with_the_number(tmp_path):
    with pytest.raises(
        pydantic.ValidationError, match=r"2 x rollout.max_new_tokens \+ 2 x|3 x .* = 244 exceeds model.max_pos"
    ):
        game_config(tmp_path, turns=3)
    packaged = {"weights": "packaged:rook-small", "tokenizer": "chess"}
    with pytest.raises((WeightsError, ConfigError), match="324"):
        Trainer(game_config(tmp_path, turns=4, model=packaged))


def test_the_references_training_refuses_games(tmp_path):
    with pytest.raises(
        ConfigError, match=r"task\.name is game, whose completions are answered: torch_ref\.train has one"
    ):
        torch_ref.train.Trainer(game_config(tmp_path), torch_ref.options.Options())


# Beside other players --------------------------------------------------------------------------------------------------


def test_short_games_of_random_legal_play_are_legal_and_captures_score_more_than_random_moves():
    """The yardstick's own worth: its mean is near a half against itself, less against captures."""
    tick = lambda done: None  # noqa: E731
    player = random_legal(3)
    actual = {name: short_games(HELDOUT, name, player, 3, tick) for name in OPPONENTS}
    means = {name: float(np.mean([row["outcome"] for row in rows])) for name, rows in actual.items()}
    print(means)
    assert short_games(HELDOUT, "capture", player, 3, tick) == actual["capture"]
    assert all(row["legal_moves"] == 1 for rows in actual.values() for row in rows)
    assert means["capture"] < means["random"] - 0.05
    sides = {"white": [" w " in p.fen for p in HELDOUT]}
    estimates = strength.estimates(HELDOUT, actual["capture"], 0, sides)
    whole = estimates["all/outcome"]
    assert whole.value == pytest.approx(means["capture"], abs=1e-6) and whole.low < whole.value < whole.high  # pyright: ignore[reportOptionalOperand]
    assert 0 < estimates["white/outcome"].count < whole.count == 200


# Whole runs ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow  # four programs, three runs
@pytest.mark.parametrize("opponent", ["capture", "self", "reference"])
def test_a_run_of_games_that_died_and_was_continued_is_the_run_that_did_not(opponent, tmp_path, monkeypatch):
    def settings(name: str) -> Config:
        sections: dict = {
            "kl": {"beta": 0.1},
            "checkpoint": {"every": 1},
            "iterations": 4,
            "evaluation": {"positions": 2},
        }
        sections |= {"logging": {"samples_every": 1, "tensorboard": False}}
        return game_config(tmp_path / name, task={"opponent": opponent}, **sections)

    cut, whole = cut_and_whole(settings, monkeypatch)
    ours, theirs = lines_without_times(cut), lines_without_times(whole)
    assert [r for r in ours if "loss" in r] == [r for r in theirs if "loss" in r]
    for name in ("samples.jsonl", "weights/model.safetensors"):
        assert (cut / name).read_bytes() == (whole / name).read_bytes(), name


@pytest.mark.slow  # a model of some size, in two modes
@pytest.mark.parametrize("opponent", ["self", "reference"])
def test_a_policy_opponent_writes_what_that_policy_writes_and_held_out_games_repeat(opponent, tmp_path):
    model = {"weights": "packaged:rook-small", "tokenizer": "chess"}
    settings = game_config(
        tmp_path, model=model, task={"opponent": opponent}, kl={"beta": 0.1}, evaluation={"positions": 8}
    )
    trainer = Trainer(settings)
    metrics = trainer.iterate(0)[0]
    assert 0 <= metrics.get("log/opponent_replaced", 0) < 1
    policy = trainer.task_policy
    assert policy is not None and (policy.frozen is None) == (opponent == "self")
    prompts = [trainer.task.prompt(position, 0) for position in HELDOUT[:3]]
    write = policy.write(trainer.state.params, 0, 0)
    assert write(prompts, [5, 6, 7]) == [*write(prompts[:1], [5]), *write(prompts[1:], [6, 7])], "each by itself"
    evaluator = make_evaluator(trainer, heldout_rows(settings, trainer.positions, trainer.task.read))
    assert evaluator is not None
    first, second = evaluator(trainer.state.params), evaluator(trainer.state.params)
    assert first.metrics == second.metrics and first.completions == second.completions
    assert {"eval/greedy/outcome", "eval/sampled/forfeited"} <= set(first.metrics)
    assert isinstance(trainer.task, GameTask)
    with pytest.raises(RewardError, match="task 'game'"):
        checked_steps(trainer.task, prompts, {0: Episode(None)}, ["e2e4"])  # pyright: ignore[reportArgumentType]
