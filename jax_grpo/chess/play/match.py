"""A match of the model's UCI engine against Stockfish at a fixed low level, or against random moves; games are whole.

    python -m jax_grpo.match --weights W --games 20 --level 0 --pgn match.pgn --json match.json

Each random opening is played twice, colours exchanged. Both sides are ordinary engine processes (`chess.engine`).
"""

import argparse
import contextlib
import functools
import json
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import chess
import chess.engine
import chess.pgn
import chess.svg

from jax_grpo.chess import games
from jax_grpo.chess.games import ILLEGAL, Game, Player, random_move
from jax_grpo.chess.play import arena
from jax_grpo.chess.play.arena import HELD, OPENING_PLIES, add_games, counts, ends, paired_game
from jax_grpo.chess.play.ratings import elo_of_games
from jax_grpo.chess.play.uci import FALLBACK, add_model_options
from jax_grpo.chess.style import find_style
from jax_grpo.chess.tasks.engine import EngineError, find_engine, start_engine
from jax_grpo.config.files import require_weights
from jax_grpo.config.loading import ConfigError
from jax_grpo.system.progress import progress_bar
from jax_grpo.system.whole_files import require_new, write_record

# Options of a match over UCI that one of many games at once does not have.
ALONE = ("opponent", "level", "elo", "nodes", "picture", "tokenizer", "prompt_style")
START_S = 300.0  # seconds an engine may take to start and compile


class MatchError(RuntimeError):
    """An engine failed or an option does not fit it; names what, and what was expected."""


class ModelProcess:
    """The model's engine as a player, with the `seconds` that its moves took together."""

    def __init__(self, engine: chess.engine.SimpleEngine):
        self._engine, self.seconds = engine, 0.0

    def __call__(self, games: Sequence[Game]) -> list[str]:
        """Raises MatchError: the process ended, or answered no move."""
        return list(map(self._move, games))

    def _move(self, game: Game) -> str:
        started = time.perf_counter()
        try:
            limit, info = chess.engine.Limit(nodes=1), chess.engine.INFO_ALL
            result = self._engine.play(game.board, limit, game=game, info=info)
        except chess.engine.EngineTerminatedError as error:
            raise MatchError(f"the model's engine ended in {game.board.fen()!r}: {error}") from error
        except chess.engine.EngineError:  # python-chess's, for a move that its board refuses
            return ""
        self.seconds += time.perf_counter() - started
        text = result.info.get("string", "")
        if text.startswith(FALLBACK):
            game.illegal[len(game.board.move_stack)] = json.loads(text.removeprefix(FALLBACK))["written"]
        return _answered(result, game, "the model")


def _answered(result: chess.engine.PlayResult, game: Game, side: str) -> str:
    if result.move is None:
        raise MatchError(f"no move from {side}: {game.board.fen()}")
    return result.move.uci()


@contextlib.contextmanager
def stockfish(path: str | None, level: int, elo: int | None, nodes: int) -> Iterator[tuple[str, Player[Game]]]:
    """(name, player) of a Stockfish held to a `Skill Level`, or to a `UCI_Elo` where given.

    Raises:
        MatchError: the level or Elo is outside what this Stockfish offers.
        EngineError: no Stockfish.
    """
    with start_engine(find_engine(path, "--engine")) as engine:
        name, value = ("Skill Level", level) if elo is None else ("UCI_Elo", elo)
        option, software = engine.options.get(name), engine.id.get("name", "unknown")
        if option is None or not (option.min or 0) <= value <= (option.max or 0):
            bounds = f"{option.min} to {option.max}" if option else "no such option"
            raise MatchError(f"{'--level' if elo is None else '--elo'} {value}: {software} offers {bounds}")
        engine.configure({name: value} | ({} if elo is None else {"UCI_LimitStrength": True}))
        described, limit = f"{software}, {name} {value}, {nodes} nodes", chess.engine.Limit(nodes=nodes)
        move = lambda game: _answered(engine.play(game.board, limit, game=game), game, "the opponent")  # noqa: E731
        yield described, lambda games: list(map(move, games))


