"""A policy as a run begins with it: weights of a name with their tokenizer, and the adapters that are trained in their place.

Owns what names mean (packaged weights, folders, adapters, checkpoints) and the files of adapters. Knows nothing of training.
"""
