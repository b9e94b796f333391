"""A run as files: its folder and lock, checkpoints that are whole or not there, and what continues from them.

Owns what is written so that nothing saved is ever lost. Knows trees of arrays, never a model.
"""
