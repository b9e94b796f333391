"""Supervised fine-tuning on rows of both tasks: the start that reinforcement learning needs.

Owns the rows and the loop over them. Knows nothing of rewards; nobody imports it.
"""
