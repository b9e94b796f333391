"""Prompts of the user's own files: their rows, checked and split, and which of chess positions or such rows a task reads.

Knows neither what a prompt means nor tasks, tokens or models.
"""
