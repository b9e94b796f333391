"""Model FLOPs by formula, and how near a device's peak a phase of training came (MFU).

Counted is what the algorithm needs, not what a program does: real tokens (no padding), keys a token may see, a prompt once for
its G completions, no recomputation, and no backward pass where there is no gradient (`loss.update_work`). So MFU cannot be
raised by wasting work, and above 100 % the number is wrong.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from jax_grpo.model.gpt2 import GPT2Config

BACKWARD = 2  # a backward pass multiplies each matrix twice: for its weights' gradient and for its inputs'


class ImpossibleRate(RuntimeError):
    """More FLOPs a second than the device has: a time or a count is wrong."""


class Work(NamedTuple):
    """What a forward pass has to do: tokens through the blocks, (query, key) pairs of a head, tokens through the LM head."""

    tokens: int
    pairs: int
    predicted: int


def head(tokens: float, width: int, vocabulary: int) -> float:
    """FLOPs of the logits of so many tokens: 2 T H V."""
    return 2.0 * tokens * width * vocabulary


def forward(sizes: GPT2Config, work: Work) -> float:
    """FLOPs of a forward pass (Chowdhery et al. 2022, PaLM, appendix B, a third of it):

        2 * 12 L H^2 * tokens + 4 L H * pairs + 2 H V * predicted

    12 L H^2 are the blocks' matrices: biases and norms are a thousandth of them.
    """
    layers, width = sizes.num_layers, sizes.hidden_size
    blocks = 2.0 * 12 * layers * width**2 * work.tokens
    return blocks + 4.0 * layers * width * work.pairs + head(work.predicted, width, sizes.vocab_size)


def completions_work(prompt_mask_PT: npt.ArrayLike, completion_mask_PGC: npt.ArrayLike) -> Work:
    """What a pass over an iteration's tokens needs; sampling them needs the same.

    A prompt of p tokens is read once. A completion of c tokens is predicted from the prompt's last token and its own first
    c - 1, the i-th of which sees p + i keys.
    """
    p_P = np.asarray(prompt_mask_PT).sum(-1).astype(np.int64)
    c_PG = np.asarray(completion_mask_PGC).sum(-1).astype(np.int64)
    read_PG = np.maximum(c_PG - 1, 0)
    pairs = (p_P * (p_P + 1) // 2).sum() + (read_PG * p_P[:, None] + read_PG * (read_PG + 1) // 2).sum()
    return Work(int(p_P.sum() + read_PG.sum()), int(pairs), int(c_PG.sum()))


def utilisation(flops: float, seconds: float, peak: float, what: str) -> float:
    """MFU: FLOPs over what the device could have done in that time. Raises ImpossibleRate above 1."""
    share = flops / (seconds * peak)
    if share > 1:
        raise ImpossibleRate(
            f"{what}: {flops:.3e} FLOPs in {seconds:.6f} s are {share:.1%} of the device's peak of {peak:.3e} a second: the "
            f"time was not taken around finished work, or the peak in jax_grpo/system/devices.py is not this device's"
        )
    return share


def rates(work: Mapping[str, float], seconds: Mapping[str, float], peak: float | None) -> dict[str, float]:
    """`flops_per_second/<phase>` of an iteration's phases, and `mfu/<phase>` where the device's peak is known (not None).

    `work` is the FLOPs of each phase, `seconds` its time, taken around finished work.
    """
    out: dict[str, float] = {}
    for phase, flops in work.items():
        if flops and phase in seconds:
            out[f"flops_per_second/{phase}"] = flops / seconds[phase]
            if peak is not None:
                out[f"mfu/{phase}"] = utilisation(flops, seconds[phase], peak, phase)
    return out
