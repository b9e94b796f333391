"""A match of the model's UCI engine against Stockfish at a fixed low level, or against random moves; games are whole.

    python -m jax_grpo.match --weights W --games 20 --level 0 --pgn match.pgn --json match.json

Each random opening is played twice, colours exchanged. Both sides are ordinary engine processes (`chess.engine`).
"""

import argparse
import contextlib
import functools
import json
import random
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import chess
import chess.engine
import chess.pgn
import chess.svg

import jax_grpo
from jax_grpo.config.files import require_weights
from jax_grpo.config.loading import ConfigError
from jax_grpo.evaluate.statistics import elo_estimate
from jax_grpo.model.named import find_style
from jax_grpo.play import tournament
from jax_grpo.play.arena import HELD, counts, ends, random_opening, with_headers
from jax_grpo.play.uci import FALLBACK, add_model_options
from jax_grpo.positions.position import ending
from jax_grpo.positions.random_play import random_move
from jax_grpo.system.progress import progress_bar
from jax_grpo.tasks.engine import EngineError, find_engine

# Options of a match over UCI that one of many games at once does not have.
ALONE = ("opponent", "level", "elo", "nodes", "top_k", "top_p", "picture", "tokenizer", "prompt_style")
START_S = 300.0  # seconds an engine may take to start and compile

Mover = Callable[[chess.Board, object], chess.Move | None]  # the object changes from game to game


class MatchError(RuntimeError):
    """An engine failed or an option does not fit it; names what, and what was expected."""


class Game(NamedTuple):
    """One finished game."""

    board: chess.Board  # final position with all moves, the opening's included
    model_is_white: bool
    score: float  # of the model: 1, 0.5 or 0
    ending: str  # how it ended (`positions.position.ENDINGS`), or `illegal move`
    fallbacks: dict[int, str]  # by half-move number, what the model had written there instead of a legal move
    model_moves: int
    seconds: float  # of the model's moves together


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
            move, info = result.move, result.info.get("string", "")
            if info.startswith(FALLBACK):
                fallbacks[board.ply()] = json.loads(info.removeprefix(FALLBACK))["written"]
        if move is None:
            side = "the model" if board.turn == model_is_white else "the opponent"
            raise MatchError(f"no move from {side}: {board.fen()}")
        board.push(move)
    score = float(board.turn != model_is_white) if kind == "checkmate" else 0.5
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
        option, software, limit = engine.options.get(name), engine.id["name"], chess.engine.Limit(nodes=nodes)
        if option is None or not (option.min or 0) <= value <= (option.max or 0):
            bounds = f"{option.min} to {option.max}" if option else "no such option"
            raise MatchError(f"{'--level' if elo is None else '--elo'} {value}: {software} offers {bounds}")
        engine.configure({"Threads": 1, "Hash": 16, name: value} | ({} if elo is None else {"UCI_LimitStrength": True}))
        described = f"{software}, {name} {value}, {nodes} nodes"
        yield described, lambda board, game: engine.play(board, limit, game=game).move


@contextlib.contextmanager
def random_mover(seed: int) -> Iterator[tuple[str, Mover]]:
    """(name, mover) of uniform legal moves."""
    rng = random.Random(f"mover/{seed}")
    yield "random mover", lambda board, game: random_move(board, rng)


