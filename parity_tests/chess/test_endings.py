"""Won endings: python-chess judges the tables; splits by symmetry; what is trained on; the reward; games against the defender."""

import io
import random
import signal
from collections import Counter
from pathlib import Path

import chess
import chess.pgn
import numpy as np
import pytest
from conftest import PATIENCE_S
from conftest import config as tiny_config
from short_runs import finish, require_same_run, signal_after, start

from jax_grpo.chess.evaluate import endgame
from jax_grpo.chess.evaluate.policy import random_legal
from jax_grpo.chess.evaluate.suites import Data, run_suites
from jax_grpo.chess.games import Game
from jax_grpo.chess.positions.endings import (
    NEVER,
    ending,
    in_split,
    spread_sample,
    squares_of,
    symmetry_classes,
    won_position,
)
from jax_grpo.chess.positions.position import Position
from jax_grpo.chess.positions.sources import load_positions, read_packaged
from jax_grpo.chess.positions.values import NotATable, moves_lost
from jax_grpo.chess.tasks.policy import PolicyTask, legal_moves
from jax_grpo.config import ConfigError, load_config
from jax_grpo.config.files import require_source
from jax_grpo.config.sections import PromptsConfig
from jax_grpo.config.tasks import task_of
from jax_grpo.prompts.dataset import heldout_rows
from jax_grpo.trainer import Trainer
from torch_ref.options import Options
from torch_ref.train import Trainer as TorchTrainer

MEN = ("KRK", "KQK")
SOURCE = "endings:KRK,KQK"
ROOT = Path(__file__).parents[2]


def board_of(men: str, squares, turn: chess.Color, strong: chess.Color = chess.WHITE) -> chess.Board:
    """Built by python-chess alone."""
    board = chess.Board(None)
    pieces = (chess.KING, strong), (chess.Piece.from_symbol(men[1]).piece_type, strong), (chess.KING, not strong)
    for square, (kind, color) in zip(squares, pieces, strict=True):
        board.set_piece_at(square, chess.Piece(kind, color))
    board.turn = turn
    return board


def strong_value(men: str, board: chess.Board) -> int:
    """Moves to mate with White to move by one ply of python-chess's rules, the table's word for what comes after it."""
    values = []
    for move in list(board.legal_moves):
        board.push(move)
        after = int(ending(men).mated_in_KPW[squares_of(board, chess.WHITE)])
        assert not board.is_checkmate() or after == 0
        values += [after + 1] if after != NEVER else []
        board.pop()
    return min(values, default=NEVER)


def weak_value(men: str, board: chess.Board) -> int:
    """The same with Black to move, who takes the piece where that is legal."""
    if board.is_checkmate():
        return 0
    values = []
    for move in list(board.legal_moves):
        if board.is_capture(move):
            return NEVER
        board.push(move)
        values.append(int(ending(men).mates_in_KPW[squares_of(board, chess.WHITE)]))
        board.pop()
    return NEVER if NEVER in values else max(values, default=NEVER)


def judge(men: str, squares) -> None:
    """Both tables say of these squares what python-chess does, one ply on. Mate being 0, that leaves only the true values."""
    table = ending(men)
    for turn, found_KPW, value in (
        (chess.WHITE, table.mates_in_KPW, strong_value),
        (chess.BLACK, table.mated_in_KPW, weak_value),
    ):
        board = board_of(men, squares, turn) if len(set(squares)) == 3 else None
        expected = value(men, board) if board is not None and board.is_valid() else NEVER
        assert found_KPW[tuple(squares)] == expected, (men, squares, turn)


@pytest.mark.parametrize(("men", "won", "longest", "mates"), [("KRK", 175_168, 16, 216), ("KQK", 144_508, 10, 364)])
def test_the_counts_are_the_known_ones(men, won, longest, mates):
    table = ending(men)
    assert (int((table.mates_in_KPW != NEVER).sum()), int(table.mates_in_KPW.max())) == (won, longest)
    assert int((table.mated_in_KPW == 0).sum()) == mates


@pytest.mark.parametrize("men", MEN)
def test_python_chess_agrees_on_a_sample_of_all_placements(men):
    rng = random.Random(men)
    for _ in range(1200):
        judge(men, [rng.randrange(64) for _ in range(3)])


