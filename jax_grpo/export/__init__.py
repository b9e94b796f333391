"""A trained model as a Hugging Face folder that `transformers` and `evaluate` read alike: weights, tokenizer, model card.

Owns the formats of others. Nobody imports it.
"""
