"""Stockfish as a pure function: a pool of UCI processes with a cache of analyses on disk.

An analysis depends on the position, the limit and the engine's name alone: one thread, a node limit, and a cleared hash table
before each search. An engine that dies or hangs is replaced and the same position analysed again. Knows nothing of rewards.
"""

import concurrent.futures
import contextlib
import json
import os
import queue
import re
import shutil
import signal
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import chess
import chess.engine

from jax_grpo.chess.games import Rule
from jax_grpo.chess.positions.position import MATE_PAWNS
from jax_grpo.chess.settings import EngineConfig
from jax_grpo.tasks.base import TaskError

SKILL_NODES = 1000  # of Stockfish's search at Skill Level 0
ATTEMPTS = 3  # engines tried on one position before giving up
_CAPITAL_PROMOTION = re.compile(r"\b[a-h][1-8][a-h][1-8][QRBN]\b")


class EngineError(TaskError):
    """No usable engine; the message names the config key, what was tried and how to install one."""


class Analysis(NamedTuple):
    """What an engine says of a position; of a finished game there is only the `score`."""

    moves: tuple[str, ...]  # in UCI, best first
    evaluations: tuple[float, ...]  # theirs, in pawns from the side to move
    score: float  # the first of these, or the game's result


def pawns(score: chess.engine.PovScore) -> float:
    """Evaluation in pawns from the side to move; see `MATE_PAWNS`."""
    return round(score.relative.score(mate_score=round(100 * MATE_PAWNS)) / 100, 2)


def find_engine(path: str | None, key: str = "task.engine.path") -> str:
    """Executable of Stockfish; an EngineError that none was found names `key` and how to install one."""
    for candidate in (path,) if path else ("stockfish", "/usr/games/stockfish"):
        if executable := shutil.which(candidate):
            return executable
    raise EngineError(
        f"{key} is {path!r}: no such executable; install Stockfish (Debian and Ubuntu: `apt install stockfish`, macOS: "
        f"`brew install stockfish`) or give its path. The packaged positions need no engine (task.engine: null)."
    )


class _Protocol(chess.engine.UciProtocol):
    """python-chess's, but bounds are no values, promotions may be in capitals, and a best move that is illegal ends the search."""

    _analysis: chess.engine.AnalysisResult | None = None

    def _line_received(self, line: str) -> None:
        line = _CAPITAL_PROMOTION.sub(lambda move: move[0].lower(), line)
        words = line.split()
        if self._analysis is not None and words[:1] == ["bestmove"] and words[1:2] not in (["(none)"], ["NULL"]):
            try:
                self.board.parse_uci("".join(words[1:2]).lower())
            except ValueError as error:  # python-chess would wait for another answer without end
                self._analysis.set_exception(chess.engine.EngineError(f"{line.strip()!r}: {error}"))
                line = "bestmove (none)"
        super()._line_received(line)

    async def analyse(self, *args, **kwargs):  # pyright: ignore[reportIncompatibleMethodOverride]
        """The last exact line of each move that the engine shows in the end, best first; each move once.

        A search that is cut off may show a move by a bound, or one move at its old place and its new one: what is then missing
        is filled with the moves that had exact values last.
        """
        exact: dict[chess.Move, chess.engine.InfoDict] = {}  # the latest is last
        shown: dict[int, chess.Move] = {}  # by place
        with await self.analysis(*args, **kwargs) as self._analysis:
            async for line in self._analysis:
                if "score" in line and (pv := line.get("pv")):
                    shown[line.get("multipv", 1)] = pv[0]
                    if "lowerbound" not in line and "upperbound" not in line:
                        exact.pop(pv[0], None)
                        exact[pv[0]] = line
        self._analysis = None
        moves = dict.fromkeys([move for _, move in sorted(shown.items()) if move in exact] + list(exact)[::-1])
        lines = [exact[move] for move in list(moves)[: len(shown)]]
        lines.sort(key=lambda line: pawns(line["score"]), reverse=True)  # pyright: ignore[reportTypedDictNotRequiredAccess]
        return lines if kwargs.get("multipv") else dict(*lines[:1])


def start_engine(path: str, timeout_s: float = 10.0) -> chess.engine.SimpleEngine:
    """An engine process whose searches repeat: one thread, a small hash table. A context manager.

    Raises:
        EngineError: it is no UCI engine, or has no options Threads and Hash.
    """
    try:
        engine = chess.engine.SimpleEngine.popen(_Protocol, path, timeout=timeout_s)
    except (chess.engine.EngineError, TimeoutError, OSError) as error:
        problem = str(error) or f"no answer within {timeout_s:g} s"
        raise EngineError(f"{path!r} is not a working UCI engine: {problem}") from error
    try:
        engine.configure({"Threads": 1, "Hash": 16})
    except BaseException as error:
        engine.close()  # the thread that waits for the process would keep Python from exiting
        if isinstance(error, chess.engine.EngineError | TimeoutError):
            raise EngineError(f"the engine {path!r} cannot be set to one thread and 16 MB: {error}") from error
        raise
    return engine


def engine_name(path: str) -> str:
    """The name that the engine gives itself, with its version; EngineError as for `start_engine`."""
    with start_engine(path) as engine:
        return engine.id.get("name", "unknown")


