"""Labelled position sets, arbiter rows and suites of mates, made on the user's own machine: `python -m jax_grpo.data --help`.

A source gives numbered batches of rows (`selfplay`, `files`, `arbiter`); `shards` deduplicates them and writes Parquet that
survives being killed; `positions.sets` says where a set came from, and reads it for training. Knows nothing of models.
"""
