"""A model against others, by many games at once: before against after, or a ladder of players that everybody knows.

    python -m jax_grpo.match --weights runs/quickstart --against packaged:rook-small --games 400 --json match.json
    python -m jax_grpo.match --weights runs/quickstart --against ladder --games 100 --json ladder.json

Every half-move is one question to each side about all its boards. Openings are paired: each is played twice, colours exchanged.
A side is a model, or a player of `ANCHORS`, which needs no weights. With several opponents everyone plays everyone and one rating
is fitted to all games.
"""

import argparse
import contextlib
import itertools
import random
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import chess
import chess.pgn

import jax_grpo
from jax_grpo.chess import games
from jax_grpo.chess.evaluate.policy import written_moves
from jax_grpo.chess.games import ILLEGAL, LENGTH, Game, Player, Rule, random_opening
from jax_grpo.chess.play.player import Player as ModelPlayer
from jax_grpo.chess.play.ratings import elo_of_pairs, elo_range, fit_ratings, signed
from jax_grpo.chess.positions.position import Position, legal_uci
from jax_grpo.chess.tasks.engine import find_engine, skill_zero
from jax_grpo.config.files import require_weights
from jax_grpo.rollout.texts import Generator, Tick
from jax_grpo.system.progress import timed_parts
from jax_grpo.system.terminal import print_tables
from jax_grpo.system.whole_files import write_record

RESULTS = {chess.WHITE: "1-0", None: "1/2-1/2", chess.BLACK: "0-1"}  # by the winner
ADJUDICATED = "adjudication"  # how a game ends besides `games.LENGTH` and the others
HELD = 10  # half-moves for which a lead must hold to be adjudicated a win
ANCHOR = "random"  # has the rating 0
SHARES = {"skill0-75": 0.75, "skill0-50": 0.5, "skill0-25": 0.25, "skill0": 0.0}  # of random moves among Stockfish's
ANCHORS = (ANCHOR, "capture", "two-ply", *SHARES)
OPENING_PLIES = 4  # random half-moves before each pair of games
MOST_HALF_MOVES = 300  # a game of so many is a draw
RECORDED = ("games", "temperature", "strict", "adjudicate", "seed")  # options


class ModelSide:
    """A model's moves, as a `games.Player`. Lenient, it plays the likeliest legal move where it writes none; strict, it then loses.

    `substituted` counts the moves so replaced, of those `played`.
    """

    def __init__(self, weights: str, *, temperature: float, strict: bool, seed: int):
        mode = "greedy" if temperature == 0 else f"temperature {temperature:g}"
        self.name = f"{weights}, {mode}, {'strict' if strict else 'lenient'}"
        self._player, self._strict = ModelPlayer(weights), strict
        self._task = self._player.task
        self._write = Generator(self._player.policy, self._task.stop_rule, self._player.cap, temperature, seed)
        self.played = self.substituted = 0

    def __call__(self, games: Sequence[Game]) -> list[str]:
        # The number tells apart every half-move of every game.
        numbers = [(game.number << 10) + game.board.ply() for game in games]
        moves = written_moves(self._task, self._write, [Position(game.fen) for game in games], numbers=numbers)
        self.played += len(games)
        return moves if self._strict else list(map(self._legal, games, moves))

    def _legal(self, game: Game, written: str) -> str:
        board = game.board
        if written in legal_uci(board):
            return written
        game.illegal[len(board.move_stack)] = written
        self.substituted += 1
        legal = list(board.legal_moves)
        return legal[int(self._player.move_logps(board, legal).argmax())].uci()


def plain_side(name: str, choose: Callable[[chess.Board, random.Random], str], seed: int) -> Player[Game]:
    """A player that is a function of board and random numbers, which depend on the seed, the name, the game and the half-move."""
    return games.seeded(choose, lambda game: f"{seed}/{name}/{game.number}/{game.board.ply()}")


def paired_game(seed: int, number: int) -> Game:
    """A game about to begin; 2k and 2k + 1 begin alike, a function of the arguments, and the first player is White in 2k."""
    opening = random_opening(random.Random(f"opening/{seed}/{number // 2}"), OPENING_PLIES)
    return Game(opening, number, colour=number % 2 == 0)


