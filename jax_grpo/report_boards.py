"""Boards of the report: a position with the model's move and the engine's, as SVG without scripts or text from the run.

The pieces' drawings are defined once a page (`PIECES_SVG`) and used by every board, which keeps the page small.
"""

import re

import chess
import chess.svg

MODEL, ILLEGAL, ENGINE = "#2563ebdd", "#dc2626dd", "#16a34add"
COLORS = {
    "square light": "#f0e4d0",
    "square dark": "#b9a284",
    "margin": "#00000000",
    "coord": "#8a8178",
    "inner border": "#00000000",
    "outer border": "#00000000",
}
_PIECES = "".join(chess.svg.PIECES.values())
PIECES_SVG = f'<svg width="0" height="0" aria-hidden="true" style="position:absolute"><defs>{_PIECES}</defs></svg>'
_DRAWN_ONCE = re.compile(r"<desc>.*?</desc>|<defs>.*?</defs>", re.DOTALL)


def board_svg(fen: str, model: str | None, engine: str | None) -> dict | None:
    """The board from the side to move; None where the text is no position.

    Args:
        fen: six-field FEN.
        model: UCI move, drawn in blue, or red where illegal; None or unreadable: no arrow.
        engine: the engine's first move, in green.

    Returns:
        `svg`, and `label`: the same in words.
    """
    try:
        board = chess.Board(fen)
    except ValueError:
        return None
    arrows, said = [], []
    legal = model in {move.uci() for move in board.legal_moves}
    verdict = "illegal" if not legal else "the engine's first" if model == engine else "legal"
    # the engine's arrow first, so that the model's stays visible on top of an equal one
    for who, uci, color in (("engine", engine, ENGINE), ("model", model, MODEL if legal else ILLEGAL)):
        try:
            move = chess.Move.from_uci(str(uci))
        except ValueError:
            said.append(f"{who}: no move")
            continue
        arrows.append(chess.svg.Arrow(move.from_square, move.to_square, color=color))
        said.append(f"{who}: {move.uci()}" + (f" ({verdict})" if who == "model" else ""))
    side = "White" if board.turn else "Black"
    svg = chess.svg.board(board, orientation=board.turn, arrows=arrows, colors=COLORS)
    return {"svg": _DRAWN_ONCE.sub("", svg), "label": f"{side} to move; {'; '.join(reversed(said))}"}
