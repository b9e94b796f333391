"""Log-probabilities of tokens from hidden states and the tied embedding; one function a way of computing them.

Every implementation has the signature of `materialised.token_logprobs` and is differentiable in both arrays. Those that
stand in `FUSED_LOSSES` too can take a loss that is a sum over tokens, and make its gradients in the forward. Knows nobody.
"""

import functools

from jax_grpo.lm_head import chunked, materialised
from jax_grpo.lm_head import pallas_columns as pallas_matmul
from jax_grpo.lm_head import pallas_rows as pallas_triton
from jax_grpo.lm_head.loops import Kernels

PALLAS = Kernels(
    pallas_triton.measure,
    pallas_triton.differentiate,
    pallas_triton.dlogits,
    pallas_matmul.partial,
    pallas_matmul.tile_dlogits,
)
LM_HEADS = {
    "materialised": materialised.token_logprobs,
    "chunked": chunked.token_logprobs,
    "pallas": functools.partial(chunked.token_logprobs, kernels=PALLAS),
}
FUSED_LOSSES = {"chunked": chunked.fused_loss, "pallas": functools.partial(chunked.fused_loss, kernels=PALLAS)}
