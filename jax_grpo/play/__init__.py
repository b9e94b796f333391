"""A model as a chess player: one move at a time, over UCI, and in matches against an engine.

Owns how a move is asked for and played. Knows nothing of training; nobody but the commands imports it.
"""
