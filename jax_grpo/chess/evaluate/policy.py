"""The `P:` task judged: format, legality, the engine's moves, what a move costs, and the evaluations the model writes.

Labels are the engine's moves, best first; the best move is the first for both colours. Here is also how the model is asked for
moves, in positions and as a player of games, and how likely it is to write each legal one: log-probabilities of whole completions
of a `B:` prompt, which is computed once for its moves (`Decoder.grouped`). Knows nothing of generation.
"""

from collections.abc import Callable, Sequence
from typing import Any

import chess
import jax
import numpy as np
from flax import nnx

from jax_grpo.chess.games import Game, Player, random_move, seeded
from jax_grpo.chess.positions.position import Position, legal_uci
from jax_grpo.chess.positions.values import win_probability
from jax_grpo.chess.settings import PolicySettings
from jax_grpo.chess.tasks import policy
from jax_grpo.chess.tasks.engine import EnginePool
from jax_grpo.chess.tasks.environment import plain_number
from jax_grpo.chess.tasks.policy import CANDIDATES, Answer, PolicyTask, in_style, move_prompt
from jax_grpo.lm_head.materialised import token_logprobs
from jax_grpo.model.decoder import Decoder
from jax_grpo.policy.named import Policy
from jax_grpo.rollout.generate import encode_prompts
from jax_grpo.rollout.texts import Complete, Tick

ROW, MOVE = "full", "best_move"  # answers: the whole row after `M:`; one move after `B:`
PAWNS_CAP = 10.0  # evaluations beyond +-10 pawns count as 10: a mate would outweigh every other move in a mean
PROMPTS_AT_ONCE, MOVES_AT_ONCE = 4, 32  # of a batch; a position with more moves is there several times


def policy_task(style: str) -> PolicyTask:
    """The task of a prompt style, without an engine: positions that need labels come with them (`tasks.policy.labelled`)."""
    return PolicyTask(PolicySettings.model_validate({"prompt_style": style}))


