"""Endings of king and rook, or king and queen, against king: how many moves to mate, exactly, and sets of won positions of them.

Retrograde analysis over every placement at once, in less than a second, so that no table is shipped or stored. A position is
three squares and who moves; the strong side's colour changes nothing, nor do turning and mirroring the board, as there is no pawn.
Tensors are [K, P, W]: squares (a1 = 0, h8 = 63) of the strong king, its piece, the weak king.

A set is spread evenly over the distances to mate: a game that is won in 16 moves meets each distance once on its way, while
three quarters of all positions with a rook lie between 8 and 14 moves. Knows nothing of what is asked about them.
"""

import functools
import hashlib
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import chess
import numpy as np

from jax_grpo.chess.positions.position import MATE_PAWNS, Position
from jax_grpo.chess.positions.table import PositionTable, to_columns
from jax_grpo.prompts.table import digest

PIECES = {"KRK": chess.ROOK, "KQK": chess.QUEEN}  # by ending: the strong side's piece
SPLITS = ("heldout", "test")  # a tenth of the classes each; every other class is trained on
SHARES = 10
NEVER = -1  # moves to mate where there is none
PREFIX = "endings:"  # of `prompts.source`
ROWS = {"train": 20_000, "heldout": 2_000}  # of a source, over all its endings
LONGEST = 50  # moves in which a game must be won: the fifty-move rule
FIRST_MOVE = 60  # number of the move that such a game begins with
SQUARES = chess.SQUARE_NAMES
SEEDS = {"train": 0, "heldout": 1, "test": 2}  # of samples


class Ending(NamedTuple):
    """Every position of an ending. Moves are the strong side's: a mate in 16 is its 16th."""

    attacks_KPS: np.ndarray  # bool: whether the piece reaches square S, past everything but its own king
    mates_in_KPW: np.ndarray  # int8, the strong side moves: moves to the shortest mate; NEVER: no such position
    # int8, the weak side moves: moves to the latest mate, 0 if it is mate; NEVER: draw, or no such position
    mated_in_KPW: np.ndarray


@functools.cache
def king_steps() -> np.ndarray:
    """bool [64, 64]: whether a king's step leads from one square to the other."""
    return np.array([chess.SquareSet(squares).tolist() for squares in chess.BB_KING_ATTACKS])


def _attacks(piece: chess.PieceType) -> np.ndarray:
    """`Ending.attacks_KPS`. The weak king is no obstacle: where it stands in the way it is in check, and only it may move.

    So what it leaves uncovered behind it is attacked, and the strong side never has to move past it.
    """
    attacks_KPS = np.zeros((64, 64, 64), bool)
    for king, square in itertools.permutations(chess.SQUARES, 2):
        board = chess.BaseBoard.empty()
        board.set_piece_at(king, chess.Piece(chess.KING, chess.WHITE))
        board.set_piece_at(square, chess.Piece(piece, chess.WHITE))
        attacks_KPS[king, square] = board.attacks(square).tolist()
        attacks_KPS[king, square, king] = False
    return attacks_KPS


def _any_step(from_KPS: np.ndarray) -> np.ndarray:
    """[K, P, W]: whether `from_KPS` is true of a square that a king on W steps to."""
    return from_KPS.astype(np.float32) @ king_steps().astype(np.float32) > 0


@functools.cache
def ending(men: str) -> Ending:
    """The table of `KRK` or `KQK`, made once in a process.

    Retrograde: positions that are mate, then those of the strong side with a move to one of them, then those of the weak side
    whose every move leads to one of these, and so on. Taking the piece is a move that leads to none. Positions are as
    python-chess calls them valid: three squares, kings apart, and who does not move is not in check.
    """
    attacks_KPS, steps_SS = _attacks(PIECES[men]), king_steps()
    king_K, piece_P, weak_W = np.ogrid[:64, :64, :64]
    apart_KPW = (king_K != piece_P) & (piece_P != weak_W) & (king_K != weak_W) & ~steps_SS[:, None, :]
    strong_to_move_KPW = apart_KPW & ~attacks_KPS
    # Squares that the weak king may step to, if one is beside it; that of an undefended piece is among them.
    open_KPS = (king_K != weak_W) & ~steps_SS[:, None, :] & ~attacks_KPS
    moves_KPW = _any_step(open_KPS)
    mates_in_KPW, mated_in_KPW = (np.full((64, 64, 64), NEVER, np.int8) for _ in range(2))
    new_KPW, n = apart_KPW & attacks_KPS & ~moves_KPW, 0
    by_king_SS, by_piece_KPS = steps_SS.astype(np.float32), attacks_KPS.astype(np.float32)
    while new_KPW.any():
        mated_in_KPW[new_KPW] = n
        n += 1
        lost_KPW = new_KPW.astype(np.float32)
        before_KPW = (by_king_SS @ lost_KPW.reshape(64, -1)).reshape(64, 64, 64) + by_piece_KPS @ lost_KPW
        mates_in_KPW[(before_KPW > 0) & strong_to_move_KPW & (mates_in_KPW == NEVER)] = n
        escapes_KPW = _any_step(open_KPS & (mates_in_KPW == NEVER))
        new_KPW = apart_KPW & moves_KPW & ~escapes_KPW & (mated_in_KPW == NEVER)
    return Ending(attacks_KPS, mates_in_KPW, mated_in_KPW)