def play_match(
    first: Player[Game],
    second: Player[Game],
    count: int,
    *,
    seed: int,
    max_half_moves: int = MOST_HALF_MOVES,
    adjudicate: float | None = None,
    tick: Tick = lambda done: None,
) -> list[Game]:
    """An even number of games to their ends, side by side, as `paired_game` begins them.

    Draws are claimed at once; a game of `max_half_moves`, the opening's included, is a draw. With `adjudicate`, so many pawns of
    material (queen 9, rook 5, bishop and knight 3) ahead for `HELD` half-moves in a row win, as operators of engine matches have
    it: who cannot mate would draw all games that it has won. Each tick is of the games that have ended.
    """
    played = [paired_game(seed, number) for number in range(count)]
    leads: Counter[int] = Counter()  # by game, half-moves for which the first side has been ahead; negative: the second

    def after(moved: Sequence[Game]) -> None:
        for game in moved:
            if adjudicate is not None and game.ended in (None, LENGTH):
                leads[game.number] = lead = _lead(game, leads[game.number], adjudicate)
                if abs(lead) >= HELD:
                    game.ended, game.winner = ADJUDICATED, game.colour if lead > 0 else not game.colour
        tick(sum(game.ended is not None for game in played))

    games.play(played, first, second, most=max_half_moves - OPENING_PLIES, after=after)
    return played


def _lead(game: Game, before: int, pawns: float) -> int:
    """How long a lead has held by now, where it had held so long before the last half-move."""
    ahead = games.balance(game.board) * (1 if game.first_to_move else -1)
    side = (ahead >= pawns) - (ahead <= -pawns)
    return 0 if side == 0 else side * (abs(before) + 1 if before * side > 0 else 1)


def begun(command: Sequence[str], *packages: str) -> dict[str, Any]:
    """What the record of a match begins with: how it was asked for, and the versions of this program and of packages."""
    versions = {"jax_grpo": jax_grpo.__version__} | {name: metadata.version(name) for name in packages}
    return {"command": shlex.join(["python", "-m", "jax_grpo.match", *command]), "versions": versions}


def counts(played: Sequence[Game]) -> dict[str, int]:
    """How often the first side won, drew and lost."""
    of_score = Counter(game.score for game in played)
    return {"wins": of_score[1.0], "draws": of_score[0.5], "losses": of_score[0.0]}


def ends(played: Sequence[Game]) -> dict[str, Any]:
    """How often games ended in each way, and how long they were; JSON values."""
    half_moves = sum(len(game.board.move_stack) for game in played)
    endings = dict(sorted(Counter(str(game.ended) for game in played).items()))
    return {"endings": endings, "half_moves_a_game": half_moves / len(played)}


def to_pgn(game: Game, first: str, second: str, number: int) -> chess.pgn.Game:
    """The game with headers; a comment at its end quotes the illegal move, if that ended it."""
    headers = {"Event": "jax_grpo match", "Round": str(number), "Result": RESULTS[game.winner]}
    comment = f"no legal move: {game.illegal[len(game.board.move_stack)]!a}" if game.ended == ILLEGAL else ""
    return games.to_pgn(game, (first, second), headers | {"Termination": str(game.ended)}, comment)


def add_games(path: Path, played: Iterable[chess.pgn.Game], *, begins: bool) -> None:
    """Adds games to a PGN, or begins it anew."""
    with path.open("w" if begins else "a", encoding="utf-8") as file:
        for game in played:
            print(game, file=file, end="\n\n")


def _choosing(rule: Rule, random_share: float = 0.0) -> Callable[[chess.Board, random.Random], str]:
    """Plays one of the rule's moves, or, in a share of positions, any legal one."""
    return lambda board, rng: games.choose(games.uniform if rng.random() < random_share else rule, board, rng)


