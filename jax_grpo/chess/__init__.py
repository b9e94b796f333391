"""Everything of chess: positions, tasks, rewards, engines, players, data, suites of evaluation.

The trainer knows nothing of it: it is reached by the names of `jax_grpo.names`, as a module of the user's own is.
"""
