"""Technique: won endings played out against a perfect defender. Does the model mate, how much longer does it take than it must?

The defender takes the piece if it can, else puts off the mate for as long as possible; ties by seed. It claims no draw by
repetition: who repeats runs out of moves. Two players stand beside the model: random legal moves, and the shortest mate. Knows
nothing of generation.
"""

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import chess
import chess.pgn

from jax_grpo.evaluate.statistics import Estimate, summarise
from jax_grpo.positions.endings import NEVER, PIECES, ending
from jax_grpo.positions.position import Position
from jax_grpo.positions.random_play import random_move
from jax_grpo.positions.rookworld import legal_uci
from jax_grpo.positions.won_endings import LONGEST, drawn, squares_of, won_position
from jax_grpo.rollout.texts import Complete, Tick
from jax_grpo.tasks.policy import PolicyTask

ENDINGS = tuple(PIECES)
ENDS = {
    "mated": "checkmate",
    "illegal": "the model's move is not legal, or not a move",
    "piece_lost": "the rook or queen is taken",
    "stalemate": "stalemate",
    "unmated": f"no mate in {LONGEST} moves",
}


@dataclasses.dataclass
class Ending:
    """A game as it is played."""

    men: str  # of `ENDINGS`
    board: chess.Board
    strong: chess.Color
    mate_in: int  # moves to the shortest mate from its first position
    moves: int = 0  # of the strong side, all legal
    ended: str | None = None  # a key of `ENDS`
    last_text: str = ""  # what the model wrote, where it is no legal move


Attack = Callable[[Sequence[Ending], Sequence[int], int], list[str]]  # (games, their numbers, step) -> a text for each


def starts(men: str, count: int, seed: int) -> list[Ending]:
    """Games about to begin, from positions of the test split, as many of each distance to mate as there are."""
    table, games = ending(men), []
    for squares, strong in drawn(men, "test", count, seed):
        board = chess.Board(won_position(men, squares, strong).fen)
        games.append(Ending(men, board, strong, int(table.mates_in_KPW[squares])))
    return games


def model(policy: PolicyTask, choose: Complete) -> Attack:
    """Plays what `choose` completes the prompts of the policy task with."""

    def attack(games: Sequence[Ending], numbers: Sequence[int], step: int) -> list[str]:
        prompts = [policy.prompt(Position(game.board.fen()), 0) for game in games]
        texts = choose(prompts, numbers=list(numbers), step=step)
        return [policy.move(text, game.board.fen()) for text, game in zip(texts, games, strict=True)]

    return attack


def random_legal(seed: int) -> Attack:
    """Plays any legal move."""

    def attack(games: Sequence[Ending], numbers: Sequence[int], step: int) -> list[str]:
        draws = [random.Random(f"legal/{seed}/{number}/{step}") for number in numbers]
        return [random_move(game.board, rng).uci() for game, rng in zip(games, draws, strict=True)]

    return attack


def perfect(games: Sequence[Ending], numbers: Sequence[int], step: int) -> list[str]:
    """Plays the shortest mate, the first by name of moves alike."""
    return [won_position(game.men, squares_of(game.board, game.strong), game.strong).moves[0] for game in games]


def play(games: Sequence[Ending], attack: Attack, seed: int, tick: Tick) -> None:
    """Plays all games to their ends, side by side, in place; each tick is one more move of each side."""
    for step in range(LONGEST):
        live = [number for number, game in enumerate(games) if game.ended is None]
        if not live:
            return
        texts = attack([games[number] for number in live], live, step)
        for number, text in zip(live, texts, strict=True):
            _move(games[number], text, random.Random(f"defence/{seed}/{number}/{step}"))
        tick(step + 1)
    for game in games:
        game.ended = game.ended or "unmated"


def _move(game: Ending, text: str, rng: random.Random) -> None:
    """The attacker's move and the defender's answer, or the game's end."""
    board, uci = game.board, text
    if uci not in legal_uci(board):
        game.ended, game.last_text = "illegal", text
        return
    board.push_uci(uci)
    game.moves += 1
    if board.is_checkmate() or board.is_stalemate():
        game.ended = "mated" if board.is_check() else "stalemate"
        return
    board.push(best_defence(game, rng))
    if chess.popcount(board.occupied) == 2:
        game.ended = "piece_lost"


def best_defence(game: Ending, rng: random.Random) -> chess.Move:
    """The move that takes the piece, else one of those after which the mate is furthest."""
    table, resistance = ending(game.men), {}
    king, piece, _ = squares_of(game.board, game.strong)
    for move in sorted(game.board.legal_moves, key=chess.Move.uci):
        mates_in = int(table.mates_in_KPW[king, piece, move.to_square])
        assert (mates_in == NEVER) == (move.to_square == piece), "only taking the piece saves the weak side"
        resistance[move] = LONGEST + 1 if mates_in == NEVER else mates_in
    longest = max(resistance.values())
    return rng.choice([move for move, moves in resistance.items() if moves == longest])


def estimates(games: Sequence[Ending]) -> dict[str, Estimate]:
    """`group/name` estimates, of all games and by the strong side's colour.

    Shares of games: `mated` within `LONGEST` moves, `slipped` (the piece is lost, or stalemate), `illegal`, `unmated` in time.
    `excess`: moves beyond the shortest mate from the start, mean over the games that ended in mate.
    """
    rows: list[dict[str, Any]] = [
        {
            "mated": game.ended == "mated",
            "excess": float(game.moves - game.mate_in) if game.ended == "mated" else None,
            "slipped": game.ended in ("piece_lost", "stalemate"),
            "illegal": game.ended == "illegal",
            "unmated": game.ended == "unmated",
        }
        for game in games
    ]
    sides = {name: [game.strong == color for game in games] for name, color in (("white", True), ("black", False))}
    return summarise(rows, sides)


def pgn(played: Mapping[str, Sequence[Ending]], name: str) -> str:
    """Of each set (such as `KRK, greedy`) the first game of those with the longest way to mate; every evaluation's is the same."""
    texts = []
    for event, games in played.items():
        game = max(games, key=lambda game: game.mate_in)
        out, sides = chess.pgn.Game.from_board(game.board), (name, "perfect defender")
        white, black = sides if game.strong else sides[::-1]
        headers = {"Event": f"{event}, mate in {game.mate_in}", "Site": "jax_grpo", "Date": "????.??.??"}
        out.headers.update(headers | {"White": white, "Black": black, "Termination": ENDS[game.ended or "unmated"]})
        if game.ended == "illegal":
            out.end().comment = f"{ENDS['illegal']}: {' '.join(game.last_text.split())!r}".replace("}", ")")
        texts.append(str(out))
    return "\n\n".join(texts) + "\n"
