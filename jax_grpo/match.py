"""Matches of the model: `python -m jax_grpo.match`."""

from jax_grpo.names import COMMANDS, by_name

if __name__ == "__main__":
    by_name(COMMANDS["match"])()