def written_moves(task: PolicyTask, complete: Complete, positions: Sequence[Position], **how: Any) -> list[str]:
    """The move of each completion of the positions' prompts, or text that is none; `complete` may write several a prompt."""
    texts = complete([task.prompt(position, 0) for position in positions], **how)
    each = len(texts) // max(len(positions), 1)
    return [task.move(text, positions[i // each].fen) for i, text in enumerate(texts)]


def model_player(task: PolicyTask, complete: Complete) -> Player:
    """Plays what `complete` writes; what is sampled is decided by the game's number and how many moves it has made there."""

    def moves(games: Sequence[Game]) -> list[str]:
        positions, numbers = [Position(game.fen) for game in games], [game.number for game in games]
        return written_moves(task, complete, positions, numbers=numbers, step=games[0].turn)

    return moves


def random_legal(seed: int) -> Player:
    return seeded(random_move, lambda game: f"legal/{seed}/{game.number}/{game.turn}")


def policy_rows(
    style: str, positions: Sequence[Position], completions: Sequence[str], engine: EnginePool | None
) -> list[dict[str, Any]]:
    """One row of measurements a position; None where something cannot be measured.

    Booleans `format` (every field there and of its kind), `legal`, `best_move`, `top_five` (the move played is among the
    engine's), `scored` (its cost is known: it has a label, or the engine analyses it); numbers `win_loss` (win probability
    lost against the engine's first move, 0 to 1) and `centipawn_loss` (evaluations within +-10 pawns), of scored moves, at
    least 0. `full` adds shares `candidates_legal` and `candidates_top_five` of the five candidates, and `evaluation_error`
    (pawns, capped alike) and `evaluation_error_win` (win probability), means over the candidates with a label.
    With published labels, `published_best`: the move is the published one (for Black the worst of five, see the docs).
    """
    task = policy_task(style)
    components = task.score([task.prompt(position, 0) for position in positions], completions)
    answers = [policy.parse_answer(style, text, p.fen) for text, p in zip(completions, positions, strict=True)]
    values = policy.move_values(positions, [answer.best for answer in answers], engine)
    published = any(position.best for position in positions)
    rows = []
    for i, (position, answer, pawns) in enumerate(zip(positions, answers, values, strict=True)):
        full_marks = {name: bool(scores[i] == 1) for name, scores in components.items()}
        row: dict[str, Any] = {
            "format": full_marks["parseable"] and full_marks.get("structure", True) and not full_marks["malformed"],
            "legal": full_marks["legal"],
            "best_move": full_marks["best_move"] if position.moves else None,
            "top_five": answer.best in position.moves[:CANDIDATES] if position.moves else None,
        }
        row |= _loss(position, pawns)
        if style == "full":
            row |= _candidates(position, answer)
        if published:
            row["published_best"] = answer.best == position.best if position.best else None
        rows.append(row)
    return rows


def _loss(position: Position, pawns: float | None) -> dict[str, Any]:
    """What the move costs against the engine's first. A move that looks better to the label's shallow search costs 0."""
    if pawns is None or not position.evaluations:
        return {"scored": False, "win_loss": None, "centipawn_loss": None}
    best = position.evaluations[0]
    return {
        "scored": True,
        "win_loss": max(0.0, win_probability(best) - win_probability(pawns)),
        "centipawn_loss": max(0.0, 100 * (_capped(best) - _capped(pawns))),
    }


def _capped(pawns: float) -> float:
    return max(-PAWNS_CAP, min(PAWNS_CAP, pawns))


def _candidates(position: Position, answer: Answer) -> dict[str, Any]:
    """The five candidates and the evaluations written beside them."""
    legal, labels = policy.legal_moves(position.fen), dict(zip(position.moves, position.evaluations, strict=True))
    moves = answer.moves[:CANDIDATES]
    expected = min(CANDIDATES, len(legal))  # a position may have fewer legal moves than a row has candidates
    pairs = [
        (number, labels[move])
        for move, text in zip(moves, answer.evaluations[:CANDIDATES], strict=False)
        if move in labels and (number := plain_number(text.removeprefix("+"))) is not None
    ]
    distinct, first = set(moves), set(position.moves[:CANDIDATES])
    return {
        "candidates_legal": len(distinct & legal) / max(expected, len(moves)),
        "candidates_top_five": len(distinct & first) / len(first) if first else None,
        "evaluation_error": _mean([abs(_capped(e) - _capped(label)) for e, label in pairs]),
        "evaluation_error_win": _mean([abs(win_probability(e) - win_probability(label)) for e, label in pairs]),
    }


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


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
    groups = [
        (i, moves[at : at + MOVES_AT_ONCE])
        for i, moves in enumerate(legal)
        for at in range(0, len(moves), MOVES_AT_ONCE)
    ]
    groups.sort(key=lambda group: (len(texts[group[0]]), texts[group[0]], group[1]))
    score = make_score(policy.graphdef, tokenizer.vocab_size)
    logps: list[dict[str, float]] = [{} for _ in positions]
    for start in range(0, len(groups), PROMPTS_AT_ONCE):
        batch = groups[start : start + PROMPTS_AT_ONCE]
        filled = [batch[i % len(batch)] for i in range(PROMPTS_AT_ONCE)]
        rows = [row for row, _ in filled]
        written = [[ids_of[in_style(style, uci, fens[row])] for uci in moves] for row, moves in filled]
        padded = [padded_moves(ids, tokenizer.pad_id, MOVES_AT_ONCE, length) for ids in written]
        ids_PGC, mask_PGC = map(np.stack, zip(*padded, strict=True))
        logp_PG = np.asarray(score(policy.params, ids_PT[rows], mask_PT[rows], ids_PGC, mask_PGC))
        for (row, moves), logp_G in zip(batch, logp_PG.tolist(), strict=False):
            logps[row] |= zip(moves, logp_G, strict=False)
        tick(min(start + PROMPTS_AT_ONCE, len(groups)) * len(positions) // len(groups))
    return logps
