"""Labelled position sets, arbiter rows and suites of mates, made on the user's own machine: `python -m jax_grpo.data --help`.

A source gives numbered batches of rows (`selfplay`, `labels`, `arbiter`); `shards` deduplicates them and writes Parquet that
survives being killed, with a record of where the set came from. Knows nothing of models.
"""
