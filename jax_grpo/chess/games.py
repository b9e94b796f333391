"""Games: the one record of a game as it is played, and the one loop in which players play any number of them side by side.

A player moves on all its boards at once. Here are also random games, first positions with few pieces, and players whose strength a
stranger can imagine, as yardsticks for a model: all randomness is the caller's `random.Random`. Knows nothing of models, engines or
ratings.
"""

import dataclasses
import functools
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import chess
import chess.pgn

from jax_grpo.chess.positions.position import ending, legal_uci, mating_moves

ILLEGAL, LENGTH = "illegal move", "length"  # how a game ends besides `positions.position.ENDINGS`
NO_LIMIT = sys.maxsize
VALUES = {chess.PAWN: 1, chess.KNIGHT: 3, chess.BISHOP: 3, chess.ROOK: 5, chess.QUEEN: 9, chess.KING: 100}  # pawns
Rule = Callable[[chess.Board], list[str]]
"""Moves in UCI, sorted, at least one: the player draws one of them uniformly, and is judged by their mean, exactly."""


@dataclasses.dataclass(eq=False)
class Game:
    """A game as it is played. It has a first player, whose `score` it is, and a second one."""

    board: chess.Board  # with all moves, the opening's included
    number: int = 0  # among the games played together; random numbers are made from it
    colour: chess.Color | None = None  # of the first player; None: it plays both sides
    ended: str | None = None  # `ILLEGAL`, `LENGTH` or a key of `ENDINGS`; None: the game goes on
    winner: chess.Color | None = None
    # By half-move, what was written there and is no legal move: the game ended, or another move was played instead.
    illegal: dict[int, str] = dataclasses.field(default_factory=dict)
    opening: int = dataclasses.field(init=False)  # half-moves before the players' own

    def __post_init__(self) -> None:
        self.opening = len(self.board.move_stack)

    @property
    def fen(self) -> str:
        """The position as the player to move is shown it."""
        return self.board.fen()

    @property
    def half_moves(self) -> int:
        """How many half-moves the players have played."""
        return len(self.board.move_stack) - self.opening

    @property
    def moves(self) -> int:
        """How many moves the first player has played."""
        return self.half_moves if self.colour is None else self.moves_by(self.colour)

    @property
    def turn(self) -> int:
        """How many moves the player to move has played."""
        return self.half_moves if self.colour is None else self.moves_by(self.board.turn)

    @property
    def first_to_move(self) -> bool:
        return self.colour in (None, self.board.turn)

    @property
    def score(self) -> float:
        """Of the first player: 1, 0.5 or 0."""
        return 0.5 if self.winner is None else float(self.winner == self.colour)

    def moves_by(self, colour: chess.Color) -> int:
        """How many moves were played for a colour after the opening."""
        return (self.half_moves + (colour != self.board.turn)) // 2

    def push(self, move: str, draws: str | None = "claimed", most: int = NO_LIMIT) -> None:
        """Plays a move, and ends the game by an illegal move, by the rules (see `ending`), or after `most` half-moves."""
        board = self.board
        if move not in legal_uci(board):
            self.illegal[len(board.move_stack)] = move
            self.ended, self.winner = ILLEGAL, not board.turn
            return
        board.push_uci(move)
        self.ended = ending(board, draws)
        if self.ended == "checkmate":
            self.winner = not board.turn
        elif self.ended is None and self.half_moves >= most:
            self.ended = LENGTH


AnyGame = TypeVar("AnyGame", bound=Game)
Player = Callable[[Sequence[AnyGame]], list[str]]
"""A move in UCI for each game, in all of which it is the player's turn; any other text is an illegal move."""


def play_round(
    games: Sequence[AnyGame],
    *players: Player[AnyGame],
    draws: str | None = "claimed",
    most: int = NO_LIMIT,
    after: Callable[[Sequence[AnyGame]], object] = lambda moved: None,
) -> None:
    """A move of each player, the first one's first, in every game that goes on and in which it is that player's turn.

    `draws` and `most` are those of `Game.push`. `after` is called with the games in which a player has moved, and may end them.
    """
    for first, player in ((True, players[0]), (False, players[-1])):
        if moving := [game for game in games if game.ended is None and game.first_to_move == first]:
            for game, move in zip(moving, player(moving), strict=True):
                game.push(move, draws, most)
            after(moving)


def play(games: Sequence[AnyGame], *players: Player[AnyGame], **how: Any) -> None:
    """Plays all games to their ends, in place, in rounds of the one or two players; `how` is of `play_round`."""
    while any(game.ended is None for game in games):
        play_round(games, *players, **how)


def play_alone(board: chess.Board, choose: Callable[[chess.Board], str], draws: str, most: int) -> None:
    """Plays one game on a board whose every move `choose` makes."""
    play([Game(board)], lambda games: [choose(game.board) for game in games], draws=draws, most=most)


