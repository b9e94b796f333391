"""Self-play games as PGN that any chess program opens, each with how it ended. Plays nothing."""

from collections.abc import Mapping, Sequence

import chess
import chess.pgn

from jax_grpo.evaluation.selfplay import ENDS, Game


def pgn(games_of: Mapping[str, Sequence[Game]], name: str) -> str:
    """The games of each set, one PGN after another.

    Args:
        games_of: by set, such as `model environment, greedy`.
        name: of the model, on both sides.
    """
    return "\n\n".join(
        str(_game(game, number, event, name)) for event, games in games_of.items() for number, game in enumerate(games)
    ) + ("\n" if games_of else "")


def _game(game: Game, number: int, event: str, name: str) -> chess.pgn.Game:
    # Without the engine's clock and date: the same weights and seed give the same file.
    out = chess.pgn.Game.from_board(game.board)
    headers = {"Event": f"Self-play, {event}", "Site": "jax_grpo", "Date": "????.??.??", "Round": str(number + 1)}
    headers |= {"White": name, "Black": name, "Termination": ENDS[game.ended or "length"]}
    for key, value in headers.items():
        out.headers[key] = value
    end = out.end()
    if game.ended not in ("checkmate", "draw", "length"):
        end.comment = f"{ENDS[game.ended or 'length']}: {' '.join(game.last_text.split())!r}".replace("}", ")")
    if game.opening:
        at = out
        for _ in range(game.opening):
            at = at.variations[0]
        at.comment = "the model's first move follows" if at is not end else at.comment
    return out