@functools.cache
def symmetry_classes() -> np.ndarray:
    """int32 [K, P, W]: the same number for the (up to) eight positions that are turns and mirrors of each other.

    It is the least of 4096 K + 64 P + W over the board's eight symmetries.
    """
    board = np.arange(64).reshape(8, 8)
    views = [np.rot90(side, turns).reshape(-1) for side in (board, board.T) for turns in range(4)]
    numbers = [4096 * view[:, None, None] + 64 * view[:, None] + view for view in views]
    return np.min(numbers, axis=0).astype(np.int32)


@functools.cache
def in_split(men: str, split: str) -> np.ndarray:
    """bool [K, P, W]: what is in `train`, `heldout` or `test`, by a hash of the class: no position has a twin elsewhere."""
    numbers, class_of = np.unique(symmetry_classes(), return_inverse=True)
    shares = np.array([digest(f"{men} {number}") % SHARES for number in numbers.tolist()])
    mine = shares == SPLITS.index(split) if split in SPLITS else shares >= len(SPLITS)
    return mine[class_of].reshape(64, 64, 64)


def men_of(board: chess.Board) -> str:
    """The ending on a board, such as `KRK`."""
    return "KRK" if board.rooks else "KQK"


def squares_of(board: chess.Board, strong: chess.Color) -> tuple[int, int, int]:
    """Squares of the strong king, its piece and the weak king, as `endings` counts them."""
    (piece,) = chess.scan_forward(board.occupied_co[strong] & ~board.kings)
    king, weak = board.king(strong), board.king(not strong)
    assert king is not None and weak is not None
    return king, piece, weak


def won_position(men: str, squares: Sequence[int], strong: chess.Color, played: int = 0) -> Position:
    """The position after `played` moves by each side of a game that began at move `FIRST_MOVE`; the strong side is to move.

    Its moves are all legal ones, best first, those alike by name; a mate in n moves is 100 - n/100 pawns, what lets the win slip 0.
    """
    king, piece, weak = squares
    board, table = chess.BaseBoard.empty(), ending(men)
    own_king, own_piece = chess.Piece(chess.KING, strong), chess.Piece(PIECES[men], strong)
    board.set_piece_map({king: own_king, piece: own_piece, weak: chess.Piece(chess.KING, not strong)})
    fen = f"{board.board_fen()} {'w' if strong else 'b'} - - {2 * played} {FIRST_MOVE + played}"
    kings = np.flatnonzero(king_steps()[king] & ~king_steps()[weak]).tolist()
    after = [(king, to, int(table.mated_in_KPW[to, piece, weak])) for to in kings if to != piece]
    pieces = np.flatnonzero(table.attacks_KPS[king, piece]).tolist()
    after += [(piece, to, int(table.mated_in_KPW[king, to, weak])) for to in pieces]
    worth = {
        SQUARES[start] + SQUARES[to]: 0.0 if mated_in == NEVER else round(MATE_PAWNS - (mated_in + 1) / 100, 2)
        for start, to, mated_in in after
    }
    moves = sorted(worth, key=lambda move: (-worth[move], move))
    return Position(fen, moves=tuple(moves), evaluations=tuple(worth[move] for move in moves))


def spread_sample(men: str, split: str, count: int, seed: int) -> list[tuple[tuple[int, int, int], chess.Color]]:
    """Squares and colour of the strong side of `count` won positions (or all there are), a function of the arguments.

    Round after round one of each distance to mate, in random order within a distance, without repetition: a distance with
    few positions gives all of them, and the others make up for it.
    """
    mates_in = ending(men).mates_in_KPW.reshape(-1)
    rows = np.flatnonzero((mates_in != NEVER) & in_split(men, split).reshape(-1))
    rng = np.random.default_rng((seed, SEEDS[split], ord(men[1])))
    rows = rng.permutation(rows)
    by_distance = rows[np.argsort(mates_in[rows], kind="stable")]
    _, starts, counts = np.unique(mates_in[by_distance], return_index=True, return_counts=True)
    round_of = np.arange(len(rows)) - np.repeat(starts, counts)
    chosen = by_distance[np.argsort(round_of, kind="stable")][:count]
    colours = rng.integers(0, 2, len(chosen)).astype(bool)
    squares = zip(*(index.tolist() for index in np.unravel_index(chosen, (64, 64, 64))), strict=True)
    return list(zip(squares, colours.tolist(), strict=True))


def won_positions(endings: Sequence[str], split: str) -> Iterator[Position]:
    """The positions of `ROWS` of a split: the endings take turns. How long each game has lasted is random.

    A game's prompts show its clock, so that a model that had only seen fresh games would meet unknown texts in its second move.
    The clock leaves time for the shortest mate: every position is won under the fifty-move rule too.
    """
    count = ROWS[split] // len(endings)
    shares = np.random.default_rng((SEEDS[split], len(endings))).random((count, len(endings)))
    draws = [spread_sample(men, split, count, seed=0) for men in endings]
    for n in range(count):
        for i, men in enumerate(endings):
            squares, strong = draws[i][n]
            left = LONGEST - int(ending(men).mates_in_KPW[squares])
            yield won_position(men, squares, strong, int(shares[n, i] * (left + 1)))


@functools.cache
def endings_table(source: str, split: str) -> PositionTable:
    """Positions of a `prompts.source` such as `endings:KRK,KQK`: the same for every run."""
    endings = source.removeprefix(PREFIX).split(",")
    splits = ("train", "heldout") if split == "all" else (split,)
    positions = [position for each in splits for position in won_positions(endings, each)]
    content = hashlib.sha256(repr(positions).encode()).hexdigest()
    return PositionTable(to_columns(positions, keyed=False), f"endings:{content}")
