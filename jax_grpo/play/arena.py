"""Matches between any two sides, all games at once: every half-move is one question to each side about all its boards.

Openings are paired: each is played twice, colours exchanged. A side is a model or a player that needs no weights. Knows nothing
of ratings.
"""

import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import chess
import chess.pgn

from jax_grpo.play.player import Player
from jax_grpo.positions.position import Position, ending
from jax_grpo.positions.random_play import random_move
from jax_grpo.positions.rookworld import legal_uci
from jax_grpo.rollout.texts import Generator, Tick
from jax_grpo.tasks.reference_players import balance

RESULTS = {1.0: "1-0", 0.5: "1/2-1/2", 0.0: "0-1"}  # by White's score
ILLEGAL, LENGTH, ADJUDICATED = "illegal move", "length", "adjudication"  # ends besides `positions.position.ENDINGS`
HELD = 10  # half-moves for which a lead must hold to be adjudicated a win


class Side(Protocol):
    """Who plays one side of a match."""

    name: str

    def moves(self, boards: Sequence[chess.Board], games: Sequence[int]) -> list[str]:
        """A move in UCI for each board; what is no legal move loses. `games` are the boards' games: they decide what is drawn."""
        ...


class ModelSide:
    """A model's moves. Lenient, it plays the legal move it finds likeliest where it writes none; strict, it then loses.

    `substituted` counts the moves so replaced, of `asked`.
    """

    def __init__(self, weights: str, *, name: str | None = None, temperature: float, strict: bool, seed: int):
        mode = "greedy" if temperature == 0 else f"temperature {temperature:g}"
        self.name = f"{name or weights}, {mode}, {'strict' if strict else 'lenient'}"
        self._player, self._strict = Player(weights), strict
        self._task = self._player.task
        self._write = Generator(
            self._player.policy, self._task.stop_rule, self._player.cap, temperature=temperature, seed=seed
        )
        self.asked = self.substituted = 0

    def moves(self, boards: Sequence[chess.Board], games: Sequence[int]) -> list[str]:
        """As `Side.moves`. All boards are of the same half-move or of any: each is drawn by its game's number and its own."""
        prompts = [self._task.prompt(Position(board.fen()), 0) for board in boards]
        # The number tells apart every half-move of every game.
        numbers = [(game << 10) + board.ply() for game, board in zip(games, boards, strict=True)]
        texts = self._write(prompts, numbers=numbers)
        written = [self._task.move(text, board.fen()) for text, board in zip(texts, boards, strict=True)]
        self.asked += len(boards)
        if self._strict:
            return written
        return [self._legal(board, text) for board, text in zip(boards, written, strict=True)]

    def _legal(self, board: chess.Board, written: str) -> str:
        if written in legal_uci(board):
            return written
        self.substituted += 1
        legal = list(board.legal_moves)
        return legal[int(self._player.move_logps(board, legal).argmax())].uci()


class PlayerSide:
    """A player that is a function of (board, random numbers), such as those of `tasks.reference_players`."""

    def __init__(self, name: str, choose: Callable[[chess.Board, random.Random], str], seed: int):
        self.name, self._choose, self._seed = name, choose, seed

    def moves(self, boards: Sequence[chess.Board], games: Sequence[int]) -> list[str]:
        """As `Side.moves`; what is drawn depends on the seed, the game and the half-move."""
        return [
            self._choose(board, random.Random(f"{self._seed}/{self.name}/{game}/{board.ply()}"))
            for board, game in zip(boards, games, strict=True)
        ]


def random_opening(seed: int, number: int, plies: int) -> chess.Board:
    """A position after `plies` random half-moves from the start, the game not over; a function of its arguments."""
    rng = random.Random(f"opening/{seed}/{number}")
    while True:
        board = chess.Board()
        while len(board.move_stack) < plies and any(board.legal_moves):
            board.push(random_move(board, rng))
        if len(board.move_stack) == plies and not board.is_game_over():
            return board


@dataclasses.dataclass
class Game:
    """A game as it is played, between the `first` side of a match and the second."""

    board: chess.Board  # with all moves, the opening's included
    first_is_white: bool
    score: float = 0.5  # of the first side: 1, 0.5 or 0
    ended: str | None = None  # `ILLEGAL`, `LENGTH`, `ADJUDICATED`, or a key of `ENDINGS`
    refused: str = ""  # what was no legal move
    held: int = 0  # half-moves for which the first side has had a lead to adjudicate; negative: the second side

    @property
    def first_to_move(self) -> bool:
        return self.board.turn == self.first_is_white


