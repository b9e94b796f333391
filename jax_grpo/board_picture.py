"""One chess board as matplotlib draws it, with arrows for moves. Knows nothing of runs or evaluations."""

import chess
import matplotlib.patheffects
from matplotlib.patches import FancyArrowPatch, Rectangle

GLYPHS = dict(zip("KQRBNPkqrbnp", "♚♛♜♝♞♟♚♛♜♝♞♟", strict=True))
LIGHT, DARK, MODEL, ILLEGAL, ENGINE = "#f0e4d0", "#b9a284", "#2563eb", "#dc2626", "#16a34a"


def draw_board(axis, board: chess.Board, model: str, engine: str, seen_from: chess.Color | None = None) -> None:
    """A position: the model's move in blue (red if illegal), the engine's in green, both in the title.

    Args:
        axis: matplotlib's, without ticks.
        board: position.
        model: UCI move, or any text: no arrow then.
        engine: likewise; empty: the title speaks of the model alone.
        seen_from: the side below; None: the side to move.
    """
    axis.set(xlim=(0, 8), ylim=(0, 8), aspect="equal")
    flipped = (board.turn if seen_from is None else seen_from) == chess.BLACK

    def centre(square: int) -> tuple[float, float]:
        file, rank = chess.square_file(square), chess.square_rank(square)
        return (7.5 - file, 7.5 - rank) if flipped else (file + 0.5, rank + 0.5)

    for square in chess.SQUARES:
        x, y = centre(square)
        dark = (chess.square_file(square) + chess.square_rank(square)) % 2 == 0
        axis.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, color=DARK if dark else LIGHT, linewidth=0))
        piece = board.piece_at(square)
        if piece is not None:
            # solid glyphs for both colours: the hollow white ones vanish on light squares
            fill = "#ffffff" if piece.color else "#1c1917"
            text = axis.text(x, y - 0.04, GLYPHS[piece.symbol()], fontsize=21, ha="center", va="center", color=fill)
            text.set_fontfamily("DejaVu Sans")
            text.set_path_effects([matplotlib.patheffects.withStroke(linewidth=1.0, foreground="#1c1917")])
    legal = model in {move.uci() for move in board.legal_moves}
    for uci, color, width in ((engine, ENGINE, 5), (model, MODEL if legal else ILLEGAL, 2.5)):
        try:
            move = chess.Move.from_uci(uci)
        except ValueError:
            continue
        axis.add_patch(
            FancyArrowPatch(
                centre(move.from_square),
                centre(move.to_square),
                arrowstyle="-|>",
                mutation_scale=14,
                color=color,
                linewidth=width,
                alpha=0.8,
                shrinkA=4,
                shrinkB=2,
            )
        )
    side = "White" if board.turn else "Black"
    verdict = "best" if model == engine else "legal" if legal else "illegal"
    beside = f", engine {engine}" if engine else ""
    axis.set_title(f"{side} to move\nmodel {model or 'nothing'} ({verdict}){beside}", fontsize=8)
