"""Position sources and their order; every bad row names its file, line, value and what was expected."""

import json
import random
import re
from collections import Counter

import chess
import chess.pgn
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jax_grpo.chess.evaluate.puzzles import PACKAGED_MATES
from jax_grpo.chess.positions.files import PositionFileError, read_positions
from jax_grpo.chess.positions.position import Position
from jax_grpo.chess.positions.rookworld import PolicyRow, format_policy_row
from jax_grpo.chess.positions.sources import PACKAGED, load_positions, read_packaged, selfplay_positions
from jax_grpo.config.sections import PromptsConfig
from jax_grpo.prompts.dataset import PromptDataset, sampling_numbers
from jax_grpo.prompts.table import SourceError

TRAIN, HELDOUT = read_packaged("train"), read_packaged("heldout")


@pytest.mark.slow
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
    with pytest.raises(SourceError, match=r"prompts\.source gave no rows"):
        PromptDataset([], 0)


def test_any_step_asked_in_any_order_gives_the_same_batch():
    positions = [Position(str(i)) for i in range(7)]
    size, steps = 5, list(range(20))  # batches straddle epochs
    forwards = {step: PromptDataset(positions, 3).batch(step, size) for step in steps}
    shared = PromptDataset(positions, 3)
    random.Random(0).shuffle(steps)
    for step in steps:
        assert shared.batch(step, size) == forwards[step], step
        assert all(positions[number] == position for number, position in forwards[step])
    assert len({number for number, _ in PromptDataset(positions, 3).batch(0, 14)}) == 7, "a batch of two epochs"


def test_a_number_drawn_again_in_a_batch_is_sampled_under_another():
    assert sampling_numbers([2, 0, 1], 3) == [2, 0, 1], "distinct draws keep their numbers"
    sampled = [2, 0, 1, 1, 2, 1]
    numbers = sampling_numbers(sampled, 3)
    assert numbers == [2, 0, 1, 4, 5, 7] and len(set(numbers)) == len(sampled)


@pytest.mark.slow
def test_selfplay_is_seeded_and_shares_no_position_between_splits():
    assert selfplay_positions(3, 7) == selfplay_positions(3, 7) != selfplay_positions(3, 8)
    for position in selfplay_positions(2, 7)[::10]:
        board = chess.Board(position.fen)
        assert board.is_valid() and any(board.legal_moves)
    for seed in (0, 1):  # the trainer draws its evaluation positions with another seed
        train, heldout = (
            {chess.Board(p.fen).epd() for p in load_positions(PromptsConfig(source="selfplay:30", split=split), s)}
            for split, s in (("train", 0), ("heldout", seed))
        )
        print(f"{len(train)} train, {len(heldout)} held out")
        assert not train & heldout and len(heldout) > 100


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
    (tmp_path / "bom.csv").write_bytes(b"\xef\xbb\xbf" + (tmp_path / "a.csv").read_bytes().replace(b"\n", b"\r\n"))
    assert read_positions(tmp_path / "bom.csv") == positions, "as a spreadsheet saves it"
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


def test_pgn_skips_what_has_no_move_to_play(tmp_path):
    (tmp_path / "mate.pgn").write_text("1. f3 e5 2. g4 (2. e4 Nc6) Qh4# 0-1\n")
    positions = read_positions(tmp_path / "mate.pgn")
    assert [p.history for p in positions] == [(), ("f2f3",), ("f2f3", "e7e5"), ("f2f3", "e7e5", "g2g4")]
    (tmp_path / "drawn.pgn").write_text('[FEN "8/8/4k3/8/8/8/4p3/4K3 w - - 0 1"]\n\n1. Kxe2 Kd6 2. Kd2 *\n')
    assert len(read_positions(tmp_path / "drawn.pgn")) == 1, "played on with two bare kings"


def test_rows_of_mates_in_one_are_labelled_with_their_mate(tmp_path):
    (tmp_path / "mates.jsonl").write_text(json.dumps({"fen": BACK_RANK, "mate": "a1a8"}) + "\n")
    (position,) = read_positions(tmp_path / "mates.jsonl")
    assert (position.moves, position.evaluations, position.best) == (("a1a8",), (99.99,), None)
    assert len(read_positions(PACKAGED_MATES)) == 600, "the packaged suite's rows are such"


START = chess.STARTING_FEN
BACK_RANK, TWO_MATES = (f"6k1/5ppp/8/8/8/8/8/R{files}K w - - 0 1" for files in ("6", "R5"))
MATED = "rnb1kbnr/pppp1ppp/8/4p3/6Pq/5P2/PPPPP2P/RNBQKBNR w KQkq - 1 3"