def seeded(choose: Callable[[chess.Board, random.Random], str], stream: Callable[[Game], str]) -> Player:
    """The player of a function of a board and random numbers; `stream` names those of a game's next half-move."""
    return lambda games: [choose(game.board, random.Random(stream(game))) for game in games]


def to_pgn(game: Game, players: tuple[str, str], headers: Mapping[str, str], comment: str = "") -> chess.pgn.Game:
    """The game with the names of its first and second player, other headers, and a comment at its end."""
    pgn = chess.pgn.Game.from_board(game.board)
    white, black = players[::-1] if game.colour == chess.BLACK else players
    pgn.headers.update({**headers, "White": white, "Black": black})
    if comment:
        pgn.end().comment = comment.replace("}", ")")
    return pgn


def random_opening(rng: random.Random, half_moves: int) -> chess.Board:
    """A position after random half-moves from the start, the game not over."""
    while True:
        board = chess.Board()
        while len(board.move_stack) < half_moves and any(board.legal_moves):
            board.push_uci(random_move(board, rng))
        if len(board.move_stack) == half_moves and not board.is_game_over():
            return board


def random_game(rng: random.Random, max_plies: int = 120) -> Iterator[chess.Board]:
    """The positions of one game of uniform moves, in order: one board, which is played on, with its move stack."""
    board = chess.Board()
    while not board.is_game_over() and len(board.move_stack) < max_plies:
        yield board
        board.push(rng.choice(list(board.legal_moves)))


def random_positions(rng: random.Random) -> Iterator[chess.Board]:
    """Endless positions of random games."""
    while True:
        yield from random_game(rng)


def sparse_start(rng: random.Random) -> chess.Board:
    """A legal position with few pieces: endgames, promotions and checks, which games from move one reach rarely."""
    while True:
        board = chess.Board(None)
        squares = rng.sample(range(64), 12)
        board.set_piece_at(squares[0], chess.Piece(chess.KING, chess.WHITE))
        board.set_piece_at(squares[1], chess.Piece(chess.KING, chess.BLACK))
        for square in squares[2 : rng.randint(4, 12)]:
            kind = rng.choice([1, 1, 1, 1, 2, 3, 4, 5])
            color = rng.random() < 0.5
            rank = chess.square_rank(square)
            if kind == chess.PAWN and rank in (0, 7):
                rank = 6 if color else 1  # one step from promotion
            board.set_piece_at(chess.square(chess.square_file(square), rank), chess.Piece(kind, color))
        board.turn = rng.random() < 0.5
        board.fullmove_number = rng.randint(30, 90)
        if board.is_valid() and not board.is_game_over():
            return board


def uniform(board: chess.Board) -> list[str]:
    """Every legal move."""
    return sorted(legal_uci(board))


def greedy_capture(board: chess.Board) -> list[str]:
    """A mate in one; else the most valuable piece taken by the least valuable one; else any move."""
    captures = {move.uci(): _trade(board, move) for move in board.generate_legal_captures()}
    best = max(captures.values(), default=None)
    return mating_moves(board) or sorted(uci for uci, trade in captures.items() if trade == best) or uniform(board)


def two_ply(board: chess.Board) -> list[str]:
    """A mate in one; else the most material after the opponent's best reply, who counts material too; a stalemate is even."""
    if mates := mating_moves(board):
        return mates
    even = balance(board)  # what a stalemate takes back
    values = {}
    for move in list(board.legal_moves):
        gain = _gain(board, move)
        board.push(move)
        replies = [_gain(board, reply) for reply in board.legal_moves]
        board.pop()
        values[move.uci()] = gain - max(replies) if replies else -even
    best = max(values.values())
    return sorted(uci for uci, value in values.items() if value == best)


def _trade(board: chess.Board, capture: chess.Move) -> tuple[int, int]:
    """Greater for a more valuable piece taken, then for a less valuable one that takes."""
    return _taken(board, capture), -VALUES[board.piece_type_at(capture.from_square) or chess.PAWN]


def _taken(board: chess.Board, move: chess.Move) -> int:
    if not board.is_capture(move):
        return 0
    return VALUES[board.piece_type_at(move.to_square) or chess.PAWN]  # an empty square: en passant


def _gain(board: chess.Board, move: chess.Move) -> int:
    """Pawns that the mover's balance rises by."""
    return _taken(board, move) + (VALUES[move.promotion] - VALUES[chess.PAWN] if move.promotion else 0)


def balance(board: chess.Board) -> int:
    """Pawns that the player to move is ahead."""
    pieces = board.piece_map().values()
    return sum(VALUES[piece.piece_type] * (1 if piece.color == board.turn else -1) for piece in pieces)


REFERENCE_PLAYERS: dict[str, Rule] = {"uniform": uniform, "greedy_capture": greedy_capture, "two_ply": two_ply}


def choose(rule: Rule, board: chess.Board, rng: random.Random) -> str:
    """The move that the player of a rule plays, in UCI."""
    return rng.choice(rule(board))


random_move = functools.partial(choose, uniform)  # does not depend on the order that python-chess generates moves in
