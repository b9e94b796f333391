"""A model as a chess player: one move at a time, over UCI, and in matches against an engine.

Owns how moves are made, over UCI and in matches. Knows nothing of training; nobody but the commands imports it.
"""
