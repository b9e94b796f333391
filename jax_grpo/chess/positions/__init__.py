"""Chess positions: what is known of one, the files and sets they come from, and the RookWorld texts that they are written in.

Owns formats, hashes and splits, and every `P:` and `A:` text. Knows nothing of models or rewards.
"""
