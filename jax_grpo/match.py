"""A match of the model's UCI engine against Stockfish at a fixed low level, or against random moves; games are whole.

    python -m jax_grpo.match --weights W --games 20 --level 0 --pgn match.pgn --json match.json

Each random opening is played twice, colours exchanged. Both sides are ordinary engine processes (`chess.engine`).
"""

import argparse
import contextlib
import functools
import json
import random
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import chess
import chess.engine
import chess.pgn
import chess.svg
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

import jax_grpo
from jax_grpo.config_files import require_weights
from jax_grpo.config_loading import ConfigError
from jax_grpo.data.arbiter import ending
from jax_grpo.elo import describe, estimate
from jax_grpo.tasks.engine import EngineError, find_engine

START_S = 300.0  # seconds an engine may take to start and compile
RESULTS = {1.0: "1-0", 0.5: "1/2-1/2", 0.0: "0-1"}  # by White's score
FALLBACK = re.compile(r"fallback \d+ of \d+: the model wrote (.*); \S+ is its likeliest")

Mover = Callable[[chess.Board, object], chess.Move | None]  # the object changes from game to game


class MatchError(RuntimeError):
    """An engine failed or an option does not fit it; names what, and what was expected."""


class Game(NamedTuple):
    """One finished game.

    Attributes:
        board: final position with all moves, the opening's included.
        model_is_white: colour of the model.
        score: of the model: 1, 0.5 or 0.
        ending: how it ended (`data.arbiter.ENDINGS`), or `illegal move`.
        fallbacks: by half-move number, what the model had written there instead of a legal move.
        model_moves: number of the model's moves.
        seconds: of the model's moves together.
    """

    board: chess.Board
    model_is_white: bool
    score: float
    ending: str
    fallbacks: dict[int, str]
    model_moves: int
    seconds: float


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


def to_pgn(game: Game, number: int, opponent: str, opening_plies: int) -> chess.pgn.Game:
    """The game with headers, and a comment where the model's own move was not legal."""
    pgn = chess.pgn.Game.from_board(game.board)
    white = float(game.score if game.model_is_white else 1 - game.score)
    sides = ["jax_grpo", opponent] if game.model_is_white else [opponent, "jax_grpo"]
    pgn.headers.update({"Event": "jax_grpo match", "Site": "?", "Round": str(number), "Result": RESULTS[white]})
    pgn.headers["White"], pgn.headers["Black"] = sides
    pgn.headers["Termination"] = game.ending
    pgn.headers["Opening"] = f"{opening_plies} random half-moves"
    for ply, node in enumerate(pgn.mainline()):
        if ply in game.fallbacks:
            node.comment = f"fallback: the model wrote {game.fallbacks[ply]}"
    return pgn


def summary(games: list[Game]) -> dict[str, Any]:
    """Scores of all games and of each colour, Elo with its interval, fallbacks, endings and time; JSON values."""

    def scores(part: list[Game]) -> dict[str, int]:
        return {name: sum(g.score == s for g in part) for name, s in (("wins", 1.0), ("draws", 0.5), ("losses", 0.0))}

    totals = scores(games)
    found = estimate(**totals)
    moves = sum(game.model_moves for game in games)
    fallbacks = sum(len(game.fallbacks) for game in games)
    kinds = [game.ending for game in games]
    return {
        **totals,
        "as_white": scores([game for game in games if game.model_is_white]),
        "as_black": scores([game for game in games if not game.model_is_white]),
        **found._asdict(),
        "verdict": describe(found),
        "model_moves": moves,
        "fallbacks": fallbacks,
        "fallback_rate": fallbacks / max(moves, 1),
        "illegal_moves_on_the_board": kinds.count("illegal move"),
        "endings": {kind: kinds.count(kind) for kind in sorted(set(kinds))},
        "half_moves_a_game": sum(len(game.board.move_stack) for game in games) / len(games),
        "milliseconds_a_model_move": 1000 * sum(game.seconds for game in games) / max(moves, 1),
    }


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
            _save(args, record, games, opponent)
    return record


def _save(args: argparse.Namespace, record: dict[str, Any], games: list[Game], opponent: str) -> None:
    if args.json:
        args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if args.pgn:
        with args.pgn.open("w" if len(games) == 1 else "a", encoding="utf-8") as file:
            print(to_pgn(games[-1], len(games), opponent, args.opening_plies), file=file, end="\n\n")
    if args.picture:
        best = max(games, key=lambda game: (game.score, len(game.board.move_stack)))
        board = best.board
        check = board.king(board.turn) if board.is_check() else None
        last = board.move_stack[-1] if board.move_stack else None
        svg = chess.svg.board(board, orientation=best.model_is_white, lastmove=last, check=check, size=400)
        args.picture.write_text(svg, encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m jax_grpo.match", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--weights", default="packaged:rook-small", help="packaged:NAME, Hugging Face folder or checkpoint"
    )
    parser.add_argument("--tokenizer", help="chess, gpt2 or a folder; default: the weights' own, else gpt2")
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
