"""Matches of the model against an engine: `python -m jax_grpo.match`; see `play.match`."""

from jax_grpo.play.match import main

if __name__ == "__main__":
    main()