def play_match(
    first: Side,
    second: Side,
    games: int,
    *,
    seed: int,
    opening_plies: int,
    max_half_moves: int,
    adjudicate: float | None = None,
    tick: Tick = lambda done: None,
) -> list[Game]:
    """An even number of games to their ends, side by side; game 2k and 2k + 1 begin alike, colours exchanged.

    Draws are claimed at once; a game of `max_half_moves` is a draw. With `adjudicate`, so many pawns of material (queen 9, rook
    5, bishop and knight 3) ahead for `HELD` half-moves in a row win, as operators of engine matches have it: who cannot mate
    would draw all games that it has won. Each tick is of the games that have ended.
    """
    played = [
        Game(random_opening(seed, number // 2, opening_plies), first_is_white=number % 2 == 0)
        for number in range(games)
    ]
    while live := [number for number, game in enumerate(played) if game.ended is None]:
        for side, is_first in ((first, True), (second, False)):
            asked = [number for number in live if played[number].first_to_move == is_first and not played[number].ended]
            if not asked:
                continue
            answers = side.moves([played[number].board for number in asked], asked)
            for number, move in zip(asked, answers, strict=True):
                _push(played[number], move, max_half_moves, adjudicate)
        tick(sum(game.ended is not None for game in played))
    return played


def _push(game: Game, move: str, max_half_moves: int, adjudicate: float | None) -> None:
    """Plays a move, and ends the game where it ends."""
    board, by_first = game.board, game.first_to_move
    if move not in legal_uci(board):
        game.ended, game.refused, game.score = ILLEGAL, move, float(not by_first)
        return
    board.push_uci(move)
    kind = ending(board, "claimed")
    if kind == "checkmate":
        game.score = float(by_first)
    game.ended = kind or (LENGTH if len(board.move_stack) >= max_half_moves else None)
    if kind is None and adjudicate is not None:
        _adjudicate(game, adjudicate)


def _adjudicate(game: Game, pawns: float) -> None:
    """Counts how long a lead has held, and ends the game when it has for long enough."""
    ahead = balance(game.board) * (1 if game.first_to_move else -1)
    side = (ahead >= pawns) - (ahead <= -pawns)
    game.held = 0 if side == 0 else side * (abs(game.held) + 1 if game.held * side > 0 else 1)
    if abs(game.held) >= HELD:
        game.ended, game.score = ADJUDICATED, float(side > 0)


def with_headers(
    board: chess.Board, sides: tuple[str, str], first_is_white: bool, score: float, ended: str, number: int
) -> chess.pgn.Game:
    """A finished game of a match with PGN's headers; the score is the first side's."""
    pgn = chess.pgn.Game.from_board(board)
    white, black = sides if first_is_white else reversed(sides)
    result = RESULTS[score if first_is_white else 1 - score]
    pgn.headers.update({"Event": "jax_grpo match", "Site": "?", "Round": str(number), "Result": result})
    pgn.headers.update({"White": white, "Black": black, "Termination": ended})
    return pgn


def counts(scores: Iterable[float]) -> dict[str, int]:
    """How often a side won, drew and lost, by its scores."""
    of_score = Counter(scores)
    return {"wins": of_score[1.0], "draws": of_score[0.5], "losses": of_score[0.0]}


def ends(endings: Sequence[str], boards: Iterable[chess.Board]) -> dict[str, Any]:
    """How often games ended in each way, and how long they were; JSON values."""
    half_moves = sum(len(board.move_stack) for board in boards)
    return {"endings": dict(sorted(Counter(endings).items())), "half_moves_a_game": half_moves / len(endings)}


def to_pgn(game: Game, first: str, second: str, number: int) -> chess.pgn.Game:
    """The game with headers; a comment says what was refused."""
    pgn = with_headers(game.board, (first, second), game.first_is_white, game.score, game.ended or LENGTH, number)
    if game.refused or game.ended == ILLEGAL:
        pgn.end().comment = f"no legal move: {game.refused!a}".replace("}", ")")
    return pgn
