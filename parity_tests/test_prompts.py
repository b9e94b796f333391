"""Position sources and their order; every bad row names its file, line, value and what was expected."""

import json
import os
import random
import re
from collections import Counter
from pathlib import Path

import chess
import chess.pgn
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jax_grpo.config import PromptsConfig
from jax_grpo.position_files import PositionFileError, read_positions
from jax_grpo.prompts import PromptDataset, load_positions, read_packaged, selfplay_positions
from jax_grpo.rookworld_rows import (
    PolicyRow,
    RowError,
    format_environment_row,
    format_policy_row,
    parse_environment_row,
    parse_policy_row,
)
from jax_grpo.tasks.base import Position
from jax_grpo.tasks.environment import environment_prompt, next_state

SHARED = Path(os.environ.get("JAX_GRPO_SHARED", Path(__file__).parents[2] / "shared"))
TRAIN, HELDOUT = read_packaged("train"), read_packaged("heldout")


def test_packaged_positions_are_many_labelled_and_split_by_position():
    assert len(TRAIN) >= 20_000 and len(HELDOUT) >= 1_000
    keys = {name: {chess.Board(p.fen).epd() for p in part} for name, part in (("train", TRAIN), ("heldout", HELDOUT))}
    assert len(keys["train"]) == len(TRAIN) and not keys["train"] & keys["heldout"]
    for position in TRAIN[::50]:
        legal = {move.uci() for move in chess.Board(position.fen).legal_moves}
        assert set(position.moves) <= legal and len(position.moves) == min(5, len(legal))


def test_packaged_positions_have_real_variety():
    seen = Counter()
    for position in HELDOUT:
        board = chess.Board(position.fen)
        moves = list(board.legal_moves)
        seen["white" if board.turn else "black"] += 1
        seen[
            "endgame" if len(board.piece_map()) <= 12 else "opening" if board.fullmove_number <= 8 else "middlegame"
        ] += 1
        seen["check"] += board.is_check()
        seen["promotion"] += any(m.promotion for m in moves)
        seen["castling"] += any(board.is_castling(m) for m in moves)
        seen["en passant"] += any(board.is_en_passant(m) for m in moves)
    print(dict(seen), "of", len(HELDOUT))
    for kind, least in {"white": 700, "black": 700, "endgame": 100, "opening": 100, "middlegame": 300}.items():
        assert seen[kind] >= least, kind
    for kind in ("check", "promotion", "castling", "en passant"):
        assert seen[kind] >= 3, kind


def test_order_is_a_function_of_seed_and_step():
    positions = [Position(str(i)) for i in range(10)]
    whole = [n for step in range(6) for n, _ in PromptDataset(positions, 1).batch(step, 4)]
    assert [n for n, _ in PromptDataset(positions, 1).batch(3, 4)] == whole[12:16], "resumed at step 3"
    assert sorted(whole[:10]) == sorted(whole[10:20]) == list(range(10)), "each epoch sees every position once"
    assert whole[:10] != whole[10:20]
    assert whole != [n for step in range(6) for n, _ in PromptDataset(positions, 2).batch(step, 4)]
    with pytest.raises(PositionFileError, match="no positions"):
        PromptDataset([], 0)


def test_selfplay_is_seeded_and_held_out_games_are_others():
    assert selfplay_positions(3, 7) == selfplay_positions(3, 7) != selfplay_positions(3, 8)
    for position in selfplay_positions(2, 7)[::10]:
        assert chess.Board(position.fen).is_valid()
    train, heldout = (
        load_positions(PromptsConfig(source="selfplay", selfplay_games=3, split=s), 0) for s in ("train", "heldout")
    )
    assert train != heldout


def _rows(positions):
    return [
        {"fen": p.fen, "history": list(p.history), "moves": list(p.moves), "evaluations": list(p.evaluations)}
        for p in positions
    ]


