"""Benchmarks, each a `python -m jax_grpo.bench.NAME` that prints its command, machine, medians and spread."""
