"""The model as a UCI engine: `python -m jax_grpo.uci`; see `play.uci`."""

from jax_grpo.play.uci import main

if __name__ == "__main__":
    main()
