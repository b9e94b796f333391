"""The model as a UCI engine that any chess program can load: `python -m jax_grpo.uci --weights W`.

One half-move's choice is one forward pass, so limits (time, nodes, depth) have nothing to limit and are ignored; an infinite
search holds its answer until `stop`, as the protocol asks. JAX is imported and programs are compiled at `isready`, and again when
an option changes after it; the disk keeps them for the next session. Nothing but UCI reaches stdout. The protocol: https://backscattering.de/chess/uci/
"""

import argparse
import contextlib
import functools
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import chess

import jax_grpo
from jax_grpo.config.files import require_weights
from jax_grpo.config.loading import ConfigError

if TYPE_CHECKING:
    from jax_grpo.chess.play.player import Player
    from jax_grpo.rollout.sampling import Sampling

COMMANDS = {"uci", "isready", "setoption", "ucinewgame", "position", "go", "stop", "ponderhit", "quit"}
LIMITS = {"wtime", "btime", "winc", "binc", "movestogo", "depth", "nodes", "mate", "movetime", "infinite", "ponder"}
FALLBACK = "fallback "  # begins the line about a move that the model did not write; JSON follows, see `Engine._answer`
OPTIONS = {  # name: value at first, its bounds; UCI has no type of fractions, which are texts to it
    "Temperature": (0.0, 0, 100),
    "TopK": (0, 0, 1000),
    "TopP": (1.0, 1e-6, 1),
    "Seed": (0, 0, 2**31 - 1),
    "MultiPV": (1, 1, 218),
}


class Engine:
    """State of one UCI session: `load` makes the player, when first needed; `write` sends a line to the chess program."""

    def __init__(self, load: Callable[[], "Player"], write: Callable[[str], None]):
        self._player, self._write = functools.cache(load), write
        self._options: dict[str, float] = {name: default for name, (default, *_) in OPTIONS.items()}
        self._ready = False  # programs are compiled for the options
        self._board: chess.Board | None = chess.Board()
        self._held: str | None = None  # the answer of an infinite search, until `stop`
        self._game = self._moves = self._fallbacks = 0

    def run(self, lines: Iterable[str]) -> None:
        """Answers until `quit` or the end of input. Leading unknown words are skipped, as the protocol asks."""
        for line in lines:
            words = line.split()
            while words and words[0] not in COMMANDS:
                words.pop(0)
            if words[:1] == ["quit"]:
                break
            if words:
                getattr(self, f"_{words[0]}")(words[1:])
        self._write(f"info string {self._moves} moves, of which {self._fallbacks} fallbacks")

    def _uci(self, words: list[str]) -> None:
        self._write(f"id name jax_grpo {jax_grpo.__version__}")
        self._write("id author the jax_grpo authors")
        for name, (first, low, high) in OPTIONS.items():
            kind = (
                f"spin default {first} min {low} max {high}" if isinstance(first, int) else f"string default {first:g}"
            )
            self._write(f"option name {name} type {kind}")
        self._write("uciok")

    def _isready(self, words: list[str]) -> None:
        self._compile()
        self._write("readyok")

    def _compile(self) -> None:
        self._player().compile(self._sampling())
        self._ready = True

    def _sampling(self) -> "Sampling":
        from jax_grpo.rollout.sampling import Sampling

        return Sampling(self._options["Temperature"], top_k=int(self._options["TopK"]), top_p=self._options["TopP"])

    def _setoption(self, words: list[str]) -> None:
        name, _, value = (part.strip() for part in " ".join(words).removeprefix("name ").partition(" value "))
        option = {known.lower(): known for known in OPTIONS}.get(name.lower())
        if option is None:
            self._write(f"info string no option {name!r}; there are {', '.join(OPTIONS)}")
            return
        first, low, high = OPTIONS[option]
        try:
            number = type(first)(value)
            if not low <= number <= high:  # also refuses NaN
                raise ValueError(f"expected {low} to {high}")
        except ValueError as error:
            self._write(f"info string option {option} stays {self._options[option]}: {value!r}: {error}")
        else:
            changed, self._options[option] = number != self._options[option], number
            if self._ready and changed:  # not at the first move, on the clock
                self._compile()

    def _ucinewgame(self, words: list[str]) -> None:
        self._game += 1
        self._board = chess.Board()

    def _position(self, words: list[str]) -> None:
        """`startpos` or `fen F`, then `moves ...`. For what cannot be set up there is a line of info, and `go` answers no move."""
        until = words.index("moves") if "moves" in words else len(words)
        setup, moves = words[:until], words[until + 1 :]
        self._board = None
        try:
            if setup[:1] not in (["startpos"], ["fen"]):
                raise ValueError("expected startpos or fen")
            board = chess.Board() if setup[0] == "startpos" else chess.Board(" ".join(setup[1:]))
            if not board.is_valid():
                raise ValueError(f"not a legal position: {board.status()!s}")
            for move in moves:
                board.push_uci(move.lower())  # some write promotions in capitals
            if not board.is_valid():  # after a null move
                raise ValueError(f"not a legal position: {board.status()!s}")
            self._board = board
        except ValueError as error:
            self._write(f"info string position not understood: {error}")

    def _go(self, words: list[str]) -> None:
        self._stop([])
        self._held = self._answer(words)
        if not {"infinite", "ponder"} & set(words):
            self._stop([])

    def _answer(self, words: list[str]) -> str:
        board = self._board
        among = list(board.legal_moves) if board is not None and not board.is_game_over() else []
        if board is None or not among:
            return "bestmove (none)"
        if "searchmoves" in words:
            among = self._searched(board, words[words.index("searchmoves") + 1 :]) or among
        player, sampling, seed = self._player(), self._sampling(), int(self._options["Seed"])
        started = time.perf_counter()
        choice = player.choose(board, sampling, seed=seed, game=self._game, among=among)
        lines = [choice.move]
        if (count := min(int(self._options["MultiPV"]), len(among))) > 1:
            logps = dict(zip(among, player.move_logps(board, among).tolist(), strict=True))
            lines += sorted((move for move in among if move != choice.move), key=lambda move: -logps[move])[: count - 1]
            shares = {move.uci(): float(f"{math.exp(logps[move]):.3g}") for move in lines}
            self._write(f"info string probabilities {json.dumps(shares)}")
        milliseconds, move = round(1000 * (time.perf_counter() - started)), choice.move.uci()
        self._moves += 1
        self._fallbacks += choice.logp is not None
        for place, line in enumerate(lines, 1):
            multipv = f" multipv {place}" if len(lines) > 1 else ""
            pawns = choice.pawns.get(line.uci())
            score = "" if pawns is None else f" score cp {round(100 * pawns)}"
            self._write(f"info depth 1{multipv}{score} time {milliseconds} nodes 1 pv {line.uci()}")
        if choice.logp is None:
            self._write(f"info string policy, {self._fallbacks} fallbacks of {self._moves}")
        else:
            fallback = {"written": " ".join(choice.written.split())[:40], "played": move, "logp": round(choice.logp, 3)}
            counts = {"fallbacks": self._fallbacks, "moves": self._moves}
            self._write(f"info string {FALLBACK}{json.dumps(fallback | counts)}")
        return f"bestmove {move}"

    def _searched(self, board: chess.Board, words: list[str]) -> list[chess.Move]:
        """The moves that `searchmoves` names: castling also as king takes rook, promotions also in capitals."""
        moves = []
        for word in itertools.takewhile(lambda word: word not in LIMITS, words):
            try:
                moves.append(board.parse_uci(word.lower()))
            except ValueError as error:
                self._write(f"info string searchmoves: {error}")
        return list(dict.fromkeys(filter(None, moves)))

    def _stop(self, words: list[str]) -> None:
        if self._held is not None:
            self._write(self._held)
            self._held = None

    _ponderhit = _stop


