"""Model FLOPs by formula; `system.devices` says how near a device's peak a phase of training came with them (MFU).

Counted is what the algorithm needs, not what a program does: real tokens (no padding), keys a token may see, a prompt once for
its G completions, no recomputation, and no backward pass where there is no gradient (`loss.update_work`). So MFU cannot be
raised by wasting work, and above 100 % the number is wrong.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from jax_grpo.model.architecture import Architecture

# A backward pass multiplies each matrix twice, for its weights' gradient and for its inputs'; under adapters only for these. (Those
# themselves are about a hundredth, and attention, which is multiplied twice all the same, less than the rest: neither is counted.)
BACKWARD, BACKWARD_UNDER_ADAPTERS = 2, 1


class Work(NamedTuple):
    """What a forward pass has to do: tokens through the blocks, (query, key) pairs of a head, tokens through the LM head."""

    tokens: int
    pairs: int
    predicted: int
    in_window: int = 0  # pairs in a layer with a window


def head(tokens: float, width: int, vocabulary: int) -> float:
    """FLOPs of the logits of so many tokens: 2 T H V."""
    return 2.0 * tokens * width * vocabulary


def forward(sizes: Architecture, work: Work) -> float:
    """FLOPs of a forward pass (Chowdhery et al. 2022, PaLM, appendix B, a third of it):

        2 L M * tokens + 4 L N D * pairs + 2 H V * predicted

    M are the numbers in a block's matrices, 12 H^2 of a GPT-2: biases and norms are a thousandth of them. A layer with a window has
    the pairs that lie in it.
    """
    pairs = sum(work.pairs if window is None else work.in_window for window in sizes.windows)
    blocks = 2.0 * sizes.num_layers * sizes.block_matrices * work.tokens
    attention = 4.0 * sizes.num_heads * sizes.head_dim * pairs
    return blocks + attention + head(work.predicted, sizes.hidden_size, sizes.vocab_size)


def completions_work(
    prompt_mask_PT: npt.ArrayLike, completion_mask_PGC: npt.ArrayLike, window: int | None = None
) -> Work:
    """What a pass over an iteration's tokens needs; sampling them needs the same. `window` is that of layers which have one.

    A prompt of p tokens is read once. A completion of c tokens is predicted from the prompt's last token and its own first
    c - 1, the i-th of which sees p + i keys, or those of them in the window.
    """
    p_P = np.asarray(prompt_mask_PT).sum(-1).astype(np.int64)
    c_PG = np.asarray(completion_mask_PGC).sum(-1).astype(np.int64)
    read_PG = np.maximum(c_PG - 1, 0)

    def pairs(window: float) -> int:
        def up_to(n: np.ndarray) -> np.ndarray:
            """Pairs of the first n tokens of a sequence: 1 + 2 + ... up to the window, then the window each."""
            rising = np.minimum(n, window)
            return rising * (rising + 1) / 2 + (n - rising) * (window if window < np.inf else 0)

        own_PG = up_to(p_P[:, None] + read_PG) - up_to(p_P)[:, None]
        return int(up_to(p_P).sum() + own_PG.sum())

    tokens, predicted = int(p_P.sum() + read_PG.sum()), int(c_PG.sum())
    return Work(tokens, pairs(np.inf), predicted, 0 if window is None else pairs(window))
