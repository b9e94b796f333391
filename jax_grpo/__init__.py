"""GRPO for GPT-2 in JAX, proven number by number against a PyTorch reference."""

__version__ = "0.1.0"