def _claim_stdout() -> Callable[[str], None]:
    """A writer of lines to the real stdout; whatever else is printed, by any library, goes to stderr from here on."""
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8", buffering=1, newline="\n")
    sys.stdout.flush()
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return lambda line: print(line, file=out, flush=True)


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Which model plays and how it is prompted, for this command and for `match`."""
    parser.add_argument(
        "--weights", default="packaged:rook-small", help="packaged:NAME, run folder, Hugging Face folder, checkpoint"
    )
    parser.add_argument("--tokenizer", help="chess, gpt2 or a folder; default: the weights' own")
    how = (
        "one move, the whole RookWorld row, or one move from the mover's own side; default: as the weights were taught"
    )
    parser.add_argument("--prompt-style", choices=("best_move", "full", "own_side"), help=how)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m jax_grpo.uci", description=(__doc__ or "").splitlines()[0])
    add_model_options(parser)
    args = parser.parse_args(argv)

    def load() -> "Player":
        from jax_grpo.chess.play.player import Player
        from jax_grpo.config import Config
        from jax_grpo.run.files import CheckpointError
        from jax_grpo.system.compilation import keep_programs

        keep_programs(Config.model_fields["compilation_cache"].default)
        try:
            return Player(args.weights, args.tokenizer, args.prompt_style)
        except (CheckpointError, ValueError) as error:  # the weights' or their tokenizer's, in words for people
            raise ConfigError(str(error)) from error

    try:
        require_weights(args.weights)
        lines = (line.decode("utf-8", errors="replace") for line in sys.stdin.buffer)
        with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
            Engine(load, _claim_stdout()).run(lines)
    except ConfigError as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
