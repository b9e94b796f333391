"""What is kept of a match: its games as PGN, its figures as JSON, a picture of the model's best game. Plays nothing."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import chess
import chess.pgn
import chess.svg

from jax_grpo.elo import describe, estimate

RESULTS = {1.0: "1-0", 0.5: "1/2-1/2", 0.0: "0-1"}  # by White's score


class Game(NamedTuple):
    """One finished game.

    Attributes:
        board: final position with all moves, the opening's included.
        model_is_white: colour of the model.
        score: of the model: 1, 0.5 or 0.
        ending: how it ended (`data.arbiter.ENDINGS`), or `illegal move`.
        fallbacks: by half-move number, what the model had written there instead of a legal move.
        model_moves: number of the model's moves.
        seconds: of the model's moves together.
    """

    board: chess.Board
    model_is_white: bool
    score: float
    ending: str
    fallbacks: dict[int, str]
    model_moves: int
    seconds: float


def to_pgn(game: Game, number: int, opponent: str, opening_plies: int) -> chess.pgn.Game:
    """The game with headers, and a comment where the model's own move was not legal."""
    pgn = chess.pgn.Game.from_board(game.board)
    white = float(game.score if game.model_is_white else 1 - game.score)
    sides = ["jax_grpo", opponent] if game.model_is_white else [opponent, "jax_grpo"]
    pgn.headers.update({"Event": "jax_grpo match", "Site": "?", "Round": str(number), "Result": RESULTS[white]})
    pgn.headers["White"], pgn.headers["Black"] = sides
    pgn.headers["Termination"] = game.ending
    pgn.headers["Opening"] = f"{opening_plies} random half-moves"
    for ply, node in enumerate(pgn.mainline()):
        if ply in game.fallbacks:
            node.comment = f"fallback: the model wrote {game.fallbacks[ply]}"
    return pgn


def summary(games: Sequence[Game]) -> dict[str, Any]:
    """Scores of all games and of each colour, Elo with its interval, fallbacks, endings and time; JSON values."""

    def scores(part: Sequence[Game]) -> dict[str, int]:
        return {name: sum(g.score == s for g in part) for name, s in (("wins", 1.0), ("draws", 0.5), ("losses", 0.0))}

    totals = scores(games)
    found = estimate(**totals)
    moves = sum(game.model_moves for game in games)
    fallbacks = sum(len(game.fallbacks) for game in games)
    kinds = [game.ending for game in games]
    return {
        **totals,
        "as_white": scores([game for game in games if game.model_is_white]),
        "as_black": scores([game for game in games if not game.model_is_white]),
        **found._asdict(),
        "verdict": describe(found),
        "model_moves": moves,
        "fallbacks": fallbacks,
        "fallback_rate": fallbacks / max(moves, 1),
        "illegal_moves_on_the_board": kinds.count("illegal move"),
        "endings": {kind: kinds.count(kind) for kind in sorted(set(kinds))},
        "half_moves_a_game": sum(len(game.board.move_stack) for game in games) / len(games),
        "milliseconds_a_model_move": 1000 * sum(game.seconds for game in games) / max(moves, 1),
    }


def save(
    record: Mapping[str, Any],
    games: Sequence[Game],
    opponent: str,
    opening_plies: int,
    *,
    pgn: Path | None,
    json_file: Path | None,
    picture: Path | None,
) -> None:
    """Writes the record, adds the last game to the PGN (begun anew with the first), and draws the model's best game so far."""
    if json_file:
        json_file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if pgn:
        with pgn.open("w" if len(games) == 1 else "a", encoding="utf-8") as file:
            print(to_pgn(games[-1], len(games), opponent, opening_plies), file=file, end="\n\n")
    if picture:
        best = max(games, key=lambda game: (game.score, len(game.board.move_stack)))
        board = best.board
        check = board.king(board.turn) if board.is_check() else None
        last = board.move_stack[-1] if board.move_stack else None
        svg = chess.svg.board(board, orientation=best.model_is_white, lastmove=last, check=check, size=400)
        picture.write_text(svg, encoding="utf-8")
