"""Benchmarks, each a `python -m jax_grpo.bench.NAME`: they print their command and machine, and write their raw data."""
