"""The model as a UCI engine: `python -m jax_grpo.uci`."""

from jax_grpo.names import COMMANDS, by_name

if __name__ == "__main__":
    by_name(COMMANDS["uci"])()
