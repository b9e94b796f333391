"""Won positions of the endings as `Position`s with every legal move's exact value, and the draws that sets of them are made by.

A set is spread evenly over the distances to mate: a game that is won in 16 moves meets each distance once on its way, while
three quarters of all positions with a rook lie between 8 and 14 moves. Knows nothing of what is asked about them.
"""

import functools
import hashlib
import re
from collections.abc import Iterator, Sequence

import chess
import numpy as np

from jax_grpo.positions.endings import NEVER, ending, in_split, values_of_moves
from jax_grpo.positions.position import MATE_PAWNS, Position
from jax_grpo.positions.table import PositionTable, to_columns

PREFIX = "endings:"  # of `prompts.source`
ROWS = {"train": 20_000, "heldout": 2_000}  # of a source, over all its endings
LONGEST = 50  # moves in which a game must be won: the fifty-move rule
FIRST_MOVE = 60  # number of the move that such a game begins with
SQUARES = chess.SQUARE_NAMES
SEEDS = {"train": 0, "heldout": 1, "test": 2}  # of what is drawn


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
    letter = men[1] if strong else men[1].lower()
    men_on = {king: "K" if strong else "k", piece: letter, weak: "k" if strong else "K"}
    fen = f"{_placement(men_on)} {'w' if strong else 'b'} - - {2 * played} {FIRST_MOVE + played}"
    values = [
        (0.0 if mate_in == NEVER else round(MATE_PAWNS - mate_in / 100, 2), SQUARES[start] + SQUARES[to])
        for start, to, mate_in in values_of_moves(ending(men), king, piece, weak)
    ]
    values.sort(key=lambda value: (-value[0], value[1]))
    pawns, moves = zip(*values, strict=True)
    return Position(fen, moves=moves, evaluations=pawns)


def _placement(men_on: dict[int, str]) -> str:
    """First field of the FEN."""
    ranks = ["".join(men_on.get(8 * rank + file, "1") for file in range(8)) for rank in range(7, -1, -1)]
    return re.sub("1+", lambda empty: str(len(empty[0])), "/".join(ranks))


def drawn(men: str, split: str, count: int, seed: int) -> list[tuple[tuple[int, int, int], chess.Color]]:
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
    draws = [drawn(men, split, count, seed=0) for men in endings]
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
