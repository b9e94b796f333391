"""The model judged as chess players and researchers would: one module a suite, each a function of (weights, data, seed).

Owns what is asked, how answers are judged, and the statistics and pages of it. Knows nothing of how a model is trained.
"""

MODES = ("greedy", "sampled")  # how a model answers: its likeliest token each time, or tokens drawn


class EvaluationError(ValueError):
    """An evaluation cannot be made; the message names the argument or file, what was found and what to do."""
