"""No position that a run trains on is called held out, whatever it is read from; and what was checked once is not checked again."""

import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import chess
import chess.pgn
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from short_runs import CONFIG

import jax_grpo.train
import torch_ref.train
from jax_grpo.chess.data.__main__ import main as make_set
from jax_grpo.chess.positions import files as position_files
from jax_grpo.chess.positions import rookworld
from jax_grpo.chess.positions.files import PositionFileError, read_positions
from jax_grpo.chess.positions.position import Position, position_key
from jax_grpo.chess.positions.rookworld import EnvironmentRow, PolicyRow, format_environment_row, format_policy_row
from jax_grpo.chess.positions.sources import (
    PACKAGED,
    PACKAGED_SOURCES,
    checked_table,
    file_hash,
    load_positions,
    read_packaged,
    selfplay_positions,
    shipped,
)
from jax_grpo.chess.tasks.environment import next_state
from jax_grpo.config import Config, ConfigError, load_config
from jax_grpo.config.sections import PromptsConfig
from jax_grpo.model.tokenizer import Tokenizer
from jax_grpo.prompts.dataset import describe_rows, heldout_rows
from jax_grpo.prompts.table import is_heldout
from jax_grpo.run import files
from jax_grpo.trainer import Trainer
from torch_ref.options import Options

KINDS = ("pgn", "jsonl", "csv", "parquet", "txt", "A:", "arbiter", "folder")
LABELLED = read_packaged("heldout")[:150]


def key(position: Position) -> str:
    return position_key(position.fen)


def keys(positions) -> set[str]:
    return {key(position) for position in positions}


def write(kind: str, folder: Path) -> Path:
    """About a hundred positions and more as a file of the kind, or a data set's folder."""
    rows = [
        {"fen": p.fen, "history": list(p.history), "moves": list(p.moves), "evaluations": list(p.evaluations)}
        for p in LABELLED
    ]
    if kind == "pgn":
        games = []
        for number in range(4):
            rng, board = random.Random(number), chess.Board()
            while len(board.move_stack) < 40 and any(board.legal_moves):
                board.push(rng.choice(sorted(board.legal_moves, key=chess.Move.uci)))
            games.append(str(chess.pgn.Game.from_board(board)))
        text = "\n\n".join(games)
    elif kind == "jsonl":
        text = "\n".join(map(json.dumps, rows))
    elif kind == "csv":
        lists = ("history", "moves", "evaluations")
        lines = [",".join([row["fen"], *(" ".join(map(str, row[name])) for name in lists)]) for row in rows]
        text = "\n".join(["fen,history,moves,evaluations", *lines])
    elif kind == "txt":
        text = "\n".join(format_policy_row(PolicyRow(p.fen, p.moves, p.evaluations, p.moves[0])) for p in LABELLED)
    elif kind == "A:":
        text = "\n".join(format_environment_row(row) for p in LABELLED for row in outcomes(p))
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), folder / "p.parquet")
        return folder / "p.parquet"
    else:  # of the tool
        out = folder / kind
        make_set(["arbiter", "--count", "400", "--illegal", "0.2", "--processes", "1", "--out", str(out)])
        if kind == "folder":
            return out
        both = pa.concat_tables([pq.read_table(path) for path in sorted(out.glob("*.parquet"))])
        pq.write_table(both, folder / "a.parquet")
        return folder / "a.parquet"
    path = folder / f"p.{'txt' if kind == 'A:' else kind}"
    path.write_text(text)
    return path


def outcomes(position: Position) -> list[EnvironmentRow]:
    """Two moves of one position: one position in one split, not one row."""
    board, rows = chess.Board(position.fen), []
    for uci in position.moves[:2]:
        fen, reward, terminated, truncated = next_state(board, chess.Move.from_uci(uci)).split("+")
        rows.append(EnvironmentRow(position.fen, uci, (uci,), fen, float(reward), terminated == "1", truncated == "1"))
    return rows


