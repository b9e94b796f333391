"""The engine pool under failure: processes killed or stopped in mid-search, and caches that cannot be used."""

import contextlib
import shutil
import signal
import sqlite3
import sys

import chess
import pytest

from jax_grpo.chess.settings import EngineConfig
from jax_grpo.chess.tasks.engine import EngineError, EnginePool

HAS_ENGINE = shutil.which("stockfish") or shutil.which("/usr/games/stockfish")
pytestmark = pytest.mark.skipif(not HAS_ENGINE, reason="Stockfish is not installed (apt install stockfish)")
RICH = "r3k2r/p1ppqpb1/bn2pnp1/3PN3/1p2P3/2N2Q1p/PPPBBPPP/R3K2R w KQkq - 0 1"


def _process(pool: EnginePool) -> int:
    """Process id of the one engine of an idle pool."""
    engine = pool._idle.get()
    assert engine is not None
    pool._idle.put(engine)
    return engine.transport.get_pid()


# Stockfish behind a process that ends or stops itself in the middle of its first search, at a line that the search writes. It
# shares no pipe with Stockfish, which would keep them open beyond its end.
FAILING_ONCE = """#!{python} -S
import os, subprocess, sys, threading
engine = subprocess.Popen([{engine!r}], stdin=-1, stdout=-1, stderr=-3, text=True, bufsize=1)
def forward():
    for line in sys.stdin:
        engine.stdin.write(line)
    engine.stdin.close()
threading.Thread(target=forward, daemon=True).start()
for line in engine.stdout:
    if " depth 3 " in line and not os.path.exists({mark!r}):
        open({mark!r}, "w").close()
        os.kill(os.getpid(), {signal})
    sys.stdout.write(line)
    sys.stdout.flush()
"""


@pytest.mark.default_cases("killed")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_search_cut_off_halfway_is_done_again_by_a_new_process(how, tmp_path):
    with EnginePool(EngineConfig(nodes=20_000, processes=1)) as pool:
        expected = pool.analyse([RICH])
    script, mark = tmp_path / "engine", tmp_path / "failed"
    values = {"python": sys.executable, "engine": HAS_ENGINE, "mark": str(mark), "signal": int(how)}
    script.write_text(FAILING_ONCE.format(**values))
    script.chmod(0o755)
    with EnginePool(EngineConfig(path=str(script), nodes=20_000, processes=1)) as pool:
        # Only a hang is noticed by the clock. An idle machine searches for milliseconds; a busy one has three attempts.
        pool._config = pool._config.model_copy(update={"timeout_s": 5.0})
        process = _process(pool)
        assert pool.analyse([RICH]) == expected
        assert mark.exists(), "the signal came during the search"
        assert _process(pool) != process, "the search was finished by another process"


@pytest.mark.parametrize("other", [{"nodes": 20_000}, {"multipv": 5}], ids=["nodes", "multipv"])
def test_analyses_of_other_limits_are_not_mixed_up(tmp_path, other):
    limit = {"nodes": 1000, "multipv": 2, "processes": 1, "cache": str(tmp_path / "cache.sqlite")}
    for _ in range(2):  # the second time both are read from the file
        actual = []
        for config in (EngineConfig(**limit), EngineConfig(**limit | other)):
            with EnginePool(config) as pool:
                actual.append(pool.analyse([RICH])[0])
                assert len(actual[-1].moves) == config.multipv
        assert actual[0] != actual[1]
    with contextlib.closing(sqlite3.connect(limit["cache"])) as file:
        assert file.execute("SELECT COUNT(*) FROM analyses").fetchone() == (2,)


def test_a_finished_game_needs_no_search():
    with EnginePool(EngineConfig(nodes=200, processes=1)) as pool:
        mated, stalemate = pool.analyse(["R5k1/5ppp/8/8/8/8/8/6K1 b - - 1 1", "7k/5Q2/6K1/8/8/8/8/8 b - - 1 1"])
        assert mated == ((), (), -100.0) and stalemate == ((), (), 0.0)


def test_evaluations_are_from_the_side_to_move():
    board = chess.Board("4k3/8/8/8/8/8/8/Q3K3 w - - 0 1")
    with EnginePool(EngineConfig(nodes=2000, processes=1)) as pool:
        white = pool.analyse([board.fen()])[0].score
        board.push(chess.Move.null())
        assert white > 3 and pool.analyse([board.fen()])[0].score < -3


@pytest.mark.parametrize("kind", ["no such folder", "not a database"])
def test_a_cache_that_cannot_be_used_is_named(tmp_path, kind):
    path = tmp_path / "folder" / "cache.sqlite" if kind == "no such folder" else tmp_path / "cache.sqlite"
    if kind == "not a database":
        path.write_bytes(b"these are not pages of SQLite" * 100)
    with pytest.raises(EngineError, match=r"task\.engine\.cache '.*cache\.sqlite'.*expected"):
        EnginePool(EngineConfig(nodes=200, cache=str(path)))
