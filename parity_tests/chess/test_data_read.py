"""Training on data sets that `jax_grpo.data` made; what cannot be trained on is refused."""

import json
import random

import chess
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import set_rows

from jax_grpo.chess.data import arbiter
from jax_grpo.chess.data.__main__ import main
from jax_grpo.chess.data.arbiter import SCHEMA
from jax_grpo.chess.data.labels import read_stream
from jax_grpo.chess.positions.files import PositionFileError, read_positions
from jax_grpo.chess.positions.rookworld import (
    parse_environment_row,
)
from jax_grpo.chess.positions.sources import load_positions, read_packaged
from jax_grpo.chess.tasks.environment import EnvironmentTask, draw_move, next_state
from jax_grpo.chess.tasks.policy import PolicyTask
from jax_grpo.config.sections import PromptsConfig
from jax_grpo.config.tasks import task_of


def test_a_set_of_labelled_positions_is_read_for_training_split_by_split(tmp_path):
    positions = read_packaged("heldout")[:300]
    rows = [{"fen": p.fen, "moves": list(p.moves), "evaluations": list(p.evaluations)} for p in positions]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    main(["label", str(tmp_path / "p.jsonl"), "--nodes", "0", "--out", str(tmp_path / "o"), "--shard-rows", "50"])
    splits = {s: load_positions(PromptsConfig(source=str(tmp_path / "o"), split=s), 0) for s in ("train", "heldout")}
    print({split: len(part) for split, part in splits.items()})
    labels = {p.fen: (p.moves, p.evaluations) for p in positions}
    actual = {p.fen: (p.moves, p.evaluations) for part in splits.values() for p in part}
    assert actual == labels and 10 <= len(splits["heldout"]) <= 60
    task = PolicyTask(task_of(prompt_style="best_move"))
    prompts = [task.prompt(position, 0) for position in splits["train"][:8]]
    assert task.score(prompts, [f" {p.row.moves[0]}" for p in prompts])["best_move"].tolist() == [1.0] * 8
    (shard,) = [path for path in (tmp_path / "o").glob("train-00000.parquet")]
    assert list(load_positions(PromptsConfig(source=str(shard)), 0)) == splits["train"][: len(read_positions(shard))], (
        "or one file"
    )


@pytest.mark.slow
def test_a_set_of_arbiter_rows_asks_for_its_own_moves_and_answers(tmp_path):
    main(["arbiter", "--count", "800", "--illegal", "0.2", "--out", str(tmp_path / "o"), "--processes", "1"])
    positions = load_positions(PromptsConfig(source=str(tmp_path / "o")), 0)
    task = EnvironmentTask(task_of(name="environment", illegal_fraction=0.0))
    for row, position in zip(set_rows(tmp_path / "o"), positions, strict=True):
        prompt = task.prompt(position, 0)
        parsed = parse_environment_row(f"{prompt.text}{prompt.answer}")
        assert (parsed.fen, parsed.move, parsed.next_fen) == (row["fen"], row["move"], row["next_fen"])
        assert (parsed.reward, parsed.terminated, parsed.truncated) == (
            row["reward"],
            row["terminated"],
            row["truncated"],
        )
        assert parsed.history == (*row["history"][-9:], row["move"])
        scores = task.score([prompt], [prompt.answer or ""])
        assert scores["exact_fen"] == scores["reward_field"] == scores["flags"] == 1
    assert {row["kind"] for row in set_rows(tmp_path / "o")} >= {"ordinary", "illegal"}
    keys = {
        split: {chess.Board(r["fen"]).epd() for r in set_rows(tmp_path / "o", split)} for split in ("train", "heldout")
    }
    assert len(keys["train"]) < len(positions), "some positions have several moves"
    assert keys["heldout"] and not keys["train"] & keys["heldout"], "and all of them are in one split"


