"""Log-probabilities of tokens from hidden states and the tied embedding; one function a way of computing them.

Every implementation has the signature of `materialised.token_logprobs` and is differentiable in both arrays.
"""

from jax_grpo.lm_head.materialised import token_logprobs

LM_HEADS = {"materialised": token_logprobs}
