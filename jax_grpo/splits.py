"""Which split a position is in: a hash of the position itself, so that no position is ever in two, whatever file it stands in.

Data sets (`data`) and files are split by the same hash. Knows no files.
"""

import hashlib

import chess

SHARES = 10_000  # a share is rounded to so many parts
FILE_SHARE = 0.1  # of a file's positions, held out; the default share of a data set


def position_key(board: chess.Board) -> str:
    """Board, side to move, castling rights and en passant square: what makes two positions the same."""
    return board.epd()


def digest(key: str) -> int:
    """64 bits of a position's key, which its split is taken from."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")


def is_heldout(key: str, heldout: int, count: int) -> bool:
    """Whether the position belongs to the held-out split, which is `heldout` parts beside `count` parts of training."""
    return digest(key) % (count + heldout) < heldout
