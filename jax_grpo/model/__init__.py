"""Decoders of several families in Flax, their weights and tokenizers on disk and in memory, and what their arithmetic costs.

Owns tokens, hidden states and parameters. Knows nothing of losses, rewards or how tokens are sampled.
"""
