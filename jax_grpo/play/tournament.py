"""A model against others, by many games at once: before against after, or a ladder of players that everybody knows.

    python -m jax_grpo.match --weights runs/quickstart --against packaged:rook-small --games 400 --json match.json
    python -m jax_grpo.match --weights runs/quickstart --against ladder --games 100 --json ladder.json

An opponent is a model, or a name of `ANCHORS`. With several, everyone plays everyone and one rating is fitted to all games.
"""

import argparse
import contextlib
import itertools
import json
import random
import shlex
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import chess
from rich.console import Console
from rich.table import Table

import jax_grpo
from jax_grpo.config.files import require_weights
from jax_grpo.play.arena import Game, ModelSide, PlayerSide, Side, counts, ends, play_match, to_pgn
from jax_grpo.play.ratings import PairedElo, Rating, fit_ratings, paired_elo
from jax_grpo.system.progress import timed_parts
from jax_grpo.system.whole_files import written_whole
from jax_grpo.tasks.engine import find_engine
from jax_grpo.tasks.reference_players import Player, drawn, greedy_capture, skill_zero, two_ply, uniform

ANCHOR = "random"  # has the rating 0
SHARES = {"skill0-75": 0.75, "skill0-50": 0.5, "skill0-25": 0.25, "skill0": 0.0}  # of random moves among Stockfish's
ANCHORS = (ANCHOR, "capture", "two-ply", *SHARES)
MOST_HALF_MOVES = 300  # a game of so many is a draw
RECORDED = ("games", "temperature", "strict", "adjudicate", "opening_plies", "seed")  # options

Choose = Callable[[chess.Board, random.Random], str]


def _drawing(player: Player, random_share: float = 0.0) -> Choose:
    """Draws one of the player's moves, or, in a share of positions, any legal one."""
    return lambda board, rng: drawn(uniform if rng.random() < random_share else player, board, rng).uci()


@contextlib.contextmanager
def sides(args: argparse.Namespace, names: Sequence[str]) -> Iterator[dict[str, Side]]:
    """Who plays, by name; an engine runs for as long as this is open.

    Raises:
        ConfigError: a name that is neither an anchor's nor that of weights.
        EngineError: no Stockfish, for an anchor that needs it.
    """
    with contextlib.ExitStack() as cleanup:
        plain = {ANCHOR: _drawing(uniform), "capture": _drawing(greedy_capture), "two-ply": _drawing(two_ply)}
        if set(names) & set(SHARES):
            stockfish = cleanup.enter_context(skill_zero(find_engine(args.engine, "--engine")))
            plain |= {name: _drawing(stockfish, share) for name, share in SHARES.items()}
        yield {
            name: PlayerSide(name, plain[name], args.seed)
            if name in ANCHORS
            else ModelSide(name, temperature=args.temperature, strict=args.strict, seed=args.seed)
            for name in names
        }


def run(args: argparse.Namespace, command: Sequence[str]) -> dict[str, Any]:
    """Plays all matches of the command line and writes the record after each, so that an interrupted one keeps the others."""
    asked = args.against.split(",")
    opponents = list(dict.fromkeys(name for one in asked for name in (ANCHORS if one == "ladder" else (one,))))
    names = list(dict.fromkeys([args.weights, *opponents]))
    for name in names:
        if name not in ANCHORS:
            require_weights(name)
    pairs = list(itertools.combinations(names, 2))
    record: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "jax_grpo.match", *command]),
        "settings": {name: getattr(args, name) for name in RECORDED},
        "versions": {"jax_grpo": jax_grpo.__version__, **{name: metadata.version(name) for name in ("jax", "chess")}},
        "matches": [],
    }
    scores: dict[tuple[str, str], list[float]] = {}
    with sides(args, names) as players, timed_parts() as steps:
        for first, second in pairs:
            games = play_match(
                players[first],
                players[second],
                args.games,
                seed=args.seed,
                opening_plies=args.opening_plies,
                max_half_moves=MOST_HALF_MOVES,
                adjudicate=args.adjudicate,
                tick=steps(f"{first} against {second}", args.games),
            )
            scores[first, second] = [game.score for game in games]
            record["matches"].append({"first": first, "second": second, **summary(games)})
            _write_record(args.json, record)
            _add_games(args.pgn, games, (first, second), begins=len(record["matches"]) == 1)
        for side in players.values():
            if isinstance(side, ModelSide) and not args.strict:
                record.setdefault("substituted", {})[side.name] = {"moves": side.asked, "replaced": side.substituted}
    if ANCHOR in names and len(pairs) > 1:
        ratings = fit_ratings(scores, ANCHOR, args.seed)
        record["ratings"] = {name: rating._asdict() for name, rating in ratings.items()}
    _write_record(args.json, record)
    show(record)
    return record


def summary(games: Sequence[Game]) -> dict[str, Any]:
    """Counts of the first side's results, its paired Elo, and how games ended; JSON values."""
    elo: PairedElo = paired_elo([game.score for game in games])
    how = ends([str(game.ended) for game in games], (game.board for game in games))
    return {**counts(game.score for game in games), **elo._asdict(), **how}


def _write_record(path: Path | None, record: dict[str, Any]) -> None:
    if path is not None:
        with written_whole(path) as working:
            working.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _add_games(path: Path | None, games: Sequence[Game], names: tuple[str, str], *, begins: bool) -> None:
    """Adds a match to the PGN, which the first one begins anew."""
    if path is not None:
        with path.open("w" if begins else "a", encoding="utf-8") as file:
            for number, game in enumerate(games, 1):
                print(to_pgn(game, *names, number), file=file, end="\n\n")


def _signed(elo: float | None) -> str:
    return "-" if elo is None else f"{elo:+.0f}"


def show(record: dict[str, Any]) -> None:
    """Tables of the matches and of the ratings."""
    console = Console(highlight=False)
    table = Table("first", "second", "won", "drawn", "lost", "score", "Elo difference", "95 %")
    for match in record["matches"]:
        low, high = map(_signed, match["elo_interval"])
        counts = (str(match[name]) for name in ("wins", "draws", "losses"))
        row = (*counts, f"{match['score']:.1%}", _signed(match["elo"]), f"{low} to {high}")
        table.add_row(match["first"], match["second"], *row)
    console.print(table)
    if "ratings" in record:
        table = Table("rating", "Elo", "95 %", "games", title=f"all games together, {ANCHOR} = 0", title_justify="left")
        for name, rating in sorted(record["ratings"].items(), key=lambda item: -item[1]["elo"]):
            own = Rating(**rating)
            table.add_row(name, f"{own.elo:.0f}", f"{own.low:.0f} to {own.high:.0f}", str(own.games))
        console.print(table)
