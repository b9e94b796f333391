"""What a model of chess is taught before it is trained: rows of text, and moves by what they are worth.

Rows teach the rules, the best move and RookWorld's texts. Tables teach all legal moves of a position at once, each with the
probability that its value gives it: p(m) = (1 - u) softmax(w(m) / tau) + u / n over the n legal moves by their win probabilities
w. A move is its tokens up to and with end-of-text, and the loss -sum_m p(m) log pi(m) is a sum over prefixes s of moves,

    -sum_s sum_v p(s v) log pi(v | s)        p(s v): probability of the moves that begin with s v

so that a prefix is computed once for all moves that begin with it, and the prompt once for all prefixes. Of a tree of prefixes
some branches are computed: those of the likeliest first tokens, and of the others a few at random with larger weights; in each
branch one path is drawn by p. The loss of such a draw has the mean of the whole sum.
"""

import functools
import itertools
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import chess
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_grpo.chess.games import random_positions
from jax_grpo.chess.positions.position import Position, PositionFileError, is_black, mirrored, recent_moves
from jax_grpo.chess.positions.rookworld import PolicyRow, format_policy_row, policy_prompt, state_prompt
from jax_grpo.chess.positions.sources import load_positions, read_packaged
from jax_grpo.chess.positions.values import move_table
from jax_grpo.chess.settings import OWN_SIDE
from jax_grpo.chess.tasks.environment import draw_move, next_state
from jax_grpo.config.sections import PromptsConfig
from jax_grpo.model.tokenizer import Tokenizer
from jax_grpo.rollout.generate import encode_prompts, padded_length
from jax_grpo.sft.rows import Row, Stage

GAMES, LABELS = "random games (python-chess)", "the packaged positions labelled by Stockfish"
# What each kind is made of; `legal_moves` teaches the rules faster than one move can.
DATA = {"legal_moves": GAMES, "best_move": LABELS, "policy": LABELS, "environment": GAMES}
_packaged = functools.cache(read_packaged)  # once for all stages
BRANCHES = 6  # computed of a position's tree
SAMPLED = 2  # of them, where there are more: of first tokens drawn from the less likely ones
PROMPT_MULTIPLE = 8  # prompts are padded to a multiple, so that only a few shapes are compiled
CHILDREN = 32  # tokens that may follow a prefix: more than pieces (16) and a queen's squares (27); padded to a multiple


def legal_moves_row(board: chess.Board, rng: random.Random) -> Row:
    """All legal moves after `B:` or `M:`: a model that samples the first move of such a list plays legal chess."""
    moves = [move.uci() for move in board.legal_moves]
    rng.shuffle(moves)
    return Row(policy_prompt(board.fen(), rng.choice(["M:", "B:"])), "".join(f" {move}" for move in moves))


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


def makers(rng: random.Random) -> dict[str, Callable[[], Row]]:
    """What makes a row of each kind of `DATA`."""
    boards, positions = random_positions(rng), _packaged("train")

    def board() -> chess.Board:
        return next(itertools.islice(boards, rng.randint(0, 4), None))  # neighbours differ by one move: skip some

    def best_move() -> Row:
        position = rng.choice(positions)
        return Row(policy_prompt(position.fen, "B:"), f" {position.moves[0]}")

    return {
        "legal_moves": lambda: legal_moves_row(board(), rng),
        "best_move": best_move,
        "policy": lambda: policy_row(rng.choice(positions), rng),
        "environment": lambda: environment_row(board(), rng),
    }


class Node(NamedTuple):
    """A prefix of moves, and what share of the target follows it by each next token, in the units of the whole loss."""

    branch: int
    depth: int  # tokens of the prefix
    weights: Mapping[int, float]