ARBITER = {
    "fen": chess.STARTING_FEN,
    "history": [],
    "move": "e2e4",
    "next_fen": "rnbqkbnr/pppppppp/8/8/4P3/8/PPPP1PPP/RNBQKBNR b KQkq - 0 1",
    "reward": 0.001,
    "terminated": False,
    "truncated": False,
    "kind": "ordinary",
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"next_fen": chess.STARTING_FEN}, r"a.parquet: row 1: next_fen 'rnbq.* after e2e4 .*expected 'rnbq.*4P3"),
        ({"move": "e2e5"}, r"a.parquet: row 1: next_fen .* after e2e5"),
        ({"move": "e2e5", "next_fen": chess.STARTING_FEN}, r"row 1: truncated is False but e2e5 .*is illegal"),
        ({"truncated": True}, r"row 1: truncated is True but e2e4 in .* is legal"),
        ({"move": "Nf3"}, r"row 1: move 'Nf3' is not a UCI move"),
        ({"move": "e2e2"}, r"row 1: move 'e2e2' is not a UCI move"),
        ({"move": None}, r"row 1: 'move' is missing; an arbiter row has move, next_fen"),
        ({"reward": float("nan")}, r"row 1: reward 'nan'; expected finite number"),
        ({"terminated": None}, r"row 1: 'terminated' is missing"),
    ],
)
def test_a_bad_arbiter_row_names_its_file_and_row(change, message, tmp_path):
    pq.write_table(pa.Table.from_pylist([ARBITER, ARBITER | change], SCHEMA), tmp_path / "a.parquet")
    with pytest.raises(PositionFileError, match=message):
        load_positions(PromptsConfig(source=str(tmp_path / "a.parquet")), 0)


CASTLING = "r3k2r/pppq1ppp/2npbn2/2b1p3/2B1P3/2NPBN2/PPPQ1PPP/R3K2R w KQkq - 0 9"  # both sides may castle either way
KING_TAKES_ROOK = ("e1h1", "e1a1")


def test_castling_written_king_takes_rook_is_an_illegal_move_wherever_a_set_is_made_or_read(tmp_path):
    """python-chess takes it for castling, its list of legal moves has it as e1g1: one move, drawn as illegal, answered legal."""
    board = chess.Board(CASTLING)
    assert all(board.is_legal(chess.Move.from_uci(uci)) for uci in KING_TAKES_ROOK), "what made the fault"
    sampled = {draw_move(board, random.Random(seed), illegal_fraction=1.0).uci() for seed in range(20_000)}
    assert sampled >= set(KING_TAKES_ROOK), "the task draws them as illegal moves"
    rows = [arbiter._row(board, [], uci, board, "illegal") for uci in (*KING_TAKES_ROOK, "e1e8")]
    pq.write_table(pa.Table.from_pylist(rows, SCHEMA), tmp_path / "a.parquet")
    for position, row in zip(read_positions(tmp_path / "a.parquet"), rows, strict=True):
        truth = next_state(board, chess.Move.from_uci(row["move"]))
        assert truth == f"{CASTLING}+-1.0+0+1" == position.next_state, row["move"]
    assert next_state(board, chess.Move.from_uci("e1g1")).endswith("+0.001+0+0")


def test_castling_written_king_takes_rook_is_refused_as_a_label_and_as_a_solution(tmp_path):
    for uci in KING_TAKES_ROOK:
        row = {"fen": CASTLING, "moves": [uci], "evaluations": [0.1]}
        (tmp_path / "p.jsonl").write_text(json.dumps(row))
        with pytest.raises(PositionFileError, match=f"move '{uci}' is not legal"):
            read_positions(tmp_path / "p.jsonl")
        before = chess.Board(CASTLING)
        before.turn = chess.BLACK
        (tmp_path / "p.csv").write_text(f"PuzzleId,FEN,Moves\nx,{before.fen()},a7a6 {uci}\n")
        with pytest.raises(PositionFileError, match=f"move '{uci}' is not legal"):
            list(read_stream(tmp_path / "p.csv"))


def test_an_unfinished_or_one_sided_set_is_refused_with_what_to_do(tmp_path):
    (tmp_path / "p.jsonl").write_text(json.dumps({"fen": chess.STARTING_FEN}))
    out = tmp_path / "o"
    main(["label", str(tmp_path / "p.jsonl"), "--nodes", "0", "--heldout-share", "0", "--out", str(out)])
    assert len(load_positions(PromptsConfig(source=str(out)), 0)) == 1
    with pytest.raises(PositionFileError, match=r"o has no heldout positions; make the set with held-out positions"):
        load_positions(PromptsConfig(source=str(out), split="heldout"), 0)
    record = json.loads((out / "provenance.json").read_text())
    (out / "provenance.json").write_text(json.dumps(record | {"finished": False}))
    with pytest.raises(PositionFileError, match=r"o is not finished; finish it first: python -m jax_grpo.data label"):
        load_positions(PromptsConfig(source=str(out)), 0)
    (out / "provenance.json").write_text("[]")
    with pytest.raises(PositionFileError, match=r"provenance.json is not a data set's record"):
        load_positions(PromptsConfig(source=str(out)), 0)
