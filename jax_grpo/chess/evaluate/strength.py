"""How well moves are chosen, from tables of every legal move's win probability: no engine, and the same each time.

A player's answers in a position are equally likely ones: one, samples, or all that it draws from. An answer that is no legal move
costs what the worst legal move does. Knows nothing of generation.
"""

import math
from collections.abc import Mapping, Sequence

import chess
import numpy as np

from jax_grpo.chess.evaluate import by_side
from jax_grpo.chess.games import REFERENCE_PLAYERS
from jax_grpo.chess.positions.position import Position
from jax_grpo.chess.positions.values import UNDECIDED, move_table
from jax_grpo.chess.tasks.policy import TECHNIQUE, VALUE, PolicyTask, in_style
from jax_grpo.evaluate.statistics import Estimate, cluster_bootstrap_mean
from jax_grpo.report.records import YARDSTICK
from jax_grpo.tasks.base import Prompt

GOOD = 0.02  # a legal move that loses less than this passes: win probability, below a deep table's own error
# Lost win probability: Lichess's threshold, 0.3 of winning chances 2 w - 1 (lila, modules/tree Advice.scala).
BLUNDER = 0.15
SAMPLES = 16  # sampled answers of a model in each position


def accuracy(loss: float) -> float:
    """Lichess's accuracy of a move that loses so much win probability, in [0, 1] (lichess.org/page/accuracy).

    103.1668 exp(-0.04354 loss) - 3.1669, of and in percent, held within 0 and 100.
    """
    return min(max((103.1668 * math.exp(-0.04354 * 100 * loss) - 3.1669) / 100, 0.0), 1.0)


def pass_at_k(n: int, passed: int, k: int) -> float:
    """Unbiased estimate that one of k samples passes, from n of which so many did: 1 - C(n - c, k) / C(n, k) (Chen 2021, eq. 1)."""
    return 1 - math.comb(n - passed, k) / math.comb(n, k)


def kendall_tau(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Kendall's tau-b (1945), in [-1, 1]: concordant less discordant pairs over sqrt(pairs untied in one x in the other).

    None where one of the two has no order: all values are equal, or there is one.
    """
    x_M, y_M = np.asarray(first, np.float64), np.asarray(second, np.float64)
    x_MM, y_MM = (np.sign(v_M[:, None] - v_M) for v_M in (x_M, y_M))
    pairs = math.sqrt((x_MM**2).sum() * (y_MM**2).sum())
    return float((x_MM * y_MM).sum()) / pairs if pairs else None


def judged(position: Position, answers: Sequence[str]) -> dict[str, float | None]:
    """Means over the answers in a position, which are equally likely.

    `loss`, win probability given away; `legal`; `loss_legal`, of the legal answers, None without one; `within`, legal and within
    `GOOD` of the best move; `best`, legal and no move is better; `accuracy`; `blunder`, the share that loses `BLUNDER` or more.
    Raises NotATable: the position lacks a legal move's value.
    """
    table = move_table(position)
    losses = [table.loss(move) for move in answers]
    legal = [move in table.wins for move in answers]
    of_legal = [loss for loss, is_legal in zip(losses, legal, strict=True) if is_legal]
    passed = sum(loss < GOOD for loss in of_legal)
    n = len(answers)
    return {
        "loss": math.fsum(losses) / n,
        "legal": sum(legal) / n,
        "loss_legal": math.fsum(of_legal) / len(of_legal) if of_legal else None,
        "within": passed / n,
        "best": sum(loss == 0 for loss in of_legal) / n,
        "accuracy": math.fsum(map(accuracy, losses)) / n,
        "blunder": sum(loss >= BLUNDER for loss in losses) / n,
    }


def passes(position: Position, samples: Sequence[str]) -> dict[str, float]:
    """`pass_1` and `pass_<number of samples>`: that one of so many samples is a legal move within `GOOD` of the best one."""
    table, n = move_table(position), len(samples)
    passed = sum(move in table.wins and table.loss(move) < GOOD for move in samples)
    return {f"pass_{k}": pass_at_k(n, passed, k) for k in (1, n)}


def rank(position: Position, logps: Mapping[str, float]) -> dict[str, float | None]:
    """`tau`, Kendall's, between log-probabilities of all legal moves and their win probabilities."""
    wins = move_table(position).wins
    return {"tau": kendall_tau([logps[move] for move in wins], list(wins.values()))}


def groups_of(positions: Sequence[Position]) -> dict[str, list[bool]]:
    """Which positions are in each group: `white` and `black` to move, and `undecided` and `decided` where there are both."""
    out = by_side(positions)
    open_ = [UNDECIDED[0] <= move_table(position).best <= UNDECIDED[1] for position in positions]
    if any(open_) and not all(open_):
        out |= {"undecided": open_, "decided": [not each for each in open_]}
    return out


def estimates(
    positions: Sequence[Position],
    rows: Sequence[Mapping[str, float | None]],
    seed: int,
    groups: Mapping[str, Sequence[bool]] | None = None,
) -> dict[str, Estimate]:
    """`group/name` estimates of the rows of as many positions, with intervals by game; a position without one is its own.

    No `groups`: those of `groups_of`. `loss_legal` is the mean over all legal answers, not over positions: a position counts by
    its share of them.
    """
    games = [position.fen if position.game is None else position.game for position in positions]
    groups, out = groups_of(positions) if groups is None else groups, {}
    for group, members in {"all": [True] * len(positions), **groups}.items():
        for name in rows[0] if rows else ():
            weight = "legal" if name == "loss_legal" else None
            terms = [
                (value, game, (row[weight] or 0.0) if weight else 1.0)
                for member, row, game in zip(members, rows, games, strict=True)
                if member and (value := row[name]) is not None
            ]
            values, clusters, weights = zip(*terms, strict=True) if terms else ((), (), ())
            out[f"{group}/{name}"] = cluster_bootstrap_mean(values, clusters, seed, weights)
    return out


def yardsticks(task: PolicyTask, prompts: Sequence[Prompt]) -> dict[str, float]:
    """`yardstick/<player>/<component>` for `value` and `technique`, where the task is to write one move and is paid for them.

    What plain players would get from a run's own reward on its held-out prompts: what a model's curve is read beside. Exact: a
    player that draws from several moves is judged by their mean.
    """
    paid = [name for name in (VALUE, TECHNIQUE) if task.component_weights.get(name)]
    if task.style == "full" or not paid:
        return {}
    positions = [prompt.row for prompt in prompts]
    means: dict[str, float] = {}
    for player, moves_of in REFERENCE_PLAYERS.items():
        choices = [moves_of(chess.Board(position.fen)) for position in positions]
        counts_P = [len(moves) for moves in choices]
        repeated = [prompt for prompt, count in zip(prompts, counts_P, strict=True) for _ in range(count)]
        answers = [
            in_style(task.style, move, position.fen)
            for position, moves in zip(positions, choices, strict=True)
            for move in moves
        ]
        scores = task.score(repeated, answers)
        starts_P = np.cumsum([0, *counts_P[:-1]])
        for name in paid:
            means_P = np.add.reduceat(scores[name], starts_P) / counts_P
            means[f"{YARDSTICK}{player}/{name}"] = float(means_P.mean())
    return means
