"""What an update has to compute of an iteration's batch: the tokens that have a gradient, and those whose value somebody reads.

A completion whose loss is a constant 0 (no advantage, no KL term, no entropy bonus) needs no backward pass, and one that is masked
whole not even a forward one. Programs skip some of that (`lm_head.loops`) and some not; MFU credits none of them for it.
"""

import jax.numpy as jnp
import numpy as np

from jax_grpo import flops
from jax_grpo.batch import Batch, GroupedTokens
from jax_grpo.config import Config
from jax_grpo.lm_head.loops import IDLE, LEARNS
from jax_grpo.loss import token_terms


def update_work(batch: Batch, config: Config) -> tuple[flops.Work, flops.Work]:
    """Useful work of one pass over the batch, (forward, backward)."""
    assert isinstance(batch.tokens, GroupedTokens), "the trainer's own layout"
    work_BS = token_terms(batch, 0.0, config, jnp.float32).head_work()
    work_PGC = np.asarray(work_BS).reshape(batch.tokens.completion_mask_PGC.shape)
    return _needed(batch.tokens, work_PGC != IDLE), _needed(batch.tokens, work_PGC == LEARNS)


def _needed(tokens: GroupedTokens, wanted_PGC: np.ndarray) -> flops.Work:
    """Work for these tokens alone: through the blocks goes every completion that has one, and its group's prompt."""
    completion_mask_PGC = np.asarray(tokens.completion_mask_PGC) * np.any(wanted_PGC, axis=-1, keepdims=True)
    prompt_mask_PT = np.asarray(tokens.prompt_mask_PT) * np.any(wanted_PGC, axis=(1, 2))[:, None]
    return flops.completions_work(prompt_mask_PT, completion_mask_PGC)._replace(predicted=int(wanted_PGC.sum()))