def test_every_format_reads_the_same_positions(tmp_path):
    positions = HELDOUT[:20]
    rows = _rows(positions)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    lines = [
        ",".join([r["fen"], *(" ".join(map(str, r[k])) for k in ("history", "moves", "evaluations"))]) for r in rows
    ]
    (tmp_path / "a.csv").write_text("\n".join(["fen,history,moves,evaluations", *lines]))
    for name in ("a.parquet", "a.jsonl", "a.csv"):
        assert read_positions(tmp_path / name) == positions, name
    policy = [PolicyRow(p.fen, p.moves, p.evaluations, p.moves[0]) for p in positions]
    (tmp_path / "a.txt").write_text("\n".join(format_policy_row(r) for r in policy))
    assert [p.fen for p in read_positions(tmp_path / "a.txt")] == [p.fen for p in positions]


def test_pgn_gives_every_position_with_its_history(tmp_path):
    game = chess.pgn.Game()
    node, board, rng = game, chess.Board(), random.Random(0)
    for _ in range(30):
        move = rng.choice(list(board.legal_moves))
        board.push(move)
        node = node.add_variation(move)
    (tmp_path / "g.pgn").write_text(f"{game}\n\n{game}\n")
    positions = read_positions(tmp_path / "g.pgn")
    assert len(positions) == 60 and positions[0].fen == chess.STARTING_FEN
    assert positions[29].history == tuple(m.uci() for m in board.move_stack[19:29])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"fen": "8/8 w - - 0 1"}', r"a.jsonl:1: FEN '8/8 w - - 0 1' cannot be read"),
        ("a.jsonl", '{"fen": "8/8/8/8/8/8/8/8 w - - 0 1"}', r"a.jsonl:1: FEN .* is not a legal position"),
        ("a.jsonl", '\n{"fem": "x"}', r"a.jsonl:2: column 'fen' is missing; did you mean it to be 'fem'\?"),
        ("a.jsonl", "{", r"a.jsonl:1: not JSON"),
        ("a.jsonl", "[1]", r"a.jsonl:1: .*expected an object with a 'fen'"),
        ("a.jsonl", json.dumps({"fen": chess.STARTING_FEN, "moves": ["e2e4"]}), r"1 moves but 0 evaluations"),
        (
            "a.jsonl",
            json.dumps({"fen": chess.STARTING_FEN, "moves": ["e2e5"], "evaluations": [1]}),
            r"move 'e2e5' is not legal",
        ),
        (
            "a.csv",
            f"fen,moves,evaluations\n{chess.STARTING_FEN},e2e4,good\n",
            r"a.csv:2: evaluations 'good'; expected numbers",
        ),
        ("a.parquet", "PAR1 cut short", r"a.parquet: not a readable Parquet file"),
        ("a.txt", "P: x M: y", r"a.txt:1: policy row 'P: x M: y'; expected `P: <FEN> M:"),
        ("a.pgn", "1. e4 e5 2. Ke7 *\n", r"a.pgn: game 1: illegal san"),
        ("a.jsonl", "\n", r"a.jsonl: no positions in it"),
        ("a.xyz", "", r"unknown ending '.xyz'; expected .parquet, .jsonl"),
    ],
)
def test_bad_files_are_one_clear_error(name, content, message, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(PositionFileError, match=message):
        read_positions(tmp_path / name)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(PositionFileError, match=re.escape(f"{tmp_path}/none.csv: no such file")):
        read_positions(tmp_path / "none.csv")


def test_environment_rows_round_trip():
    for position in HELDOUT[:50]:
        board = chess.Board(position.fen)
        move = chess.Move.from_uci(position.moves[0])
        text = environment_prompt(board, move, position.history) + next_state(board, move)
        row = parse_environment_row(text)
        assert format_environment_row(row) == text and parse_environment_row(f"{text}+") == row
    with pytest.raises(RowError, match="has 2 fields; expected 7"):
        parse_environment_row("A: x+y")


@pytest.mark.skipif(not (SHARED / "data").is_dir(), reason="the 250 real RookWorld rows are not part of the repository")
def test_all_250_published_rows_parse_and_print_back():
    path = SHARED / "data" / "rook_val_first250.txt"
    rows = path.read_text().splitlines()
    assert len(rows) == 250
    for text in rows:
        row = parse_policy_row(text)
        assert parse_policy_row(format_policy_row(row)) == row
        assert format_policy_row(row, padded=True).split() == text.split()
        position = row.position()
        assert list(position.evaluations) == sorted(row.evaluations, reverse=True)
    assert len(read_positions(path)) == 250
