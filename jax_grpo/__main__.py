"""The doors of the package as one command: `jax-grpo train --config C`, which is `python -m jax_grpo.train --config C`."""

import sys

from jax_grpo.names import COMMANDS, by_name

# By command: what takes the rest of the words, and what it is for.
DOORS = {
    "train": ("jax_grpo.train:main", "train a model"),
    "evaluate": (
        "jax_grpo.evaluate.__main__:main",
        "judge a run or a model on what is held out, or compare two evaluations",
    ),
    "report": ("jax_grpo.report.__main__:main", "one page of a run, or of several"),
    "export": ("jax_grpo.export.__main__:main", "a model for other software"),
    "sft": ("jax_grpo.sft.__main__:main", "a supervised warm start"),
    "memory": ("jax_grpo.memory.__main__:main", "does a run fit, and what fills the device"),
    "data": (COMMANDS["data"], "make positions, tables, puzzles"),
    "uci": (COMMANDS["uci"], "the model as a UCI engine"),
    "match": (COMMANDS["match"], "matches of the model"),
    "replay": ("jax_grpo.replay:main", "one optimiser step of a recorded batch"),
}


def usage() -> str:
    """The commands, a line each."""
    lines = [f"  {name:<9} {words}" for name, (_, words) in DOORS.items()]
    return "usage: jax-grpo COMMAND ... (--help after it lists its options)\n\n" + "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    """Hands the words behind the command to its door."""
    command, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if command in ("-h", "--help"):
        print(usage())
        return
    if command not in DOORS:
        raise SystemExit(f"jax-grpo: no command {command!r}; expected one of {', '.join(DOORS)}")
    by_name(DOORS[command][0])(rest)


if __name__ == "__main__":
    main()
