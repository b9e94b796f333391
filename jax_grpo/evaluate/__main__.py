"""`python -m jax_grpo.evaluate RUN`: a run's held-out prompts by its own rewards. With options: a model's chess, by suites."""

import sys
from collections.abc import Sequence

from jax_grpo.names import COMMANDS, by_name
from jax_grpo.tasks.base import TaskError


def main(argv: Sequence[str]) -> None:
    if not argv or argv[0].startswith("-"):
        return by_name(COMMANDS["evaluate"])(argv)
    run, *options = argv
    if options:
        raise SystemExit(f"RUN {run}: expected alone, as its config has all settings; --weights W has options")
    from jax_grpo.evaluate import own_rewards
    from jax_grpo.run.files import CheckpointError
    from jax_grpo.system.terminal import print_tables

    try:
        print_tables([own_rewards.table_of(run)])
    except (CheckpointError, TaskError, ValueError, OSError) as error:  # the project's input errors are ValueErrors
        raise SystemExit(f"{type(error).__name__}: {error}") from error


if __name__ == "__main__":
    main(sys.argv[1:])