@pytest.mark.default_cases("csv", "pgn")
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_file_is_split_by_the_hash_that_data_sets_are_split_by(kind, tmp_path):
    path = write(kind, tmp_path)
    parts = {s: load_positions(PromptsConfig(source=str(path), split=s), 0) for s in ("train", "heldout", "all")}
    train, heldout, everything = (list(parts[split]) for split in ("train", "heldout", "all"))
    print({split: len(part) for split, part in parts.items()})
    assert len(heldout) >= 5 and not keys(train) & keys(heldout)
    assert len(train) + len(heldout) == len(everything)
    assert {p.fen for p in heldout} == {p.fen for p in everything if is_heldout(key(p), 1000, 9000)}
    if kind != "folder":
        assert everything == read_positions(path), "in the file's order, every column as it was read"
        assert train == [p for p in everything if not is_heldout(key(p), 1000, 9000)]
    assert [parts["train"][i] for i in (0, -1)] == [train[0], train[-1]], "a drawn position is the listed one"


def config_of(folder: Path, source: Path | str, *overrides: str) -> Config:
    (folder / "c.yaml").write_text(CONFIG.replace("source: positions.jsonl, split: all", f"source: {source}"))
    small = ["--iterations", "1", "--update.warmup_steps", "0", "--compilation_cache", "null", "--record_batches", "0"]
    return load_config(str(folder / "c.yaml"), [*small, "--run_dir", str(folder / "run"), *overrides])


