"""Text rows for the supervised warm start: (prompt, completion) pairs made from positions.

Four kinds: `legal_moves` (all legal moves in random order: teaches the rules faster than any single move can),
`best_move` (the reduced prompt), `policy` and `environment` (RookWorld's two tasks). Everything is a function of the
`random.Random` passed in. Knows nothing of tokens or models.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import chess

from jax_grpo.positions.position import Position, recent_moves
from jax_grpo.positions.random_play import random_positions
from jax_grpo.positions.rookworld import PolicyRow, format_policy_row, policy_prompt, state_prompt
from jax_grpo.tasks.environment import draw_move, next_state

KINDS = ("legal_moves", "best_move", "policy", "environment")


class Row(NamedTuple):
    """`completion` is what the loss is taken on; end-of-text follows it."""

    prompt: str
    completion: str


def legal_moves_row(board: chess.Board, rng: random.Random) -> Row:
    """All legal moves after `B:` or `M:`: a model that samples the first move of such a list plays legal chess."""
    moves = [move.uci() for move in board.legal_moves]
    rng.shuffle(moves)
    return Row(policy_prompt(board.fen(), rng.choice(["M:", "B:"])), "".join(f" {move}" for move in moves))


def best_move_row(position: Position) -> Row:
    return Row(policy_prompt(position.fen, "B:"), f" {position.moves[0]}")


def policy_row(position: Position, rng: random.Random) -> Row:
    """A RookWorld policy row with four spaces between fields; moves in random order, evaluations aligned with them."""
    order = rng.sample(range(len(position.moves)), len(position.moves))
    moves = tuple(position.moves[i] for i in order)
    evaluations = tuple(round(position.evaluations[i], 2) for i in order)
    row, prompt = PolicyRow(position.fen, moves, evaluations, position.moves[0]), policy_prompt(position.fen, "M:")
    return Row(prompt, format_policy_row(row).removeprefix(prompt))


def environment_row(board: chess.Board, rng: random.Random, illegal_fraction: float = 0.05) -> Row:
    """`A: <FEN>+<uci>+<history>+` and the state after it; a few moves are illegal and leave the board as it was."""
    move = draw_move(board, rng, illegal_fraction)
    return Row(state_prompt(board.fen(), move.uci(), recent_moves(board)), next_state(board, move))


def rows(mixture: dict[str, float], positions: Sequence[Position], rng: random.Random) -> Iterator[Row]:
    """Endless rows, each kind (see `KINDS`) drawn with its weight; `best_move` and `policy` need labelled positions."""
    boards = random_positions(rng)

    def board() -> chess.Board:
        for _ in range(rng.randint(1, 5)):  # neighbours in a game differ by one move: skip some
            current = next(boards)
        return current

    makers: dict[str, Callable[[], Row]] = {
        "legal_moves": lambda: legal_moves_row(board(), rng),
        "best_move": lambda: best_move_row(rng.choice(positions)),
        "policy": lambda: policy_row(rng.choice(positions), rng),
        "environment": lambda: environment_row(board(), rng),
    }
    kinds, weights = list(mixture), list(mixture.values())
    while True:
        yield makers[rng.choices(kinds, weights)[0]]()
