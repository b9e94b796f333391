"""Benchmarks, each a `python -m jax_grpo.bench.NAME`: they print their command and machine, and write their raw data.

`all` runs those that a machine can run, `harness` times them alike, and every other file is one subject. Knows everybody; nobody
imports it.
"""
