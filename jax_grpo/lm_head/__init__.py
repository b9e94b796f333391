"""Log-probabilities of tokens from hidden states and the tied embedding; one function a way of computing them.

Every implementation has the signature of `materialised.token_logprobs` and is differentiable in both arrays. Those that
stand in `FUSED_LOSSES` too can take a loss that is a sum over tokens, and make its gradients in the forward.
Knows nothing of objectives: of a loss it knows the function of a token's log-probability and entropy that it is given.
"""

import functools

from jax_grpo.lm_head import chunked, materialised, pallas_columns, pallas_rows
from jax_grpo.lm_head.loops import Kernels

PALLAS = Kernels(pallas_rows.measure, pallas_rows.differentiate, pallas_columns.partial, pallas_columns.tile_dlogits)
LM_HEADS = {
    "materialised": materialised.token_logprobs,
    "chunked": chunked.token_logprobs,
    "pallas": functools.partial(chunked.token_logprobs, kernels=PALLAS),
}
FUSED_LOSSES = {"chunked": chunked.fused_loss, "pallas": functools.partial(chunked.fused_loss, kernels=PALLAS)}