def search(
    engine: chess.engine.SimpleEngine, board: chess.Board, *, nodes: int, multipv: int, depth: int | None = None
) -> Analysis:
    """One search, whose result depends on the position and the limits alone; no line is a chess.engine.EngineError."""
    # A fresh `game` sends ucinewgame, which clears the hash table.
    lines = engine.analyse(board, chess.engine.Limit(nodes=nodes, depth=depth), multipv=multipv, game=object())
    best = [(pv[0].uci(), pawns(score)) for line in lines if (pv := line.get("pv")) and (score := line.get("score"))]
    if not best:
        raise chess.engine.EngineError(f"no line with a value for {board.fen()!r}")
    moves, evaluations = zip(*best, strict=True)
    return Analysis(moves, evaluations, evaluations[0])


@contextlib.contextmanager
def skill_zero(path: str) -> Iterator[Rule]:
    """Stockfish at Skill Level 0 and `SKILL_NODES`. It draws by its own clock: no two processes play the same.

    Raises:
        EngineError: not a Stockfish.
    """
    with start_engine(path) as engine:
        if "Skill Level" not in engine.options:
            raise EngineError(f"--engine {path}: {engine.id.get('name')} has no Skill Level; expected Stockfish")
        engine.configure({"Skill Level": 0})
        limit = chess.engine.Limit(nodes=SKILL_NODES)

        def play(board: chess.Board) -> list[str]:
            move = engine.play(board, limit, game=object()).move
            assert move is not None, board.fen()
            return [move.uci()]

        yield play


class EnginePool(contextlib.AbstractContextManager):
    """Analyses positions in parallel, to a `depth` at most where one is given. A context manager, or `close()` it.

    EngineError: no executable, no UCI, no usable cache.
    """

    def __init__(self, config: EngineConfig, depth: int | None = None):
        self._config, self._depth = config, depth
        self._path = find_engine(config.path)
        self._idle: queue.SimpleQueue[chess.engine.SimpleEngine | None] = queue.SimpleQueue()
        self._cache = _open_cache(config.cache)  # before any process: one without an owner keeps Python from exiting
        self._cache_lock = threading.Lock()
        first = start_engine(self._path, self._config.timeout_s)
        self.name = first.id.get("name", "unknown")
        self._idle.put(first)
        for _ in range(config.processes - 1):
            self._idle.put(None)  # started when needed
        self._executor = concurrent.futures.ThreadPoolExecutor(config.processes, thread_name_prefix="engine")

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Ends the processes and the cache."""
        self._executor.shutdown()
        while not self._idle.empty():
            if engine := self._idle.get():
                _end(engine)
        self._cache.close()

    def analyse(self, fens: Sequence[str]) -> list[Analysis]:
        """Analyses in the order of the positions, cached ones for nothing; EngineError names one on which all attempts failed."""
        return list(self._executor.map(self._cached, fens))

    def by_fen(self, fens: Iterable[str]) -> dict[str, Analysis]:
        """`analyse`, each position once."""
        distinct = sorted(set(fens))
        return dict(zip(distinct, self.analyse(distinct), strict=True))

    def _cached(self, fen: str) -> Analysis:
        # "exact": analyses stored without the word may hold bounds
        key = f"exact|{self.name}|nodes {self._config.nodes}|multipv {self._config.multipv}|{fen}"
        key = key if self._depth is None else f"depth {self._depth}|{key}"
        with self._cache_lock:
            row = self._cache.execute("SELECT value FROM analyses WHERE key = ?", (key,)).fetchone()
        if row is not None:
            moves, evaluations, score = json.loads(row[0])
            return Analysis(tuple(moves), tuple(evaluations), score)
        analysis = self._search(fen)
        with self._cache_lock, self._cache:
            self._cache.execute("INSERT OR REPLACE INTO analyses VALUES (?, ?)", (key, json.dumps(analysis)))
        return analysis

    def _search(self, fen: str) -> Analysis:
        board = chess.Board(fen)
        if outcome := board.outcome():
            return Analysis((), (), 0.0 if outcome.winner is None else -MATE_PAWNS)
        failures = (chess.engine.EngineError, concurrent.futures.CancelledError, TimeoutError, EngineError, OSError)
        problem: Exception | None = None
        for _ in range(ATTEMPTS):
            engine = self._idle.get()
            try:
                engine = engine or start_engine(self._path, self._config.timeout_s)
                analysis = self._watched(engine, board)
                self._idle.put(engine)
                return analysis
            except failures as error:
                problem = error
                if engine is not None:
                    _end(engine)
                self._idle.put(None)
        raise EngineError(
            f"{self._path} failed {ATTEMPTS} times on {fen!r}: {type(problem).__name__}: {problem}"
        ) from problem

    def _watched(self, engine: chess.engine.SimpleEngine, board: chess.Board) -> Analysis:
        """One search. A node limit has no clock, so a stopped process would be waited for without end: it is killed."""
        watchdog = threading.Timer(self._config.timeout_s, _kill, (engine,))
        watchdog.start()
        try:
            limits = {"nodes": self._config.nodes, "multipv": self._config.multipv, "depth": self._depth}
            return search(engine, board, **limits)
        finally:
            watchdog.cancel()


def _open_cache(path: str | None) -> sqlite3.Connection:
    try:
        cache = sqlite3.connect(path or ":memory:", check_same_thread=False)
        cache.execute("CREATE TABLE IF NOT EXISTS analyses (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID")
    except sqlite3.Error as error:
        raise EngineError(
            f"task.engine.cache {path!r}: {error}; expected an SQLite file, or a new name, in a folder that exists "
            "(null keeps analyses in memory)"
        ) from error
    return cache


def _kill(engine: chess.engine.SimpleEngine) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(engine.transport.get_pid(), signal.SIGKILL)


def _end(engine: chess.engine.SimpleEngine) -> None:
    """Closes without waiting for a process that may hang: kills it first."""
    _kill(engine)
    engine.close()