def run(args: argparse.Namespace, command: list[str]) -> dict[str, Any]:
    """Plays the match and writes its files after every game, so that an interrupted one keeps its games."""
    style = args.prompt_style or find_style(args.weights)
    model = ["--weights", args.weights, "--prompt-style", style]
    model += ["--tokenizer", args.tokenizer] if args.tokenizer else []
    settings = {"Temperature": str(args.temperature), "Seed": args.seed}
    rng = random.Random(f"mover/{args.seed}")
    random_mover = "random mover", lambda games: [random_move(game.board, rng) for game in games]
    opponents = {
        "stockfish": stockfish(args.engine, args.level, args.elo, args.nodes),
        "random": contextlib.nullcontext(random_mover),
    }
    with (
        opponents[args.opponent] as (name, opponent),
        chess.engine.SimpleEngine.popen_uci([sys.executable, "-m", "jax_grpo.uci", *model], timeout=START_S) as engine,
        progress_bar() as bar,
    ):
        engine.configure(settings)
        engine.ping()  # compiles
        task = bar.add_task("games", total=args.games)
        say = functools.partial(bar.console.print, highlight=False, soft_wrap=True, markup=False)
        say(f"{args.weights} against {name}, {args.games} games")
        record = arena.begun(command, "jax", "flax", "chess") | {
            "model": args.weights,
            "opponent": name,
            "model_options": settings | {"prompt_style": style},
            "opening_plies": OPENING_PLIES,
        }
        model, played = ModelProcess(engine), list[Game]()
        for number in range(args.games):
            game = paired_game(args.seed, number)
            games.play([game], model, opponent)
            played.append(game)
            record |= {"games": len(played), **summary(played, model.seconds)}
            colour, score = "White" if game.colour else "Black", _score_line(record)
            say(
                f"game {len(played)}: {colour}, {game.score:g} by {game.ended}, {len(game.board.move_stack)} half-moves, "
                f"{_fallbacks(game)} fallbacks of {game.moves} moves; {score}"
            )
            bar.update(task, completed=len(played), description=score)
            save(record, played, args)
    return record


def _score_line(results: Mapping[str, Any]) -> str:
    return f"+{results['wins']} ={results['draws']} -{results['losses']}"


def _fallbacks(game: Game) -> int:
    """How many of the model's moves it had not written."""
    return len(game.illegal) - (game.ended == ILLEGAL)


def summary(played: Sequence[Game], seconds: float) -> dict[str, Any]:
    """Scores of all games and of each colour, Elo with its interval, fallbacks, endings and time; JSON values."""
    totals = counts(played)
    elo = elo_of_games(**totals)
    moves, fallbacks = sum(game.moves for game in played), sum(map(_fallbacks, played))
    return {
        **totals,
        "as_white": counts([game for game in played if game.colour]),
        "as_black": counts([game for game in played if not game.colour]),
        **elo._asdict(),
        "verdict": str(elo),
        "model_moves": moves,
        "fallbacks": fallbacks,
        "fallback_rate": fallbacks / max(moves, 1),
        "illegal_moves_on_the_board": sum(game.ended == ILLEGAL for game in played),
        **ends(played),
        "milliseconds_a_model_move": 1000 * seconds / max(moves, 1),
    }


def save(record: Mapping[str, Any], played: Sequence[Game], args: argparse.Namespace) -> None:
    """Writes the record, adds the last game to the PGN (begun anew with the first), and draws the model's best game so far."""
    if args.json:
        write_record(args.json, record)
    if args.pgn:
        add_games(args.pgn, [to_pgn(played[-1], record, len(played))], begins=len(played) == 1)
    if args.picture:
        best = max(played, key=lambda game: (game.score, len(game.board.move_stack)))
        board = best.board
        check = board.king(board.turn) if board.is_check() else None
        last = board.move_stack[-1] if board.move_stack else None
        svg = chess.svg.board(board, orientation=bool(best.colour), lastmove=last, check=check, size=400)
        args.picture.write_text(svg, encoding="utf-8")


def to_pgn(game: Game, record: Mapping[str, Any], number: int) -> chess.pgn.Game:
    """The game with headers, and a comment where the model's own move was not legal."""
    pgn = arena.to_pgn(game, "jax_grpo", record["opponent"], number)
    pgn.headers["Opening"] = f"{record['opening_plies']} random half-moves"
    for ply, node in enumerate(pgn.mainline()):
        if ply in game.illegal:
            node.comment = f"fallback: the model wrote {game.illegal[ply]!a}"
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
    try:
        for option, path in (("--pgn", args.pgn), ("--json", args.json), ("--picture", args.picture)):
            if path is not None:
                require_new(path, option)
                path.parent.mkdir(parents=True, exist_ok=True)
        require_weights(args.weights)
        if args.against is not None:
            arena.run(args, argv)
            return
        record = run(args, argv)
    except (ConfigError, EngineError, FileExistsError, MatchError, chess.engine.EngineError, TimeoutError) as error:
        raise SystemExit(f"{error}") from error
    print(
        f"{record['games']} games: {_score_line(record)}; {record['verdict']}; "
        f"{record['fallbacks']} fallbacks in {record['model_moves']} moves; "
        f"{record['illegal_moves_on_the_board']} illegal moves on the board"
    )


if __name__ == "__main__":
    main()