@contextlib.contextmanager
def sides(args: argparse.Namespace, names: Sequence[str]) -> Iterator[dict[str, Player[Game]]]:
    """Who plays, by name; an engine runs for as long as this is open.

    Raises:
        ConfigError: a name that is neither an anchor's nor that of weights.
        EngineError: no Stockfish, for an anchor that needs it.
    """
    with contextlib.ExitStack() as cleanup:
        rules = {ANCHOR: games.uniform, "capture": games.greedy_capture, "two-ply": games.two_ply}
        plain = {name: _choosing(rule) for name, rule in rules.items()}
        if set(names) & set(SHARES):
            stockfish = cleanup.enter_context(skill_zero(find_engine(args.engine, "--engine")))
            plain |= {name: _choosing(stockfish, share) for name, share in SHARES.items()}
        yield {
            name: plain_side(name, plain[name], args.seed)
            if name in ANCHORS
            else ModelSide(name, temperature=args.temperature, strict=args.strict, seed=args.seed)
            for name in names
        }


def run(args: argparse.Namespace, command: Sequence[str]) -> None:
    """Plays all matches of the command line and writes the record after each, so that an interrupted one keeps the others."""
    words = args.against.split(",")
    opponents = itertools.chain.from_iterable(ANCHORS if word == "ladder" else (word,) for word in words)
    names = list(dict.fromkeys([args.weights, *opponents]))
    for name in names:
        if name not in ANCHORS:
            require_weights(name)
    pairs = list(itertools.combinations(names, 2))
    settings = {name: getattr(args, name) for name in RECORDED} | {"opening_plies": OPENING_PLIES}
    record = begun(command, "jax", "chess") | {"settings": settings, "matches": []}
    scores: dict[tuple[str, str], list[float]] = {}
    with sides(args, names) as players, timed_parts() as steps:
        for first, second in pairs:
            played = play_match(
                players[first],
                players[second],
                args.games,
                seed=args.seed,
                adjudicate=args.adjudicate,
                tick=steps(f"{first} against {second}", args.games),
            )
            scores[first, second] = [game.score for game in played]
            record["matches"].append({"first": first, "second": second, **summary(played)})
            if args.json:
                write_record(args.json, record)
            if args.pgn:
                texts = (to_pgn(game, first, second, game.number + 1) for game in played)
                add_games(args.pgn, texts, begins=len(record["matches"]) == 1)
        for side in players.values():
            if isinstance(side, ModelSide) and not args.strict:
                record.setdefault("substituted", {})[side.name] = {"moves": side.played, "replaced": side.substituted}
    if ANCHOR in names and len(pairs) > 1:
        record["ratings"] = {
            name: {"elo": rating.value, "low": rating.low, "high": rating.high, "games": rating.count}
            for name, rating in fit_ratings(scores, ANCHOR, args.seed).items()
        }
    if args.json:
        write_record(args.json, record)
    show(record)


def summary(played: Sequence[Game]) -> dict[str, Any]:
    """Counts of the first side's results, its paired Elo, and how games ended; JSON values."""
    elo = elo_of_pairs([game.score for game in played])
    return {**counts(played), "pairs": len(played) // 2, **elo._asdict(), **ends(played)}


def show(record: dict[str, Any]) -> None:
    """Tables of the matches and of the ratings."""
    rows = []
    for match in record["matches"]:
        results = (str(match[name]) for name in ("first", "second", "wins", "draws", "losses"))
        rows.append([*results, f"{match['score']:.1%}", signed(match["elo"]), elo_range(match["elo_interval"])])
    tables = [("matches", ["first", "second", "won", "drawn", "lost", "score", "Elo difference", "95 %"], rows)]
    if "ratings" in record:
        rows = []
        for name, rating in sorted(record["ratings"].items(), key=lambda item: -item[1]["elo"]):
            elo, low, high = (str(round(rating[key])) for key in ("elo", "low", "high"))
            rows.append([name, elo, f"{low} to {high}", str(rating["games"])])
        tables.append((f"all games together, {ANCHOR} = 0", ["rating", "Elo", "95 %", "games"], rows))
    print_tables(tables)
