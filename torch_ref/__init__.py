"""A second GRPO, in PyTorch, written from the definitions and not from `jax_grpo`'s code.

It exists to be compared with. It may read `jax_grpo`'s config, tokenizer, tasks and prompts; it never imports its maths.
"""
