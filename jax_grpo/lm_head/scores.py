"""Statistics of a scoring pass, kept with the version of the parameters that made them.

While the parameters are still those, a loss needs no pass to find its log-sum-exps (`fused_loss(known=...)`): the
minimum-memory mode is then three matmuls instead of four. With others it would be wrong and nothing would show it.
"""

from typing import NamedTuple

from jax_grpo.lm_head.tiles import RowStatistics


class StaleScores(ValueError):
    """Scores of other parameters than the ones at hand."""


class Scores(NamedTuple):
    """Statistics [B, S] of the tokens of a batch under the parameters of `version` (completed optimiser steps)."""

    statistics: RowStatistics
    version: int


def reuse(scores: Scores, version: int) -> RowStatistics:
    """The statistics, if they are of the parameters at hand.

    Raises:
        StaleScores: they are of another version.
    """
    if scores.version != version:
        raise StaleScores(
            f"scores are of the parameters after optimiser step {scores.version}, but the parameters at hand are those after "
            f"step {version}; score the batch again, or leave the scores out"
        )
    return scores.statistics
