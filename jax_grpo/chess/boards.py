"""One chess board with arrows for the model's move and the engine's: as SVG for the report, or as matplotlib draws it.

The SVG has no script and no text from the run; its pieces are defined once a page (`PIECES_SVG`) and used by every board, which
keeps the page small. Knows nothing of runs or evaluations.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import chess
import chess.svg

from jax_grpo.chess.positions.position import Position, legal_uci
from jax_grpo.chess.positions.values import win_probability
from jax_grpo.report.pictures import saved_figure

MODEL, ILLEGAL, ENGINE = "#2563eb", "#dc2626", "#16a34a"
LIGHT, DARK = "#f0e4d0", "#b9a284"
BOARDS = 8  # on a page at most
UNSEEN = 0.02  # less likely moves have no arrow
COLORS = {
    **{"square light": LIGHT, "square dark": DARK, "coord": "#8a8178"},
    **dict.fromkeys(["margin", "inner border", "outer border"], "#00000000"),
}
GLYPHS = dict(zip("KQRBNPkqrbnp", "♚♛♜♝♞♟♚♛♜♝♞♟", strict=True))
_PIECES = "".join(chess.svg.PIECES.values())
PIECES_SVG = f'<svg width="0" height="0" aria-hidden="true" style="position:absolute"><defs>{_PIECES}</defs></svg>'
_SHARED = re.compile(r"<desc>.*?</desc>|<defs>.*?</defs>", re.DOTALL)


def _moves(board: chess.Board, model: str | None, engine: str | None) -> list[tuple[str, chess.Move | None, str]]:
    """Whose, move and colour; None: not a move. The engine's first, so that the model's arrow stays visible on an equal one."""
    moves = []
    own = MODEL if model in legal_uci(board) else ILLEGAL
    for who, uci, color in (("engine", engine, ENGINE), ("model", model, own)):
        try:
            moves.append((who, chess.Move.from_uci(str(uci)), color))
        except ValueError:
            moves.append((who, None, color))
    return moves


def board_svg(fen: str, model: str | None, engine: str | None) -> dict | None:
    """`svg`, a board of the six-field FEN from the side to move, and `label`, the same in words; None where it is no position.

    The model's UCI move is drawn in blue, or red where illegal, the engine's first in green; None or unreadable: no arrow.
    """
    try:
        board = chess.Board(fen)
    except ValueError:
        return None
    verdict = "illegal" if model not in legal_uci(board) else "the engine's first" if model == engine else "legal"
    arrows, words = [], []
    for who, move, color in _moves(board, model, engine):
        words.append(f"{who}: {'no move' if move is None else move.uci()}")
        if move is not None:
            arrows.append(chess.svg.Arrow(move.from_square, move.to_square, color=f"{color}dd"))
            words[-1] += f" ({verdict})" if who == "model" else ""
    svg = chess.svg.board(board, orientation=board.turn, arrows=arrows, colors=COLORS)
    side = "White" if board.turn else "Black"
    return {"svg": _SHARED.sub("", svg), "label": f"{side} to move; {'; '.join(reversed(words))}"}


def draw_board(
    axis,
    board: chess.Board,
    model: str,
    engine: str,
    seen_from: chess.Color | None = None,
    lost: float | None = None,
) -> None:
    """A position on matplotlib's axis: the model's move in blue (red if illegal), the engine's in green, both in the title.

    Moves are UCI, or any text, which has no arrow; with an empty one of the engine's the title speaks of the model alone.
    `seen_from` is the side below; None: the side to move. `lost` is the win probability that the move gives away, if known.
    """
    centre = _draw_pieces(axis, board, board.turn if seen_from is None else seen_from)
    for who, move, color in _moves(board, model, engine):
        if move is not None:
            _draw_arrow(axis, centre, move, 14, color=color, linewidth={"engine": 5, "model": 2.5}[who], alpha=0.8)
    side = "White" if board.turn else "Black"
    verdict = "best" if model == engine else "legal" if model in legal_uci(board) else "illegal"
    beside = f", engine {engine}" if engine else ""
    cost = "" if lost is None else f", loses {lost:.1%}"
    axis.set_title(f"{side} to move\nmodel {model or 'nothing'} ({verdict}{cost}){beside}", fontsize=8)


def draw_distribution(axis, board: chess.Board, probabilities: Mapping[str, float], best: Collection[str]) -> None:
    """A position on matplotlib's axis from the side to move, with an arrow for each move that is at all likely.

    An arrow's width and opacity grow with the move's probability (UCI to probability; below `UNSEEN` there is none). The squares of
    the best moves are framed in green. Has no title.
    """
    from matplotlib.patches import Rectangle  # slow to import, and the report draws without it

    centre = _draw_pieces(axis, board, board.turn)
    for uci in best:
        move = chess.Move.from_uci(uci)
        for square in (move.from_square, move.to_square):
            x, y = centre(square)
            axis.add_patch(Rectangle((x - 0.45, y - 0.45), 0.9, 0.9, fill=False, edgecolor=ENGINE, linewidth=2.5))
    for uci, probability in sorted(probabilities.items(), key=lambda pair: pair[1]):
        if probability >= UNSEEN:
            share = probability**0.5  # small ones would look alike
            strength = {"alpha": 0.2 + 0.7 * share, "linewidth": 0.8 + 6 * share, "color": MODEL}
            _draw_arrow(axis, centre, chess.Move.from_uci(uci), 6 + 14 * share, **strength)


def _draw_arrow(
    axis, centre: Callable[[int], tuple[float, float]], move: chess.Move, head: float, **style: Any
) -> None:
    """An arrow with a head of that size."""
    from matplotlib.patches import FancyArrowPatch

    ends = centre(move.from_square), centre(move.to_square)
    axis.add_patch(FancyArrowPatch(*ends, arrowstyle="-|>", mutation_scale=head, shrinkA=4, shrinkB=2, **style))


def _draw_pieces(axis, board: chess.Board, seen_from: chess.Color) -> Callable[[int], tuple[float, float]]:
    """Squares and pieces; returns where the centre of a square is."""
    from matplotlib.patches import Rectangle
    from matplotlib.patheffects import withStroke

    axis.set(xlim=(0, 8), ylim=(0, 8), aspect="equal")

    def centre(square: int) -> tuple[float, float]:
        file, rank = chess.square_file(square), chess.square_rank(square)
        return (7.5 - file, 7.5 - rank) if seen_from == chess.BLACK else (file + 0.5, rank + 0.5)

    for i, (file, rank) in enumerate(zip(chess.FILE_NAMES, chess.RANK_NAMES, strict=True)):
        for label, x, y in ((file, centre(i)[0] + 0.45, 0.03), (rank, 0.04, centre(8 * i)[1] + 0.45)):
            side = {"ha": "right", "va": "bottom"} if label == file else {"ha": "left", "va": "top"}
            axis.text(x, y, label, fontsize=6, color="#5b5148", **side)
    for square in chess.SQUARES:
        x, y = centre(square)
        color = LIGHT if chess.BB_LIGHT_SQUARES & chess.BB_SQUARES[square] else DARK
        axis.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, color=color, linewidth=0))
        if (piece := board.piece_at(square)) is not None:
            # solid glyphs for both colours: the hollow white ones vanish on light squares
            style = {"color": "#ffffff" if piece.color else "#1c1917", "fontsize": 21, "fontfamily": "DejaVu Sans"}
            effects = [withStroke(linewidth=1.0, foreground="#1c1917")]
            axis.text(x, y - 0.04, GLYPHS[piece.symbol()], ha="center", va="center", path_effects=effects, **style)
    return centre


def save_boards(moves: Sequence[tuple[Position, str]], path: Path) -> None:
    """A page of the first `BOARDS` labelled positions: the model's move (red if illegal), what it loses, the label."""
    moves, columns = moves[:BOARDS], 4
    rows = -(-len(moves) // columns)
    with saved_figure(path, rows, columns, (3.1 * columns, 3.5 * rows), dpi=110) as (_, axes):
        for axis in axes.flat:
            axis.axis("off")
        for axis, (position, move) in zip(axes.flat, moves, strict=False):
            worth = {uci: win_probability(p) for uci, p in zip(position.moves, position.evaluations, strict=True)}
            lost = max(worth.values()) - worth[move] if move in worth else None
            draw_board(axis, chess.Board(position.fen), move, position.moves[0], lost=lost)
