"""GPT-2: its architecture in Flax, its weights and tokenizers on disk and in memory, and what its arithmetic costs.

Owns tokens, hidden states and parameters. Knows nothing of losses, rewards or how tokens are sampled.
"""
