"""`prompt_style: own_side`: positions are shown with White to move, and moves are turned back, wherever they are asked and read."""

import itertools
import json
import random
import shutil

import chess
import numpy as np
import pytest

from jax_grpo.chess.evaluate.policy import move_logps
from jax_grpo.chess.evaluate.puzzles import PACKAGED_PUZZLES, read_mates, read_puzzles
from jax_grpo.chess.evaluate.suites import Data, OurModel, run_suites
from jax_grpo.chess.games import Game
from jax_grpo.chess.lessons import batches
from jax_grpo.chess.play.arena import ModelSide
from jax_grpo.chess.play.player import Player
from jax_grpo.chess.positions.endings import NEVER, ending, squares_of, won_position
from jax_grpo.chess.positions.position import as_white, is_black, legal_uci, mirrored, turned
from jax_grpo.chess.positions.sources import read_packaged
from jax_grpo.chess.settings import OWN_SIDE
from jax_grpo.chess.style import find_style
from jax_grpo.chess.tasks.game import GameTask
from jax_grpo.chess.tasks.opponents import PolicyOpponent
from jax_grpo.chess.tasks.policy import PolicyTask, in_style, move_prompt
from jax_grpo.config import Config, ConfigError
from jax_grpo.config.files import weights_directory
from jax_grpo.config.tasks import task_of
from jax_grpo.export.__main__ import export_hf
from jax_grpo.model.tokenizer import Tokenizer
from jax_grpo.policy.named import load_named
from jax_grpo.report.records import sample_rows
from jax_grpo.tasks.base import as_component
from jax_grpo.train import train

HELDOUT = read_packaged("heldout", "packaged:tables")[:300]
BLACK = [position for position in HELDOUT if is_black(position.fen)]
# Castling both ways, en passant and promotion, all Black's.
RULES = ("r3k2r/8/8/8/8/8/8/4K3 b kq - 0 1", "4k3/8/8/8/3pP3/8/8/4K3 b - e3 0 1", "4k3/8/8/8/8/8/p7/4K3 b - - 0 1")


def policy(style, **rewards):
    return PolicyTask(task_of(prompt_style=style, rewards=rewards or None))


def shown(prompt) -> chess.Board:
    """The board that a prompt's text shows."""
    return chess.Board(prompt.text.removeprefix("P: ").removesuffix("    B:"))


@pytest.mark.parametrize("fen", [*(p.fen for p in BLACK[:40]), *RULES], ids=lambda fen: fen.split()[0])
def test_moves_of_the_view_turned_back_are_the_boards_own(fen):
    view = chess.Board(as_white(fen))
    assert view.turn == chess.WHITE and view.is_valid()
    assert {turned(move, fen) for move in legal_uci(view)} == legal_uci(chess.Board(fen))
    assert as_white(as_white(fen)) == as_white(fen)


def test_white_to_move_and_what_is_no_move_are_left_alone():
    white = next(p.fen for p in HELDOUT if not is_black(p.fen))
    assert as_white(white) is white and turned("e2e4", white) == "e2e4"
    assert [turned(text, BLACK[0].fen) for text in ("", "castles", "e2e9", "e7e5 e5")] == [
        "",
        "castles",
        "e2e9",
        "e7e5 e5",
    ]


def test_every_component_is_that_of_the_move_on_the_board():
    own, board = policy(OWN_SIDE, value=1.0), policy("best_move", value=1.0)
    rng = random.Random(0)
    moves = [rng.choice([*p.moves, "a1h8", "nothing"]) for p in HELDOUT]
    written = [in_style(OWN_SIDE, move, p.fen) for move, p in zip(moves, HELDOUT, strict=True)]
    assert sum(a != b for a, b in zip(moves, written, strict=True)) > 100
    actual = own.score([own.prompt(p, 0) for p in HELDOUT], written)
    wanted = board.score([board.prompt(p, 0) for p in HELDOUT], moves)
    assert actual.keys() == wanted.keys() and all(np.array_equal(actual[name], wanted[name]) for name in actual)


class Views:
    """A model that plays the best move of the table, or mates, by what its prompt shows: it never sees Black to move."""

    def __init__(self, positions=()):
        self.best = {as_white(p.fen): in_style(OWN_SIDE, p.moves[0], p.fen) for p in positions}

    def __call__(self, kind, mode):
        def complete(prompts, *, numbers=None, step=0, tick=None):
            times = 16 if mode == "samples" else 1
            return [f" {self.move(shown(prompt))}" for prompt in prompts for _ in range(times)]

        return complete if kind == "best_move" else lambda prompts, **_: [""] * len(prompts)

    def move_logps(self, positions, tick):
        return [dict(zip(p.moves, p.evaluations, strict=True)) for p in positions]

    def move(self, board):
        assert board.turn == chess.WHITE
        if board.fen() in self.best:
            return self.best[board.fen()]
        if chess.popcount(board.occupied) == 3:
            men = "KRK" if board.rooks else "KQK"
            if ending(men).mates_in_KPW[squares_of(board, chess.WHITE)] != NEVER:
                return won_position(men, squares_of(board, chess.WHITE), chess.WHITE).moves[0]
        mates = [m for m in board.legal_moves if board.gives_check(m) and _mates(board, m)]
        return (mates or list(board.legal_moves))[0].uci()


