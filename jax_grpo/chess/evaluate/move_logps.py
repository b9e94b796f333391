"""How likely a model is to write each legal move of a position: log-probabilities of whole completions of a `B:` prompt.

The prompt is computed once for its moves (`GPT2.grouped`). Knows nothing of what moves are worth.
"""

from collections.abc import Callable, Sequence
from typing import Any

import chess
import jax
import numpy as np
from flax import nnx

from jax_grpo.chess.positions.position import Position
from jax_grpo.chess.positions.rookworld import legal_uci
from jax_grpo.chess.tasks.policy import in_style, move_prompt
from jax_grpo.lm_head.materialised import token_logprobs
from jax_grpo.model.decoder import Decoder
from jax_grpo.policy.named import Policy
from jax_grpo.rollout.generate import encode_prompts
from jax_grpo.rollout.texts import Tick

PROMPTS, MOVES = 4, 32  # of a batch; a position with more moves is there several times


def make_score(graphdef: Any, vocab_size: int) -> Callable[..., jax.Array]:
    """Compiled `score(params, ids_PT, mask_PT, ids_PGC, mask_PGC) -> logp_PG`: of whole completions, the sum over their tokens."""

    @jax.jit
    def score(params, ids_PT, mask_PT, ids_PGC, mask_PGC):
        model: Decoder = nnx.merge(graphdef, params)
        hidden_PGCH = model.grouped(ids_PT, mask_PT, ids_PGC, mask_PGC)
        rows = (-1, ids_PGC.shape[-1])
        hidden_BCH, ids_BC = hidden_PGCH.reshape(*rows, hidden_PGCH.shape[-1]), ids_PGC.reshape(rows)
        embedding_VH = model.head_VH
        logp_BC, _ = token_logprobs(hidden_BCH, embedding_VH, ids_BC, vocab_size=vocab_size, temperature=1.0)
        return (logp_BC.reshape(ids_PGC.shape) * mask_PGC).sum(-1)

    return score


def padded_moves(
    encoded: Sequence[Sequence[int]], pad_id: int, group: int, length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Ids and mask, int32 [group, length], of at most so many moves of at most so many tokens."""
    ids_GC = np.full((group, length), pad_id, np.int32)
    mask_GC = np.zeros_like(ids_GC)
    for g, ids in enumerate(encoded):
        ids_GC[g, : len(ids)] = ids
        mask_GC[g, : len(ids)] = 1
    return ids_GC, mask_GC


def move_logps(
    policy: Policy, positions: Sequence[Position], tick: Tick = lambda done: None, style: str = "best_move"
) -> list[dict[str, float]]:
    """Log-probability, in nats at temperature 1, of writing each legal move where a style asks for one, by UCI and position.

    A position's are the same in any order of the positions: batches are cut by length and text.
    Raises PromptTooLong: a prompt and a move do not fit the model's positions.
    """
    fens = [position.fen for position in positions]
    texts = [move_prompt(style, fen).text for fen in fens]
    legal = [sorted(legal_uci(chess.Board(fen))) for fen in fens]
    distinct = sorted({in_style(style, uci, fen) for moves, fen in zip(legal, fens, strict=True) for uci in moves})
    tokenizer = policy.tokenizer
    ids_of = dict(zip(distinct, tokenizer.encode_batch([f" {uci}" for uci in distinct]), strict=True))
    length = max(map(len, ids_of.values()), default=1)
    ids_PT, mask_PT = encode_prompts(texts, tokenizer, policy.architecture.max_position_embeddings - length)
    groups = [(i, moves[at : at + MOVES]) for i, moves in enumerate(legal) for at in range(0, len(moves), MOVES)]
    groups.sort(key=lambda group: (len(texts[group[0]]), texts[group[0]], group[1]))
    score = make_score(policy.graphdef, tokenizer.vocab_size)
    logps: list[dict[str, float]] = [{} for _ in positions]
    for start in range(0, len(groups), PROMPTS):
        batch = groups[start : start + PROMPTS]
        filled = [batch[i % len(batch)] for i in range(PROMPTS)]
        rows = [row for row, _ in filled]
        written = [[ids_of[in_style(style, uci, fens[row])] for uci in moves] for row, moves in filled]
        padded = [padded_moves(ids, tokenizer.pad_id, MOVES, length) for ids in written]
        ids_PGC, mask_PGC = map(np.stack, zip(*padded, strict=True))
        logp_PG = np.asarray(score(policy.params, ids_PT[rows], mask_PT[rows], ids_PGC, mask_PGC))
        for (row, moves), logp_G in zip(batch, logp_PG.tolist(), strict=False):
            logps[row] |= zip(moves, logp_G, strict=False)
        tick(min(start + PROMPTS, len(groups)) * len(positions) // len(groups))
    return logps
