"""The arbiter's rows: each by the rules of chess, and as it was published."""

import random
from collections import Counter

import chess
import pytest
from conftest import set_rows

from jax_grpo.chess.data.__main__ import main
from jax_grpo.chess.data.arbiter import Options, game_rows, illegal_move, seeded_game
from jax_grpo.chess.positions.files import read_positions
from jax_grpo.chess.positions.rookworld import (
    EnvironmentRow,
    format_environment_row,
    parse_environment_row,
)
from jax_grpo.chess.tasks.environment import EnvironmentTask, next_state
from jax_grpo.config.tasks import task_of

OPTIONS = Options(seed=1, draws="claimed", illegal=0.1, kept=0.2)


def _replay(row):
    board = chess.Board(row["fen"])
    move = chess.Move.from_uci(row["move"])
    legal = move in list(board.legal_moves)  # `in board.legal_moves` takes e1h1 for castling
    if legal:
        board.push(move)
    return board, legal


def _check(row):
    """A row against the rules, from its text alone where that decides."""
    board, legal = _replay(row)
    assert row["next_fen"] == board.fen() and row["truncated"] == (not legal), row
    reward = {"checkmate": 1.0, "ordinary": 0.001, "illegal": -1.0}.get(row["kind"], 0.5)
    assert row["reward"] == reward and row["terminated"] == (row["kind"] not in ("ordinary", "illegal")), row
    decided = {
        "checkmate": board.is_checkmate(),
        "stalemate": board.is_stalemate(),
        "insufficient_material": board.is_insufficient_material(),
        "fifty_moves": board.halfmove_clock >= 100,
        "seventyfive_moves": board.halfmove_clock >= 150,
        "illegal": not legal,
        "ordinary": legal and not board.is_game_over(),
    }
    assert decided.get(row["kind"], True), row
    if row["kind"] == "ordinary" and len(row["history"]) >= 9:  # whether a position came back needs the game
        assert not board.is_checkmate()


@pytest.mark.slow
def test_arbiter_rows_obey_the_rules_and_reach_every_ending():
    rows = [row for game in range(250) for row in seeded_game(game, OPTIONS)]
    for row in rows:
        _check(row)
    kinds = Counter(row["kind"] for row in rows)
    print(dict(kinds))
    for kind in ("checkmate", "stalemate", "insufficient_material", "fifty_moves", "threefold", "illegal"):
        assert kinds[kind] >= 3, kind
    assert 0.06 < kinds["illegal"] / len(rows) < 0.14
    assert {row["fen"].split()[1] for row in rows if row["kind"] == "checkmate"} == {"w", "b"}


def test_a_threefold_row_is_the_third_occurrence_and_not_a_later_one():
    moves = ["g1f3", "g8f6", "f3g1", "f6g8", "g1f3", "g8f6", "f3g1", "f6g8", "e2e4"]
    rows = game_rows(chess.Board(), iter(moves), OPTIONS._replace(kept=1.0, illegal=0.0), random.Random(0))
    assert [row["kind"] for row in rows] == ["ordinary"] * 7 + ["threefold"], "the start position's third time ends it"
    assert rows[-1]["history"] == moves[:7] and rows[-1]["reward"] == 0.5 and rows[-1]["terminated"]
    automatic = OPTIONS._replace(kept=1.0, illegal=0.0, draws="automatic")
    rows = game_rows(chess.Board(), iter(moves[:8] * 3), automatic, random.Random(0))
    assert [row["kind"] for row in rows] == ["ordinary"] * 15 + ["fivefold"]


@pytest.mark.slow
def test_automatic_draws_agree_with_the_environment_task_row_by_row():
    options = OPTIONS._replace(draws="automatic")
    rows = [row for game in range(120) for row in seeded_game(game, options) if row["kind"] != "fivefold"]
    assert Counter(row["kind"] for row in rows)["seventyfive_moves"] >= 1
    for row in rows:  # the task sees the position only, so a fivefold repetition is beyond it
        reported = next_state(chess.Board(row["fen"]), chess.Move.from_uci(row["move"]))
        assert reported == f"{row['next_fen']}+{row['reward']}+{int(row['terminated'])}+{int(row['truncated'])}", row


def test_illegal_moves_are_illegal_and_half_of_them_only_expose_the_king():
    board, rng = chess.Board("4k3/8/8/8/7b/8/5P2/4K3 w - - 0 1"), random.Random(0)
    moves = [illegal_move(board, rng) for _ in range(200)]
    assert not any(move in list(board.legal_moves) for move in moves)
    exposing = sum(move in list(board.pseudo_legal_moves) for move in moves)
    print(f"{exposing} of 200 only expose the king")
    assert 60 < exposing < 140


def test_games_of_a_pgn_become_rows_up_to_their_end(tmp_path):
    (tmp_path / "g.pgn").write_text("1. f3 e5 2. g4 Qh4# 0-1\n\n1. e4 e5 *\n")
    main(
        [
            "arbiter",
            str(tmp_path / "g.pgn"),
            "--kept",
            "0.999",
            "--illegal",
            "0",
            "--heldout-share",
            "0",
            "--out",
            str(tmp_path / "o"),
        ]
    )
    rows = set_rows(tmp_path / "o")
    assert [(r["move"], r["kind"]) for r in rows if r["kind"] == "checkmate"] == [("d8h4", "checkmate")]
    assert {"f2f3", "e2e4"} <= {row["move"] for row in rows}
    for row in rows:
        _check(row)


def test_published_environment_rows_come_back_as_they_were(tmp_path):
    texts = []
    for row in [row for game in range(20) for row in seeded_game(game, OPTIONS)]:
        values = {name: row[name] for name in ("fen", "move", "next_fen", "reward", "terminated", "truncated")}
        texts.append(format_environment_row(EnvironmentRow(**values, history=(*row["history"][-9:], row["move"]))))
    published = list(dict.fromkeys(texts))
    policy = "P: 8/8/R7/7p/P2K2k1/7r/8/8 w - - 0 56    M: a4a5    E: 0.0    B: a4a5"
    (tmp_path / "a.txt").write_text("\n".join([published[0], policy, *published[1:]]) + "\n")
    main(["arbiter", str(tmp_path / "a.txt"), "--out", str(tmp_path / "o"), "--heldout-share", "0"])
    rows = set_rows(tmp_path / "o")
    made = {f"{r['fen']}+{r['move']}": r for r in rows}
    distinct = {f"{chess.Board(r['fen']).epd()} {r['move']} {r['kind']}" for r in rows}
    assert len(published) - 5 <= len(rows) == len(distinct), "one position and move is kept once, whatever its counters"
    for expected in map(parse_environment_row, published):
        if f"{expected.fen}+{expected.move}" not in made:
            continue
        row = made[f"{expected.fen}+{expected.move}"]
        assert (row["next_fen"], row["reward"]) == (expected.next_fen, expected.reward)
    positions = read_positions(tmp_path / "a.txt")
    prompt = EnvironmentTask(task_of(name="environment")).prompt(positions[0], 0)
    assert f"{prompt.text}{prompt.answer}" == published[0], "and training asks for the published row itself"
