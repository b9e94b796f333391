"""A run as files: its folder and lock, checkpoints that are whole or not there, and runs that continue from them.

Owns the files that must never be lost. Knows trees of arrays, never a model.
"""