class SoftMoves(NamedTuple):
    """Left-padded prompts [P, T], branches of moves [P, G, C], and for N = 1 + G (C - 1) prefixes the K tokens that may follow.

    Prefix 0 is the prompt alone; then come those of each branch, shortest first. Weights of what is not there are 0.
    """

    prompt_ids_PT: np.ndarray
    prompt_mask_PT: np.ndarray
    completion_ids_PGC: np.ndarray
    completion_mask_PGC: np.ndarray
    tokens_PNK: np.ndarray  # int32
    weights_PNK: np.ndarray  # float32; the weights of a prefix sum to the share of the target that begins with it


def target(wins: Mapping[str, float], tau: float, uniform: float) -> dict[str, float]:
    """p(m) of the module's text, by UCI; `tau` is in win probability."""
    w_M = np.array(list(wins.values()))
    p_M = np.exp((w_M - w_M.max()) / tau)
    p_M = (1 - uniform) * p_M / p_M.sum() + uniform / len(p_M)
    return dict(zip(wins, p_M.tolist(), strict=True))


def tree(moves: Mapping[tuple[int, ...], float], rng: random.Random) -> tuple[list[tuple[int, ...]], list[Node]]:
    """One path of tokens for each branch, and the nodes on them, the root first.

    `moves` are tokens and p(m), none a prefix of another. Where there are no more first tokens than branches, all are
    computed, and only the paths behind them are drawn.
    """
    first = _next_tokens(moves, ())
    order = sorted(first, key=lambda token: -first[token])
    if len(order) <= BRANCHES:
        chosen = first
    else:
        likely, rest = order[: BRANCHES - SAMPLED], order[BRANCHES - SAMPLED :]
        chosen = {token: first[token] for token in likely}
        chosen |= {token: first[token] * len(rest) / SAMPLED for token in rng.sample(rest, SAMPLED)}
    paths, nodes = [], [Node(0, 0, first)]
    for branch, (token, share) in enumerate(chosen.items()):
        path, inside = (token,), {move: p for move, p in moves.items() if move[0] == token}
        while path not in inside:
            following = _next_tokens(inside, path)
            total = sum(following.values())
            nodes.append(Node(branch, len(path), {one: share * p / total for one, p in following.items()}))
            path = (*path, *rng.choices(list(following), list(following.values())))
            inside = {move: p for move, p in inside.items() if move[: len(path)] == path}
        paths.append(path)
    return paths, nodes


def _next_tokens(moves: Mapping[tuple[int, ...], float], prefix: tuple[int, ...]) -> dict[int, float]:
    shares: dict[int, float] = {}
    for move, p in moves.items():
        if move[: len(prefix)] == prefix:
            shares[move[len(prefix)]] = shares.get(move[len(prefix)], 0.0) + p
    return shares


def soft_moves(
    positions: Sequence[Position], tokenizer: Tokenizer, rng: random.Random, tau: float, uniform: float
) -> SoftMoves:
    """One batch. Raises NotATable: a position lacks a legal move's value."""
    trees = []
    for position in positions:
        shares = target(move_table(position).wins, tau, uniform)
        tokens = tokenizer.encode_batch([f" {move}" for move in shares])
        ended = ((*ids, tokenizer.eos_id) for ids in tokens)
        trees.append(tree(dict(zip(ended, shares.values(), strict=True)), rng))
    texts = [policy_prompt(position.fen, "B:") for position in positions]
    prompts = encode_prompts(texts, tokenizer, sys.maxsize, multiple=PROMPT_MULTIPLE)  # `batches` knows the context
    longest = max(len(path) for paths, _ in trees for path in paths)
    most = max(len(node.weights) for _, nodes in trees for node in nodes)
    branches_PGC = np.full((len(texts), BRANCHES, longest), tokenizer.pad_id, np.int32)
    there_PGC = np.zeros(branches_PGC.shape, np.int32)
    shape = (len(texts), 1 + BRANCHES * (longest - 1), padded_length(most, CHILDREN))
    tokens_PNK, weights_PNK = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
    for row, (paths, nodes) in enumerate(trees):
        for branch, path in enumerate(paths):
            branches_PGC[row, branch, : len(path)], there_PGC[row, branch, : len(path)] = path, 1
        for node in nodes:
            at = node.depth and node.branch * (longest - 1) + node.depth
            tokens_PNK[row, at, : len(node.weights)] = list(node.weights)
            weights_PNK[row, at, : len(node.weights)] = list(node.weights.values())
    return SoftMoves(*prompts, branches_PGC, there_PGC, tokens_PNK, weights_PNK)


