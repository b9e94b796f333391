"""Data sets: the same rows however often they are killed; labels from the engine, the rules or the file; training on them."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import chess
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import PATIENCE_S

from jax_grpo.config.sections import PromptsConfig
from jax_grpo.config.tasks import TaskConfig
from jax_grpo.data import arbiter, selfplay
from jax_grpo.data.__main__ import main
from jax_grpo.data.arbiter import SCHEMA, Options, game_rows, illegal_move, seeded_game
from jax_grpo.data.black_labels import count
from jax_grpo.data.files import read_stream
from jax_grpo.data.shards import Source, write_shards
from jax_grpo.positions.dataset import load_positions, read_packaged
from jax_grpo.positions.files import PositionFileError, read_positions, text_rows
from jax_grpo.positions.rookworld import (
    EnvironmentRow,
    format_environment_row,
    parse_environment_row,
    parse_policy_row,
)
from jax_grpo.tasks.environment import EnvironmentTask, draw_move, next_state
from jax_grpo.tasks.policy import PolicyTask

HAS_ENGINE = shutil.which("stockfish") or shutil.which("/usr/games/stockfish")
needs_engine = pytest.mark.skipif(not HAS_ENGINE, reason="Stockfish is not installed (apt install stockfish)")
OPTIONS = Options(seed=1, draws="claimed", illegal=0.1, kept=0.2)


def _shards(folder):
    return {path.name: path.read_bytes() for path in sorted(Path(folder).glob("*.parquet"))}


def _rows(folder, split="train"):
    return [row for path in sorted(Path(folder).glob(f"{split}-*.parquet")) for row in pq.read_table(path).to_pylist()]


def _command(*words):
    return [sys.executable, "-m", "jax_grpo.data", *map(str, words)]


# Killing ---------------------------------------------------------------------------------------------------------------


ENGINES_SETS = [pytest.param(kind, marks=[needs_engine, pytest.mark.slow]) for kind in ("selfplay", "tables")]


@pytest.mark.parametrize("kind", ["arbiter", *ENGINES_SETS])
def test_killed_at_any_moment_and_restarted_ends_with_the_same_files(kind, tmp_path):
    words = {
        "arbiter": ["arbiter", "--count", 1500, "--shard-rows", 100, "--processes", 1],
        "selfplay": ["selfplay", "--count", 600, "--heldout", 60, "--nodes", 300, "--shard-rows", 40],
        "tables": ["tables", "--count", 300, "--heldout", 60, "--test", 60, "--nodes", 200, "--shard-rows", 40],
    }[kind]
    subprocess.run(
        _command(*words, "--out", tmp_path / "whole"), check=True, timeout=PATIENCE_S, stdout=subprocess.DEVNULL
    )
    rng, shards_at_kill = random.Random(0), []
    while len(shards_at_kill) < 2:
        before = len(_shards(tmp_path / "killed"))
        with subprocess.Popen(_command(*words, "--out", tmp_path / "killed"), stdout=subprocess.DEVNULL) as process:
            while process.poll() is None and len(_shards(tmp_path / "killed")) <= before:
                time.sleep(0.01)
            time.sleep(rng.uniform(0, 0.1))
            process.kill()
        if process.returncode == 0:  # it came to its end before this busy process's turn to kill it: from the start
            shutil.rmtree(tmp_path / "killed")
            shards_at_kill.clear()
            continue
        shards_at_kill.append(len(_shards(tmp_path / "killed")))
        assert process.returncode == -signal.SIGKILL
    print(f"killed with {shards_at_kill} shards written")
    subprocess.run(
        _command(*words, "--out", tmp_path / "killed"), check=True, timeout=PATIENCE_S, stdout=subprocess.DEVNULL
    )
    whole = _shards(tmp_path / "whole")
    assert len(whole) >= 5 and whole == _shards(tmp_path / "killed")
    records = [json.loads((tmp_path / name / "provenance.json").read_text()) for name in ("whole", "killed")]
    assert records[0].pop("command") and records[1].pop("command") and records[0] == records[1]
    assert records[0]["finished"] and sum(records[0]["rows"].values()) == sum(
        len(_rows(tmp_path / "whole", s)) for s in records[0]["rows"]
    )


def test_interrupted_between_any_two_writes_the_rows_are_those_of_an_undisturbed_run(tmp_path, monkeypatch):
    """Every instant at which a file appears, as a power cut would leave it."""
    schema = pa.schema([("value", pa.string())])

    def batches(start):
        for number in range(start, 12):
            yield [{"value": str(random.Random(f"{number}/{i}").randint(0, 60))} for i in range(7)]

    source = Source(schema, {}, batches, lambda row: row["value"])

    def run(out):
        out.mkdir(exist_ok=True)
        unbounded = {"train": None, "heldout": None}
        *_, done = write_shards(out, source, lambda key, row: "heldout" if key[-1] == "7" else "train", unbounded, 10)
        return done

    class Cut(BaseException):
        """Like a power cut, it leaves nobody the time to tidy up."""

    whole = run(tmp_path / "whole")
    files = _shards(tmp_path / "whole")
    replace, writes = os.replace, len(files)
    assert (
        writes >= 6 and whole.rows["heldout"] >= 2 and len(set(_texts(tmp_path / "whole"))) == sum(whole.rows.values())
    )
    for allowed in range(writes):
        for renamed in (False, True):  # cut before the last rename, or just after it
            out, done = tmp_path / f"{allowed}{renamed}", []

            def cut(a, b, *, renamed=renamed, done=done, allowed=allowed):
                if len(done) < allowed or renamed:
                    replace(a, b)
                done.append(b)
                if len(done) > allowed:
                    raise Cut

            monkeypatch.setattr(os, "replace", cut)
            with pytest.raises(Cut):
                run(out)
            monkeypatch.setattr(os, "replace", replace)
            again = run(out)
            assert again.rows == whole.rows and _shards(out) == files, (allowed, renamed)
            assert not list(out.glob("*unfinished*"))


def _texts(folder):
    return [row["value"] for split in ("train", "heldout") for row in _rows(folder, split)]


def test_a_set_is_continued_only_with_the_options_it_was_begun_with(tmp_path):
    out = tmp_path / "set"
    main(["arbiter", "--count", "200", "--out", str(out), "--processes", "1"])
    before = _shards(out)
    main(["arbiter", "--count", "200", "--out", str(out), "--processes", "2"])
    assert _shards(out) == before, "finished: nothing to do, and processes do not matter"
    with pytest.raises(SystemExit, match=r"begun with seed 1, now 2: give the same options to go on, or another --out"):
        main(["arbiter", "--count", "200", "--seed", "2", "--out", str(out)])
    (out / "provenance.json").write_text("{}")
    with pytest.raises(SystemExit, match=r"provenance.json is not a data set's record; give another --out"):
        main(["arbiter", "--count", "200", "--out", str(out)])
    (out / "provenance.json").unlink()
    with pytest.raises(SystemExit, match=r"holds Parquet files but no provenance.json"):
        main(["arbiter", "--count", "200", "--out", str(out)])
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match=r"file is a file; expected a folder"):
        main(["arbiter", "--count", "200", "--out", str(tmp_path / "file")])


def test_a_damaged_shard_is_named_and_not_built_upon(tmp_path):
    out = tmp_path / "set"
    main(["arbiter", "--count", "200", "--out", str(out), "--processes", "1"])
    (out / "train-00000.parquet").write_bytes(b"PAR1")
    record = json.loads((out / "provenance.json").read_text()) | {"finished": False}
    (out / "provenance.json").write_text(json.dumps(record))
    with pytest.raises(SystemExit, match=r"train-00000.parquet is damaged .*delete its folder and make the set again"):
        main(["arbiter", "--count", "200", "--out", str(out), "--processes", "1"])


def test_two_writers_of_one_folder_are_refused(tmp_path):
    with subprocess.Popen(
        _command("arbiter", "--count", 100_000, "--out", tmp_path / "set"), stdout=subprocess.DEVNULL
    ) as process:
        try:
            while not (tmp_path / "set" / "provenance.json").exists():
                assert process.poll() is None, "it writes 100,000 rows"
                time.sleep(0.05)
            with pytest.raises(SystemExit, match=r"another process is writing --out"):
                main(["arbiter", "--count", "100000", "--out", str(tmp_path / "set")])
        finally:
            process.kill()


# The arbiter's rows -----------------------------------------------------------------------------------------------------


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
    rows = game_rows(
        chess.Board(), map(chess.Move.from_uci, moves), OPTIONS._replace(kept=1.0, illegal=0.0), random.Random(0)
    )
    assert [row["kind"] for row in rows] == ["ordinary"] * 7 + ["threefold"], "the start position's third time ends it"
    assert rows[-1]["history"] == moves[:7] and rows[-1]["reward"] == 0.5 and rows[-1]["terminated"]
    automatic = OPTIONS._replace(kept=1.0, illegal=0.0, draws="automatic")
    rows = game_rows(chess.Board(), map(chess.Move.from_uci, moves[:8] * 3), automatic, random.Random(0))
    assert [row["kind"] for row in rows] == ["ordinary"] * 15 + ["fivefold"]


def test_automatic_draws_agree_with_the_environment_task_row_by_row():
    options = OPTIONS._replace(draws="automatic")
    rows = [row for game in range(120) for row in seeded_game(game, options) if row["kind"] != "fivefold"]
    assert Counter(row["kind"] for row in rows)["seventyfive_moves"] >= 1
    for row in rows:  # the task sees the position only, so a fivefold repetition is beyond it
        told = next_state(chess.Board(row["fen"]), chess.Move.from_uci(row["move"]))
        assert told == f"{row['next_fen']}+{row['reward']}+{int(row['terminated'])}+{int(row['truncated'])}", row


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
    rows = _rows(tmp_path / "o")
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
    rows = _rows(tmp_path / "o")
    made = {f"{r['fen']}+{r['move']}": r for r in rows}
    distinct = {f"{chess.Board(r['fen']).epd()} {r['move']} {r['kind']}" for r in rows}
    assert len(published) - 5 <= len(rows) == len(distinct), "one position and move is kept once, whatever its counters"
    for expected in map(parse_environment_row, published):
        if f"{expected.fen}+{expected.move}" not in made:
            continue
        row = made[f"{expected.fen}+{expected.move}"]
        assert (row["next_fen"], row["reward"]) == (expected.next_fen, expected.reward)
    positions = read_positions(tmp_path / "a.txt")
    prompt = EnvironmentTask(TaskConfig(name="environment")).prompt(positions[0], 0)
    assert f"{prompt.text}{prompt.answer}" == published[0], "and training asks for the published row itself"


# Labelled positions ----------------------------------------------------------------------------------------------------


@needs_engine
@pytest.mark.slow
def test_selfplay_reproduces_the_packaged_positions(tmp_path):
    main(["--out", str(tmp_path / "s"), "--count", "60", "--heldout", "6", "--seed", "1", "--nodes", "3000"])
    record = json.loads((tmp_path / "s" / "provenance.json").read_text())
    packaged = Path(selfplay.__file__).parent.parent / "assets" / "positions"
    if record["settings"]["engine"] != json.loads((packaged / "provenance.json").read_text())["engine"]:
        pytest.skip(f"labels of {record['settings']['engine']}")
    kept = {
        row["fen"]: row
        for split in ("train", "heldout")
        for row in pq.read_table(packaged / f"{split}.parquet").to_pylist()
    }
    rows = _rows(tmp_path / "s") + _rows(tmp_path / "s", "heldout")
    assert len(rows) == 66 and all(kept[row["fen"]] == row for row in rows)


PUZZLES = """PuzzleId,FEN,Moves,Rating,RatingDeviation,Popularity,NbPlays,Themes,GameUrl,OpeningTags
00008,r6k/pp2r2p/4Rp1Q/3p4/8/1N1P2R1/PqP2bPP/7K b - - 0 24,f2g3 e6e7 b2b1 b3c1 b1c1 h6c1,1925,74,95,8000,crushing,https://lichess.org/x,
0000D,5rk1/1p3ppp/pq3b2/8/8/1P1Q1N2/P4PPP/3R2K1 w - - 2 27,d3d6 f8d8 d6d8 f6d8,1513,74,96,30000,advantage,https://lichess.org/y,
"""


@needs_engine
def test_lichess_puzzles_are_asked_after_the_first_move_with_the_solution_as_best(tmp_path):
    (tmp_path / "p.csv").write_text(PUZZLES)
    main(["label", str(tmp_path / "p.csv"), "--nodes", "3000", "--heldout-share", "0", "--out", str(tmp_path / "o")])
    first, second = _rows(tmp_path / "o")
    assert first["fen"] == "r6k/pp2r2p/4Rp1Q/3p4/8/1N1P2b1/PqP3PP/7K w - - 0 25"
    assert (first["history"], first["best"], first["moves"][0]) == (["f2g3"], "e6e7", "e6e7")
    assert (second["history"], second["best"], second["moves"][0]) == (["d3d6"], "f8d8", "f8d8")
    assert len(first["moves"]) == len(first["evaluations"]) == 5 and first["evaluations"][0] > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("f2g3 e6e7", "f2g3"), r"p.csv:2: Moves 'f2g3 b2b1|p.csv:2: move 'b2b1' is not legal"),
        (("d3d6 f8d8 d6d8 f6d8", "d3d6"), r"p.csv:3: Moves 'd3d6'; expected the opponent's move and the solution"),
        (("d3d6", "d3d9"), r"p.csv:3: move 'd3d9' is not legal in '5rk1"),
        (("crushing", "x" * 200_000), r"p.csv:2: not CSV \(field larger"),
        (("5rk1/1p3ppp", "5rk1/1p3pp"), r"p.csv:3: FEN '5rk1/1p3pp/.* cannot be read"),
    ],
)
def test_a_bad_puzzle_is_named(change, message, tmp_path):
    (tmp_path / "p.csv").write_text(PUZZLES.replace(*change))
    with pytest.raises(SystemExit, match=message):
        main(["label", str(tmp_path / "p.csv"), "--nodes", "0", "--out", str(tmp_path / "o")])


def test_one_position_of_many_rows_is_kept_once_and_never_in_both_splits(tmp_path):
    games = "\n\n".join(f"1. e4 e5 2. Nf3 Nc6 3. {move} *" for move in ("Bb5", "Bc4", "d4", "Nc3"))
    shuffled = "1. Nf3 Nc6 2. e4 e5 3. Bb5 *\n"  # the same position with other counters
    (tmp_path / "g.pgn").write_text(f"{games}\n\n{shuffled}")
    main(["label", str(tmp_path / "g.pgn"), "--nodes", "0", "--heldout-share", "0.5", "--out", str(tmp_path / "o")])
    keys = {s: [chess.Board(row["fen"]).epd() for row in _rows(tmp_path / "o", s)] for s in ("train", "heldout")}
    everything = keys["train"] + keys["heldout"]
    expected = {chess.Board(p.fen).epd() for p in read_positions(tmp_path / "g.pgn")}
    assert len(everything) == len(set(everything)) == len(expected) and set(everything) == expected
    assert keys["train"] and keys["heldout"]


# Training on them ------------------------------------------------------------------------------------------------------


def test_a_set_of_labelled_positions_is_read_for_training_split_by_split(tmp_path):
    positions = read_packaged("heldout")[:300]
    rows = [{"fen": p.fen, "moves": list(p.moves), "evaluations": list(p.evaluations)} for p in positions]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    main(["label", str(tmp_path / "p.jsonl"), "--nodes", "0", "--out", str(tmp_path / "o"), "--shard-rows", "50"])
    splits = {s: load_positions(PromptsConfig(source=str(tmp_path / "o"), split=s), 0) for s in ("train", "heldout")}
    print({split: len(part) for split, part in splits.items()})
    labels = {p.fen: (p.moves, p.evaluations) for p in positions}
    found = {p.fen: (p.moves, p.evaluations) for part in splits.values() for p in part}
    assert found == labels and 10 <= len(splits["heldout"]) <= 60
    task = PolicyTask(TaskConfig(prompt_style="best_move"))
    prompts = [task.prompt(position, 0) for position in splits["train"][:8]]
    assert (
        task.score(prompts, [f" {p.position.moves[0]}" for p in prompts if p.position])["best_move"].tolist()
        == [1.0] * 8
    )
    (shard,) = [path for path in (tmp_path / "o").glob("train-00000.parquet")]
    assert list(load_positions(PromptsConfig(source=str(shard)), 0)) == splits["train"][: len(read_positions(shard))], (
        "or one file"
    )


def test_a_set_of_arbiter_rows_asks_for_its_own_moves_and_answers(tmp_path):
    main(["arbiter", "--count", "800", "--illegal", "0.2", "--out", str(tmp_path / "o"), "--processes", "1"])
    positions = load_positions(PromptsConfig(source=str(tmp_path / "o")), 0)
    task = EnvironmentTask(TaskConfig(name="environment", illegal_fraction=0.0))
    for row, position in zip(_rows(tmp_path / "o"), positions, strict=True):
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
    assert {row["kind"] for row in _rows(tmp_path / "o")} >= {"ordinary", "illegal"}
    keys = {
        split: {chess.Board(r["fen"]).epd() for r in _rows(tmp_path / "o", split)} for split in ("train", "heldout")
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
    drawn = {draw_move(board, random.Random(seed), illegal_fraction=1.0).uci() for seed in range(20_000)}
    assert drawn >= set(KING_TAKES_ROOK), "the task draws them as illegal moves"
    rows = [arbiter._row(board, [], chess.Move.from_uci(uci), board, "illegal") for uci in (*KING_TAKES_ROOK, "e1e8")]
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


# Labels of published rows ----------------------------------------------------------------------------------------------


def test_labels_are_counted_by_colour(tmp_path):
    white, black = "8/8/R7/7p/P2K2k1/7r/8/8 w - - 0 56", "8/8/R7/7p/P2K2k1/7r/8/8 b - - 0 56"
    lines = [
        f"P: {white}    M: a4a5 a6a8    E: 1.0 0.5    B: a4a5",
        f"P: {white}    M: a4a5 a6a8    E: 0.5 0.5    B: a4a5",
        "A: left out",
        f"P: {black}    M: h3h1 h3h2    E: 1.0 0.5    B: h3h2",
        f"P: {black}    M: h3h1 h3h2    E: 1.0 0.5    B: h3h1",
    ]
    (tmp_path / "r.txt").write_text("\n".join(lines))
    names = ("rows", "evaluations differ", "B: is the highest", "B: is the lowest")
    table = count(list(text_rows(tmp_path / "r.txt", parse_policy_row, without=("A:",))))
    assert [table["White"][name] for name in names] == [2, 1, 1, 0]
    assert [table["Black"][name] for name in names] == [2, 2, 1, 1]
    (tmp_path / "r.txt").write_bytes(b"\xff\n")
    for words in (
        ["labels"],
        ["label", "--nodes", "0", "--out", str(tmp_path / "o")],
        ["arbiter", "--out", str(tmp_path / "p")],
    ):
        with pytest.raises(SystemExit, match=r"r.txt: not UTF-8 text"):
            main([*words, str(tmp_path / "r.txt")])
    (tmp_path / "r.txt").write_text("P: nothing\n")
    with pytest.raises(SystemExit, match=r"r.txt:1: policy row"):
        main(["labels", str(tmp_path / "r.txt")])
