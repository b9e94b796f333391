"""Completions of prompts: prefill, the decode loop, sampling, and texts in batches of one size.

Owns what is generated and the random numbers that draw it. Knows nothing of rewards, losses or what a text means.
"""
