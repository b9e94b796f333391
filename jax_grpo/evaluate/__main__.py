"""A model judged on held-out positions: `python -m jax_grpo.evaluate`."""

from jax_grpo.names import COMMANDS, by_name

if __name__ == "__main__":
    by_name(COMMANDS["evaluate"])()
