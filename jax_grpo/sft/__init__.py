"""Supervised fine-tuning on rows of the tasks, and a vocabulary for one of them: the start that reinforcement learning needs.

Owns the rows and the loop over them. Knows nothing of rewards; nobody imports it.
"""
