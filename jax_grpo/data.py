"""Positions, tables and puzzles to train on: `python -m jax_grpo.data`."""

from jax_grpo.names import COMMANDS, by_name

if __name__ == "__main__":
    by_name(COMMANDS["data"])()
