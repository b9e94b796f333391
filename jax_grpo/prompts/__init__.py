"""Prompts of the user's own files: their rows, checked and split, and the texts that a chat template makes of their messages.

Knows neither what a prompt means nor tasks, tokens or models.
"""