ENVIRONMENT = ["--task", "{name: environment}", "--prompts.max_prompt_tokens", "176"]
EACH_KIND = [
    pytest.param("pgn", [], marks=pytest.mark.slow),
    pytest.param("arbiter", ENVIRONMENT, marks=pytest.mark.slow),
    pytest.param("folder", ENVIRONMENT, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("kind", "overrides"), EACH_KIND)
def test_neither_implementation_asks_what_it_trains_on(kind, overrides, tmp_path, monkeypatch, capsys):
    config = config_of(tmp_path, write(kind, tmp_path), "--evaluation.positions", "8", *overrides)
    requested: dict[str, list] = {}
    make, ask = jax_grpo.train.Evaluator, torch_ref.train.evaluate

    def made(policy, task, prompts, *more):
        requested["jax"] = prompts
        return make(policy, task, prompts, *more)

    def evaluated(texts, prompts, *more):
        requested["torch"] = prompts
        return ask(texts, prompts, *more)

    monkeypatch.setattr(jax_grpo.train, "Evaluator", made)
    monkeypatch.setattr(torch_ref.train, "evaluate", evaluated)
    trained = Trainer(config).prompts.dataset
    jax_grpo.train.train(config)
    torch_ref.train.train(config.model_copy(update={"run_dir": str(tmp_path / "torch")}), Options())
    training = keys(trained.at(index)[1] for index in range(len(trained)))
    assert requested["jax"] == requested["torch"] and len(requested["jax"]) == 8
    assert not keys(prompt.row for prompt in requested["jax"]) & training
    notes = re.findall(
        rf"{len(trained)} positions to train on, (\d+) held out, of which 8 are asked", capsys.readouterr().out
    )
    assert len(notes) == 2, "each says so once"


def test_other_positions_to_ask_lose_those_that_are_trained_on(tmp_path):
    (tmp_path / "train.jsonl").write_text("\n".join(json.dumps({"fen": p.fen}) for p in LABELLED[:100]))
    turned = LABELLED[99].fen.rsplit(" ", 2)[0] + " 7 90"  # other counters: the same position
    rows = [*(p.fen for p in LABELLED[90:120]), turned]
    (tmp_path / "ask.csv").write_text("\n".join(["fen", *rows]))
    given = ["--evaluation.positions", "50", "--evaluation.source", str(tmp_path / "ask.csv")]
    config = config_of(tmp_path, tmp_path / "train.jsonl", "--prompts.split", "all", *given)
    training = load_positions(config.prompts, 0)
    heldout = heldout_rows(config, training, load_positions)
    assert heldout is not None and [p.fen for p in heldout.rows] == [p.fen for p in LABELLED[100:120]]
    assert describe_rows(training, heldout) == (
        "100 positions to train on, 20 held out, of which 20 are asked; left out 11 of evaluation.source that the run trains on"
    )
    split = heldout_rows(
        config_of(tmp_path, tmp_path / "train.jsonl", *given), load_positions(config.prompts, 0), load_positions
    )
    assert split is not None, "and with files' own split"
    packaged = config_of(
        tmp_path, tmp_path / "train.jsonl", "--evaluation.positions", "50", "--evaluation.source", "packaged"
    )
    actual = heldout_rows(packaged, load_positions(packaged.prompts, 0), load_positions)
    assert actual is not None and not keys(actual.rows) & keys(load_positions(packaged.prompts, 0))
    assert actual.available + actual.left_out == 2000, "of the packaged positions the held-out ones"
    with pytest.raises(
        PositionFileError, match=r"evaluation.source '.*train.jsonl': the run trains on all of its 100 positions"
    ):
        heldout_rows(
            config_of(
                tmp_path, tmp_path / "train.jsonl", "--prompts.split", "all", "--evaluation.positions", "5",
                "--evaluation.source", str(tmp_path / "train.jsonl"),
            ),
            training, load_positions,
        )  # fmt: skip


def test_a_file_too_small_to_be_split_says_the_ways_out(tmp_path):
    train = next(p for p in LABELLED if not is_heldout(key(p), 1000, 9000))
    held = next(p for p in LABELLED if is_heldout(key(p), 1000, 9000))
    (tmp_path / "t.jsonl").write_text(json.dumps({"fen": train.fen}))
    (tmp_path / "h.jsonl").write_text(json.dumps({"fen": held.fen}))
    config = config_of(tmp_path, tmp_path / "t.jsonl", "--evaluation.positions", "4")
    with pytest.raises(
        PositionFileError, match=r"no held-out positions.*as evaluation.source, or set evaluation.positions to 0"
    ):
        jax_grpo.train.train(config)
    with pytest.raises(PositionFileError, match=r"h.jsonl has no positions to train on.*Set prompts.split to all"):
        load_positions(PromptsConfig(source=str(tmp_path / "h.jsonl")), 0)
    alone = load_positions(PromptsConfig(source=str(tmp_path / "t.jsonl")), 0)
    assert describe_rows(alone, None, "prompts") == "1 prompts to train on (evaluation.positions is 0)", (
        "as a task calls them"
    )
    assert describe_rows(alone, None) == "1 positions to train on (evaluation.positions is 0)"
    both = tmp_path / "b.jsonl"
    both.write_text(f"{(tmp_path / 't.jsonl').read_text()}\n{(tmp_path / 'h.jsonl').read_text()}")
    unused = describe_rows(load_positions(PromptsConfig(source=str(both)), 0), None)
    assert unused == "1 positions to train on, 1 held out and not asked (evaluation.positions is 0)"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--prompts.split", "all", "--evaluation.positions", "4"], r"prompts.split is all, so the run trains on .* 4 would ask"),
        (["--prompts.split", "heldout", "--evaluation.positions", "4"], r"prompts.split is heldout, so the run trains on"),
        (["--evaluation.source", "packaged"], r"evaluation.source is 'packaged', but evaluation.positions is 0"),
    ],
)  # fmt: skip
def test_settings_that_would_ask_what_is_trained_on_or_nothing_are_refused(overrides, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        config_of(tmp_path, "packaged", *overrides)


# Runs that were made before files were split ---------------------------------------------------------------------------


def make_old(run: Path, source: Path) -> None:
    """Turns the run's checkpoint into one of the time before: no evaluation.source, split ignored, identity of all positions."""
    positions = read_positions(source)
    for checkpoint in files.complete(run / "checkpoints"):
        content = files.read_manifest(checkpoint)
        del content["config"]["evaluation"]["source"]
        content["config"]["prompts"]["split"] = "train"
        content["identity"]["positions"] = hashlib.sha256(repr(positions).encode()).hexdigest()
        whole = {"sha256": hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest(), "content": content}
        (checkpoint / files.MANIFEST).write_text(json.dumps(whole))


@pytest.mark.slow  # two runs
def test_a_run_made_before_files_were_split_is_refused_with_what_to_set_and_continues_so(tmp_path, capsys):
    source = tmp_path / "p.jsonl"
    source.write_text("\n".join(json.dumps({"fen": p.fen}) for p in selfplay_positions(2, 0)[:40]))
    jax_grpo.train.train(config_of(tmp_path, source, "--prompts.split", "all"))
    make_old(tmp_path / "run", source)
    longer = ["--iterations", "2", "--update.total_steps", "9"]
    with pytest.raises(files.CheckpointError) as refused:
        jax_grpo.train.train(config_of(tmp_path, source, *longer), resume="auto")
    assert re.search(
        r"prompts.split is 'train', but .*000001 was made before files were split: it trains on every position of .*p.jsonl.*"
        r"Set prompts.split to all to continue it", str(refused.value),
    )  # fmt: skip
    jax_grpo.train.train(config_of(tmp_path, source, "--prompts.split", "all", *longer), resume="auto")
    assert "continuing after iteration 1" in capsys.readouterr().out
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2
    source.write_text("\n".join(reversed(source.read_text().splitlines())))
    with pytest.raises(files.CheckpointError, match=r"prompts.source holds something else than when"):
        jax_grpo.train.train(config_of(tmp_path, source, "--prompts.split", "all", *longer), resume="auto")


@pytest.mark.slow  # two runs
def test_a_run_made_before_on_the_packaged_positions_continues(tmp_path):
    config = config_of(tmp_path, "packaged")
    jax_grpo.train.train(config)
    make_old(tmp_path / "run", PACKAGED / "train.parquet")
    longer = config_of(tmp_path, "packaged", "--iterations", "2", "--update.total_steps", "9")
    jax_grpo.train.train(longer, resume="auto")
    identity = files.read_manifest(tmp_path / "run" / "checkpoints" / "000002")["identity"]
    assert identity["positions"] == f"sha256:{shipped()['train']}"


# What was checked once -------------------------------------------------------------------------------------------------


class Counted:
    """How many rows were checked, games replayed and batches of prompts encoded."""

    def __init__(self, monkeypatch):
        self.calls = 0
        for owner, name in (
            (position_files, "_position"),
            (position_files, "read_games"),
            (Tokenizer, "encode_prompts"),
        ):
            monkeypatch.setattr(owner, name, self._counting(getattr(owner, name)))
        for name in ("parse_policy_row", "parse_environment_row"):
            monkeypatch.setattr(rookworld, name, self._counting(getattr(rookworld, name)))

    def _counting(self, function):
        def counting(*arguments):
            self.calls += 1
            return function(*arguments)

        return counting

    def of(self, work) -> int:
        self.calls = 0
        work()
        return self.calls


@pytest.mark.default_cases("csv", "pgn")
@pytest.mark.parametrize("kind", KINDS)
def test_what_was_checked_once_is_not_checked_again(kind, tmp_path, monkeypatch):
    path, cache, counted = write(kind, tmp_path), tmp_path / "cache", Counted(monkeypatch)

    def load(split="train"):
        return load_positions(PromptsConfig(source=str(path), split=split), 0, str(cache))

    first = []
    assert counted.of(lambda: first.append(list(load()))) > 0
    assert counted.of(load) == counted.of(lambda: load("heldout" if kind != "folder" else "train")) == 0
    assert list(load()) == first[0] == list(load_positions(PromptsConfig(source=str(path)), 0))
    assert load().identity == load_positions(PromptsConfig(source=str(path)), 0).identity
    for retained in (cache / "positions").glob("*"):  # a damaged file costs the check again
        retained.write_bytes(retained.read_bytes()[: -retained.stat().st_size // 2])
    assert counted.of(load) > 0 and counted.of(load) == 0 and list(load()) == first[0]
    assert not list((cache / "positions").glob("*.parquet.*")), "nothing half written is left"


def test_a_file_that_changed_is_checked_and_nothing_is_written_beside_it(tmp_path):
    folder = tmp_path / "user"
    folder.mkdir()
    path = write("jsonl", folder)
    assert len(checked_table(path, tmp_path / "cache")) == len(LABELLED)
    text = path.read_text()
    path.write_text(text.replace(LABELLED[0].moves[0], "a1a1", 1))
    with pytest.raises(PositionFileError, match=r"p.jsonl:1: move 'a1a1' is not legal"):
        checked_table(path, tmp_path / "cache")
    path.write_text(text)
    assert [entry.name for entry in folder.iterdir()] == ["p.jsonl"]
    (tmp_path / "in the way").write_text("")  # a cache that cannot be a folder costs the check, nothing else
    assert len(checked_table(path, tmp_path / "in the way")) == len(LABELLED)


SHIPPED = [("packaged", "train"), ("packaged", "heldout"), ("packaged:tables", "heldout"), ("packaged:tables", "test")]


@pytest.mark.default_cases("packaged-heldout")
@pytest.mark.parametrize(("source", "split"), [*SHIPPED, ("packaged:tables", "train")])
def test_the_shipped_positions_have_their_hashes_and_every_row_of_those_is_sound(source, split):
    folder = PACKAGED_SOURCES[source]
    path = PACKAGED.parent / folder / f"{split}.parquet"
    assert file_hash(path) == shipped(folder)[split], "changed without its hash: run this test, then write the new one"
    assert read_positions(path) == read_packaged(split, source), "every row checked"


def test_the_shipped_positions_are_vouched_for_by_their_hashes(monkeypatch):
    counted = Counted(monkeypatch)
    assert counted.of(lambda: [read_packaged("train"), load_positions(PromptsConfig(split="all"), 0)]) == 0
    monkeypatch.setitem(shipped("positions"), "heldout", "0" * 64)
    assert counted.of(lambda: read_packaged("heldout")) == 2000, "a file that is not the shipped one is checked"


@pytest.mark.slow
def test_a_second_start_checks_no_row_and_encodes_no_prompt_but_still_refuses_one_that_is_too_long(
    tmp_path, monkeypatch
):
    path, counted = write("jsonl", tmp_path), Counted(monkeypatch)
    cache = ["--compilation_cache", str(tmp_path / "cache"), "--iterations", "30"]
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "")
    assert counted.of(lambda: Trainer(config_of(tmp_path, path, *cache))) > len(LABELLED)
    assert counted.of(lambda: Trainer(config_of(tmp_path, path, *cache))) == 0
    for change in (
        ["--seed", "1"],
        ["--iterations", "2"],
        ["--task.prompt_style", "full"],
        ["--model.tokenizer", "gpt2"],
    ):
        assert counted.of(lambda: Trainer(config_of(tmp_path, path, *cache, *change))) > 0, change  # noqa: B023
    made = []
    monkeypatch.setattr("jax_grpo.trainer.make_programs", lambda *arguments: made.append(arguments))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"expected 1 to prompts.max_prompt_tokens = 60"):
            Trainer(config_of(tmp_path, path, *cache, "--prompts.max_prompt_tokens", "60"))
    assert not made, "before a program is made"
    for damaged in (tmp_path / "cache" / "remembered").glob("*"):
        damaged.write_text('["')
    monkeypatch.undo()
    Trainer(config_of(tmp_path, path, *cache))


def test_what_is_not_needed_before_the_first_iteration_is_not_imported(tmp_path):
    program = (
        "import sys, pathlib, jax_grpo.train; from jax_grpo.report.log import EventFile;"
        f"EventFile(pathlib.Path({str(tmp_path)!r})).scalars({{'loss': 1.0}}, 0);"
        "print([name for name in ('matplotlib', 'torch', 'transformers', 'pyarrow.dataset') if name in sys.modules])"
    )
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == "[]", done.stdout


def test_a_table_of_positions_is_the_list_of_them(tmp_path):
    path = write("A:", tmp_path)
    table, listed = checked_table(path, None), read_positions(path)
    rng = np.random.default_rng(0)
    assert [table[int(i)] for i in rng.permutation(len(table))[:50]] == [
        listed[int(i)] for i in np.random.default_rng(0).permutation(len(table))[:50]
    ]
    assert list(table) == listed == table[:] and table[3:9:2] == listed[3:9:2] and table[-1] == listed[-1]
    assert table.digest_of_positions() == hashlib.sha256(repr(listed).encode()).hexdigest(), (
        "as older checkpoints have it"
    )
    with pytest.raises(IndexError):
        table[len(table)]
    shutil.rmtree(tmp_path)
    assert table[5] == listed[5], "and needs its file no more"
