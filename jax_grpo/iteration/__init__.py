"""The host's steps of one iteration, which `trainer` calls in order: draw prompts, reward completions, refill a batch, count.

Owns which prompts are next, rewards, and which groups are trained on. Knows nothing of log-probabilities, losses or files.
"""
