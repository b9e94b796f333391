"""A match of the model's UCI engine against Stockfish at a fixed low level, or against random moves; games are whole.

    python -m jax_grpo.match --weights W --games 20 --level 0 --pgn match.pgn --json match.json

Each random opening is played twice, colours exchanged. Both sides are ordinary engine processes (`chess.engine`).
"""

import argparse
import contextlib
import functools
import random
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import chess
import chess.engine
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

import jax_grpo
from jax_grpo.config_files import require_weights
from jax_grpo.config_loading import ConfigError
from jax_grpo.data.arbiter import ending
from jax_grpo.match_record import Game, save, summary
from jax_grpo.tasks.engine import EngineError, find_engine

START_S = 300.0  # seconds an engine may take to start and compile
FALLBACK = re.compile(r"fallback \d+ of \d+: the model wrote (.*); \S+ is its likeliest")

Mover = Callable[[chess.Board, object], chess.Move | None]  # the object changes from game to game


class MatchError(RuntimeError):
    """An engine failed or an option does not fit it; names what, and what was expected."""


def random_opening(seed: int, number: int, plies: int) -> chess.Board:
    """A position after `plies` random half-moves from the start, the game not over; a function of its arguments."""
    rng = random.Random(f"opening/{seed}/{number}")
    while True:
        board = chess.Board()
        while len(board.move_stack) < plies and any(board.legal_moves):
            board.push(rng.choice(sorted(board.legal_moves, key=chess.Move.uci)))
        if len(board.move_stack) == plies and not board.is_game_over():
            return board


def play(engine: chess.engine.SimpleEngine, opponent: Mover, opening: chess.Board, *, model_is_white: bool) -> Game:
    """One game from the opening to its end by the rules, draws claimed at once (fifty moves, threefold repetition).

    Raises:
        MatchError: an engine's process ended or answered no move.
    """
    board, game = opening.copy(), object()
    fallbacks: dict[int, str] = {}
    moves, seconds = 0, 0.0
    while (kind := ending(board, "claimed")) is None:
        if board.turn != model_is_white:
            move = opponent(board, game)
        else:
            started = time.perf_counter()
            try:
                result = engine.play(board, chess.engine.Limit(nodes=1), game=game, info=chess.engine.INFO_ALL)
            except chess.engine.EngineTerminatedError as error:
                raise MatchError(f"the model's engine ended in {board.fen()!r}: {error}") from error
            except chess.engine.EngineError:  # python-chess's, for a move that its board refuses
                return Game(board, model_is_white, 0.0, "illegal move", fallbacks, moves, seconds)
            seconds += time.perf_counter() - started
            moves += 1
            move = result.move
            if found := FALLBACK.match(result.info.get("string", "")):
                fallbacks[board.ply()] = found[1]
        if move is None:
            raise MatchError(
                f"no move from {'the model' if board.turn == model_is_white else 'the opponent'}: {board.fen()}"
            )
        board.push(move)
    mated = kind == "checkmate"
    score = 0.5 if not mated else float(board.turn != model_is_white)
    return Game(board, model_is_white, score, kind, fallbacks, moves, seconds)


@contextlib.contextmanager
def stockfish(path: str | None, level: int, elo: int | None, nodes: int) -> Iterator[tuple[str, Mover]]:
    """(name, mover) of a Stockfish held to a `Skill Level`, or to a `UCI_Elo` where given.

    Raises:
        MatchError: the level or Elo is outside what this Stockfish offers.
        EngineError: no Stockfish.
    """
    with chess.engine.SimpleEngine.popen_uci(find_engine(path, "--engine")) as engine:
        name, value = ("Skill Level", level) if elo is None else ("UCI_Elo", elo)
        option = engine.options.get(name)
        if option is None or not (option.min or 0) <= value <= (option.max or 0):
            bounds = f"{option.min} to {option.max}" if option else "no such option"
            raise MatchError(f"{'--level' if elo is None else '--elo'} {value}: {engine.id['name']} offers {bounds}")
        engine.configure({"Threads": 1, "Hash": 16, name: value} | ({} if elo is None else {"UCI_LimitStrength": True}))

        def move(board: chess.Board, game: object) -> chess.Move | None:
            return engine.play(board, chess.engine.Limit(nodes=nodes), game=game).move

        yield f"{engine.id['name']}, {name} {value}, {nodes} nodes", move


@contextlib.contextmanager
def random_mover(seed: int) -> Iterator[tuple[str, Mover]]:
    """(name, mover) of uniform legal moves."""
    rng = random.Random(f"mover/{seed}")
    yield "random mover", lambda board, game: rng.choice(sorted(board.legal_moves, key=chess.Move.uci))


