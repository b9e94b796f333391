"""Two evaluations in pictures: what each model would play in the same positions, and the same ending played by each.

Draws what evaluation.json and endgame.pgn hold; asks no model.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import chess
import chess.pgn
import numpy as np

from jax_grpo.chess.boards import draw_board, draw_distribution
from jax_grpo.chess.positions.position import Position
from jax_grpo.chess.positions.values import UNDECIDED, move_table
from jax_grpo.report.pictures import saved_figure

BOARDS = 4  # positions of the strength suite that are shown
MOMENTS = 6  # of a game
ENDGAMES, DISTRIBUTIONS, REPLAY = "endgame.pgn", "boards_compared.png", "endgame_compared.png"


def chosen(positions: Sequence[Position]) -> list[int]:
    """Numbers of the positions that are shown: undecided ones, by a checksum of the position, so that nobody has chosen them."""
    low, high = UNDECIDED
    open_ = [i for i, position in enumerate(positions) if low <= move_table(position).best <= high]
    return sorted(open_, key=lambda i: hashlib.sha256(positions[i].fen.encode()).hexdigest())[:BOARDS]


def distribution(position: Position, logps: Mapping[str, float]) -> dict[str, Any]:
    """What evaluation.json keeps of a position that is shown.

    `probability` of each legal move, `best` moves, `legal` (the probability of any legal move), and `loss`: the win probability
    that an answer is expected to lose, where one that is no legal move costs what the worst legal move does.
    """
    table = move_table(position)
    probability = {uci: math.exp(logp) for uci, logp in logps.items()}
    legal = math.fsum(probability.values())
    lost = math.fsum(p * table.loss(uci) for uci, p in probability.items()) + (1 - legal) * table.loss("")
    best = [uci for uci in sorted(table.wins) if table.loss(uci) == 0]
    return {"fen": position.fen, "probability": probability, "best": best, "legal": legal, "loss": lost}


def save_side_by_side(reports: Sequence[Mapping[str, Any]], folders: Sequence[Path], out: Path) -> list[Path]:
    """Those pictures that both evaluations have something for, of the same positions; returns the files."""
    names = [report["model"]["name"] for report in reports]
    files = []
    of_fen = [{board["fen"]: board for board in report.get("boards", [])} for report in reports]
    if pairs := [(board, of_fen[1][fen]) for fen, board in of_fen[0].items() if fen in of_fen[1]]:
        files.append(out / DISTRIBUTIONS)
        _distributions(pairs, names, files[-1])
    if games := _same_game(*(_games(folder / ENDGAMES) for folder in folders)):
        files.append(out / REPLAY)
        _replay(games, names, files[-1])
    return files


def _distributions(
    pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]], names: Sequence[str], path: Path
) -> None:
    """A column a position, a row an evaluation."""
    with saved_figure(path, 2, len(pairs), (3.1 * len(pairs), 7.4)) as (figure, axes):
        for column, pair in enumerate(pairs):
            for row, (thought, name) in enumerate(zip(pair, names, strict=True)):
                axis, board = axes[row, column], chess.Board(thought["fen"])
                axis.set_axis_off()
                draw_distribution(axis, board, thought["probability"], thought["best"])
                side = "White" if board.turn else "Black"
                axis.set_title(f"{side} to move; {'before' if row == 0 else 'after'}: {name}", fontsize=8)
                below = f"legal {thought['legal']:.0%}, loses {thought['loss']:.1%} of win probability"
                axis.text(4, -0.35, below, ha="center", va="top", fontsize=8)
        figure.suptitle("Probability of each move (arrows); the best moves are framed", fontsize=9)


def _games(file: Path) -> dict[str, chess.pgn.Game]:
    """The games of a PGN by their event and first position; none where there is no such file."""
    games: dict[str, chess.pgn.Game] = {}
    if file.is_file():
        with file.open(encoding="utf-8") as text:
            while game := chess.pgn.read_game(text):
                games[f"{game.headers['Event']} {game.board().fen()}"] = game
    return games


def _same_game(
    before: Mapping[str, chess.pgn.Game], after: Mapping[str, chess.pgn.Game]
) -> tuple[chess.pgn.Game, chess.pgn.Game] | None:
    """The first start that both played, one that was won only after before any other."""
    shared = [(before[key], after[key]) for key in before if key in after]
    won_after = [pair for pair in shared if not _mated(pair[0]) and _mated(pair[1])]
    return next(iter(won_after or shared), None)


def _mated(game: chess.pgn.Game) -> bool:
    return game.end().board().is_checkmate()


def _replay(games: Sequence[chess.pgn.Game], names: Sequence[str], path: Path) -> None:
    """A row a game: moments from its start to its end, each with the move that follows."""
    strong = games[0].board().turn
    with saved_figure(path, 2, MOMENTS, (2.4 * MOMENTS, 6.4)) as (figure, axes):
        for row, (game, name) in enumerate(zip(games, names, strict=True)):
            line = list(game.mainline())
            boards = [game.board(), *(node.board() for node in line)]
            plies = np.unique(np.linspace(0, len(line), MOMENTS).round().astype(int)).tolist()
            for axis in axes[row]:
                axis.set_axis_off()
            for axis, ply in zip(axes[row], plies, strict=False):
                draw_board(axis, boards[ply], line[ply].move.uci() if ply < len(line) else "", "", seen_from=strong)
                lines = [f"{'before' if row == 0 else 'after'}: {name}"] if ply == 0 else []
                lines += [f"end: {game.headers['Termination']}"] if ply == len(line) else [f"move {ply // 2 + 1}"]
                axis.set_title("\n".join(lines), fontsize=8, wrap=True)
        figure.suptitle(f"{games[0].headers['Event']}: the same start before and after", fontsize=9)