def _mates(board, move):
    board = board.copy(stack=False)
    board.push(move)
    return board.is_checkmate()


def steps(what, total):
    return lambda done: None


def test_every_suite_reads_the_view_and_turns_the_moves_back():
    puzzles, asked = read_puzzles(PACKAGED_PUZZLES, 12), HELDOUT[:50]
    assert 10 < sum(is_black(position.fen) for position in asked) < 40
    data = Data(asked, read_mates()[:60], 6, 20, 0, endgames=12, tables=asked, puzzles=puzzles, style=OWN_SIDE)
    ask = Views(asked)
    for puzzle in puzzles:  # the solver's moves, by what is shown before each
        board = chess.Board(puzzle.fen)
        for own, move in zip(itertools.cycle([True, False]), puzzle.line, strict=False):
            if own:
                ask.best[as_white(board.fen())] = in_style(OWN_SIDE, move, board.fen())
            board.push_uci(move)
    suites = ["policy", "mates", "selfplay", "endgame", "short_games", "strength", "puzzles"]
    results = run_suites(suites, ask, data, steps)
    actual = {path: estimate.value for path, estimate in results.estimates.items()}
    assert actual["policy/best_move/greedy/all/legal"] == actual["policy/best_move/greedy/all/best_move"] == 1
    assert actual["mates/best_move/sampled/all/mate"] == 1
    for men in ("KRK", "KQK"):
        assert actual[f"endgame/{men}/greedy/all/mated"] == 1 and actual[f"endgame/{men}/greedy/all/excess"] == 0
    assert actual["short_games/capture/greedy/all/legal_moves"] == 1
    assert actual["short_games/capture/random_legal/all/legal_moves"] == 1
    assert actual["strength/tables/greedy/all/loss"] == 0 and actual["strength/tables/sampled/all/legal"] == 1
    assert actual["puzzles/lines/greedy/all/solved"] == 1
    assert not any(game.end == "illegal_move" for game in results.games["python_chess/greedy"])


def test_a_game_and_its_opponent_turn_moves_back():
    settings = {"name": "game", "prompt_style": OWN_SIDE, "opponent": "self", "episode": {"turns": 3}}
    task = GameTask(task_of(**settings))
    assert isinstance(task._opponent, PolicyOpponent)
    prompts = [task.prompt(p, 0) for p in HELDOUT[:40]]
    view = Views()
    task.meet(lambda asked, numbers: [f" {view.move(shown(prompt))}" for prompt in asked])
    games = [task.reset(prompt) for prompt in prompts]
    for _ in range(3):
        live = [game for game in games if game.ended is None]
        task.steps(live, [f" {view.move(shown(move_prompt(OWN_SIDE, game.board.fen())))}" for game in live])
    assert not any(game.ended == "illegal move" for game in games) and task._opponent.replaced == 0


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
    """The packaged model, called one that sees its own side."""
    folder = tmp_path_factory.mktemp("weights") / "own"
    shutil.copytree(weights_directory("packaged:rook-small"), folder)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"prompt_style": OWN_SIDE}))
    return str(folder)


@pytest.mark.slow  # four programs are compiled; the likelihoods below are the same view
def test_a_player_of_such_weights_is_asked_by_the_view_and_plays_on_the_board(taught):
    own, plain = Player(taught), Player("packaged:rook-small")
    for position in BLACK[:6]:
        board, view = chess.Board(position.fen), chess.Board(as_white(position.fen))
        moves = list(board.legal_moves)
        seen = [chess.Move.from_uci(turned(move.uci(), position.fen)) for move in moves]
        assert np.array_equal(own.move_logps(board, moves), plain.move_logps(view, seen))
        assert own.choose(board).written == turned(plain.choose(view).written, position.fen)
    boards = [chess.Board(p.fen) for p in BLACK[:12]]
    views = [chess.Board(as_white(p.fen)) for p in BLACK[:12]]
    sides = [ModelSide(name, temperature=0, strict=False, seed=0) for name in (taught, "packaged:rook-small")]
    answers = [
        side([Game(board, n) for n, board in enumerate(each)])
        for side, each in zip(sides, (boards, views), strict=True)
    ]
    assert answers[0] == [turned(move, board.fen()) for move, board in zip(answers[1], boards, strict=True)]


