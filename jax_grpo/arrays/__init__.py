"""Operations on arrays that need no model: products of matrices in bfloat16, and rows of tokens without the padding among them.

Owns how XLA computes them. Knows nothing of layers, losses or what the numbers mean.
"""