def batches(
    positions: Sequence[Position],
    tokenizer: Tokenizer,
    batch_size: int,
    context: int,
    rng: random.Random,
    tau: float,
    uniform: float,
    own_side: bool = False,
) -> Iterator[SoftMoves]:
    """Endless batches, epoch after epoch in a new order, each position as it is or mirrored; `own_side`: always with White to move.

    Raises:
        PositionFileError: not one batch of them, or a position and a move are more than `context` tokens.
        NotATable: a position lacks a legal move's value.
    """
    if len(positions) < batch_size:
        raise PositionFileError(f"{len(positions)} positions; expected at least one batch of {batch_size}")
    while True:
        order = rng.sample(range(len(positions)), len(positions))
        for at in range(0, len(order) - batch_size + 1, batch_size):
            chosen = (positions[number] for number in order[at : at + batch_size])
            sides = [
                mirrored(each) if (is_black(each.fen) if own_side else rng.random() < 0.5) else each for each in chosen
            ]
            batch = soft_moves(sides, tokenizer, rng, tau, uniform)
            lengths_P = batch.prompt_mask_PT.sum(-1)
            if (most := lengths_P.max() + batch.completion_ids_PGC.shape[-1]) > context:
                where = sides[int(lengths_P.argmax())].fen
                raise PositionFileError(
                    f"{where!r} and a move are {most} tokens; the model has positions for {context}"
                )
            yield batch


def table_batches(
    stage: Stage, seed: int, tokenizer: Tokenizer, size: int, context: int, rng: random.Random
) -> Iterator[Sequence[np.ndarray]]:
    """Batches of `soft_moves` from a stage's tables; the first is made now, which refuses bad data."""
    assert stage.tables is not None, "the stage is one of tables"
    positions = load_positions(PromptsConfig(source=stage.tables), seed)
    own_side = stage.prompt_style == OWN_SIDE
    moves = batches(positions, tokenizer, size, context, rng, stage.tau, stage.uniform, own_side)
    return itertools.chain([next(moves)], moves)


def make_loss(graphdef: Any) -> Callable[..., jax.Array]:
    """`(params, *SoftMoves) -> loss`, nats a position: the module's sum, whose least value is the target's own entropy."""

    def loss(params, prompt_ids_PT, prompt_mask_PT, completion_ids_PGC, completion_mask_PGC, tokens_PNK, weights_PNK):
        model = nnx.merge(graphdef, params)
        hidden_PGCH = model.grouped(prompt_ids_PT, prompt_mask_PT, completion_ids_PGC, completion_mask_PGC)
        prompts, *_, width = hidden_PGCH.shape
        behind_PNH = hidden_PGCH[:, :, 1:].reshape(prompts, -1, width)
        hidden_PNH = jnp.concatenate([hidden_PGCH[:, 0, :1], behind_PNH], axis=1)
        embedding_VH = model.head_VH[: model.vocabulary].astype(hidden_PNH.dtype)
        wide = jnp.promote_types(hidden_PNH.dtype, jnp.float32)
        logits_PNV = jnp.einsum("pnh,vh->pnv", hidden_PNH, embedding_VH).astype(wide)
        chosen_PNK = jnp.take_along_axis(logits_PNV, tokens_PNK, axis=-1)
        logp_PNK = chosen_PNK - jax.nn.logsumexp(logits_PNV, axis=-1, keepdims=True)
        return -jnp.sum(jnp.where(weights_PNK > 0, weights_PNK * logp_PNK, 0)) / prompts

    return loss