@pytest.mark.slow
@pytest.mark.parametrize("men", MEN)
def test_python_chess_agrees_on_every_placement(men):
    """On one of each class, and the tables are alike on all of a class."""
    classes, table = symmetry_classes().reshape(-1), ending(men)
    for actual in (table.mates_in_KPW.reshape(-1), table.mated_in_KPW.reshape(-1)):
        np.testing.assert_array_equal(actual, actual[classes])  # a class is named by its least member
    for number in np.unique(classes).tolist():
        judge(men, (*divmod(number // 64, 64), number % 64))


def test_turned_and_mirrored_positions_are_one_class_and_one_split():
    turns = (chess.flip_vertical, chess.flip_horizontal, chess.flip_diagonal, chess.flip_anti_diagonal)
    classes = symmetry_classes()
    for squares, strong in spread_sample("KRK", "heldout", 60, seed=3):
        board = board_of("KRK", squares, strong, strong)
        twins = [board, *(board.transform(turn) for turn in turns)]
        twins += [twins[1].transform(turns[1]), twins[3].transform(turns[0]), twins[3].transform(turns[1])]
        assert len({classes[squares_of(twin, strong)] for twin in twins}) == 1
        assert all(in_split("KRK", "heldout")[squares_of(twin, strong)] for twin in twins)
    sizes = np.unique(classes, return_counts=True)[1]
    assert set(sizes.tolist()) == {4, 8}, "another class than all twins, which on a diagonal are four"
    for men in MEN:
        assert (sum(in_split(men, split).astype(int) for split in ("train", "heldout", "test")) == 1).all()


@pytest.fixture(scope="module")
def training():
    return load_positions(PromptsConfig(source=SOURCE), 0)


@pytest.mark.slow
def test_every_legal_move_of_a_training_position_has_its_exact_value(training):
    assert len(training) == 20_000 and load_positions(PromptsConfig(source=SOURCE), 5).identity == training.identity
    colours = set()
    for position in training[:400]:
        board = chess.Board(position.fen)
        men, strong = ("KRK" if board.rooks else "KQK"), board.turn
        assert board.is_valid() and set(position.moves) == legal_moves(position.fen)
        mate_in = round(100 * (100 - position.evaluations[0]))
        assert mate_in == ending(men).mates_in_KPW[squares_of(board, strong)]
        assert board.halfmove_clock // 2 + mate_in <= 50, "the fifty-move rule leaves time"
        for move, pawns in zip(position.moves, position.evaluations, strict=True):
            board.push_uci(move)
            mated_in = ending(men).mated_in_KPW[squares_of(board, strong)]
            assert pawns == (0 if mated_in == NEVER else pytest.approx(100 - (mated_in + 1) / 100))
            board.pop()
        colours.add((men, strong))
    assert len(colours) == 4


@pytest.mark.slow
def test_a_set_is_spread_over_the_distances_and_shares_no_class_with_what_is_asked(training):
    distances = [round(100 * (100 - p.evaluations[0])) for p in training if "r" in p.fen.lower()]
    counts = np.bincount(distances)[1:]
    assert len(counts) == 16 and counts.max() <= 1.1 * np.median(counts), counts
    config = tiny_config(prompts={"source": SOURCE}, evaluation={"positions": 2000})
    requested = heldout_rows(config, training, load_positions)
    assert requested is not None and len(requested.rows) == 2000

    def classes(positions):
        boards = [chess.Board(p.fen) for p in positions]
        return {(bool(b.rooks), int(symmetry_classes()[squares_of(b, b.turn)])) for b in boards}

    heldout = classes(requested.rows)
    assert not heldout & classes(training[:4000])
    elsewhere = tiny_config(prompts={"source": "packaged"}, evaluation={"positions": 50, "source": "endings:KRK"})
    other = heldout_rows(elsewhere, load_positions(elsewhere.prompts, 0), load_positions)
    assert other is not None and classes(other.rows) <= {
        (True, int(n)) for n in symmetry_classes()[in_split("KRK", "heldout")]
    }


def test_an_ending_that_is_not_there_is_one_clear_error():
    with pytest.raises(
        ConfigError, match=r"prompts.source is 'endings:KBK': no such file; .*endings:KRK.*Did you mean"
    ):
        require_source("endings:KBK")


def test_technique_pays_for_speed_and_nothing_for_a_win_that_slips():
    task = PolicyTask(task_of(prompt_style="best_move", rewards={"technique": 1.0}))
    mate_in_one = won_position("KRK", (chess.B3, chess.H6, chess.B1), chess.WHITE)
    prompt = task.prompt(mate_in_one, 0)
    actual = task.score([prompt] * 5, [" h6h1", " h6c6", " b3a3", " b3b2", " nonsense"])["technique"]
    assert actual == pytest.approx([1, 0.7, 0.7**11, 0, 0])
    slipping = won_position("KRK", (chess.B3, chess.B2, chess.A1), chess.BLACK)
    lost = moves_lost(slipping)
    assert set(slipping.moves) - set(lost) == {
        m for m in slipping.moves if slipping.evaluations[slipping.moves.index(m)] == 0
    }
    assert set(lost) < set(slipping.moves), "some move gives the rook away"
    assert "technique" not in PolicyTask(task_of(prompt_style="best_move")).component_weights


CORNER = "k7/8/8/8/8/8/6R1/K7 b - - 0 1", (), ("a8a7", "a8b7", "a8b8")


@pytest.mark.parametrize(
    ("position", "words"),
    [
        (read_packaged("heldout")[0], "has values for 5 moves and none for"),
        (Position(*CORNER, (0, -99.8, 0)), "a8b7 at -99.8 pawns; .* take prompts.source endings:KRK,KQK"),
        (Position(*CORNER, (0, 0, 0)), "no move that wins"),
    ],
)
def test_technique_needs_a_won_position_with_an_exact_table(position, words):
    task = PolicyTask(task_of(prompt_style="best_move", rewards={"technique": 1.0}))
    with pytest.raises(NotATable, match=words):
        task.prompt(position, 0)


def played(men: str, attack, count: int = 60) -> list[Game]:
    games = endgame.starts(men, count, seed=1)
    endgame.play(games, attack, 1, lambda done: None)
    return games


@pytest.mark.parametrize("men", MEN)
def test_a_perfect_attacker_mates_in_exactly_the_moves_of_the_table_and_no_faster(men):
    games = played(men, endgame.perfect)
    assert all(endgame.end_of(game) == "mated" and game.board.is_checkmate() for game in games)
    assert [game.moves for game in games] == [endgame.mate_in(game) for game in games]
    assert {game.colour for game in games} == {True, False}
    assert all(in_split(men, "test")[squares_of(game.board.root(), bool(game.colour))] for game in games)
    actual = endgame.estimates(games)
    assert (actual["all/mated"].value, actual["all/excess"].value, actual["all/slipped"].value) == (1, 0, 0)


def test_random_moves_lose_the_piece_and_a_move_that_is_none_loses_the_game():
    actual = endgame.estimates(played("KRK", random_legal(0)))
    value = {name: actual[f"all/{name}"].value for name in ("mated", "slipped", "unmated", "illegal")}
    assert sum(value.values()) == pytest.approx(1)
    assert value["mated"] < 0.2 < value["slipped"] and value["illegal"] == 0
    games = played("KRK", lambda games: ["a1a1"] * len(games), count=4)
    assert {endgame.end_of(game) for game in games} == {"illegal"} and endgame.estimates(games)[
        "all/excess"
    ].value is None


def test_stalemate_is_a_win_that_slipped_and_a_late_mate_costs_its_moves():
    def first(move, men, squares):
        board = board_of(men, squares, chess.WHITE)
        game, moves = Game(board, colour=chess.WHITE), iter([move])
        endgame.play([game], lambda games: [next(moves, None) or endgame.perfect(games)[0]], 0, print)
        return game

    assert endgame.end_of(first("g1g6", "KQK", (chess.A1, chess.G1, chess.H8))) == "stalemate"
    assert endgame.end_of(first("h6h2", "KRK", (chess.B3, chess.H6, chess.B1))) == "mated"
    slow = first("b3a3", "KRK", (chess.B3, chess.H6, chess.B1))
    assert (endgame.end_of(slow), endgame.mate_in(slow), slow.moves) == ("mated", 1, 12)
    assert endgame.estimates([slow])["all/excess"].value == 11


def test_the_suite_asks_all_games_at_once_and_its_games_are_pgn_that_reads_back():
    requested = []

    def ask(kind, mode):
        def complete(prompts, *, numbers=None, step=0, tick=None):
            requested.append((mode, step, len(prompts)))
            boards = [chess.Board(prompt.row.fen) for prompt in prompts]
            men = ["KRK" if board.rooks else "KQK" for board in boards]
            return [
                f" {won_position(m, squares_of(b, b.turn), b.turn).moves[0]}" if mode == "greedy" else " a1a1"
                for m, b in zip(men, boards, strict=True)
            ]

        return complete

    data = Data([], [], 0, 0, 0, endgames=20)
    results = run_suites(["endgame"], ask, data, lambda what, total: lambda done: None)
    assert requested.count(("greedy", 0, 20)) == requested.count(("sampled", 0, 20)) == 2  # KRK and KQK
    assert max(Counter(row[:2] for row in requested).values()) == 2, "all games of an ending in one call a move"
    values = {path: estimate.value for path, estimate in results.estimates.items()}
    for men in MEN:
        assert values[f"endgame/{men}/greedy/all/mated"] == values[f"endgame/{men}/perfect/all/mated"] == 1
        assert values[f"endgame/{men}/sampled/all/illegal"] == 1 and f"endgame/{men}/perfect/white/mated" not in values
    file = io.StringIO(endgame.pgn(results.endgames, "a model"))
    for key, games in results.endgames.items():
        read = chess.pgn.read_game(file)
        longest = max(games, key=endgame.mate_in)
        assert read is not None and list(read.mainline_moves()) == longest.board.move_stack, key
        assert read.headers["White" if longest.colour else "Black"] == "a model"


@pytest.mark.slow
def test_a_stopped_run_on_endings_ends_as_an_unbroken_one_and_other_endings_are_refused(tmp_path):
    options = ["--prompts.source", "endings:KRK", "--task.rewards", "{technique: 1, legal: 0.1}"]
    finish(start(tmp_path, "whole", *options))
    signal_after(process := start(tmp_path, "cut", *options), tmp_path / "cut", 5, signal.SIGTERM)
    assert "SIGTERM: finishing this iteration" in finish(process)
    other = start(tmp_path, "cut", *options, "--resume", "auto", "--prompts.source", "endings:KQK")
    output = other.communicate(timeout=PATIENCE_S)[0]
    assert other.returncode == 1 and "prompts.source holds something else than when" in output, output
    finish(start(tmp_path, "cut", *options, "--resume", "auto"))
    require_same_run(tmp_path / "cut", tmp_path / "whole")


@pytest.mark.slow
def test_both_implementations_reward_endings_alone_and_in_a_mixture(tmp_path):
    small = ["--prompts.per_iteration", "6", "--rollout.group_size", "2", "--update.warmup_steps", "0"]
    small += ["--iterations", "2", "--prompts.source", SOURCE, "--evaluation.positions", "0"]
    mixed = ["--task.mixture.policy.rewards", "{technique: 1.0}"]
    for file, name, more in (("endgame", "technique", []), ("quickstart_mixed", "policy/technique", mixed)):
        config = load_config(str(ROOT / "configs" / f"{file}.yaml"), [*small, *more])
        ours, scored, _ = Trainer(config).iterate(0)
        theirs = TorchTrainer(config, Options()).iterate(0)[0]
        for metrics in (ours, theirs):
            assert 0 <= metrics[f"reward/{name}/mean"] <= 1
        part = config.task.mixture["policy"] if config.task.mixture else config.task
        own = PolicyTask(task_of(prompt_style=part.prompt_style, rewards={"technique": 1.0}))
        requested = [
            (p, text) for p, text in zip(scored.prompts, scored.completions, strict=True) if p.task in ("", "policy")
        ]
        alone = own.score(*map(list, zip(*requested, strict=True)))["technique"]
        assert ours[f"reward/{name}/mean"] == pytest.approx(alone.mean(), rel=1e-5)
