"""A trained model as a Hugging Face folder that `transformers` and `evaluate` read alike: weights, tokenizer, model card.

Owns the formats of others. Knows nothing of training; nobody imports it.
"""