def run(args: argparse.Namespace, command: list[str]) -> dict[str, Any]:
    """Plays the match and writes what was asked for after every game, so that an interrupted one keeps its games."""
    engine_command = [
        sys.executable,
        "-m",
        "jax_grpo.uci",
        "--weights",
        args.weights,
        "--prompt-style",
        args.prompt_style,
    ]
    engine_command += ["--tokenizer", args.tokenizer] if args.tokenizer else []
    settings = {"Temperature": str(args.temperature), "TopK": args.top_k, "TopP": str(args.top_p), "Seed": args.seed}
    against = {
        "stockfish": lambda: stockfish(args.engine, args.level, args.elo, args.nodes),
        "random": lambda: random_mover(args.seed),
    }
    games: list[Game] = []
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with (
        against[args.opponent]() as (opponent, mover),
        chess.engine.SimpleEngine.popen_uci(engine_command, timeout=START_S) as engine,
        Progress(*columns, disable=not sys.stdout.isatty()) as bar,
    ):
        engine.configure(settings)
        engine.ping()  # compiles
        task = bar.add_task("games", total=args.games)
        say = functools.partial(bar.console.print, highlight=False, soft_wrap=True, markup=False)
        say(f"{args.weights} against {opponent}, {args.games} games")
        record: dict[str, Any] = {}
        for number in range(args.games):
            opening = random_opening(args.seed, number // 2, args.opening_plies)
            games.append(play(engine, mover, opening, model_is_white=number % 2 == 0))
            last = games[-1]
            found = summary(games)
            colour = "White" if last.model_is_white else "Black"
            told = f"+{found['wins']} ={found['draws']} -{found['losses']}"
            say(
                f"game {number + 1}: {colour}, {last.score:g} by {last.ending}, {len(last.board.move_stack)} half-moves, "
                f"{len(last.fallbacks)} fallbacks of {last.model_moves} moves; {told}"
            )
            bar.update(task, completed=number + 1, description=told)
            record = {
                "command": shlex.join(["python", "-m", "jax_grpo.match", *command]),
                "model": args.weights,
                "opponent": opponent,
                "model_options": settings | {"prompt_style": args.prompt_style},
                "opening_plies": args.opening_plies,
                "games": len(games),
                **found,
                "versions": {"jax_grpo": jax_grpo.__version__}
                | {name: metadata.version(name) for name in ("jax", "flax", "chess")},
            }
            save(record, games, opponent, args.opening_plies, pgn=args.pgn, json_file=args.json, picture=args.picture)
    return record


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m jax_grpo.match", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--weights", default="packaged:rook-small", help="packaged:NAME, run folder, Hugging Face folder, checkpoint"
    )
    parser.add_argument("--tokenizer", help="chess, gpt2 or a folder; default: the weights' own")
    parser.add_argument("--prompt-style", choices=("best_move", "full"), default="best_move")
    parser.add_argument("--games", type=int, default=20, help="(20)")
    parser.add_argument("--opponent", choices=("stockfish", "random"), default="stockfish")
    parser.add_argument("--level", type=int, default=0, help="Stockfish's Skill Level, 0 to 20 (0)")
    parser.add_argument(
        "--elo", type=int, help="Stockfish's UCI_Elo instead; the least differs by version (1320 or 1350)"
    )
    parser.add_argument("--nodes", type=int, default=1000, help="Stockfish's search nodes a move (1000)")
    parser.add_argument("--engine", help="path of Stockfish; default: on the PATH, or in /usr/games")
    parser.add_argument("--temperature", type=float, default=0.0, help="of the model's moves; 0: greedy (0)")
    parser.add_argument("--top-k", type=int, default=0, help="0: off (0)")
    parser.add_argument("--top-p", type=float, default=1.0, help="1: off (1)")
    parser.add_argument("--opening-plies", type=int, default=4, help="random half-moves before each pair of games (4)")
    parser.add_argument("--seed", type=int, default=0, help="of openings, sampling and the random mover (0)")
    parser.add_argument("--pgn", type=Path, help="write the games here")
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--picture", type=Path, help="write the model's best game's final position here, as SVG")
    return parser


def main(argv: list[str] | None = None) -> None:
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    args = parser.parse_args(argv)
    if args.games < 1:
        parser.error(f"--games {args.games}: expected 1 or more")
    for path in filter(None, (args.pgn, args.json, args.picture)):
        path.parent.mkdir(parents=True, exist_ok=True)
    try:
        require_weights(args.weights)
        record = run(args, argv)
    except (ConfigError, EngineError, MatchError, chess.engine.EngineError, TimeoutError) as error:
        raise SystemExit(f"{error}") from error
    print(
        f"{record['games']} games: +{record['wins']} ={record['draws']} -{record['losses']}; {record['verdict']}; "
        f"{record['fallbacks']} fallbacks in {record['model_moves']} moves; "
        f"{record['illegal_moves_on_the_board']} illegal moves on the board"
    )


if __name__ == "__main__":
    main()
