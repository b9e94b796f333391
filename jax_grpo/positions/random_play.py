"""Chess without an engine: random games, and first positions with few pieces. All randomness is the caller's `random.Random`."""

import random
from collections.abc import Iterator

import chess


def random_move(board: chess.Board, rng: random.Random) -> chess.Move:
    """A uniform legal move; the draw does not depend on the order that python-chess generates moves in."""
    return rng.choice(sorted(board.legal_moves, key=chess.Move.uci))


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