def test_likelihoods_of_legal_moves_are_those_of_the_view(taught):
    model = load_named(taught)
    own, plain = move_logps(model, BLACK[:5], style=OWN_SIDE), move_logps(model, [mirrored(p) for p in BLACK[:5]])
    for position, ours, theirs in zip(BLACK, own, plain, strict=False):
        assert ours.keys() == legal_uci(chess.Board(position.fen))
        assert ours == pytest.approx({turned(move, position.fen): logp for move, logp in theirs.items()}, abs=1e-4)


def test_weights_say_how_they_were_taught_and_another_way_is_refused(taught, tmp_path):
    assert find_style(taught) == OWN_SIDE and find_style("packaged:rook-small") == "best_move"
    export_hf(taught, tmp_path / "exported")
    assert find_style(str(tmp_path / "exported")) == OWN_SIDE
    model, run = {"weights": taught, "tokenizer": "chess"}, tmp_path / "run"
    wrong = Config.model_validate(
        {"iterations": 1, "run_dir": str(run), "model": model, "task": {"prompt_style": "best_move"}}
    )
    with pytest.raises(
        ConfigError, match=r"task.prompt_style is 'best_move', but .* expected task.prompt_style: own_side"
    ):
        train(wrong)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_soft_moves_show_white_alone():
    tokenizer = Tokenizer.load("chess")
    batch = next(batches(BLACK[:32], tokenizer, 32, 256, random.Random(0), 0.02, 0.1, True))
    texts = [
        tokenizer.decode(ids[mask == 1]) for ids, mask in zip(batch.prompt_ids_PT, batch.prompt_mask_PT, strict=True)
    ]
    assert set(texts) == {f"P: {as_white(p.fen)}    B:" for p in BLACK[:32]}


def test_samples_and_boards_of_a_run_show_moves_on_the_board():
    sections = {"model": {"weights": "unused"}, "task": {"prompt_style": OWN_SIDE}, "rollout": {"group_size": 2}}
    config = Config.model_validate({"iterations": 1, "run_dir": "unused", **sections})
    asked = [policy(OWN_SIDE).prompt(p, 0) for p in BLACK[:3]]
    written = [f" {in_style(OWN_SIDE, p.moves[1], p.fen)}" for p in BLACK[:3]]
    twice = [each for each in zip(asked, written, strict=True) for _ in range(2)]
    task = policy(OWN_SIDE)
    rows = sample_rows(task, *zip(*twice, strict=True), np.ones(6), {"legal": as_component(np.ones(6))}, config)
    assert [row["model_move"] for row in rows] == [p.moves[1] for p in BLACK[:3]]
    assert [row["fen"] for row in rows] == [p.fen for p in BLACK[:3]]
    answers = task.answered_moves(asked, [*written[:2], ""])
    assert [move for _, move in answers] == [BLACK[0].moves[1], BLACK[1].moves[1], ""]


@pytest.mark.slow  # the whole packaged model
def test_the_packaged_start_is_asked_its_own_way_and_gives_away_less_than_random_moves():
    name, positions = "packaged:rook-deep", HELDOUT[:100]
    assert find_style(name) == OWN_SIDE
    data = Data([], [], 0, 0, 0, tables=positions, style=OWN_SIDE)
    actual = run_suites(["strength"], OurModel(load_named(name), 1.0, 0, OWN_SIDE), data, steps).estimates
    loss = {player: actual[f"strength/tables/{player}/all/loss"].value for player in ("greedy", "uniform")}
    assert actual["strength/tables/greedy/all/legal"].value > 0.85
    assert loss["greedy"] < loss["uniform"]


@pytest.mark.slow
def test_a_runs_weights_and_checkpoints_say_how_they_were_taught(tmp_path):
    sizes = {"num_layers": 1, "num_heads": 2, "hidden_size": 16, "max_position_embeddings": 96}
    sections = {
        "model": {"tokenizer": "chess", **sizes},
        "task": {"prompt_style": OWN_SIDE},
        "prompts": {"source": "packaged:tables", "per_iteration": 2, "max_prompt_tokens": 80},
        "rollout": {"group_size": 2, "max_new_tokens": 4},
        "evaluation": {"positions": 4},
        "checkpoint": {"every": 1},
    }
    run = train(Config.model_validate({"iterations": 1, "run_dir": str(tmp_path / "run"), **sections}))
    assert find_style(str(run)) == find_style(str(run / "checkpoints" / "000001")) == OWN_SIDE
    assert (run / "boards.png").exists()
