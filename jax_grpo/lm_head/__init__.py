"""Log-probabilities of tokens from hidden states and the tied embedding; one function a way of computing them.

Every implementation has the signature of `materialised.token_logprobs` and is differentiable in both arrays. Those that
stand in `FUSED_LOSSES` too can take a loss that is a sum over tokens, and make its gradients in the forward.
"""

from jax_grpo.lm_head import chunked, materialised

LM_HEADS = {"materialised": materialised.token_logprobs, "chunked": chunked.token_logprobs}
FUSED_LOSSES = {"chunked": chunked.fused_loss}
