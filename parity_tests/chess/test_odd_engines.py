"""Engines that are not Stockfish: their values are read as they mean them, or one error says what they lack, and nothing hangs."""

import sys
import threading
import time

import chess.engine
import pytest
from conftest import PATIENCE_S

from jax_grpo.chess.data.__main__ import main
from jax_grpo.chess.settings import EngineConfig
from jax_grpo.chess.tasks.engine import EngineError, EnginePool, engine_name, start_engine

START = "rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR w KQkq - 0 1"
PROMOTING = "8/P7/8/8/8/k7/8/K7 w - - 0 1"
OPTIONS = "\n".join(f"option name {name} type spin default 1 min 1 max 500" for name in ("Threads", "Hash", "MultiPV"))
ENGINE = """#!{python} -S
import sys
for line in sys.stdin:
    word = line.split()[0]
    if word in ("uci", "isready", "go"):
        print({{"uci": {uci!r}, "isready": "readyok", "go": {go!r}}}[word], flush=True)
    if word == "quit":
        break
"""


@pytest.fixture
def odd(tmp_path):
    """Makes an engine that answers `uci` and `go` with the given lines."""

    def make(go=("info depth 1 multipv 1 score cp 10 pv e2e4",), uci=OPTIONS, name="id name odd\n", best="e2e4"):
        path = tmp_path / "odd"
        answers = {"uci": f"{name}{uci}\nuciok", "go": "\n".join([*go, f"bestmove {best}"])}
        path.write_text(ENGINE.format(python=sys.executable, **answers))
        path.chmod(0o755)
        return str(path)

    return make


def _analysis(path, fen=START, multipv=2):
    with EnginePool(EngineConfig(path=path, nodes=10, multipv=multipv, processes=1, timeout_s=PATIENCE_S)) as pool:
        return pool.analyse([fen])[0]


TWO = ("info depth 1 multipv 1 score cp 50 pv e2e4", "info depth 1 multipv 2 score cp 40 pv d2d4")
VALUES = {  # lines -> moves and pawns
    "a lower bound is no value": (
        (*TWO, "info depth 2 multipv 1 score cp 900 lowerbound pv e2e4"),
        {"e2e4": 0.5, "d2d4": 0.4},
    ),
    "an upper bound is no value": (
        (*TWO, "info depth 2 multipv 2 score cp -900 upperbound pv d2d4"),
        {"e2e4": 0.5, "d2d4": 0.4},
    ),
    "a move shown by a bound at another place": (
        (*TWO, "info depth 2 multipv 1 score cp 90 lowerbound pv d2d4", "info depth 2 multipv 2 score cp 30 pv e2e4"),
        {"d2d4": 0.4, "e2e4": 0.3},
    ),
    "a move known by bounds alone": (
        (*TWO, "info depth 2 multipv 1 score cp 90 lowerbound pv g1f3"),
        {"e2e4": 0.5, "d2d4": 0.4},
    ),
    "cut off between two lines": ((*TWO, "info depth 2 multipv 1 score cp 45 pv d2d4"), {"e2e4": 0.5, "d2d4": 0.45}),
    "worst first": (("info multipv 1 score cp 1 pv e2e4", "info multipv 2 score cp 9 pv d2d4"), {"d2d4": 0.09, "e2e4": 0.01}),
    "a move twice": (("info multipv 1 score cp 5 pv e2e4", "info multipv 2 score cp 5 pv e2e4"), {"e2e4": 0.05}),
    "words after its lines": ((*TWO, "info string score cp 999 pv h2h4"), {"e2e4": 0.5, "d2d4": 0.4}),
    "a line that cannot be played": ((*TWO, "info depth 2 multipv 1 score cp 60 pv a1a1"), {"e2e4": 0.5, "d2d4": 0.4}),
    "mates": (
        ("info multipv 1 score mate 2 wdl 1000 0 0 pv e2e4", "info multipv 2 score mate -3 pv d2d4"),
        {"e2e4": 99.98, "d2d4": -99.97},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("lines", "values"), VALUES.values(), ids=VALUES)
def test_each_move_has_its_last_exact_value_best_first(lines, values, odd):
    actual = _analysis(odd(lines))
    assert list(zip(actual.moves, actual.evaluations, strict=True)) == list(values.items())
    assert actual.score == max(values.values())


def test_promotions_in_capitals_are_moves(odd):
    lines = ("info multipv 1 score cp 900 pv a7a8Q a3b3", "info multipv 2 score cp 500 pv a7a8R")
    assert _analysis(odd(lines, best="a7a8Q"), PROMOTING).moves == ("a7a8q", "a7a8r")


def _engine_threads():
    return [thread for thread in threading.enumerate() if "SimpleEngine" in thread.name]


UNUSABLE = {
    "no options": ({"uci": ""}, r"cannot be set to one thread and 16 MB: engine does not support option Threads"),
    "no Hash": ({"uci": OPTIONS.replace("Hash", "Ash")}, r"16 MB: engine does not support option Hash"),
    "too small a Hash": ({"uci": OPTIONS.replace("Hash type spin default 1 min 1", "Hash type spin default 32 min 32")}, r"Hash"),
    "no MultiPV": ({"uci": OPTIONS.replace("MultiPV", "Lines")}, r"failed 3 times on 'rnbq.*MultiPV"),
    "no values": ({"go": ()}, r"failed 3 times on 'rnbq.*no line with a value"),
    "bounds alone": ({"go": ("info score cp 5 lowerbound pv e2e4",)}, r"no line with a value"),
    "a best move that cannot be played": ({"best": "e2e5"}, r"failed 3 times on 'rnbq.*illegal uci"),
}  # fmt: skip


@pytest.mark.parametrize(("what", "message"), UNUSABLE.values(), ids=UNUSABLE)
def test_an_engine_that_cannot_be_used_is_one_error_and_leaves_nothing_running(what, message, odd):
    with pytest.raises(EngineError, match=message):
        _analysis(odd(**what))
    until = time.monotonic() + PATIENCE_S
    while _engine_threads() and time.monotonic() < until:
        time.sleep(0.01)
    assert not _engine_threads(), "Python would wait for them and never exit"


def test_an_engine_that_says_nothing_is_named_with_the_time_it_was_given():
    with pytest.raises(EngineError, match=r"'/bin/cat' is not a working UCI engine: no answer within 0\.2 s"):
        start_engine("/bin/cat", timeout_s=0.2)


def test_an_engine_without_a_name_has_one(odd):
    assert engine_name(odd(name="")) == "unknown"


@pytest.mark.parametrize("command", ["label", "selfplay", "tables"])
def test_data_commands_name_an_engine_that_cannot_be_used(command, odd, tmp_path):
    (tmp_path / "g.pgn").write_text("1. e4 e5 *\n")
    words = [command, *([str(tmp_path / "g.pgn")] if command == "label" else [])]
    with pytest.raises(SystemExit, match="one thread and 16 MB: engine does not support option Threads"):
        main([*words, "--engine", odd(uci=""), "--out", str(tmp_path / "o")])


def test_a_search_without_several_lines_gives_the_one_there_is(odd):
    with start_engine(odd(TWO)) as engine:
        line = engine.analyse(chess.Board(), chess.engine.Limit(nodes=1))
        assert line["score"].relative.score() == 50, "its first"  # pyright: ignore[reportTypedDictNotRequiredAccess]
