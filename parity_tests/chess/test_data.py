"""Data sets: the same rows however often they are killed; labels from the engine or the file."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import chess
import chess.engine
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import PATIENCE_S, set_rows

import jax_grpo
from jax_grpo.chess.data import selfplay
from jax_grpo.chess.data.__main__ import main
from jax_grpo.chess.data.labels import count
from jax_grpo.chess.data.shards import Source, write_shards
from jax_grpo.chess.positions.files import read_positions, text_rows
from jax_grpo.chess.positions.rookworld import parse_policy_row
from jax_grpo.chess.tasks import engine

HAS_ENGINE = shutil.which("stockfish") or shutil.which("/usr/games/stockfish")
needs_engine = pytest.mark.skipif(not HAS_ENGINE, reason="Stockfish is not installed (apt install stockfish)")


def _shards(folder):
    return {path.name: path.read_bytes() for path in sorted(Path(folder).glob("*.parquet"))}


def _command(*words):
    return [sys.executable, "-m", "jax_grpo.data", *map(str, words)]


# Killing ---------------------------------------------------------------------------------------------------------------


ENGINES_SETS = [pytest.param(kind, marks=needs_engine) for kind in ("selfplay", "tables")]


@pytest.mark.slow
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
        len(set_rows(tmp_path / "whole", s)) for s in records[0]["rows"]
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
    return [row["value"] for split in ("train", "heldout") for row in set_rows(folder, split)]


@pytest.mark.slow
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


@pytest.mark.slow
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


# Labelled positions ----------------------------------------------------------------------------------------------------


@needs_engine
@pytest.mark.slow
def test_selfplay_reproduces_the_packaged_positions(tmp_path, monkeypatch):
    """They were labelled when the last line of a move counted, be it exact or a bound: python-chess's own `analyse`."""
    monkeypatch.setattr(engine._Protocol, "analyse", chess.engine.UciProtocol.analyse)
    monkeypatch.setattr(selfplay, "ProcessPoolExecutor", lambda count, **_: ThreadPoolExecutor(count))  # same process
    main(["--out", str(tmp_path / "s"), "--count", "60", "--heldout", "6", "--seed", "1", "--nodes", "3000"])
    record = json.loads((tmp_path / "s" / "provenance.json").read_text())
    packaged = Path(jax_grpo.__file__).parent / "assets" / "positions"
    if record["settings"]["engine"] != json.loads((packaged / "provenance.json").read_text())["engine"]:
        pytest.skip(f"labels of {record['settings']['engine']}")
    retained = {
        row["fen"]: row
        for split in ("train", "heldout")
        for row in pq.read_table(packaged / f"{split}.parquet").to_pylist()
    }
    rows = set_rows(tmp_path / "s") + set_rows(tmp_path / "s", "heldout")
    assert len(rows) == 66 and all(retained[row["fen"]] == row for row in rows)


PUZZLES = """PuzzleId,FEN,Moves,Rating,RatingDeviation,Popularity,NbPlays,Themes,GameUrl,OpeningTags
00008,r6k/pp2r2p/4Rp1Q/3p4/8/1N1P2R1/PqP2bPP/7K b - - 0 24,f2g3 e6e7 b2b1 b3c1 b1c1 h6c1,1925,74,95,8000,crushing,https://lichess.org/x,
0000D,5rk1/1p3ppp/pq3b2/8/8/1P1Q1N2/P4PPP/3R2K1 w - - 2 27,d3d6 f8d8 d6d8 f6d8,1513,74,96,30000,advantage,https://lichess.org/y,
"""


@needs_engine
def test_lichess_puzzles_are_asked_after_the_first_move_with_the_solution_as_best(tmp_path):
    (tmp_path / "p.csv").write_text(PUZZLES)
    main(["label", str(tmp_path / "p.csv"), "--nodes", "3000", "--heldout-share", "0", "--out", str(tmp_path / "o")])
    first, second = set_rows(tmp_path / "o")
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
    keys = {s: [chess.Board(row["fen"]).epd() for row in set_rows(tmp_path / "o", s)] for s in ("train", "heldout")}
    everything = keys["train"] + keys["heldout"]
    expected = {chess.Board(p.fen).epd() for p in read_positions(tmp_path / "g.pgn")}
    assert len(everything) == len(set(everything)) == len(expected) and set(everything) == expected
    assert keys["train"] and keys["heldout"]


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
