"""Benchmarks, each a `python -m jax_grpo.bench.NAME`: they print their command and machine, and write their raw data.

`runner` times all variants alike, `machine` is what every command writes, `problems` gives all variants one problem, `all` runs
what a machine can run, `trl_*` are TRL as a peer, `variants` and `curves` training runs over seeds, and every other file is one
subject. Knows everybody; nobody imports it.
"""