def run(args: argparse.Namespace, command: list[str]) -> dict[str, Any]:
    """Plays the match and writes what was asked for after every game, so that an interrupted one keeps its games."""
    style = args.prompt_style or find_style(args.weights)
    model = ["--weights", args.weights, "--prompt-style", style]
    model += ["--tokenizer", args.tokenizer] if args.tokenizer else []
    settings = {"Temperature": str(args.temperature), "TopK": args.top_k, "TopP": str(args.top_p), "Seed": args.seed}
    movers = {"stockfish": stockfish(args.engine, args.level, args.elo, args.nodes), "random": random_mover(args.seed)}
    with (
        movers[args.opponent] as (name, mover),
        chess.engine.SimpleEngine.popen_uci([sys.executable, "-m", "jax_grpo.uci", *model], timeout=START_S) as engine,
        progress_bar() as bar,
    ):
        engine.configure(settings)
        engine.ping()  # compiles
        task = bar.add_task("games", total=args.games)
        say = functools.partial(bar.console.print, highlight=False, soft_wrap=True, markup=False)
        say(f"{args.weights} against {name}, {args.games} games")
        versions = {package: metadata.version(package) for package in ("jax", "flax", "chess")}
        record: dict[str, Any] = {
            "command": shlex.join(["python", "-m", "jax_grpo.match", *command]),
            "model": args.weights,
            "opponent": name,
            "model_options": settings | {"prompt_style": style},
            "opening_plies": args.opening_plies,
        }
        games: list[Game] = []
        for number in range(args.games):
            opening = random_opening(args.seed, number // 2, args.opening_plies)
            last = play(engine, mover, opening, model_is_white=number % 2 == 0)
            games.append(last)
            record |= {"games": len(games), **summary(games)}
            record["versions"] = {"jax_grpo": jax_grpo.__version__, **versions}
            colour, score = "White" if last.model_is_white else "Black", _score_line(record)
            say(
                f"game {len(games)}: {colour}, {last.score:g} by {last.ending}, {len(last.board.move_stack)} half-moves, "
                f"{len(last.fallbacks)} fallbacks of {last.model_moves} moves; {score}"
            )
            bar.update(task, completed=len(games), description=score)
            save(record, games, args)
    return record


def _score_line(results: Mapping[str, Any]) -> str:
    return f"+{results['wins']} ={results['draws']} -{results['losses']}"


def summary(games: Sequence[Game]) -> dict[str, Any]:
    """Scores of all games and of each colour, Elo with its interval, fallbacks, endings and time; JSON values."""
    totals = counts(game.score for game in games)
    elo = elo_estimate(**totals)
    moves = sum(game.model_moves for game in games)
    fallbacks = sum(len(game.fallbacks) for game in games)
    endings = [game.ending for game in games]
    return {
        **totals,
        "as_white": counts(game.score for game in games if game.model_is_white),
        "as_black": counts(game.score for game in games if not game.model_is_white),
        **elo._asdict(),
        "verdict": str(elo),
        "model_moves": moves,
        "fallbacks": fallbacks,
        "fallback_rate": fallbacks / max(moves, 1),
        "illegal_moves_on_the_board": endings.count("illegal move"),
        **ends(endings, (game.board for game in games)),
        "milliseconds_a_model_move": 1000 * sum(game.seconds for game in games) / max(moves, 1),
    }


def save(record: Mapping[str, Any], games: Sequence[Game], args: argparse.Namespace) -> None:
    """Writes the record, adds the last game to the PGN (begun anew with the first), and draws the model's best game so far."""
    if args.json:
        args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if args.pgn:
        with args.pgn.open("w" if len(games) == 1 else "a", encoding="utf-8") as file:
            print(to_pgn(games[-1], record, len(games)), file=file, end="\n\n")
    if args.picture:
        best = max(games, key=lambda game: (game.score, len(game.board.move_stack)))
        board = best.board
        check = board.king(board.turn) if board.is_check() else None
        last = board.move_stack[-1] if board.move_stack else None
        svg = chess.svg.board(board, orientation=best.model_is_white, lastmove=last, check=check, size=400)
        args.picture.write_text(svg, encoding="utf-8")


def to_pgn(game: Game, record: Mapping[str, Any], number: int) -> chess.pgn.Game:
    """The game with headers, and a comment where the model's own move was not legal."""
    sides = "jax_grpo", record["opponent"]
    pgn = with_headers(game.board, sides, game.model_is_white, game.score, game.ending, number)
    pgn.headers["Opening"] = f"{record['opening_plies']} random half-moves"
    for ply, node in enumerate(pgn.mainline()):
        if ply in game.fallbacks:
            node.comment = f"fallback: the model wrote {game.fallbacks[ply]!a}"
    return pgn


def main(argv: list[str] | None = None) -> None:
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="python -m jax_grpo.match", description=(__doc__ or "").splitlines()[0])
    add_model_options(parser)
    option = parser.add_argument
    option(
        "--against",
        metavar="WHO",
        help="weights, an anchor's name, `ladder`, or several with commas: many games at once",
    )
    option("--strict", action="store_true", help="with --against: an illegal move loses, none is replaced")
    option(
        "--adjudicate",
        type=float,
        metavar="PAWNS",
        help=f"with --against: so much material ahead for {HELD} half-moves wins, 9 for a queen; default: never",
    )
    option("--games", type=int, default=20, help="of each match; with --against an even number (20)")
    option("--opponent", choices=("stockfish", "random"), default="stockfish")
    option("--level", type=int, default=0, help="Stockfish's Skill Level, 0 to 20 (0)")
    option("--elo", type=int, help="Stockfish's UCI_Elo instead; the least differs by version (1320 or 1350)")
    option("--nodes", type=int, default=1000, help="Stockfish's search nodes a move (1000)")
    option("--engine", help="path of Stockfish; default: on the PATH, or in /usr/games")
    option("--temperature", type=float, default=0.0, help="of the model's moves; 0: greedy (0)")
    option("--top-k", type=int, default=0, help="0: off (0)")
    option("--top-p", type=float, default=1.0, help="1: off (1)")
    option("--opening-plies", type=int, default=4, help="random half-moves before each pair of games (4)")
    option("--seed", type=int, default=0, help="of openings, sampling and the random mover (0)")
    option("--pgn", type=Path, help="write the games here")
    option("--json", type=Path, help="write the result here")
    option("--picture", type=Path, help="write the model's best game's final position here, as SVG")
    args = parser.parse_args(argv)
    if args.games < 1:
        parser.error(f"--games {args.games}: expected 1 or more")
    of_the_other = ("strict", "adjudicate") if args.against is None else ALONE
    for name in of_the_other:
        if getattr(args, name) != parser.get_default(name):
            how = "needs" if args.against is None else "does nothing with"
            parser.error(f"--{name.replace('_', '-')} {how} --against")
    if args.adjudicate is not None and not args.adjudicate > 0:
        parser.error(f"--adjudicate {args.adjudicate:g}: expected pawns, more than 0")
    if args.against is not None and args.games % 2:
        parser.error(f"--games {args.games}: expected an even number, each opening is played twice")
    for path in filter(None, (args.pgn, args.json, args.picture)):
        path.parent.mkdir(parents=True, exist_ok=True)
    try:
        require_weights(args.weights)
        if args.against is not None:
            tournament.run(args, argv)
            return
        record = run(args, argv)
    except (ConfigError, EngineError, MatchError, chess.engine.EngineError, TimeoutError) as error:
        raise SystemExit(f"{error}") from error
    print(
        f"{record['games']} games: {_score_line(record)}; {record['verdict']}; "
        f"{record['fallbacks']} fallbacks in {record['model_moves']} moves; "
        f"{record['illegal_moves_on_the_board']} illegal moves on the board"
    )


if __name__ == "__main__":
    main()
