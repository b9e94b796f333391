"""Rows of text that a model is taught: prompt and completion, of several kinds, and batches of them. Knows nothing of models."""

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import chess
import numpy as np

from jax_grpo.model.tokenizer import Tokenizer
from jax_grpo.positions.position import Position, recent_moves
from jax_grpo.positions.random_play import random_positions
from jax_grpo.positions.rookworld import PolicyRow, format_policy_row, policy_prompt, state_prompt
from jax_grpo.tasks.environment import draw_move, next_state
from jax_grpo.tasks.instructions.lessons import FOLLOWED, lesson

GAMES, LABELS = "random games (python-chess)", "the packaged positions labelled by Stockfish"
DATA = {  # the first teaches the rules faster than one move can
    "legal_moves": GAMES,
    "best_move": LABELS,
    "policy": LABELS,
    "environment": GAMES,
    "instructions": "prompts and answers drawn by jax_grpo.tasks.instructions",
}
KINDS = tuple(DATA)
LENGTH_MULTIPLE = 32  # batches are padded to a multiple, so that only a few shapes are compiled
CHUNK_BATCHES = 16  # rows are sorted by length within this many batches


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


def environment_row(board: chess.Board, rng: random.Random) -> Row:
    """`A: <FEN>+<uci>+<history>+` and the state after it; a few moves are illegal and leave the board as it was."""
    move = draw_move(board, rng, illegal_fraction=0.05)
    return Row(state_prompt(board.fen(), move.uci(), recent_moves(board)), next_state(board, move))


def rows(
    mixture: dict[str, float], positions: Sequence[Position], rng: random.Random, followed: float = FOLLOWED
) -> Iterator[Row]:
    """Endless rows, each kind (see `KINDS`) drawn with its weight; `best_move` and `policy` need labelled positions."""
    boards = random_positions(rng)

    def board() -> chess.Board:
        return next(itertools.islice(boards, rng.randint(0, 4), None))  # neighbours differ by one move: skip some

    makers: dict[str, Callable[[], Row]] = {
        "legal_moves": lambda: legal_moves_row(board(), rng),
        "best_move": lambda: best_move_row(rng.choice(positions)),
        "policy": lambda: policy_row(rng.choice(positions), rng),
        "environment": lambda: environment_row(board(), rng),
        "instructions": lambda: Row(*lesson(rng.getrandbits(64), followed)),
    }
    kinds, weights = list(mixture), list(mixture.values())
    while True:
        yield makers[rng.choices(kinds, weights)[0]]()


def batches(
    source: Iterator[Row], tokenizer: Tokenizer, batch_size: int, max_length: int, rng: random.Random
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Right-padded (input_ids, attention_mask, loss_mask), each [B, T], of similar length; longer rows are left out."""
    while True:
        chunk = [next(source) for _ in range(batch_size * CHUNK_BATCHES)]
        prompts = tokenizer.encode_batch([row.prompt for row in chunk])
        completions = tokenizer.encode_batch([row.completion for row in chunk])
        tokens = [(len(p), [*p, *c, tokenizer.eos_id]) for p, c in zip(prompts, completions, strict=True)]
        tokens = sorted((row for row in tokens if len(row[1]) <= max_length), key=lambda row: len(row[1]))
        groups = [tokens[i : i + batch_size] for i in range(0, len(tokens) - batch_size + 1, batch_size)]
        rng.shuffle(groups)
        for group in groups:
            length = min(-(-len(group[-1][1]) // LENGTH_MULTIPLE) * LENGTH_MULTIPLE, max_length)
            input_ids_BT = np.full((batch_size, length), tokenizer.pad_id, np.int32)
            attention_BT, loss_BT = np.zeros((2, batch_size, length), np.int32)
            for i, (prompt_length, ids) in enumerate(group):
                input_ids_BT[i, : len(ids)] = ids
                attention_BT[i, : len(ids)] = 1
                loss_BT[i, prompt_length : len(ids)] = 1
            yield input_ids_BT, attention_BT, loss_BT
