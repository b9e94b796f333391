"""Does a run fit, and what fills the device? `python -m jax_grpo.memory --config C.yaml --target rtx4090 --out DIR`"""

import argparse
import json
import os
import sys
from pathlib import Path

from jax_grpo import targets


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="python -m jax_grpo.memory", description=(__doc__ or "").splitlines()[0])
    found.add_argument("--config", required=True, help="of the run; any --section.key value overrides it")
    found.add_argument(
        "--target", default="rtx4090", help=f"{', '.join(targets.known())}, cpu, or local (default: rtx4090)"
    )
    found.add_argument("--json", metavar="FILE", help="the report as data")
    found.add_argument("--out", metavar="DIR", help="the report as JSON, Markdown and a picture")
    found.add_argument("--search", action="store_true", help="also the largest micro-batch and batch (a minute or two)")
    found.add_argument(
        "--measure", action="store_true", help="run each program here and compare (targets cpu and local)"
    )
    return found


def main(argv: list[str] | None = None) -> None:
    arguments, overrides = parser().parse_known_args(argv)
    if arguments.target != "local":
        os.environ["JAX_PLATFORMS"] = "cpu"  # with a GPU platform asked for, JAX looks for a driver first
    from jax_grpo import aot
    from jax_grpo.config import load_config
    from jax_grpo.memory.compiled import HERE
    from jax_grpo.memory.measured import compare
    from jax_grpo.memory.micro_batches import chosen
    from jax_grpo.memory.picture import save_picture
    from jax_grpo.memory.report import report, text

    if arguments.measure and arguments.target not in HERE:
        raise SystemExit(
            f"--measure runs programs on this machine; --target {arguments.target} is not it: give cpu or local"
        )
    try:
        config = chosen(load_config(arguments.config, overrides), print, target=arguments.target)
        found = report(config, arguments.target, search=arguments.search)
    except (aot.CannotCompile, ValueError) as error:  # the project's input errors are ValueErrors
        raise SystemExit(f"{type(error).__name__}: {error}") from error
    command = "python -m jax_grpo.memory " + " ".join(sys.argv[1:] if argv is None else argv)
    record = {"command": command} | found.as_dict()
    words = text(found)
    if arguments.measure:
        numbered = [*overrides, "--update.micro_batches", str(config.update.parts)]  # what `auto` stands for
        record["measured"], compared = compare(arguments.config, numbered, arguments.target, found)
        words += compared
    print(words, end="")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(record, indent=1) + "\n")
    if arguments.out:
        folder, name = Path(arguments.out), f"{Path(arguments.config).stem}_{arguments.target}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
        (folder / f"{name}.md").write_text(f"`{command}`\n\n{words}\n![by part]({name}.png)\n")
        save_picture(found, folder / f"{name}.png", Path(arguments.config).stem)


if __name__ == "__main__":
    main()
