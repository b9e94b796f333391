"""Endings of king and rook, or king and queen, against king: how many moves to mate, exactly, and what makes two of them the same.

Retrograde analysis over every placement at once, in less than a second, so that no table is shipped or stored. A position is
three squares and who moves; the strong side's colour changes nothing, nor do turning and mirroring the board, as there is no pawn.
Knows nothing of FENs; tensors are [K, P, W]: squares (a1 = 0, h8 = 63) of the strong king, its piece, the weak king.
"""

import functools
from typing import NamedTuple

import numpy as np

from jax_grpo.positions.position import digest

_STRAIGHT, _DIAGONAL = ((0, 1), (0, -1), (1, 0), (-1, 0)), ((1, 1), (1, -1), (-1, 1), (-1, -1))
PIECES = {"KRK": _STRAIGHT, "KQK": _STRAIGHT + _DIAGONAL}  # by ending: the directions (ranks, files) its piece moves in
SPLITS = ("heldout", "test")  # a tenth of the classes each; every other class is trained on
SHARES = 10
NEVER = -1  # moves to mate where there is none


class Ending(NamedTuple):
    """Every position of an ending. Moves are the strong side's: a mate in 16 is its 16th."""

    attacks_KPS: np.ndarray  # bool: whether the piece reaches square S, past everything but its own king
    mates_in_KPW: np.ndarray  # int8, the strong side moves: moves to the shortest mate; NEVER: no such position
    # int8, the weak side moves: moves to the latest mate, 0 if it is mate; NEVER: draw, or no such position
    mated_in_KPW: np.ndarray
    # int32: the same number for the (up to) eight positions that are turns and mirrors of each other
    class_KPW: np.ndarray


def _on_board(square: int, step: tuple[int, int], times: int) -> int | None:
    rank, file = square // 8 + times * step[0], square % 8 + times * step[1]
    return 8 * rank + file if 0 <= rank < 8 and 0 <= file < 8 else None


@functools.cache
def king_steps() -> np.ndarray:
    """bool [64, 64]: whether a king's step leads from one square to the other."""
    steps_SS = np.zeros((64, 64), bool)
    for square in range(64):
        for step in (*_STRAIGHT, *_DIAGONAL):
            if (target := _on_board(square, step, 1)) is not None:
                steps_SS[square, target] = True
    return steps_SS


def _attacks(directions: tuple[tuple[int, int], ...]) -> np.ndarray:
    """`Ending.attacks_KPS`. The weak king is no obstacle: where it stands in the way it is in check, and only it may move.

    So what it leaves uncovered behind it is attacked, and the strong side never has to move past it.
    """
    attacks_KPS = np.zeros((64, 64, 64), bool)
    for square in range(64):
        for step in directions:
            passed = []
            for times in range(1, 8):
                if (target := _on_board(square, step, times)) is None:
                    break
                passed.append(target)
                attacks_KPS[:, square, target] = True
                attacks_KPS[passed, square, target] = False
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
    found_KPW, n = apart_KPW & attacks_KPS & ~moves_KPW, 0
    by_king_SS, by_piece_KPS = steps_SS.astype(np.float32), attacks_KPS.astype(np.float32)
    while found_KPW.any():
        mated_in_KPW[found_KPW] = n
        n += 1
        lost_KPW = found_KPW.astype(np.float32)
        before_KPW = (by_king_SS @ lost_KPW.reshape(64, -1)).reshape(64, 64, 64) + by_piece_KPS @ lost_KPW
        mates_in_KPW[(before_KPW > 0) & strong_to_move_KPW & (mates_in_KPW == NEVER)] = n
        escapes_KPW = _any_step(open_KPS & (mates_in_KPW == NEVER))
        found_KPW = apart_KPW & moves_KPW & ~escapes_KPW & (mated_in_KPW == NEVER)
    return Ending(attacks_KPS, mates_in_KPW, mated_in_KPW, symmetry_classes())


@functools.cache
def symmetry_classes() -> np.ndarray:
    """`Ending.class_KPW`: the least of 4096 K + 64 P + W over the board's eight symmetries."""
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


def values_of_moves(table: Ending, king: int, piece: int, weak: int) -> list[tuple[int, int, int]]:
    """(from, to, moves to mate, that one included, or NEVER) of every legal move of the strong side."""
    kings = np.flatnonzero(king_steps()[king] & ~king_steps()[weak])
    after = [(king, to, int(table.mated_in_KPW[to, piece, weak])) for to in kings.tolist() if to != piece]
    pieces = np.flatnonzero(table.attacks_KPS[king, piece]).tolist()
    after += [(piece, to, int(table.mated_in_KPW[king, to, weak])) for to in pieces]
    return [(start, to, NEVER if mated_in == NEVER else mated_in + 1) for start, to, mated_in in after]
