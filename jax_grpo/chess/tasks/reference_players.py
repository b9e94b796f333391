"""Players whose strength a stranger can imagine, as yardsticks for a model: each says which moves it draws from in a position.

A player that draws one of several moves uniformly is judged by their mean, exactly, with no draw to add noise; `choose` plays one.
Knows nothing of models or of how moves are judged.
"""

import contextlib
import random
from collections.abc import Callable, Iterator

import chess
import chess.engine

from jax_grpo.chess.positions.position import mating_moves
from jax_grpo.chess.positions.rookworld import legal_uci
from jax_grpo.chess.tasks.engine import EngineError, start_engine

Rule = Callable[[chess.Board], list[str]]  # moves in UCI, sorted, at least one; the player draws one of them uniformly
VALUES = {chess.PAWN: 1, chess.KNIGHT: 3, chess.BISHOP: 3, chess.ROOK: 5, chess.QUEEN: 9, chess.KING: 100}  # pawns
SKILL_NODES = 1000  # of Stockfish's search at Skill Level 0


def uniform(board: chess.Board) -> list[str]:
    """Every legal move."""
    return sorted(legal_uci(board))


def greedy_capture(board: chess.Board) -> list[str]:
    """A mate in one; else the most valuable piece taken by the least valuable one; else any move."""
    captures = {move.uci(): _trade(board, move) for move in board.generate_legal_captures()}
    best = max(captures.values(), default=None)
    return mating_moves(board) or sorted(uci for uci, trade in captures.items() if trade == best) or uniform(board)


def two_ply(board: chess.Board) -> list[str]:
    """A mate in one; else the most material after the opponent's best reply, who counts material too; a stalemate is even."""
    if mates := mating_moves(board):
        return mates
    even = balance(board)  # what a stalemate takes back
    values = {}
    for move in list(board.legal_moves):
        gain = _gain(board, move)
        board.push(move)
        replies = [_gain(board, reply) for reply in board.legal_moves]
        board.pop()
        values[move.uci()] = gain - max(replies) if replies else -even
    best = max(values.values())
    return sorted(uci for uci, value in values.items() if value == best)


def _trade(board: chess.Board, capture: chess.Move) -> tuple[int, int]:
    """Greater for a more valuable piece taken, then for a less valuable one that takes."""
    return _taken(board, capture), -VALUES[board.piece_type_at(capture.from_square) or chess.PAWN]


def _taken(board: chess.Board, move: chess.Move) -> int:
    if not board.is_capture(move):
        return 0
    return VALUES[board.piece_type_at(move.to_square) or chess.PAWN]  # an empty square: en passant


def _gain(board: chess.Board, move: chess.Move) -> int:
    """Pawns that the mover's balance rises by."""
    return _taken(board, move) + (VALUES[move.promotion] - VALUES[chess.PAWN] if move.promotion else 0)


def balance(board: chess.Board) -> int:
    """Pawns that the player to move is ahead."""
    pieces = board.piece_map().values()
    return sum(VALUES[piece.piece_type] * (1 if piece.color == board.turn else -1) for piece in pieces)


REFERENCE_PLAYERS: dict[str, Rule] = {"uniform": uniform, "greedy_capture": greedy_capture, "two_ply": two_ply}


def choose(rule: Rule, board: chess.Board, rng: random.Random) -> str:
    """The move that the player of a rule plays, in UCI."""
    return rng.choice(rule(board))


@contextlib.contextmanager
def skill_zero(path: str) -> Iterator[Rule]:
    """Stockfish at Skill Level 0 and `SKILL_NODES`. It draws by its own clock: no two processes play the same.

    Raises:
        EngineError: not a Stockfish.
    """
    with start_engine(path) as engine:
        if "Skill Level" not in engine.options:
            raise EngineError(f"--engine {path}: {engine.id.get('name')} has no Skill Level; expected Stockfish")
        engine.configure({"Skill Level": 0})
        limit = chess.engine.Limit(nodes=SKILL_NODES)

        def play(board: chess.Board) -> list[str]:
            move = engine.play(board, limit, game=object()).move
            assert move is not None, board.fen()
            return [move.uci()]

        yield play
