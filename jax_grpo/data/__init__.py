"""Labelled position sets, arbiter rows and the mate-in-one suite, made on the user's own machine: `python -m jax_grpo.data --help`.

A source gives numbered batches of rows (`selfplay`, `files`, `arbiter`); `shards` deduplicates them and writes Parquet that
survives being killed; `provenance` says where a set came from. Knows nothing of models.
"""

from jax_grpo.data.selfplay import SCHEMA, generate, play_game, sparse_start
from jax_grpo.splits import is_heldout, position_key

__all__ = ["SCHEMA", "generate", "is_heldout", "play_game", "position_key", "sparse_start"]