def _json(**row):
    return json.dumps({"fen": START} | row)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"fen": "8/8 w - - 0 1"}', r"a.jsonl:1: FEN '8/8 w - - 0 1' cannot be read"),
        ("a.jsonl", json.dumps({"fen": START[:-4]}), r"a.jsonl:1: FEN .* it has 4 fields; expected 6"),
        ("a.jsonl", json.dumps({"fen": None}), r"a.jsonl:1: FEN 'None' cannot be read"),
        ("a.jsonl", json.dumps({"fen": MATED}), r"a.jsonl:1: the game is over in 'rnb1kbnr/"),
        ("a.jsonl", _json(mate="e2e4"), r"a.jsonl:1: mate 'e2e4' in .*; expected the one move that mates, found none"),
        (
            "a.jsonl",
            json.dumps({"fen": TWO_MATES, "mate": "a1a8"}),
            r"a.jsonl:1: mate 'a1a8' in .* found a1a8, b1b8",
        ),
        (
            "a.jsonl",
            json.dumps({"fen": BACK_RANK, "mate": "a1a8", "best": "a1a8"}),
            r"a.jsonl:1: mate beside moves or best; expected one",
        ),
        ("a.jsonl", "[" * 100_000, r"a.jsonl:1: not JSON"),
        (
            "a.jsonl",
            _json(moves=["e2e4"], evaluations=[float("nan")]),
            r"a.jsonl:1: evaluations 'nan'; expected finite",
        ),
        ("a.jsonl", _json(moves=["e2e4"], evaluations=[None]), r"a.jsonl:1: evaluations 'None'; expected numbers"),
        ("a.jsonl", _json(history=["Nf3"]), r"a.jsonl:1: 'Nf3' in history is not a UCI move"),
        ("a.jsonl", _json(moves={"e2e4": 1}), r"a.jsonl:1: moves is \{'e2e4': 1\}; expected a list"),
        ("a.jsonl", _json(evaluation=[]), r"column 'evaluations' is missing; did you mean it to be 'evaluation'\?"),
        ("a.csv", f"FEN\n{START}\n", r"a.csv:2: column 'fen' is missing; did you mean it to be 'FEN'\?"),
        (
            "a.csv",
            f"PuzzleId,FEN,Moves\n1,{START},e2e4 e7e5\n",
            r"a.csv:2: these are Lichess's puzzles.*jax_grpo.data label",
        ),
        ("a.csv", "fen\n\n\nbad\n", r"a.csv:4: FEN 'bad' cannot be read"),
        ("a.csv", f"fen,moves\n{START},e2e4,d2d4\n", r"a.csv:2: 1 more fields than the header, \['d2d4'\]"),
        ("a.csv", f"fen\n{'x' * 200_000}\n", r"a.csv:2: not CSV \(field larger"),
        ("a.csv", b"fen\n\xff\n", r"a.csv: not UTF-8 text"),
        ("a.pgn", '[Variant "Atomic"]\n\n1. e4 *\n', r"a.pgn: game 1: variant 'Atomic'; expected standard chess"),
        ("a.pgn", '[FEN "8/8/8/8/8/8/P7/8 w - - 0 1"]\n\n1. a3 *\n', r"a.pgn: game 1: FEN .* is not a legal position"),
        ("a.jsonl", '{"fen": "8/8/8/8/8/8/8/8 w - - 0 1"}', r"a.jsonl:1: FEN .* is not a legal position"),
        ("a.jsonl", '\n{"fem": "x"}', r"a.jsonl:2: column 'fen' is missing; did you mean it to be 'fem'\?"),
        ("a.jsonl", '{"prompt": "x", "kwargs": []}', r"a.jsonl:1: these rows have a 'prompt' .* task.name: prompts"),
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
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(PositionFileError, match=message):
        read_positions(tmp_path / name)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(PositionFileError, match=re.escape(f"{tmp_path}/none.csv: no such file")):
        read_positions(tmp_path / "none.csv")


def test_parquet_cut_or_damaged_anywhere_is_one_clear_error(tmp_path):
    whole = (PACKAGED / "heldout.parquet").read_bytes()
    rng, outcomes = random.Random(0), Counter()
    path = tmp_path / "a.parquet"
    for cut in (0, 4, 10, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(PositionFileError, match=r"a.parquet: not a readable Parquet file"):
            read_positions(path)
    for _ in range(10):
        damaged = bytearray(whole)
        for _ in range(5):
            damaged[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            read_positions(path)
            outcomes["harmless"] += 1
        except PositionFileError:  # anything else fails the test
            outcomes["refused"] += 1
    print(dict(outcomes))
    assert outcomes["refused"]


def test_one_position_asks_one_prompt_however_its_fen_is_written(tmp_path):
    board = chess.Board()
    board.push_uci("e2e4")
    right, answer = board.fen(), "e7e5"
    after = board.copy()
    after.push_uci(answer)
    written = {  # as chess.com, the FEN standard, and others write it
        "en passant": right.replace("KQkq -", "KQkq e3"),
        "castling in another order": right.replace("KQkq", "QKqk"),
        "castling by files": right.replace("KQkq", "HAha"),
        "blanks": right.replace(" ", "  "),
        "leading zeros": right.replace(" 0 1", " 00 01"),
        "move number 0": right.replace(" 0 1", " 0 0"),
    }
    next_fen = after.fen().replace("KQkq -", "KQkq e6")
    step = {"history": ["e2e4"], "move": answer, "next_fen": next_fen, "reward": 0.001}
    step |= {"terminated": False, "truncated": False}
    for name, fen in written.items():
        assert chess.Board(fen).fen() == right, name
        (tmp_path / "a.jsonl").write_text(_json(fen=fen) + "\n" + _json(fen=fen, **step) + "\n")
        (tmp_path / "a.csv").write_text(f"fen\n{fen}\n")
        (tmp_path / "p.txt").write_text(f"P: {fen} M: e7e5 E: 0.1 B: e7e5\n")
        (tmp_path / "s.txt").write_text(f"A: {fen}+e7e5+e2e4 e7e5+{next_fen}+0.001+0+0\n")
        (tmp_path / "i.txt").write_text(f"A: {fen}+e7e4+e2e4 e7e4+{fen}+-1.0+0+1\n")
        read = [p for file in sorted(tmp_path.iterdir()) for p in read_positions(file)]
        assert {position.fen for position in read} == {right}, name
        states = {p.next_state for p in read} - {None}
        assert states == {f"{after.fen()}+0.001+0+0", f"{right}+-1.0+0+1"}, name
    taken = chess.Board("4k3/8/8/8/3pP3/8/8/4K3 b - e3 0 1").fen()
    (tmp_path / "b.jsonl").write_text(_json(fen=taken))
    assert read_positions(tmp_path / "b.jsonl")[0].fen == taken, "a square that can be taken on is part of the position"
